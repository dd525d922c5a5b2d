//! Segments: the element ranges of tensors in an arena, their parts in a shard, and their division into pieces and blocks.

use std::ops::Range;

#[cfg(any(feature = "cuda", test))]
use gradsync_device::abi::Span;

use crate::error::{Error, Result};

/// Checks that segments ascend, do not overlap and end within `len` elements.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the first segment that violates this.
pub(crate) fn check(operation: &'static str, segments: &[Range<usize>], len: usize) -> Result<()> {
    let mut end = 0;
    for (index, segment) in segments.iter().enumerate() {
        if segment.start < end || segment.end < segment.start || segment.end > len {
            let reason = format!("segment {index} is {segment:?}, but must lie within {end}..{len}");
            return Err(Error::InvalidArgument { operation, reason });
        }
        end = segment.end;
    }
    Ok(())
}

/// The intersection of each segment with `range`, counted from the start of `range`; empty for segments outside. Panics if the range ends
/// before it begins.
pub(crate) fn clip(segments: &[Range<usize>], range: Range<usize>) -> Vec<Range<usize>> {
    let offset = |element: usize| element.clamp(range.start, range.end) - range.start;
    segments.iter().map(|segment| offset(segment.start)..offset(segment.end)).collect()
}

/// The gaps between ascending segments of an arena of `len` elements; never empty ranges.
pub(crate) fn gaps(segments: &[Range<usize>], len: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    let ends = segments.iter().map(|segment| segment.end);
    let starts = segments.iter().map(|segment| segment.start).chain([len]);
    [0].into_iter().chain(ends).zip(starts).map(|(end, start)| end..start).filter(|gap| !gap.is_empty())
}

/// A range in pieces of `len` elements, in order; the last piece may be shorter. Panics if `len` is 0.
pub(crate) fn pieces(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = range.end;
    range.step_by(len).map(move |begin| begin..end.min(begin + len))
}

/// The segments divided into pieces of at most `piece_len` elements: `(segment, range)`, in order. Panics if that is 0.
pub(crate) fn pieces_of_all(
    segments: &[Range<usize>],
    piece_len: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    segments
        .iter()
        .enumerate()
        .flat_map(move |(index, segment)| pieces(segment.clone(), piece_len).map(move |piece| (index, piece)))
}

/// The table in which a kernel looks up its segment, and the number of blocks of at most `block_len` elements. Panics if that is 0.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn spans(segments: &[Range<usize>], block_len: usize) -> (Vec<Span>, u64) {
    let mut blocks = 0;
    let spans = segments.iter().map(|segment| {
        let span = Span { begin: segment.start as u64, len: segment.len() as u64, first_block: blocks };
        blocks += segment.len().div_ceil(block_len) as u64;
        span
    });
    (spans.collect(), blocks)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ascending(lens: Vec<(usize, usize)>) -> Vec<Range<usize>> {
        let mut end = 0;
        let mut segments = Vec::new();
        for (gap, len) in lens {
            segments.push(end + gap..end + gap + len);
            end += gap + len;
        }
        segments
    }

    proptest! {
        #[test]
        fn clip_partitions_every_segment(lens in prop::collection::vec((0usize..9, 0usize..50), 0..12), world in 1usize..9) {
            let segments = ascending(lens);
            let total = segments.last().map_or(0, |last| last.end);
            let shard = total.div_ceil(world);
            let mut found = vec![0; segments.len()];
            for rank in 0..world {
                let clipped = clip(&segments, rank * shard..(rank + 1) * shard);
                check("test", &clipped, shard).unwrap();
                for (count, part) in found.iter_mut().zip(&clipped) {
                    *count += part.len();
                }
            }
            prop_assert_eq!(found, segments.iter().map(Range::len).collect::<Vec<_>>());
        }

        #[test]
        fn gaps_are_outside_all_segments(lens in prop::collection::vec((0usize..9, 0usize..50), 0..12), behind in 0usize..9) {
            let segments = ascending(lens);
            let len = segments.last().map_or(0, |last| last.end) + behind;
            let gaps: Vec<_> = gaps(&segments, len).collect();
            prop_assert!(gaps.iter().all(|gap| !gap.is_empty()));
            let found: Vec<usize> = gaps.into_iter().flatten().collect();
            let expected = (0..len).filter(|element| !segments.iter().any(|segment| segment.contains(element)));
            prop_assert_eq!(found, expected.collect::<Vec<_>>());
        }

        #[test]
        fn spans_number_the_blocks(lens in prop::collection::vec((0usize..9, 0usize..50), 0..12), block_len in 1usize..20) {
            let segments = ascending(lens);
            let (spans, blocks) = spans(&segments, block_len);
            let expected: Vec<_> = pieces_of_all(&segments, block_len).collect();
            prop_assert_eq!(blocks as usize, expected.len());
            for (block, (segment, range)) in expected.into_iter().enumerate() {
                let span = spans[segment];
                let begin = span.begin as usize + (block - span.first_block as usize) * block_len;
                prop_assert_eq!(begin, range.start);
            }
        }
    }

    #[test]
    fn check_refuses_disorder_by_name() {
        let message = check("combine", &[0..4, 3..6], 10).unwrap_err().to_string();
        assert!(message.contains("segment 1") && message.contains("3..6"), "{message}");
        assert!(check("combine", &[0..4, 4..11], 10).is_err());
        assert!(check("combine", &[0..4, 4..4, 9..10], 10).is_ok());
    }
}
