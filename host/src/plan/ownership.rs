//! The ownership of whole tensors by ranks, as in ONNX Runtime's `NcclAllGather` and `NcclReduceScatter`.
//!
//! Tensors are contiguous in a scratch buffer, padded so that every rank has a shard of the same length; a tensor belongs to the rank in
//! whose shard it starts. A gather copies every tensor from its owner to all ranks; a scatter leaves the sum over ranks in the owner's
//! tensor and does not change the others. All counts are elements, of one dtype. Nothing here moves data: [`Moves`] describe the copies
//! that a transport has to make. A tensor is never divided; [`zero`](super::zero) does that.

use std::ops::Range;

use crate::error::{Error, Result};

/// The unit of shard lengths in elements: the padded length is a multiple of this times the world size.
pub const SHARD_ALIGNMENT: usize = 32;

/// Contiguous tensors, without alignment, and padding after the last one. In elements.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PaddedLayout {
    /// The element range of each tensor, in order, without gaps.
    pub segments: Vec<Range<usize>>,
    /// The length of the scratch buffer in elements: `world_size` shards.
    pub padded_len: usize,
    /// The length of one rank's shard in elements; rank r has `r * shard_len..(r + 1) * shard_len`.
    pub shard_len: usize,
}

impl PaddedLayout {
    /// Lays out tensors of the given lengths, in elements, for `world_size` shards.
    ///
    /// There is always padding: a total that is a multiple of [`SHARD_ALIGNMENT`]` * world_size` gains another such
    /// block.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a world of 0 ranks, or more elements than `usize` counts.
    pub fn new(operation: &'static str, world_size: usize, lens: &[usize]) -> Result<Self> {
        let refused = |reason| Error::InvalidArgument { operation, reason };
        if world_size == 0 {
            return Err(refused("the world size is 0".into()));
        }
        let mut segments = Vec::with_capacity(lens.len());
        let mut total = 0usize;
        for (index, &len) in lens.iter().enumerate() {
            let end = total.checked_add(len).ok_or_else(|| {
                refused(format!(
                    "tensor {index} has {len} elements: with the {total} before it, they exceed the address space"
                ))
            })?;
            segments.push(total..end);
            total = end;
        }
        let padded_len = world_size.checked_mul(SHARD_ALIGNMENT).and_then(|block| {
            let padding = block - total % block;
            total.checked_add(padding)
        });
        let padded_len = padded_len.ok_or_else(|| {
            refused(format!("{total} elements, padded for {world_size} ranks, exceed the address space"))
        })?;
        Ok(Self { segments, padded_len, shard_len: padded_len / world_size })
    }
}

/// One copy of a whole tensor into or out of the scratch buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Move {
    /// The tensor's index.
    pub tensor: usize,
    /// The element range in the scratch buffer, counted from the buffer's start (not the shard's).
    pub range: Range<usize>,
}

/// The copies of one rank before and after a collective over the scratch buffer, in the order of the tensors.
///
/// Empty tensors have no moves. Elements that no move writes, such as the padding, are unspecified before the collective.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moves {
    /// Copies from tensors into the scratch buffer, before the collective.
    pub copy_in: Vec<Move>,
    /// Copies from the scratch buffer into tensors, after the collective.
    pub copy_out: Vec<Move>,
}

/// The owner of each tensor of a list. The same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    world_size: usize,
    layout: PaddedLayout,
    owners: Vec<usize>,
}

impl Ownership {
    /// Computes the owners of tensors of the given lengths, in elements. Errors name `operation`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] in the cases of [`PaddedLayout::new`], or naming the first tensor that does not end in the shard in
    /// which it starts.
    pub fn new(operation: &'static str, world_size: usize, lens: &[usize]) -> Result<Self> {
        let layout = PaddedLayout::new(operation, world_size, lens)?;
        let mut owners = Vec::with_capacity(lens.len());
        for (index, segment) in layout.segments.iter().enumerate() {
            // The owner is below the world size even for an empty tensor at the end, since there is always padding.
            let owner = segment.start / layout.shard_len;
            let shard = owner * layout.shard_len..(owner + 1) * layout.shard_len;
            if segment.end > shard.end {
                let reason = format!(
                    "tensor {index} is elements {segment:?}, which leave the shard {shard:?} of rank {owner}; one of \
                     {world_size} ranks must own all of it"
                );
                return Err(Error::InvalidArgument { operation, reason });
            }
            owners.push(owner);
        }
        Ok(Self { world_size, layout, owners })
    }

    /// The number of ranks, and of shards.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The length of the scratch buffer in elements, padding included: all ranks' shards together.
    pub fn padded_len(&self) -> usize {
        self.layout.padded_len
    }

    /// The length of one rank's shard in elements: its contribution to an all-gather, or its result of a reduce-scatter.
    pub fn shard_len(&self) -> usize {
        self.layout.shard_len
    }

    /// The elements of each tensor in the scratch buffer, in order.
    pub fn segments(&self) -> &[Range<usize>] {
        &self.layout.segments
    }

    /// The offset of each tensor in the scratch buffer in elements, in order.
    pub fn offsets(&self) -> impl ExactSizeIterator<Item = usize> + '_ {
        self.layout.segments.iter().map(|segment| segment.start)
    }

    /// The owner of each tensor, in order; ranks never descend.
    pub fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// The shard of `rank` in the scratch buffer. Panics for a rank beyond the world.
    pub fn shard(&self, rank: usize) -> Range<usize> {
        assert!(rank < self.world_size, "rank {rank} of {} has no shard", self.world_size);
        rank * self.shard_len()..(rank + 1) * self.shard_len()
    }

    /// The indices of the tensors that `rank` owns: consecutive, empty tensors included. Panics for a rank beyond the
    /// world.
    pub fn owned(&self, rank: usize) -> Range<usize> {
        assert!(rank < self.world_size, "rank {rank} of {} owns nothing", self.world_size);
        self.owners.partition_point(|&owner| owner < rank)..self.owners.partition_point(|&owner| owner <= rank)
    }

    /// The copies of `rank` around an all-gather of the shards: its own tensors are copied in, and all other tensors out. Panics for a
    /// rank beyond the world.
    pub fn gather_moves(&self, rank: usize) -> Moves {
        let own = self.owned(rank);
        let others = (0..own.start).chain(own.end..self.owners.len());
        Moves { copy_in: self.moves(own), copy_out: self.moves(others) }
    }

    /// The copies of `rank` around a reduce-scatter of the scratch buffer: all tensors are copied in, and its own out. The result of the
    /// collective is the rank's shard; where a transport delivers the shard alone, subtract [`shard`](Self::shard)`(rank).start` from a
    /// range. Tensors of other owners keep their unreduced elements. Panics for a rank beyond the world.
    pub fn scatter_moves(&self, rank: usize) -> Moves {
        Moves { copy_in: self.all_moves(), copy_out: self.moves(self.owned(rank)) }
    }

    /// The copies of all tensors, in their order.
    pub(crate) fn all_moves(&self) -> Vec<Move> {
        self.moves(0..self.owners.len())
    }

    fn moves(&self, tensors: impl Iterator<Item = usize>) -> Vec<Move> {
        let moves = tensors.map(|tensor| Move { tensor, range: self.layout.segments[tensor].clone() });
        moves.filter(|step| !step.range.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ownership(world_size: usize, lens: &[usize]) -> Ownership {
        Ownership::new("test", world_size, lens).unwrap()
    }

    fn refusal(world_size: usize, lens: &[usize]) -> String {
        Ownership::new("test", world_size, lens).unwrap_err().to_string()
    }

    proptest! {
        #[test]
        fn ownership_is_of_a_whole_tensor_or_refused(
            lens in prop::collection::vec(0usize..200, 0..12),
            world_size in 1usize..10,
        ) {
            let layout = PaddedLayout::new("test", world_size, &lens).unwrap();
            let total: usize = lens.iter().sum();
            let block = SHARD_ALIGNMENT * world_size;
            prop_assert_eq!(layout.padded_len % block, 0);
            prop_assert!(layout.padded_len > total && layout.padded_len <= total + block);
            prop_assert_eq!(layout.shard_len * world_size, layout.padded_len);
            prop_assert!(layout.segments.iter().map(Range::len).eq(lens.iter().copied()));
            let inside = |segment: &Range<usize>| {
                (0..world_size).any(|rank| {
                    let shard = rank * layout.shard_len..(rank + 1) * layout.shard_len;
                    shard.contains(&segment.start) && segment.end <= shard.end
                })
            };
            let straddler = layout.segments.iter().position(|segment| !inside(segment));
            match (Ownership::new("test", world_size, &lens), straddler) {
                (Ok(ownership), None) => {
                    for (segment, &owner) in ownership.segments().iter().zip(ownership.owners()) {
                        prop_assert!(ownership.shard(owner).contains(&segment.start));
                    }
                    let owned: Vec<_> = (0..world_size).flat_map(|rank| ownership.owned(rank)).collect();
                    prop_assert_eq!(owned, (0..lens.len()).collect::<Vec<_>>());
                }
                (Err(error), Some(index)) => {
                    prop_assert!(error.to_string().contains(&format!("tensor {index} is")), "{}", error);
                }
                (result, _) => prop_assert!(false, "{result:?} where the straddler is {straddler:?}"),
            }
        }
    }

    #[test]
    fn padded_len_adds_a_block_to_an_aligned_total() {
        for (world_size, total, padded) in
            [(2, 63, 64), (2, 64, 128), (2, 950, 960), (2, 1024, 1088), (4, 950, 1024), (1, 0, 32), (3, 0, 96)]
        {
            let layout = PaddedLayout::new("test", world_size, &[total]).unwrap();
            assert_eq!((layout.padded_len, layout.shard_len), (padded, padded / world_size));
        }
        let none = ownership(5, &[]);
        assert_eq!((none.padded_len(), none.shard_len(), none.offsets().len()), (160, 32, 0));
    }

    #[test]
    fn owners_at_edges_are_of_the_shard_that_starts_there() {
        let ownership = ownership(2, &[0, 480, 0, 470, 0]);
        assert_eq!(ownership.owners(), [0, 0, 1, 1, 1]);
        assert_eq!(ownership.offsets().collect::<Vec<_>>(), [0, 0, 480, 480, 950]);
        assert_eq!((ownership.shard(0), ownership.shard(1)), (0..480, 480..960));
        assert_eq!((ownership.owned(0), ownership.owned(1)), (0..2, 2..5));
    }

    #[test]
    fn gather_moves_and_scatter_moves_are_own_and_foreign() {
        let ownership = ownership(2, &[400, 0, 80, 470]);
        let at = |tensor, range| Move { tensor, range };
        let (first, second, third) = (at(0, 0..400), at(2, 400..480), at(3, 480..950));
        let gather = Moves { copy_in: vec![third.clone()], copy_out: vec![first.clone(), second.clone()] };
        assert_eq!(ownership.gather_moves(1), gather);
        let scatter = Moves {
            copy_in: vec![first.clone(), second.clone(), third],
            copy_out: vec![first.clone(), second.clone()],
        };
        assert_eq!(ownership.scatter_moves(0), scatter);
    }

    #[test]
    fn padded_len_names_refused_values() {
        let message = refusal(2, &[479, 2, 469]);
        for part in ["test: ", "tensor 1 ", "479..481", "0..480", "rank 0"] {
            assert!(message.contains(part), "{message} does not say {part}");
        }
        assert!(refusal(0, &[1]).contains("world size is 0"));
        let message = refusal(2, &[3, usize::MAX]);
        assert!(message.contains("tensor 1") && message.contains(&usize::MAX.to_string()), "{message}");
        assert!(refusal(1, &[usize::MAX]).contains(&usize::MAX.to_string()));
        assert!(refusal(usize::MAX / 2, &[1]).contains(&(usize::MAX / 2).to_string()));
        // The last multiple of 32 within `usize` is still a valid buffer.
        assert_eq!(ownership(1, &[usize::MAX - 32]).padded_len(), usize::MAX - 31);
    }

    #[test]
    #[should_panic(expected = "rank 2 of 2")]
    fn shard_panics_beyond_the_world() {
        ownership(2, &[1]).shard(2);
    }
}
