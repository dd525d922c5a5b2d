//! Ranks that die, stop, sleep, panic or leave while the others wait for them inside NCCL or in a kernel, with and without the comparison of
//! calls.
//!
//! Every other rank gets in time an error that names the rank; its queue drains; and the remaining ranks continue as a smaller group. A
//! suite has one fault: later cases in a process that died would be reported by some ranks and not by others. The output of a rank before
//! it dies is flushed line by line.

mod act;
mod survivor;
mod threads;
mod work;

use std::time::Duration;

use gradsync::CommError;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::driver::Queue;

use crate::context::Context;
use crate::report::Report;
use crate::{ONE_CONTEXT, SEVERAL, Suite};
use act::Act;
use work::{Kind, Work};

/// The deadline of the communicators here.
const LIMIT: Duration = Duration::from_secs(3);
/// The time that an error may take beyond the deadline.
const SLACK: Duration = Duration::from_secs(2);
/// The rank with the fault, unless that is rank 0, which has the coordinator of the control channel.
const LOST: usize = 1;

/// A fault and its circumstances.
#[derive(Clone, Copy, Debug)]
struct Fault {
    act: Act,
    rank: usize,
    /// The operation in which the others wait.
    work: Kind,
    /// Whether NCCL's communicator is a blocking one.
    is_blocking: bool,
    /// Whether the fault occurs before ranks have connected, so that calls of NCCL hang instead of kernels.
    is_cold: bool,
    /// Whether ranks compare their calls, which is the default of the library.
    has_checks: bool,
    /// Whether ranks are threads of one process, whose calls wait until they have been compared.
    are_threads: bool,
}

impl Fault {
    const fn new(act: Act) -> Self {
        let (work, is_blocking) = (Kind::AllReduce, true);
        Fault { act, rank: LOST, work, is_blocking, is_cold: false, has_checks: false, are_threads: false }
    }

    /// This fault while kernels access the rank's memory.
    const fn among_peers(self) -> Self {
        Fault { work: Kind::Adasum, ..self }
    }

    /// This fault while kernels wait for the rank's packets.
    const fn among_packets(self) -> Self {
        Fault { work: Kind::LowLatency, ..self }
    }

    /// This fault while ranks compare their calls.
    const fn checked(self) -> Self {
        Fault { has_checks: true, ..self }
    }

    /// This fault on rank 0, which has the coordinator of the control channel.
    const fn of_rank0(self) -> Self {
        Fault { rank: 0, ..self }
    }

    fn options(self, context: &Context) -> NcclOptions {
        context.options().with_deadline(LIMIT).with_checks(self.has_checks).with_blocking(self.is_blocking)
    }

    /// The common operation of the ranks, run once before the fault unless ranks must not have connected.
    fn ready<'c>(self, queue: &Queue, comm: &'c NcclCommunicator) -> Work<'c> {
        let mut work = Work::new(queue, comm, self.work);
        if !self.is_cold {
            work.run().unwrap();
        }
        work
    }

    /// Whether a failure is the right consequence of this fault.
    fn explains(self, error: &CommError) -> bool {
        error.blamed() == [self.rank] && self.act.explains(error)
    }
}

/// Every suite of faults.
pub(crate) fn suites() -> Vec<Suite> {
    const EXIT: Fault = Fault::new(Act::Exit);
    const KILL: Fault = Fault::new(Act::Kill);
    const STOP: Fault = Fault::new(Act::Stop);
    const SLEEP: Fault = Fault::new(Act::Sleep);
    const SLEEP_NONBLOCKING: Fault = Fault { is_blocking: false, ..SLEEP };
    const PANIC: Fault = Fault::new(Act::Panic);
    const LEAVE: Fault = Fault::new(Act::Leave);
    type Run = fn(&Context, &mut Report);
    let faults: [(&'static str, &'static [usize], Run); 37] = [
        ("fault-exit", &[LOST], |context, report| run(context, report, EXIT)),
        ("fault-kill", &[LOST], |context, report| run(context, report, KILL)),
        ("fault-stop", &[LOST], |context, report| run(context, report, STOP)),
        ("fault-sleep", &[], |context, report| run(context, report, SLEEP)),
        ("fault-panic", &[], |context, report| run(context, report, PANIC)),
        ("fault-leave", &[], |context, report| run(context, report, LEAVE)),
        ("fault-kill-nonblocking", &[LOST], |context, report| {
            run(context, report, Fault { is_blocking: false, ..KILL });
        }),
        ("fault-sleep-nonblocking", &[], |context, report| run(context, report, SLEEP_NONBLOCKING)),
        ("fault-sleep-cold", &[], |context, report| run(context, report, Fault { is_cold: true, ..SLEEP })),
        ("fault-sleep-cold-nonblocking", &[], |context, report| {
            run(context, report, Fault { is_cold: true, ..SLEEP_NONBLOCKING });
        }),
        ("fault-exit-checked", &[LOST], |context, report| run(context, report, EXIT.checked())),
        ("fault-kill-checked", &[LOST], |context, report| run(context, report, KILL.checked())),
        ("fault-stop-checked", &[LOST], |context, report| run(context, report, STOP.checked())),
        ("fault-sleep-checked", &[], |context, report| run(context, report, SLEEP.checked())),
        ("fault-panic-checked", &[], |context, report| run(context, report, PANIC.checked())),
        ("fault-leave-checked", &[], |context, report| run(context, report, LEAVE.checked())),
        ("fault-exit-peers", &[LOST], |context, report| run(context, report, EXIT.among_peers())),
        ("fault-kill-peers", &[LOST], |context, report| run(context, report, KILL.among_peers())),
        ("fault-stop-peers", &[LOST], |context, report| run(context, report, STOP.among_peers())),
        ("fault-sleep-peers", &[], |context, report| run(context, report, SLEEP.among_peers())),
        ("fault-panic-peers", &[], |context, report| run(context, report, PANIC.among_peers())),
        ("fault-leave-peers", &[], |context, report| run(context, report, LEAVE.among_peers())),
        ("fault-kill-checked-peers", &[LOST], |context, report| run(context, report, KILL.checked().among_peers())),
        ("fault-sleep-checked-peers", &[], |context, report| run(context, report, SLEEP.checked().among_peers())),
        ("fault-kill-packets-peers", &[LOST], |context, report| run(context, report, KILL.among_packets())),
        ("fault-stop-packets-peers", &[LOST], |context, report| run(context, report, STOP.among_packets())),
        ("fault-sleep-packets-peers", &[], |context, report| run(context, report, SLEEP.among_packets())),
        ("fault-kill-checked-packets-peers", &[LOST], |context, report| {
            run(context, report, KILL.checked().among_packets());
        }),
        ("fault-exit-rank0", &[0], |context, report| run(context, report, EXIT.of_rank0())),
        ("fault-rank0", &[0], |context, report| run(context, report, KILL.of_rank0())),
        ("fault-rank0-checked", &[0], |context, report| run(context, report, KILL.of_rank0().checked())),
        ("fault-stop-rank0", &[0], |context, report| run(context, report, STOP.of_rank0())),
        ("fault-sleep-rank0", &[], |context, report| run(context, report, SLEEP.of_rank0())),
        ("fault-panic-rank0", &[], |context, report| run(context, report, PANIC.of_rank0())),
        ("fault-leave-rank0", &[], |context, report| run(context, report, LEAVE.of_rank0())),
        ("fault-rank0-peers", &[0], |context, report| run(context, report, KILL.of_rank0().among_peers())),
        ("fault-stop-rank0-peers", &[0], |context, report| run(context, report, STOP.of_rank0().among_peers())),
    ];
    let of_processes = faults.map(|(name, victims, run)| {
        let by_peers = name.ends_with("-peers");
        let needs_one_node = by_peers.then_some("its ranks wait in kernels that reach into the memory of peers");
        Suite { victims, needs_one_node, ..Suite::new(name, SEVERAL, run) }
    });
    let of_threads =
        Suite { in_threads: true, needs_own_gpus: ONE_CONTEXT, ..Suite::new("fault-threads", SEVERAL, threads::run) };
    of_processes.into_iter().chain([of_threads]).collect()
}

fn run(context: &Context, report: &mut Report, fault: Fault) {
    let mut ready = None;
    report.case("set-up", || {
        familiarize(context, fault, 0);
        ready = Some(connect(context, fault, 1));
    });
    let Some(comm) = ready else { return };
    let is_lost = context.rank == fault.rank;
    report.case("fault", || {
        if is_lost {
            Act::perform(fault, &context.queue, comm);
        } else {
            survivor::endure(fault, &context.queue, comm);
        }
    });
    report.case("rebuild", || {
        if !is_lost {
            survivor::rebuild(context, fault.rank, 2);
        }
    });
}

/// Prepares the process: its first communicator takes seconds, and the first launch of a kernel includes compilation. A short deadline
/// suffices for neither.
fn familiarize(context: &Context, fault: Fault, generation: u64) {
    let comm = context.communicator(generation, &context.options());
    Work::new(&context.queue, &comm, fault.work).run().unwrap();
}

/// The communicator on which the fault occurs.
fn connect(context: &Context, fault: Fault, generation: u64) -> NcclCommunicator {
    let comm = context.communicator(generation, &fault.options(context));
    assert!(comm.failure().is_none(), "a communicator that works has a failure");
    comm
}
