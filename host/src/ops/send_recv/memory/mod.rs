//! [`BundleMemory`]: the steps of a transfer that differ between the kinds of memory.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use std::fmt::Debug;
use std::ops::Range;

use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Memory;

/// Panics unless there is a range for each tensor, of its length in bytes, as a [`BundleLayout`](crate::plan::bundle::BundleLayout) has them.
fn check_lens(lens: impl Iterator<Item = usize> + Clone, ranges: &[Range<usize>]) {
    let is_same = lens.clone().eq(ranges.iter().map(Range::len));
    assert!(is_same, "tensors of {:?} bytes at {ranges:?}", lens.collect::<Vec<_>>());
}

/// A kind of memory from which bundles of tensors are sent and into which they are received: [`Host`](crate::memory::Host) and `Cuda`.
pub trait BundleMemory: Memory {
    /// The end of a transfer.
    type End: Debug;
    /// Memory for [`exchange_words`](Self::exchange_words).
    type Workspace: Default;

    /// The queue on which work on the elements is ordered.
    fn queue<'a>(data: Self::Slice<'a>) -> &'a Self::Queue;

    /// Refuses operands whose work is ordered on another queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument).
    fn check_queue(operation: &'static str, queue: &Self::Queue, other: &Self::Queue) -> Result<()>;

    /// The elements of a type in a range of bytes. Panics for a range that leaves the memory, or that begins in device memory at an address
    /// that is not aligned to the type.
    fn part<'s, 'l: 's>(memory: Self::Slice<'l>, bytes: Range<usize>, dtype: DType) -> Self::Slice<'s>;

    /// The bytes of a payload, if these tensors have these ranges in it, without foreign memory between them. Panics, as all functions with
    /// ranges, unless there is a range for each tensor, of its length.
    fn contiguous<'a>(tensors: &[Self::Slice<'a>], ranges: &[Range<usize>]) -> Option<Self::Slice<'a>>;

    /// The writable bytes of such a payload; returns the tensors as an error if they have another layout.
    ///
    /// # Errors
    /// The tensors.
    fn contiguous_mut<'a>(
        tensors: Vec<Self::SliceMut<'a>>,
        ranges: &[Range<usize>],
    ) -> Result<Self::SliceMut<'a>, Vec<Self::SliceMut<'a>>>;

    /// Allocates a payload of `bytes` bytes, aligned to 256 bytes.
    ///
    /// # Errors
    /// The error of memory that does not suffice: [`Error::OutOfMemory`](crate::Error::OutOfMemory), or `Error::Cuda` with code 2.
    fn allocate(operation: &'static str, queue: &Self::Queue, bytes: usize) -> Result<Self::Buffer>;

    /// The first `bytes` bytes, to write.
    fn bytes_mut(payload: &mut Self::Buffer, bytes: usize) -> Self::SliceMut<'_>;

    /// Copies tensors to their ranges of a payload; panics for a range that is not in it.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn pack(payload: &mut Self::Buffer, ranges: &[Range<usize>], tensors: &[Self::Slice<'_>]) -> Result<()>;

    /// Copies tensors from their ranges of a payload; panics for a range that is not in it.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn unpack(payload: &Self::Buffer, ranges: &[Range<usize>], tensors: Vec<Self::SliceMut<'_>>) -> Result<()>;

    /// Makes the workspace large enough for exchanges that send and receive `words` words together.
    ///
    /// # Errors
    /// The errors of [`allocate`](Self::allocate); the workspace is as large as before.
    fn reserve(queue: &Self::Queue, workspace: &mut Self::Workspace, words: usize) -> Result<()>;

    /// Exchanges messages in host memory, all at once; panics unless room for them has been [reserved](Self::reserve), so that this does
    /// not fail for lack of memory.
    ///
    /// # Errors
    /// The errors of [`Communicator::exchange`].
    fn exchange_words(
        comm: &dyn Communicator<Self>,
        workspace: &mut Self::Workspace,
        sends: &[(usize, Vec<u64>)],
        receives: &mut [(usize, Vec<u64>)],
    ) -> Result<()>;

    /// The end of everything that is in the queue now.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn end(queue: &Self::Queue) -> Result<Self::End>;

    /// Whether the queue has passed this end. Does not wait.
    ///
    /// # Errors
    /// `Error::Cuda` for work that failed while it ran.
    fn has_passed(end: &Self::End) -> Result<bool>;
}
