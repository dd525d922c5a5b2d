//! Ranks that die, stop, sleep, panic or leave while the others wait for them inside NCCL, where no comparison of calls notices it.
//!
//! Every other rank gets an error that names the rank, in time; its queue drains; and those that are left go on as a smaller group.
//! A suite has one fault: what comes after it in a process that died would be reported by some ranks and not by others. What a rank
//! prints before it dies goes out line by line.

mod act;
mod survivor;
mod threads;

use std::time::Duration;

use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{DeviceCommunicator, ReduceOp, Scaling};
use gradsync::driver::DeviceBuffer;
use gradsync::{CommError, DType};

use crate::Suite;
use crate::context::Context;
use crate::report::Report;
use act::Act;

/// The deadline of the communicators here.
const LIMIT: Duration = Duration::from_secs(3);
/// What an error may need on top of it.
const SLACK: Duration = Duration::from_secs(2);
/// The rank to which it happens, unless it is rank 0, where the hub of the control channel is.
const LOST: usize = 1;
/// Elements of the all-reduce that they wait in: 64 MiB.
const LEN: usize = 16 << 20;

/// What goes wrong.
#[derive(Clone, Copy, Debug)]
struct Fault {
    act: Act,
    rank: usize,
    /// Which kind of NCCL's communicators it happens to.
    is_blocking: bool,
    /// Whether it happens before ranks have connected, so that calls of NCCL hang and not kernels.
    is_cold: bool,
}

impl Fault {
    const fn new(act: Act) -> Self {
        Fault { act, rank: LOST, is_blocking: true, is_cold: false }
    }

    fn options(self) -> NcclOptions {
        NcclOptions { deadline: LIMIT, checks: false, blocking: self.is_blocking }
    }

    /// Whether a failure is what becomes of this.
    fn explains(self, error: &CommError) -> bool {
        error.blamed() == [self.rank] && self.act.explains(error)
    }
}

/// Every suite of faults.
pub(crate) fn suites() -> Vec<Suite> {
    const SEVERAL: &[usize] = &[2, 3, 4];
    const NONBLOCKING: Fault = Fault { is_blocking: false, ..Fault::new(Act::Sleep) };
    const RANK_0: Fault = Fault { rank: 0, ..Fault::new(Act::Kill) };
    type Run = fn(&Context, &mut Report);
    let faults: [(&'static str, &'static [usize], Run); 12] = [
        ("fault-exit", &[LOST], |context, report| run(context, report, Fault::new(Act::Exit))),
        ("fault-kill", &[LOST], |context, report| run(context, report, Fault::new(Act::Kill))),
        ("fault-stop", &[LOST], |context, report| run(context, report, Fault::new(Act::Stop))),
        ("fault-sleep", &[], |context, report| run(context, report, Fault::new(Act::Sleep))),
        ("fault-panic", &[], |context, report| run(context, report, Fault::new(Act::Panic))),
        ("fault-leave", &[], |context, report| run(context, report, Fault::new(Act::Leave))),
        ("fault-kill-nonblocking", &[LOST], |context, report| {
            run(context, report, Fault { act: Act::Kill, ..NONBLOCKING });
        }),
        ("fault-sleep-nonblocking", &[], |context, report| run(context, report, NONBLOCKING)),
        ("fault-sleep-cold", &[], |context, report| {
            run(context, report, Fault { is_cold: true, ..Fault::new(Act::Sleep) });
        }),
        ("fault-sleep-cold-nonblocking", &[], |context, report| {
            run(context, report, Fault { is_cold: true, ..NONBLOCKING });
        }),
        ("fault-rank0", &[0], |context, report| run(context, report, RANK_0)),
        ("fault-stop-rank0", &[0], |context, report| run(context, report, Fault { act: Act::Stop, ..RANK_0 })),
    ];
    let of_processes = faults.map(|(name, victims, run)| Suite { victims, ..Suite::new(name, SEVERAL, run) });
    let of_threads = Suite { in_threads: true, ..Suite::new("fault-threads", SEVERAL, threads::run) };
    of_processes.into_iter().chain([of_threads]).collect()
}

fn run(context: &Context, report: &mut Report, fault: Fault) {
    let mut ready = None;
    report.case("set-up", || {
        familiarize(context, 0);
        ready = Some(connect(context, fault, 1));
    });
    let Some((comm, data)) = ready else { return };
    let is_lost = context.rank == fault.rank;
    report.case("fault", || {
        if is_lost {
            fault.act.perform(comm, data);
        } else {
            survivor::endure(context, fault, comm, data);
        }
    });
    report.case("rebuild", || {
        if !is_lost {
            survivor::rebuild(context, fault.rank, 2);
        }
    });
}

/// The first communicator of a process takes seconds, and a short deadline is not for that.
fn familiarize(context: &Context, generation: u64) {
    let comm = context.communicator(generation, &context.options());
    all_reduce(&comm, &mut DeviceBuffer::zeroed(&context.queue, DType::F32, LEN).unwrap()).unwrap();
    comm.synchronize(&context.queue).unwrap();
}

/// The communicator to which it happens, and data for it.
fn connect(context: &Context, fault: Fault, generation: u64) -> (NcclCommunicator, DeviceBuffer) {
    let comm = context.communicator(generation, &fault.options());
    let mut data = DeviceBuffer::zeroed(&context.queue, DType::F32, LEN).unwrap();
    if !fault.is_cold {
        all_reduce(&comm, &mut data).unwrap();
        comm.synchronize(&context.queue).unwrap();
    }
    assert!(comm.failure().is_none(), "a communicator that works has a failure");
    (comm, data)
}

fn all_reduce(comm: &NcclCommunicator, data: &mut DeviceBuffer) -> gradsync::Result<()> {
    comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum, Scaling::NONE)
}
