//! Execution of a plan of transfers: the caller supplies and takes the tensors, and the plan determines the order.
//!
//! There is one group call for each slot. Only transfers of the plan can run.

use super::SendRecv;
use super::bundle::{Bundle, Expected, Received};
use super::memory::BundleMemory;
use crate::call::scope;
use crate::error::{Error, Operation, Result};
use crate::memory::Host;
use crate::plan::schedule::{Payload, PipelineStep, RankSchedule, Slot, Stage};

/// The caller's side of planned transfers: it supplies the tensors to send and takes the received ones. `payload` is the plan's name of a
/// transfer.
///
/// An error ends the run on this rank. The others detect it when this rank's communicator is dropped, or at their deadline.
pub trait TransferHandler<T, M: BundleMemory = Host> {
    /// Returns the tensors to send to a peer; they stay in place until they have been sent.
    ///
    /// # Errors
    /// The caller's own.
    fn send(&self, to: usize, payload: &T) -> Result<Bundle<'_, M>>;

    /// Returns the expectation of the tensors from a peer.
    ///
    /// # Errors
    /// The caller's own.
    fn expect(&self, from: usize, payload: &T) -> Result<Expected>;

    /// Takes the tensors received from a peer.
    ///
    /// # Errors
    /// The caller's own.
    fn received(&mut self, from: usize, payload: &T, tensors: Received<M>) -> Result<()>;

    /// Called when the tensors of [`send`](Self::send) have been sent, and their memory may be reused.
    ///
    /// # Errors
    /// The caller's own.
    fn sent(&mut self, to: usize, payload: &T) -> Result<()> {
        let _ = (to, payload);
        Ok(())
    }
}

/// The passes of one stage of a pipeline, and the transfers between stages.
pub trait StageWork<M: BundleMemory = Host>: TransferHandler<Payload, M> {
    /// Runs the forward pass of a micro-batch; its activation, unless this is the first stage, has been received.
    ///
    /// # Errors
    /// The caller's own.
    fn forward(&mut self, micro_batch: usize) -> Result<()>;

    /// Runs the backward pass of a micro-batch; its gradient, unless this is the last stage, has been received.
    ///
    /// # Errors
    /// The caller's own.
    fn backward(&mut self, micro_batch: usize) -> Result<()>;
}

/// Runs all transfers that a schedule has for this rank, slot by slot (ONNX Runtime's NcclService).
///
/// All ranks that a slot connects must run it; with the parts of one [`Schedule`](super::Schedule) they cannot deadlock.
///
/// # Errors
/// [`Error::InvalidArgument`] if the schedule is for another rank or world size than the communicator's; the first error of a transfer or
/// of `work`, which ends the run.
pub fn run_schedule<T, M: BundleMemory>(
    ranks: &SendRecv<'_, M>,
    schedule: &RankSchedule<T>,
    work: &mut impl TransferHandler<T, M>,
) -> Result<()> {
    check(ranks, schedule)?;
    schedule.slots().try_for_each(|(_, slot)| run_slot(Operation::RunSchedule, ranks, slot, work))
}

/// Runs one stage of a pipeline: its passes and transfers, in the order of the plan. The communicator's ranks are the stages.
///
/// # Errors
/// The errors of [`run_schedule`].
pub fn run_stage<M: BundleMemory>(ranks: &SendRecv<'_, M>, stage: &Stage, work: &mut impl StageWork<M>) -> Result<()> {
    check(ranks, &stage.transfers)?;
    for &step in &stage.steps {
        match step {
            PipelineStep::Forward(micro_batch) => work.forward(micro_batch)?,
            PipelineStep::Backward(micro_batch) => work.backward(micro_batch)?,
            PipelineStep::Slot(number) => {
                let Some(slot) = stage.transfers.slot(number) else {
                    let reason =
                        format!("stage {} has a step for slot {number}, and no transfers for it", ranks.comm().rank());
                    return Err(Error::InvalidArgument { operation: OPERATION, reason });
                };
                run_slot(Operation::RunStage, ranks, slot, work)?;
            }
        }
    }
    Ok(())
}

const OPERATION: &str = "schedule";

fn check<T, M: BundleMemory>(ranks: &SendRecv<'_, M>, schedule: &RankSchedule<T>) -> Result<()> {
    let planned = (schedule.rank(), schedule.world_size());
    let own = (ranks.comm().rank(), ranks.comm().world_size());
    if planned == own {
        return Ok(());
    }
    let reason =
        format!("the schedule is for rank {} of {}, and this is rank {} of {}", planned.0, planned.1, own.0, own.1);
    Err(Error::InvalidArgument { operation: OPERATION, reason })
}

/// The scope covers only the transfers: the rest is the caller's own code.
fn run_slot<T, M: BundleMemory>(
    operation: Operation,
    ranks: &SendRecv<'_, M>,
    slot: &Slot<T>,
    work: &mut impl TransferHandler<T, M>,
) -> Result<()> {
    let receives =
        slot.recvs.iter().map(|transfer| Ok((transfer.peer, work.expect(transfer.peer, &transfer.payload)?)));
    let receives = receives.collect::<Result<Vec<_>>>()?;
    let received = {
        let sends = slot.sends.iter().map(|transfer| Ok((transfer.peer, work.send(transfer.peer, &transfer.payload)?)));
        let sends = sends.collect::<Result<Vec<_>>>()?;
        let _scope = scope::within(operation);
        ranks.exchange_without_completion(&sends, &receives)?
    };
    for transfer in &slot.sends {
        work.sent(transfer.peer, &transfer.payload)?;
    }
    for (transfer, tensors) in slot.recvs.iter().zip(received) {
        work.received(transfer.peer, &transfer.payload, tensors)?;
    }
    Ok(())
}
