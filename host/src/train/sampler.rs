//! [`ShardedIndices`]: the examples of a rank, their order, and the position after a restart (PyTorch's DistributedSampler).
//!
//! The numbers of the examples are pure arithmetic; ranks communicate only where they agree on a [`Position`].

use std::collections::BTreeSet;
use std::iter::FusedIterator;

use serde::{Deserialize, Serialize};

use super::random::{SplitMix64, derive};
use super::same_bits::numbers;
use crate::call::{Value, scope, setters};
use crate::call_comparison::{ComparedCall, agree, gather};
use crate::comm::Ranks;
use crate::error::{Error, Operation, Result};

const OPERATION: &str = "sharded indices";

/// The treatment of the last examples of an epoch if the number of examples is not divisible by the number of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

/// A position in the data, for a checkpoint: plain numbers, the same on every rank, and all that makes them valid. It does not depend on
/// the number of ranks. [`ShardedIndices::position`] makes one, and [`ShardedIndices::resume`] continues there.
///
/// ```
/// use gradsync::train::{Position, ShardOptions};
///
/// // The begin of the fourth epoch.
/// let options = ShardOptions::default().with_seed(42);
/// let position = Position { epoch: 3, ..Position::start(100, options) };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Position {
    /// The number of examples of the data, all of which are in each epoch.
    pub len: u64,
    /// The order of the examples, and the treatment of the last ones.
    pub options: ShardOptions,
    /// The epoch, from 0.
    pub epoch: u64,
    /// The number of examples of this epoch that all ranks together have taken.
    pub consumed: u64,
}

impl Position {
    /// The begin of the first epoch of `len` examples.
    pub fn start(len: usize, options: ShardOptions) -> Self {
        Self { len: len as u64, options, epoch: 0, consumed: 0 }
    }

    /// The properties that position and data must share, by the names of their fields.
    fn properties(&self) -> [(&'static str, String); 4] {
        let ShardOptions { seed, shuffles, tail } = self.options;
        [
            ("len", self.len.to_string()),
            ("seed", seed.to_string()),
            ("shuffles", shuffles.to_string()),
            ("tail", format!("{tail:?}")),
        ]
    }

    /// Refuses to continue here with other data or options, with which examples would be repeated and left out.
    fn check(&self, len: usize, options: ShardOptions) -> Result<()> {
        let refuse = |reason| Err(Error::InvalidArgument { operation: OPERATION, reason });
        let given = Self::start(len, options).properties();
        if let Some(((name, saved), (_, given))) =
            self.properties().iter().zip(&given).find(|(own, other)| own != other)
        {
            return refuse(format!(
                "the position was saved with {name} {saved} and cannot continue with {name} {given}: pass {name} {saved}, or begin \
                 an epoch of the new data by `Position::start`"
            ));
        }
        if self.consumed > self.len {
            return refuse(format!(
                "the position says that {} examples of epoch {} were consumed, and there are {len}: it was changed since it was saved",
                self.consumed, self.epoch
            ));
        }
        Ok(())
    }
}

/// The examples of one rank, by their numbers from 0: an iterator over the examples of one epoch.
///
/// An epoch has one order of all examples, the same on all ranks. Ranks take turns: from a position on, the `k`-th example of rank `r` of
/// `P` is number `consumed + k P + r` of the order. So the examples taken by all ranks are a prefix of the order, and a run that continues
/// at a [`Position`], on any number of ranks, neither repeats nor leaves out an example.
///
/// What counts is how many examples a rank has *asked for*: with [`Tail::Uneven`], ranks that have one example less than others ask in the
/// last turn too, and get none. A `for` loop and [`next_batch`](Self::next_batch) do that by themselves.
///
/// The order is the Fisher–Yates shuffle of 0, 1, …: from the last position `i` down to 1, swap with position `j ≤ i`. The numbers `j` come
/// from SplitMix64 by Lemire's method, beginning with the state `mix((mix(seed + γ) ⊕ epoch) + γ)`, where `mix` and `γ` are SplitMix64's.
/// It does not change with the version of this crate. It needs 8 bytes of memory per example.
///
/// ```
/// use gradsync::comm::{Ranks, local};
/// use gradsync::train::{Position, ShardOptions, ShardedIndices};
///
/// let options = ShardOptions::default().with_seed(42);
/// // Four ranks take 10 examples each of 100, and a checkpoint is made.
/// let runs = local::run(4, |comm| {
///     let mut indices = ShardedIndices::new(100, comm.rank(), comm.world_size(), options)?;
///     Ok((indices.next_batch(10), indices.position(&comm)?))
/// })?;
/// let position = runs[0].1;
/// assert_eq!(position, Position { consumed: 40, ..Position::start(100, options) });
/// // Three ranks go on.
/// let mut had: Vec<usize> = runs.into_iter().flat_map(|(taken, _)| taken).collect();
/// for rank in 0..3 {
///     had.extend(ShardedIndices::resume(100, rank, 3, options, position)?);
/// }
/// had.sort_unstable();
/// assert_eq!(had, (0..100).collect::<Vec<_>>());
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardedIndices {
    rank: usize,
    world_size: usize,
    /// The position at which this iterator began.
    from: Position,
    /// The order of this epoch; empty for the order of the numbers.
    order: Vec<usize>,
    /// The number of examples that this rank has asked for since, at most [`turns_in_all`](Self::turns_in_all).
    turns: usize,
}

impl ShardedIndices {
    /// Begins the first epoch of `len` examples, for rank `rank` of `world_size`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that does not exist; [`Error::OutOfMemory`] for the order.
    pub fn new(len: usize, rank: usize, world_size: usize, options: ShardOptions) -> Result<Self> {
        Self::resume(len, rank, world_size, options, Position::start(len, options))
    }

    /// Continues at a position, which another number of ranks may have reached.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::InvalidArgument`] naming the value for a position that was saved with another `len`
    /// or with other options, or in which more examples are consumed than exist.
    pub fn resume(
        len: usize,
        rank: usize,
        world_size: usize,
        options: ShardOptions,
        position: Position,
    ) -> Result<Self> {
        if rank >= world_size {
            let reason = format!("rank {rank} is none of {world_size} ranks");
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        position.check(len, options)?;
        let order = if options.shuffles { shuffled(len, options.seed, position.epoch)? } else { Vec::new() };
        Ok(Self { rank, world_size, from: position, order, turns: 0 })
    }

    /// Begins the next epoch, at any position of this one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] for the order, and [`Error::InvalidArgument`] if this epoch has the largest number; nothing is changed then.
    pub fn next_epoch(&mut self) -> Result<()> {
        let Some(epoch) = self.from.epoch.checked_add(1) else {
            let reason = format!("epoch {} has the largest number, and no epoch can follow it", self.from.epoch);
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        };
        let position = Position { epoch, consumed: 0, ..self.from };
        *self = Self::resume(self.data_len(), self.rank, self.world_size, position.options, position)?;
        Ok(())
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.from.epoch
    }

    /// The position that all ranks have reached, for a checkpoint. All ranks must call it, also if only one of them writes the checkpoint.
    /// The host waits for the other ranks.
    ///
    /// A loader that prefetches examples has asked for more than were trained on: see [`position_after`](Self::position_after).
    ///
    /// # Errors
    /// On every rank: [`Error::InvalidArgument`] if ranks have asked for different numbers of examples, listing the ranks and their
    /// numbers, or if `ranks` are not all ranks that share the examples; [`Error::Disagreement`] if their data or options differ. The
    /// errors of a collective.
    pub fn position<R: Ranks + ?Sized>(&self, ranks: &R) -> Result<Position> {
        self.agreed(ranks, self.turns)
    }

    /// The position of [`position`](Self::position) after the first `asked` examples from this iterator, those that this rank has trained
    /// on: prefetched examples do not count. In the last turn of an uneven epoch a rank without an example counts one too, or none.
    ///
    /// # Errors
    /// The errors of [`position`](Self::position).
    pub fn position_after<R: Ranks + ?Sized>(&self, ranks: &R, asked: usize) -> Result<Position> {
        self.agreed(ranks, asked.min(self.turns_in_all()))
    }

    /// The position if every rank has asked for as many examples as this one; no other rank is asked. It is for a log, or for a program
    /// whose ranks compare it themselves; a checkpoint takes [`position`](Self::position).
    pub fn local_position(&self) -> Position {
        self.position_at(self.turns)
    }

    /// The number of examples of this rank that are left in this epoch.
    pub fn remaining(&self) -> usize {
        self.share_len().saturating_sub(self.turns)
    }

    /// This rank's next `count` examples, or fewer at the end of the epoch.
    pub fn next_batch(&mut self, count: usize) -> Vec<usize> {
        // The call ends at the first turn without an example, which is the last turn of all ranks.
        (0..count).map_while(|_| self.next()).collect()
    }

    fn agreed<R: Ranks + ?Sized>(&self, ranks: &R, turns: usize) -> Result<Position> {
        let operation = Operation::Position;
        let _scope = scope::within(operation);
        let [rank, turns, count] = [self.rank, turns, self.share_len()].map(|number| number as u64);
        let own = [rank, turns, count, self.from.epoch, self.from.consumed];
        let all = if ranks.world_size() == 1 {
            own.to_vec()
        } else {
            let properties = self.from.properties();
            let mut lines: Vec<_> = properties.iter().map(|(name, value)| (*name, Value::Name(value))).collect();
            lines.push(("the number of ranks that share the examples", Value::Number(self.world_size)));
            agree(ranks, &ComparedCall { lines: &lines, ..ComparedCall::of(operation) }, Result::<()>::Ok(()))?;
            gather(ranks, &own)?
        };
        let all: Vec<[u64; 5]> = all.chunks_exact(5).map(|words| words.try_into().expect("five words")).collect();
        // Every rank has the same numbers, so every rank takes the same branch.
        let refuse = |reason| Err(Error::InvalidArgument { operation: OPERATION, reason });
        let sharing: BTreeSet<u64> = all.iter().map(|&[rank, ..]| rank).collect();
        if sharing.len() != self.world_size {
            return refuse(format!(
                "{} ranks share the examples, and only {sharing:?} of them agree on a position; pass a communicator of all",
                self.world_size
            ));
        }
        let most = all.iter().map(|&[_, turns, ..]| turns).max().unwrap_or_default();
        // A rank that has no examples left may have stopped asking one turn before the others.
        let fits = |&[_, turns, count, epoch, begin]: &[u64; 5]| {
            turns.min(count) == most.min(count) && [epoch, begin] == [self.from.epoch, self.from.consumed]
        };
        if !all.iter().all(fits) {
            return refuse(self.drift(&all));
        }
        Ok(self.position_at(most as usize))
    }

    /// The text for ranks at different positions, by groups of ranks at the same one.
    fn drift(&self, all: &[[u64; 5]]) -> String {
        let mut groups: Vec<([u64; 3], Vec<usize>)> = Vec::new();
        for (rank, &[_, turns, _, epoch, begin]) in all.iter().enumerate() {
            let numbers = [turns, epoch, begin];
            match groups.iter_mut().find(|(of_group, _)| *of_group == numbers) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((numbers, vec![rank])),
            }
        }
        let described = groups.iter().map(|([turns, epoch, begin], ranks)| {
            let from = Position { epoch: *epoch, consumed: *begin, ..self.from };
            let Position { consumed, .. } = Self { from, order: Vec::new(), ..*self }.position_at(*turns as usize);
            format!("{}: {turns} examples of epoch {epoch} from {begin} on, so position {consumed}", numbers(ranks))
        });
        format!(
            "ranks have asked for different numbers of examples ({}). Ask for equally many on every rank before a position is saved, \
             and call `next_epoch` on all ranks or on none",
            described.collect::<Vec<_>>().join("; ")
        )
    }

    fn data_len(&self) -> usize {
        // `Position::check` has compared it with a `usize`.
        self.from.len as usize
    }

    /// The number of examples of this epoch that were left when this iterator began.
    fn left(&self) -> usize {
        (self.from.len - self.from.consumed) as usize
    }

    /// The number of turns of all ranks since this iterator began, in the last of which some ranks may have no example.
    fn turns_in_all(&self) -> usize {
        match self.from.options.tail {
            Tail::Drop => self.left() / self.world_size,
            Tail::Pad | Tail::Uneven => self.left().div_ceil(self.world_size),
        }
    }

    /// The number of examples of this rank since this iterator began.
    fn share_len(&self) -> usize {
        match self.from.options.tail {
            Tail::Drop | Tail::Pad => self.turns_in_all(),
            Tail::Uneven => self.left().saturating_sub(self.rank).div_ceil(self.world_size),
        }
    }

    fn position_at(&self, turns: usize) -> Position {
        let taken = turns.saturating_mul(self.world_size).min(self.left());
        Position { consumed: self.from.consumed + taken as u64, ..self.from }
    }

    /// This rank's example in a turn, which is below [`count`](Self::count).
    fn example(&self, turn: usize) -> usize {
        let begin = self.from.consumed as usize + turn * self.world_size;
        // Beyond the end the first examples repeat, fewer than one per rank; there may be fewer examples than ranks.
        let to_end = self.data_len() - begin;
        let place = if self.rank < to_end { begin + self.rank } else { (self.rank - to_end) % self.data_len() };
        self.order.get(place).copied().unwrap_or(place)
    }
}

impl Iterator for ShardedIndices {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.nth(0)
    }

    fn nth(&mut self, skipped: usize) -> Option<usize> {
        let turn = self.turns.saturating_add(skipped);
        self.turns = turn.saturating_add(1).min(self.turns_in_all());
        (turn < self.share_len()).then(|| self.example(turn))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining(), Some(self.remaining()))
    }
}

impl ExactSizeIterator for ShardedIndices {}

impl FusedIterator for ShardedIndices {}

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
