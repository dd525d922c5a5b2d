//! Division of an optimizer's state among ranks (ZeRO): tensors are divided at the edges of the ranks' shards.
//!
//! Each rank reduces, updates and keeps state for the parts in its shard only, and gathers the parameters afterwards. All counts are
//! elements. Nothing here accesses gradients, parameters or state, and no tensor is moved.

use std::ops::Range;

use super::ownership::PaddedLayout;
use super::segments;
use crate::error::{Error, Result};

const OPERATION: &str = "ZeRO partition";

/// The part of one tensor in one rank's shard. Never empty.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ZeroPart {
    /// The tensor's index.
    pub tensor: usize,
    /// The part's elements, counted from the tensor's start.
    pub within: Range<usize>,
    /// The same elements, counted from the start of the arena that all shards divide.
    pub range: Range<usize>,
    /// The rank to whose shard they belong.
    pub rank: usize,
}

/// Divides tensors with the ranges `segments` in an arena at the edges of `world_size` shards of `shard_len` elements, as in a
/// [`Layout`](super::layout::Layout). The parts ascend by range, and so by tensor and by rank; every element of every tensor is in exactly
/// one part, and an empty tensor has none.
///
/// # Errors
/// [`Error::InvalidArgument`] for a world of 0 ranks, more elements than `usize` counts, or segments that do not ascend
/// within the shards.
pub fn partition(segments: &[Range<usize>], shard_len: usize, world_size: usize) -> Result<Vec<ZeroPart>> {
    let refused = |reason| Error::InvalidArgument { operation: OPERATION, reason };
    if world_size == 0 {
        return Err(refused("the world size is 0".into()));
    }
    let len = shard_len
        .checked_mul(world_size)
        .ok_or_else(|| refused(format!("{world_size} shards of {shard_len} elements exceed the address space")))?;
    segments::check(OPERATION, segments, len)?;
    let mut parts = Vec::with_capacity(segments.len());
    for (tensor, segment) in segments.iter().enumerate() {
        let mut begin = segment.start;
        while begin < segment.end {
            // There are elements, so shards are not empty, and the edge is at most `len`.
            let rank = begin / shard_len;
            let end = segment.end.min((rank + 1) * shard_len);
            parts.push(ZeroPart {
                tensor,
                within: begin - segment.start..end - segment.start,
                range: begin..end,
                rank,
            });
            begin = end;
        }
    }
    Ok(parts)
}

/// Like [`partition`], for contiguous tensors of the given lengths, padded as in [`PaddedLayout`], which is ONNX Runtime's layout. In its
/// terms, a part is a previous, current or next piece of a rank if the part's `rank` is less, equal or greater.
///
/// The parts' lengths give the same shards as the tensors' lengths, and [`Ownership::new`](super::ownership::Ownership::new) assigns each
/// part to its `rank`.
///
/// # Errors
/// [`Error::InvalidArgument`] for a world of 0 ranks, or more elements than `usize` counts.
pub fn partition_padded(world_size: usize, lens: &[usize]) -> Result<Vec<ZeroPart>> {
    let layout = PaddedLayout::new(OPERATION, world_size, lens)?;
    partition(&layout.segments, layout.shard_len, world_size)
}

/// The parts in the shard of `rank`, from a list in the order of [`partition`] and [`partition_padded`].
pub fn parts_of(parts: &[ZeroPart], rank: usize) -> &[ZeroPart] {
    let begin = parts.partition_point(|part| part.rank < rank);
    let end = parts.partition_point(|part| part.rank <= rank);
    &parts[begin..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::plan::layout::Layout;
    use crate::plan::ownership::Ownership;

    fn part(tensor: usize, within: Range<usize>, range: Range<usize>, rank: usize) -> ZeroPart {
        ZeroPart { tensor, within, range, rank }
    }

    /// Checks that parts in order cover each segment exactly once and stay in their shards.
    fn check(parts: &[ZeroPart], segments: &[Range<usize>], shard_len: usize, world_size: usize) {
        let mut rest = parts.iter().peekable();
        for (tensor, segment) in segments.iter().enumerate() {
            let mut covered = 0;
            while let Some(part) = rest.next_if(|part| part.tensor == tensor) {
                assert_eq!(part.within.start, covered);
                assert!(!part.within.is_empty());
                assert_eq!(part.range, segment.start + part.within.start..segment.start + part.within.end);
                assert!(part.rank * shard_len <= part.range.start && part.range.end <= (part.rank + 1) * shard_len);
                covered = part.within.end;
            }
            assert_eq!(covered, segment.len());
        }
        assert_eq!(rest.next(), None);
        let by_rank: Vec<_> = (0..world_size).flat_map(|rank| parts_of(parts, rank).to_vec()).collect();
        assert_eq!(by_rank, parts);
    }

    proptest! {
        #[test]
        fn partition_puts_every_element_into_one_view(lens in prop::collection::vec(0usize..2000, 0..12), world_size in 1usize..10) {
            let layout = Layout::new(DType::F32, world_size, &lens).unwrap();
            let parts = partition(&layout.segments, layout.shard_len, world_size).unwrap();
            check(&parts, &layout.segments, layout.shard_len, world_size);

            let layout = PaddedLayout::new("test", world_size, &lens).unwrap();
            let parts = partition_padded(world_size, &lens).unwrap();
            check(&parts, &layout.segments, layout.shard_len, world_size);

            let lens: Vec<_> = parts.iter().map(|part| part.within.len()).collect();
            let ownership = Ownership::new("test", world_size, &lens).unwrap();
            prop_assert_eq!(ownership.shard_len(), layout.shard_len);
            prop_assert!(ownership.owners().iter().copied().eq(parts.iter().map(|part| part.rank)));
        }
    }

    #[test]
    fn partition_padded_divides_a_tensor_among_many_shards() {
        let parts = partition_padded(3, &[10, 0, 250]).unwrap();
        let expected = [
            part(0, 0..10, 0..10, 0),
            part(2, 0..86, 10..96, 0),
            part(2, 86..182, 96..192, 1),
            part(2, 182..250, 192..260, 2),
        ];
        assert_eq!(parts, expected);
        assert_eq!(parts_of(&parts, 0), &expected[..2]);
        assert_eq!(parts_of(&parts, 3), []);
    }

    #[test]
    fn partition_keeps_a_tensor_that_ends_at_an_edge_whole() {
        assert_eq!(partition(&[0..4, 4..8], 4, 2).unwrap(), [part(0, 0..4, 0..4, 0), part(1, 0..4, 4..8, 1)]);
        assert_eq!(partition(&[0..0, 0..0], 0, 2).unwrap(), []);
        assert_eq!(partition(&[], 4, 2).unwrap(), []);
    }

    #[test]
    fn partition_names_refused_values() {
        let refusal = |segments: &[Range<usize>], shard_len, world_size| {
            partition(segments, shard_len, world_size).unwrap_err().to_string()
        };
        assert!(refusal(&[0..4], 4, 0).contains("world size is 0"));
        let message = refusal(&[0..4, 4..9], 4, 2);
        assert!(message.contains("segment 1") && message.contains("4..9"), "{message}");
        assert!(refusal(&[0..1], 0, 2).contains("segment 0"));
        assert!(refusal(&[2..4, 0..2], 4, 2).contains("segment 1"));
        assert!(refusal(&[], usize::MAX, 2).contains(&usize::MAX.to_string()));
        assert!(partition_padded(0, &[]).unwrap_err().to_string().contains("world size is 0"));
        assert!(partition_padded(2, &[usize::MAX, 1]).unwrap_err().to_string().contains("tensor 1"));
    }
}
