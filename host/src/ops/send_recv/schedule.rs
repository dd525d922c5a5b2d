//! Running a plan of transfers: the caller says what goes and takes what comes, and the plan says when.
//!
//! One group call for each slot. A transfer that the plan does not have cannot be asked for.

use super::bundle::{Bundle, Expected, Received};
use super::exchange;
use crate::call::scope;
use crate::comm::Communicator;
use crate::error::{Error, Operation, Result};
use crate::plan::schedule::{Passed, RankSchedule, Slot, Stage, Step};

/// A kind of memory that bundles lie in.
pub trait Memory {
    /// What is sent.
    type Bundle<'a>;
    /// What has come.
    type Received;
}

/// The host's memory.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

impl Memory for Host {
    type Bundle<'a> = Bundle<'a>;
    type Received = Received;
}

/// What carries bundles between ranks: every [`Communicator`], and for the memory of GPUs `ops::cuda::send_recv::OnQueue`.
pub trait Carrier {
    /// Where the bundles lie.
    type Memory: Memory;

    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// As [`exchange`].
    ///
    /// # Errors
    /// As there.
    fn exchange(
        &self,
        sends: &[(usize, <Self::Memory as Memory>::Bundle<'_>)],
        receives: &[(usize, Expected)],
    ) -> Result<Vec<<Self::Memory as Memory>::Received>>;
}

impl<C: Communicator> Carrier for C {
    type Memory = Host;

    fn rank(&self) -> usize {
        Communicator::rank(self)
    }

    fn world_size(&self) -> usize {
        Communicator::world_size(self)
    }

    fn exchange(&self, sends: &[(usize, Bundle<'_>)], receives: &[(usize, Expected)]) -> Result<Vec<Received>> {
        exchange(self, sends, receives)
    }
}

impl Carrier for &dyn Communicator {
    type Memory = Host;

    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn exchange(&self, sends: &[(usize, Bundle<'_>)], receives: &[(usize, Expected)]) -> Result<Vec<Received>> {
        exchange(*self, sends, receives)
    }
}

/// What a caller has to send and does with what it receives, where the plan calls a transfer `what`.
///
/// An error ends the run on this rank. The others learn of it when this rank's communicator is dropped, or at their deadline.
pub trait Passing<T, M: Memory = Host> {
    /// What goes to a peer; it stays where it is until it has been sent.
    ///
    /// # Errors
    /// The caller's own.
    fn give(&self, to: usize, what: &T) -> Result<M::Bundle<'_>>;

    /// What is known of what comes from a peer.
    ///
    /// # Errors
    /// The caller's own.
    fn expect(&self, from: usize, what: &T) -> Result<Expected>;

    /// Takes what has come from a peer.
    ///
    /// # Errors
    /// The caller's own.
    fn take(&mut self, from: usize, what: &T, tensors: M::Received) -> Result<()>;

    /// Says that what [`give`](Self::give) gave has been sent, and its memory may be used for something else.
    ///
    /// # Errors
    /// The caller's own.
    fn given(&mut self, to: usize, what: &T) -> Result<()> {
        let _ = (to, what);
        Ok(())
    }
}

/// The passes of one stage of a pipeline, and what it passes on.
pub trait StageWork<M: Memory = Host>: Passing<Passed, M> {
    /// The forward pass of a micro-batch; its activation, if this is not the first stage, has been taken.
    ///
    /// # Errors
    /// The caller's own.
    fn forward(&mut self, micro_batch: usize) -> Result<()>;

    /// The backward pass of a micro-batch; its gradient, if this is not the last stage, has been taken.
    ///
    /// # Errors
    /// The caller's own.
    fn backward(&mut self, micro_batch: usize) -> Result<()>;
}

/// Makes all transfers that a schedule has for this rank, slot by slot (ONNX Runtime's NcclService).
///
/// All ranks that a slot connects run it; with [`Schedule`](crate::plan::schedule::Schedule)'s parts they cannot deadlock.
///
/// # Errors
/// [`Error::InvalidArgument`] if the schedule is that of another rank or world than the carrier's; the first error of a transfer or of
/// `work`, after which the run is over.
pub fn run_schedule<T, C: Carrier>(
    carrier: &C,
    schedule: &RankSchedule<T>,
    work: &mut impl Passing<T, C::Memory>,
) -> Result<()> {
    check(carrier, schedule)?;
    schedule.slots().try_for_each(|(_, slot)| run_slot(Operation::RunSchedule, carrier, slot, work))
}

/// Runs one stage of a pipeline: its passes and transfers, in the order of the plan. The carrier's ranks are the stages.
///
/// # Errors
/// As [`run_schedule`].
pub fn run_stage<C: Carrier>(carrier: &C, stage: &Stage, work: &mut impl StageWork<C::Memory>) -> Result<()> {
    check(carrier, &stage.transfers)?;
    for &step in &stage.steps {
        match step {
            Step::Forward(micro_batch) => work.forward(micro_batch)?,
            Step::Backward(micro_batch) => work.backward(micro_batch)?,
            Step::Slot(number) => {
                let Some(slot) = stage.transfers.slot(number) else {
                    let reason = format!("slot {number} is a step of stage {}, and has no transfers", carrier.rank());
                    return Err(Error::InvalidArgument { operation: OPERATION, reason });
                };
                run_slot(Operation::RunStage, carrier, slot, work)?;
            }
        }
    }
    Ok(())
}

const OPERATION: &str = "schedule";

fn check<T, C: Carrier>(carrier: &C, schedule: &RankSchedule<T>) -> Result<()> {
    let planned = (schedule.rank(), schedule.world_size());
    let own = (carrier.rank(), carrier.world_size());
    if planned == own {
        return Ok(());
    }
    let reason =
        format!("the plan is that of rank {} of {}, and this is rank {} of {}", planned.0, planned.1, own.0, own.1);
    Err(Error::InvalidArgument { operation: OPERATION, reason })
}

/// Only the transfers are steps of the operation: the rest is the caller's own code.
fn run_slot<T, C: Carrier>(
    operation: Operation,
    carrier: &C,
    slot: &Slot<T>,
    work: &mut impl Passing<T, C::Memory>,
) -> Result<()> {
    let receives = slot.recvs.iter().map(|transfer| Ok((transfer.peer, work.expect(transfer.peer, &transfer.what)?)));
    let receives = receives.collect::<Result<Vec<_>>>()?;
    let received = {
        let sends = slot.sends.iter().map(|transfer| Ok((transfer.peer, work.give(transfer.peer, &transfer.what)?)));
        let sends = sends.collect::<Result<Vec<_>>>()?;
        let _scope = scope::within(operation);
        carrier.exchange(&sends, &receives)?
    };
    for transfer in &slot.sends {
        work.given(transfer.peer, &transfer.what)?;
    }
    for (transfer, tensors) in slot.recvs.iter().zip(received) {
        work.take(transfer.peer, &transfer.what, tensors)?;
    }
    Ok(())
}
