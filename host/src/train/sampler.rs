//! [`ShardedIndices`]: which examples a rank sees, in which order, and where it goes on after a restart (PyTorch's DistributedSampler).
//!
//! Pure arithmetic; nothing here reads data or communicates.

use super::random::{SplitMix64, derive};
use crate::call::setters;
use crate::error::{Error, Result};

const OPERATION: &str = "sharded indices";

/// What becomes of the last examples of an epoch where they do not divide among the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tail {
    /// They are left out, fewer than one a rank, so that all ranks have equally many.
    #[default]
    Drop,
    /// Ranks without one get the first examples of the epoch again, so that all ranks have equally many.
    Pad,
    /// The first ranks have one more ([`Reducer::step_of`](super::Reducer::step_of) takes unequal numbers).
    Uneven,
}

/// Choices of [`ShardedIndices`]; equal on all ranks.
///
/// ```
/// use gradsync::train::{ShardOptions, Tail};
///
/// let options = ShardOptions::default().with_seed(42).with_tail(Tail::Pad);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ShardOptions {
    /// The seed of all epochs' orders. 0 by default.
    pub seed: u64,
    /// Whether each epoch has an order of its own; otherwise examples come as they are numbered. True by default.
    pub shuffles: bool,
    /// The last examples: [`Tail::Drop`] by default.
    pub tail: Tail,
}

impl Default for ShardOptions {
    fn default() -> Self {
        Self { seed: 0, shuffles: true, tail: Tail::Drop }
    }
}

impl ShardOptions {
    setters! { with_seed(seed: u64), with_shuffles(shuffles: bool), with_tail(tail: Tail) }
}

/// A place in the data, for a checkpoint: plain numbers, and the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The examples of this epoch that all ranks together have had.
    pub consumed: u64,
}

/// The examples of one rank, by their numbers from 0: an iterator over those of one epoch.
///
/// An epoch has one order of all examples, the same on all ranks. Ranks take turns: from a position on, the `k`-th example of rank `r` of `P` is number
/// `consumed + k P + r` of the order. So examples that were taken by all ranks are the beginning of the order, and a run that is continued at a
/// [`Position`], on any number of ranks, neither repeats nor leaves out an example.
///
/// The order is the Fisher–Yates shuffle of 0, 1, …: from the last place `i` down to 1, swap with place `j ≤ i`. The numbers `j` come from SplitMix64
/// by Lemire's method, beginning with the state `mix((mix(seed + γ) ⊕ epoch) + γ)`, where `mix` and `γ` are SplitMix64's. It does not change with the
/// version of this crate. It takes 8 bytes of memory an example.
///
/// ```
/// use gradsync::train::{Position, ShardOptions, ShardedIndices};
///
/// let options = ShardOptions::default().with_seed(42);
/// let mut had = Vec::new();
/// // Four ranks take 10 examples each of 100, and a checkpoint is made.
/// let mut position = Position::default();
/// for rank in 0..4 {
///     let mut indices = ShardedIndices::new(100, rank, 4, options)?;
///     had.extend(indices.by_ref().take(10));
///     position = indices.position();
/// }
/// assert_eq!(position, Position { epoch: 0, consumed: 40 });
/// // Three ranks go on.
/// for rank in 0..3 {
///     had.extend(ShardedIndices::resume(100, rank, 3, options, position)?);
/// }
/// had.sort_unstable();
/// assert_eq!(had, (0..100).collect::<Vec<_>>());
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardedIndices {
    len: usize,
    rank: usize,
    world_size: usize,
    options: ShardOptions,
    epoch: u64,
    /// The order of this epoch; empty where it is that of the numbers.
    order: Vec<usize>,
    /// The examples of this epoch that were consumed when this began.
    begin: usize,
    /// The examples that this rank has taken since.
    taken: usize,
}

impl ShardedIndices {
    /// The first epoch of `len` examples, for rank `rank` of `world_size`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not; [`Error::OutOfMemory`] for the order.
    pub fn new(len: usize, rank: usize, world_size: usize, options: ShardOptions) -> Result<Self> {
        Self::resume(len, rank, world_size, options, Position::default())
    }

    /// Goes on from a position, which may have been reached by another number of ranks, with equal `len` and options.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::InvalidArgument`] for more examples consumed than there are.
    pub fn resume(
        len: usize,
        rank: usize,
        world_size: usize,
        options: ShardOptions,
        position: Position,
    ) -> Result<Self> {
        let refuse = |reason| Err(Error::InvalidArgument { operation: OPERATION, reason });
        if rank >= world_size {
            return refuse(format!("rank {rank} is none of {world_size} ranks"));
        }
        let Position { epoch, consumed } = position;
        let begin = usize::try_from(consumed).unwrap_or(usize::MAX);
        if begin > len {
            return refuse(format!("{consumed} examples of epoch {epoch} were consumed, and there are {len}"));
        }
        let order = if options.shuffles { shuffled(len, options.seed, epoch)? } else { Vec::new() };
        Ok(Self { len, rank, world_size, options, epoch, order, begin, taken: 0 })
    }

    /// Begins the next epoch, wherever this one is.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] for the order; everything is as before then.
    pub fn next_epoch(&mut self) -> Result<()> {
        let position = Position { epoch: self.epoch + 1, consumed: 0 };
        *self = Self::resume(self.len, self.rank, self.world_size, self.options, position)?;
        Ok(())
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The position once every rank has taken as many examples as this one has.
    ///
    /// A loader that takes examples ahead of the training has taken more than were trained on: see [`position_after`](Self::position_after).
    pub fn position(&self) -> Position {
        self.position_after(self.taken)
    }

    /// The position once every rank has trained on `taken` examples that it has got from here, no matter how many were taken ahead.
    pub fn position_after(&self, taken: usize) -> Position {
        let consumed = taken.saturating_mul(self.world_size).saturating_add(self.begin).min(self.len);
        Position { epoch: self.epoch, consumed: consumed as u64 }
    }

    /// The examples of this rank that are left in this epoch.
    pub fn remaining(&self) -> usize {
        self.count() - self.taken
    }

    /// This rank's next `count` examples, or fewer at the end of the epoch; none where it is over.
    pub fn next_batch(&mut self, count: usize) -> Vec<usize> {
        self.by_ref().take(count).collect()
    }

    /// The examples of this rank from where this began.
    fn count(&self) -> usize {
        let left = self.len - self.begin;
        match self.options.tail {
            Tail::Drop => left / self.world_size,
            Tail::Pad => left.div_ceil(self.world_size),
            Tail::Uneven => left.saturating_sub(self.rank).div_ceil(self.world_size),
        }
    }
}

impl Iterator for ShardedIndices {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.remaining() == 0 {
            return None;
        }
        // Beyond the end are the first examples again, by less than one a rank; there may be fewer examples than ranks.
        let place = (self.begin + self.taken * self.world_size + self.rank) % self.len;
        self.taken += 1;
        Some(self.order.get(place).copied().unwrap_or(place))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining(), Some(self.remaining()))
    }
}

impl ExactSizeIterator for ShardedIndices {}

/// The order of an epoch.
fn shuffled(len: usize, seed: u64, epoch: u64) -> Result<Vec<usize>> {
    let mut order: Vec<usize> = Vec::new();
    let bytes = len.saturating_mul(size_of::<usize>());
    order.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { operation: OPERATION, bytes })?;
    order.extend(0..len);
    let mut random = SplitMix64::new(derive(seed, &[epoch]));
    for place in (1..len).rev() {
        order.swap(place, random.below(place as u64 + 1) as usize);
    }
    Ok(order)
}
