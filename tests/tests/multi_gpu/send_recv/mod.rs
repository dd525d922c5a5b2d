//! Send and Recv on device memory over NCCL, with and without comparison of calls, and transfers that break a communicator.
//!
//! The modules `cases`, `refusals` and `pipeline` hold the cases for any transport.

pub(crate) mod cases;
mod pipeline;
mod refusals;
mod tensors;

use gradsync::comm::Communicator;
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::send_recv::{Bundle, Completion, SendRecv, recv, recv_described, send};
use gradsync::plan::bundle::Limits;
use gradsync::{CommError, DType, Error, Result};
use gradsync_tests::transfers::Owned;

use crate::context::Context;
use crate::report::Report;
use tensors::Tensor;

/// The context of one rank in a case.
pub(crate) struct RankContext<'c> {
    pub(crate) comm: &'c dyn Communicator<Cuda>,
    pub(crate) queue: &'c Queue,
}

impl<'c> RankContext<'c> {
    pub(super) fn transfers(&self) -> SendRecv<'c, Cuda> {
        SendRecv::on_queue(self.comm, self.queue)
    }

    fn rank(&self) -> usize {
        self.comm.rank()
    }

    fn size(&self) -> usize {
        self.comm.world_size()
    }

    /// Returns once all ranks have called it, by the transport's own exchange of words.
    fn meet(&self) {
        self.comm.gather_words(&[1]).unwrap();
    }
}

pub(crate) fn run(context: &Context, report: &mut Report) {
    for (generation, checks) in [true, false].into_iter().enumerate() {
        let how = if checks { "compared" } else { "not compared" };
        let mut comm = None;
        report.case(&format!("communicator, {how}"), || {
            let options = context.options().with_checks(checks);
            comm = Some(context.communicator(generation as u64, &options));
        });
        let Some(comm) = comm else { return };
        let ranks = RankContext { comm: &comm, queue: &context.queue };
        for case in cases::ALL {
            report.case(&format!("{}, {how}", case.name), || (case.run)(&ranks));
        }
    }
    let fatal: [(&str, Fatal); 3] = [
        ("known shapes of other lengths", other_lengths),
        ("described, and known to the receiver", described_to_one_who_knows),
        ("known, and described to the receiver", known_to_one_who_asks),
    ];
    for (index, (name, provoke)) in fatal.into_iter().enumerate() {
        report.case(name, || {
            let comm = context.communicator(2 + index as u64, &context.options());
            let ranks = RankContext { comm: &comm, queue: &context.queue };
            provoke(&ranks);
            if ranks.rank() > 1 {
                // The other ranks hear of the failure too, and have to stay until ranks 0 and 1 have.
                while comm.failure().is_none() {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        });
    }
}

/// A transfer between ranks 0 and 1 that breaks a communicator which compares calls.
type Fatal = fn(&RankContext<'_>);

/// Waits for a transfer. Calls are compared while they are in progress, before a transfer counts as complete.
fn wait(transfer: Result<Completion<'_, Cuda>>) -> Result<bool> {
    transfer?.wait()
}

#[track_caller]
fn mismatch(outcome: Result<impl Sized>) {
    match outcome.map(drop) {
        Err(Error::Comm(CommError::Mismatch { left_rank: 0, right_rank: 1, .. })) => {}
        other => panic!("{other:?} is no mismatch of ranks 0 and 1"),
    }
}

fn other_lengths(ranks: &RankContext<'_>) {
    let tensor = |len| Tensor::new(ranks.queue, &Owned::new(DType::F32, &[len], 0), 0);
    match ranks.rank() {
        0 => mismatch(wait(send(&ranks.transfers(), true, 1, &Bundle::new([tensor(10).view()]).unwrap()))),
        1 => mismatch(wait(recv(&ranks.transfers(), true, 0, &mut [tensor(11).view_mut()]))),
        _ => {}
    }
}

/// The receiver expects a payload with exactly the length of the header's first message.
fn described_to_one_who_knows(ranks: &RankContext<'_>) {
    let mut tensor = Tensor::new(ranks.queue, &Owned::new(DType::F32, &[254], 0), 0);
    match ranks.rank() {
        0 => mismatch(send(&ranks.transfers(), true, 1, &Bundle::new([tensor.view()]).unwrap().described(3))),
        1 => mismatch(wait(recv(&ranks.transfers(), true, 0, &mut [tensor.view_mut()]))),
        _ => {}
    }
}

fn known_to_one_who_asks(ranks: &RankContext<'_>) {
    let tensor = Tensor::new(ranks.queue, &Owned::new(DType::F32, &[254], 0), 0);
    match ranks.rank() {
        0 => mismatch(wait(send(&ranks.transfers(), true, 1, &Bundle::new([tensor.view()]).unwrap()))),
        1 => mismatch(recv_described(&ranks.transfers(), true, 0, 3, &Limits::default())),
        _ => {}
    }
}
