//! [`ShardedIndices`]: the examples of a rank, their order, and the position after a restart (PyTorch's DistributedSampler).
//!
//! Pure arithmetic; nothing here reads data or communicates.

use super::random::{SplitMix64, derive};
use crate::call::setters;
use crate::error::{Error, Result};

const OPERATION: &str = "sharded indices";

/// The treatment of the last examples of an epoch if the number of examples is not divisible by the number of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Tail {
    /// They are left out, fewer than one per rank, so that all ranks have the same number.
    #[default]
    Drop,
    /// Ranks without an example get the first examples of the epoch again, so that all ranks have the same number.
    Pad,
    /// The first ranks have one more ([`Reducer::step_of`](super::Reducer::step_of) supports unequal numbers).
    Uneven,
}

/// Options of [`ShardedIndices`]; equal on all ranks.
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
    /// Whether each epoch has its own random order; otherwise examples are in the order of their numbers. True by default.
    pub shuffles: bool,
    /// The treatment of the last examples: [`Tail::Drop`] by default.
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

/// A position in the data, for a checkpoint: plain numbers, the same on every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Position {
    /// The epoch, from 0.
    pub epoch: u64,
    /// The number of examples of this epoch that all ranks together have taken.
    pub consumed: u64,
}

/// The examples of one rank, by their numbers from 0: an iterator over the examples of one epoch.
///
/// An epoch has one order of all examples, the same on all ranks. Ranks take turns: from a position on, the `k`-th example of rank `r` of
/// `P` is number `consumed + k P + r` of the order. So the examples taken by all ranks are a prefix of the order, and a run that continues
/// at a [`Position`], on any number of ranks, neither repeats nor leaves out an example.
///
/// The order is the Fisher–Yates shuffle of 0, 1, …: from the last position `i` down to 1, swap with position `j ≤ i`. The numbers `j` come
/// from SplitMix64 by Lemire's method, beginning with the state `mix((mix(seed + γ) ⊕ epoch) + γ)`, where `mix` and `γ` are SplitMix64's.
/// It does not change with the version of this crate. It needs 8 bytes of memory per example.
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
    /// The order of this epoch; empty for the order of the numbers.
    order: Vec<usize>,
    /// The number of examples of this epoch that were consumed when this iterator began.
    begin: usize,
    /// The number of examples that this rank has taken since.
    taken: usize,
}

impl ShardedIndices {
    /// Begins the first epoch of `len` examples, for rank `rank` of `world_size`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that does not exist; [`Error::OutOfMemory`] for the order.
    pub fn new(len: usize, rank: usize, world_size: usize, options: ShardOptions) -> Result<Self> {
        Self::resume(len, rank, world_size, options, Position::default())
    }

    /// Continues at a position, which another number of ranks may have reached, with equal `len` and options.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`] if more examples are consumed than exist.
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

    /// Begins the next epoch, at any position of this one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] for the order; nothing is changed then.
    pub fn next_epoch(&mut self) -> Result<()> {
        let position = Position { epoch: self.epoch + 1, consumed: 0 };
        *self = Self::resume(self.len, self.rank, self.world_size, self.options, position)?;
        Ok(())
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The position once every rank has taken as many examples as this one.
    ///
    /// A loader that prefetches examples has taken more than were trained on: see [`position_after`](Self::position_after).
    pub fn position(&self) -> Position {
        self.position_after(self.taken)
    }

    /// The position once every rank has trained on `taken` of the examples from this iterator; prefetched examples do not count.
    pub fn position_after(&self, taken: usize) -> Position {
        let consumed = taken.saturating_mul(self.world_size).saturating_add(self.begin).min(self.len);
        Position { epoch: self.epoch, consumed: consumed as u64 }
    }

    /// The number of examples of this rank that are left in this epoch.
    pub fn remaining(&self) -> usize {
        self.count() - self.taken
    }

    /// This rank's next `count` examples, or fewer at the end of the epoch.
    pub fn next_batch(&mut self, count: usize) -> Vec<usize> {
        self.by_ref().take(count).collect()
    }

    /// The number of examples of this rank since this iterator began.
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
        // Beyond the end the first examples repeat, fewer than one per rank; there may be fewer examples than ranks.
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
