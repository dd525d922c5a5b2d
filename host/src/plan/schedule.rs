//! A schedule of transfers between ranks, slot by slot, which is checked for all ranks before any of them starts.
//!
//! A [`Schedule`] has numbered slots. In each, a rank starts all its sends and receives together, as one group call, and continues when all
//! of them are complete; ranks without a transfer in a slot skip it. The n-th send from one rank to another matches the n-th receive there
//! *in the same slot*, so any number of transfers may run between two ranks. A schedule in which each transfer has a match cannot deadlock:
//! the ranks that are furthest behind are all in the same slot, or on their way to it, and their transfers match there. A schedule without
//! that property cannot be constructed.
//!
//! [`Stage::one_forward_one_backward`] computes the schedule of a pipeline.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::{Error, Result};

const OPERATION: &str = "schedule";

/// One end of a transfer: `payload` is sent to `peer`, or received from it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Transfer<T> {
    /// The rank at the other end.
    pub peer: usize,
    /// The description of the payload at both ends: a number of bytes, for example.
    pub payload: T,
}

/// The transfers of one rank in one slot: one group call. Order matters among transfers with the same peer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slot<T> {
    /// The sends.
    pub sends: Vec<Transfer<T>>,
    /// The receives.
    pub recvs: Vec<Transfer<T>>,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { sends: Vec::new(), recvs: Vec::new() }
    }
}

/// The slots of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSchedule<T> {
    rank: usize,
    world_size: usize,
    slots: BTreeMap<usize, Slot<T>>,
}

impl<T> RankSchedule<T> {
    /// Creates an empty schedule for `rank`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank beyond the world.
    pub fn new(rank: usize, world_size: usize) -> Result<Self> {
        if rank >= world_size {
            return refused(format!("rank {rank} is not in a world of {world_size}"));
        }
        Ok(Self { rank, world_size, slots: BTreeMap::new() })
    }

    /// Adds a send to `peer`, after the slot's existing sends.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a peer beyond the world, or this rank itself.
    pub fn send(&mut self, slot: usize, peer: usize, payload: T) -> Result<()> {
        self.check(slot, peer)?;
        self.slots.entry(slot).or_default().sends.push(Transfer { peer, payload });
        Ok(())
    }

    /// Adds a receive from `peer`, after the slot's existing receives.
    ///
    /// # Errors
    /// The errors of [`send`](Self::send).
    pub fn recv(&mut self, slot: usize, peer: usize, payload: T) -> Result<()> {
        self.check(slot, peer)?;
        self.slots.entry(slot).or_default().recvs.push(Transfer { peer, payload });
        Ok(())
    }

    /// The rank of this schedule.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The transfers of this rank in a slot; `None` if it skips the slot.
    pub fn slot(&self, slot: usize) -> Option<&Slot<T>> {
        self.slots.get(&slot)
    }

    /// The slots that this rank does not skip, with their numbers, in order.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = (usize, &Slot<T>)> {
        self.slots.iter().map(|(&number, slot)| (number, slot))
    }

    fn check(&self, slot: usize, peer: usize) -> Result<()> {
        let Self { rank, world_size, .. } = *self;
        if peer >= world_size || peer == rank {
            return refused(format!(
                "slot {slot}: rank {rank} cannot exchange with rank {peer}: that must be another one of the \
                 {world_size} ranks"
            ));
        }
        Ok(())
    }
}

/// The slots of all ranks, in which each send matches a receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule<T> {
    ranks: Vec<RankSchedule<T>>,
}

/// The payloads that one rank sends to another in one slot, and the payloads that the other one receives.
type Ends<'a, T> = (Vec<&'a T>, Vec<&'a T>);

impl<T> Schedule<T> {
    /// Creates an empty schedule for `world_size` ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no ranks, [`Error::OutOfMemory`] for too many.
    pub fn new(world_size: usize) -> Result<Self> {
        if world_size == 0 {
            return refused("the world size is 0".into());
        }
        let mut ranks = Vec::new();
        ranks.try_reserve_exact(world_size).map_err(|_| Error::OutOfMemory {
            operation: OPERATION,
            bytes: world_size.saturating_mul(size_of::<RankSchedule<T>>()),
        })?;
        ranks.extend((0..world_size).map(|rank| RankSchedule { rank, world_size, slots: BTreeMap::new() }));
        Ok(Self { ranks })
    }

    /// Adds a send and the matching receive.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the two are not different ranks of the world.
    pub fn transfer(&mut self, slot: usize, from: usize, to: usize, payload: T) -> Result<()>
    where
        T: Clone,
    {
        let world_size = self.ranks.len();
        let Some(sender) = self.ranks.get_mut(from) else {
            return refused(format!("slot {slot}: rank {from} is not in a world of {world_size}"));
        };
        sender.send(slot, to, payload.clone())?;
        self.ranks[to].recv(slot, from, payload)
    }

    /// Combines the parts that the ranks have made, in rank order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming ranks and slot, for the first slot in which a send or a receive has no match, so that the two
    /// ranks would wait for ever, or in which the two ends have different payloads; or if the parts do not belong to all ranks, in order.
    pub fn from_ranks(ranks: Vec<RankSchedule<T>>) -> Result<Self>
    where
        T: PartialEq + fmt::Debug,
    {
        if ranks.is_empty() {
            return refused("the world size is 0".into());
        }
        for (index, RankSchedule { rank, world_size, .. }) in ranks.iter().enumerate() {
            if *rank != index || *world_size != ranks.len() {
                return refused(format!(
                    "part {index} of {} is for rank {rank} of {world_size}: parts must be in rank order, one for each \
                     rank",
                    ranks.len()
                ));
            }
        }
        // By slot, sender and receiver.
        let mut met: BTreeMap<(usize, usize, usize), Ends<'_, T>> = BTreeMap::new();
        for part in &ranks {
            for (slot, transfers) in part.slots() {
                for Transfer { peer, payload } in &transfers.sends {
                    met.entry((slot, part.rank, *peer)).or_default().0.push(payload);
                }
                for Transfer { peer, payload } in &transfers.recvs {
                    met.entry((slot, *peer, part.rank)).or_default().1.push(payload);
                }
            }
        }
        for ((slot, from, to), (sent, received)) in met {
            if sent.len() != received.len() {
                return refused(format!(
                    "slot {slot} would deadlock: rank {from} has {} sends to rank {to}, which has {} receives",
                    sent.len(),
                    received.len()
                ));
            }
            if let Some(index) = sent.iter().zip(&received).position(|(sent, received)| sent != received) {
                return refused(format!(
                    "slot {slot}: send {index} from rank {from} to rank {to} is {:?}, and its receive {index} is {:?}",
                    sent[index], received[index]
                ));
            }
        }
        Ok(Self { ranks })
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// One rank's part. Panics for a rank beyond the world.
    pub fn rank(&self, rank: usize) -> &RankSchedule<T> {
        &self.ranks[rank]
    }
}

/// A tensor that is sent between stages of a pipeline, by micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Payload {
    /// The outputs of a stage, which are the next stage's inputs.
    Activation(usize),
    /// The gradient of a stage's inputs, which are the previous stage's outputs.
    Gradient(usize),
}

/// One step of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PipelineStep {
    /// The forward pass of a micro-batch.
    Forward(usize),
    /// The backward pass of a micro-batch.
    Backward(usize),
    /// The transfers of a slot.
    Slot(usize),
}

/// The steps of one stage of a pipeline.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stage {
    /// All steps, in order.
    pub steps: Vec<PipelineStep>,
    /// The transfers of the stage's slots. Ranks are stages: indices in the pipeline group of
    /// [`groups`](super::groups::GroupKind::Pipeline).
    pub transfers: RankSchedule<Payload>,
}

impl Stage {
    /// Computes the steps of stage `stage` of `stages` with `micro_batches`, alternating one forward and one backward pass ("1F1B").
    ///
    /// Stage s begins with `stages - s` forward passes, or all if there are fewer, and then alternates backward and forward passes. So it never
    /// keeps the activations of more than `stages - s` micro-batches, besides the received activations of at most one micro-batch that waits
    /// for its forward pass. Backward passes are in the order of the forward passes.
    ///
    /// Each pass takes one tick, and slot t transfers the results of the passes of tick t. Every tensor is received at the latest in the slot
    /// before the pass that needs it, and the whole takes `2 * (micro_batches + stages - 1)` ticks. A slot waits only for neighbours, so stages
    /// need not be synchronous if their passes take different times.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a stage beyond `stages`, no micro-batches, or `stages + micro_batches`
    /// beyond 2^31 - 1.
    pub fn one_forward_one_backward(stage: usize, stages: usize, micro_batches: usize) -> Result<Self> {
        const OPERATION: &str = "pipeline schedule";
        let refused = |reason| Err(Error::InvalidArgument { operation: OPERATION, reason });
        if stage >= stages {
            return refused(format!("stage {stage} is not in a pipeline of {stages}"));
        }
        if micro_batches == 0 {
            return refused("there are 0 micro-batches".into());
        }
        if micro_batches.checked_add(stages).is_none_or(|sum| sum > i32::MAX as usize) {
            return refused(format!("{stages} stages and {micro_batches} micro-batches are more than 2^31 - 1"));
        }
        let mut passes = Vec::with_capacity(2 * micro_batches);
        for k in 0..micro_batches {
            passes.push((forward_tick(stage, stages, k), PipelineStep::Forward(k)));
            passes.push((backward_tick(stage, stages, k), PipelineStep::Backward(k)));
        }
        passes.sort_unstable_by_key(|&(tick, _)| tick);
        let mut transfers = RankSchedule::new(stage, stages)?;
        for k in 0..micro_batches {
            if let Some(previous) = stage.checked_sub(1) {
                transfers.recv(forward_tick(previous, stages, k), previous, Payload::Activation(k))?;
                transfers.send(backward_tick(stage, stages, k), previous, Payload::Gradient(k))?;
            }
            let next = stage + 1;
            if next < stages {
                transfers.send(forward_tick(stage, stages, k), next, Payload::Activation(k))?;
                transfers.recv(backward_tick(next, stages, k), next, Payload::Gradient(k))?;
            }
        }
        let mut steps = Vec::with_capacity(passes.len() + transfers.slots.len());
        let mut slots = transfers.slots.keys().copied().peekable();
        for (tick, pass) in passes {
            while let Some(slot) = slots.next_if(|&slot| slot < tick) {
                steps.push(PipelineStep::Slot(slot));
            }
            steps.push(pass);
        }
        steps.extend(slots.map(PipelineStep::Slot));
        Ok(Stage { steps, transfers })
    }
}

/// The tick of a forward pass: right after the preceding stage's pass, until backward passes take every second tick.
fn forward_tick(stage: usize, stages: usize, k: usize) -> usize {
    if k < stages - stage { stage + k } else { stage + 2 * k }
}

/// The tick of a backward pass: on the last stage right after the forward pass, and one tick later on each earlier stage.
fn backward_tick(stage: usize, stages: usize, k: usize) -> usize {
    2 * stages - 1 - stage + 2 * k
}

fn refused<T>(reason: String) -> Result<T> {
    Err(Error::InvalidArgument { operation: OPERATION, reason })
}
