//! The layout of the tensors of a [`GradientBuffer`](crate::GradientBuffer).
//!
//! Each tensor starts at a multiple of [`TENSOR_ALIGNMENT`] bytes. The arena is padded so that every rank's shard has the same length and
//! starts at such a multiple too, and, inside a tensor, at the start of one of its chunks. Pure arithmetic; every overflow is an error.

use std::ops::Range;

use super::chunks::chunk_len;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// The alignment of every tensor and every shard in bytes: two sectors of a GPU's L2, and the alignment of allocators.
pub const TENSOR_ALIGNMENT: usize = 256;

/// The ranges of a list of tensors in one arena, in elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The element range of each tensor, in order; the gaps between them belong to no tensor and stay zero.
    pub segments: Vec<Range<usize>>,
    /// The number of elements of one rank's shard; the arena has `world_size` shards.
    pub shard_len: usize,
}

impl Layout {
    /// Lays out tensors of the given lengths for `world_size` shards.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a world of 0 ranks, or an arena that exceeds the address space.
    pub fn new(dtype: DType, world_size: usize, lens: &[usize]) -> Result<Self> {
        const OPERATION: &str = "gradient buffer";
        if world_size == 0 {
            return Err(Error::InvalidArgument { operation: OPERATION, reason: "the world size is 0".into() });
        }
        let too_large = || Error::InvalidArgument {
            operation: OPERATION,
            reason: format!("{} tensors of {dtype} for {world_size} ranks exceed the address space", lens.len()),
        };
        let align = TENSOR_ALIGNMENT / dtype.size_bytes();
        let granule = granule(lens).max(align);
        let mut segments = Vec::with_capacity(lens.len());
        let mut end = 0usize;
        for &len in lens {
            let mut begin = end.checked_next_multiple_of(align).ok_or_else(too_large)?;
            if len > granule - begin % granule {
                // An edge of a shard inside the tensor must be at the start of a chunk.
                begin = begin.checked_next_multiple_of(chunk_len(len).min(granule)).ok_or_else(too_large)?;
            }
            end = begin.checked_add(len).ok_or_else(too_large)?;
            segments.push(begin..end);
        }
        let shard_len = end.div_ceil(world_size).checked_next_multiple_of(granule).ok_or_else(too_large)?;
        let bytes = shard_len.checked_mul(world_size).and_then(|len| len.checked_mul(dtype.size_bytes()));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(too_large());
        }
        Ok(Self { segments, shard_len })
    }
}

/// The unit of shard lengths in elements: the longest chunk of any of these tensors, rounded up to a power of two.
fn granule(lens: &[usize]) -> usize {
    let chunk = |&len: &usize| chunk_len(len).min(len).next_power_of_two();
    lens.iter().map(chunk).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::chunks::chunks;

    proptest! {
        #[test]
        fn layout_aligns_tensors_in_order(
            lens in prop::collection::vec(prop_oneof![0usize..300, 0usize..5000, 0usize..50_000, 0usize..600_000], 0..20),
            world in 1usize..20,
        ) {
            for dtype in DType::FLOATS {
                let layout = Layout::new(dtype, world, &lens).unwrap();
                let is_cut = |chunk: std::ops::Range<usize>| chunk.start / layout.shard_len != (chunk.end - 1) / layout.shard_len;
                prop_assert!(!layout.segments.iter().cloned().flat_map(chunks).any(is_cut), "shards of {}", layout.shard_len);
                let mut end = 0;
                for (segment, &len) in layout.segments.iter().zip(&lens) {
                    prop_assert_eq!(segment.len(), len);
                    prop_assert!(segment.start >= end);
                    prop_assert_eq!(segment.start * dtype.size_bytes() % TENSOR_ALIGNMENT, 0);
                    end = segment.end;
                }
                prop_assert!(end <= layout.shard_len * world);
                prop_assert_eq!(layout.shard_len * dtype.size_bytes() % TENSOR_ALIGNMENT, 0);
            }
        }
    }

    #[test]
    fn layout_refuses_an_overflow() {
        assert!(Layout::new(DType::F64, 1, &[usize::MAX, 1]).is_err());
        assert!(Layout::new(DType::F64, 2, &[usize::MAX / 8]).is_err());
        assert!(Layout::new(DType::F16, 0, &[1]).unwrap_err().to_string().contains("world size is 0"));
    }
}
