//! The operands of the pending calls of a local group, as the other ranks see them. This module does not dereference an address.

use std::ops::Range;

use crate::comm::Operands;
use crate::error::Call;
use crate::slice::SliceMut;

/// A rank's buffer, as the other ranks see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) start: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: a plain address; it is followed only while its owner waits inside the call that registered it.
unsafe impl Send for Region {}

impl Region {
    pub(super) const NONE: Region = Region { start: std::ptr::null_mut(), bytes: 0 };

    /// The region of memory that is read and written.
    pub(super) fn of_mut(data: SliceMut<'_>) -> Self {
        Region::of_bytes_mut(data.as_bytes_mut())
    }

    /// The regions of an input and an output, which are identical or disjoint.
    pub(super) fn of_operands(mut operands: Operands<'_>) -> (Self, Self) {
        let (input, output) = operands.raw_bytes();
        let region = |bytes: *mut [u8]| Region { start: bytes.cast(), bytes: bytes.len() };
        (region(input.cast_mut()), region(output))
    }

    /// The region of memory that is only read.
    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        Region { start: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
    }

    /// Like [`of_mut`](Self::of_mut), for bytes.
    pub(super) fn of_bytes_mut(bytes: &mut [u8]) -> Self {
        Region { start: bytes.as_mut_ptr(), bytes: bytes.len() }
    }

    /// Shard `index` of `bytes` bytes.
    pub(super) fn shard(self, index: usize, bytes: usize) -> Self {
        self.range(index * bytes..(index + 1) * bytes)
    }

    /// These of its bytes.
    pub(super) fn range(self, bytes: Range<usize>) -> Self {
        assert!(bytes.end <= self.bytes, "bytes {bytes:?} lie beyond {} bytes", self.bytes);
        Region { start: self.start.wrapping_add(bytes.start), bytes: bytes.len() }
    }
}

/// A rank's call of a collective, with its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct CollectiveCall {
    pub(super) call: Call,
    pub(super) input: Region,
    pub(super) output: Region,
}

/// A rank's send to, or receive from, another rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct TransferCall {
    pub(super) call: Call,
    pub(super) memory: Region,
}
