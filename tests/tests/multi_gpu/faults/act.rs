//! The actions of the lost rank, and the errors that other ranks must report for them.

use std::io::Write;
use std::panic::resume_unwind;
use std::process::Command;
use std::thread;
use std::time::Duration;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, Departure};
use gradsync::driver::Queue;
use gradsync::{CommError, Error};

use super::{Fault, LIMIT};

/// The action of a rank in place of its part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Exits its process regularly.
    Exit,
    /// Kills its process.
    Kill,
    /// Stops its process for ever.
    Stop,
    /// Sleeps until well after the deadline.
    Sleep,
    /// Panics, and its process goes on.
    Panic,
    /// Drops its communicator in good order.
    Leave,
}

/// The time that the others have to enter the collective.
const LEAD: Duration = Duration::from_millis(500);

impl Act {
    /// Whether a failure that names the right rank describes this action.
    pub(super) fn explains(self, error: &CommError) -> bool {
        let has_gone = |how| matches!(error, CommError::PeerGone { departure, .. } if *departure == how);
        let is_late = matches!(error, CommError::Timeout { deadline, .. } if *deadline == LIMIT);
        match self {
            // The connection breaks at the end of the process, after all exit handlers of libraries.
            Act::Exit => has_gone(Departure::Lost) || is_late,
            Act::Kill => has_gone(Departure::Lost),
            Act::Stop | Act::Sleep => is_late,
            Act::Panic => has_gone(Departure::Panicked),
            // NCCL may delay a rank that destroys its communicator until the other ranks of its machine end theirs.
            Act::Leave => has_gone(Departure::Left) || is_late,
        }
    }

    /// Performs the action on a thread of its own, so that a panic ends only this thread. Returns only in a process that continues.
    pub(super) fn perform(fault: Fault, queue: &Queue, comm: NcclCommunicator) {
        let queue = queue.clone();
        let outcome = thread::scope(|scope| scope.spawn(move || Self::run(fault, &queue, comm)).join());
        match outcome {
            Err(panic) if fault.act != Act::Panic => resume_unwind(panic),
            outcome => assert_eq!(outcome.is_err(), fault.act == Act::Panic),
        }
    }

    fn run(fault: Fault, queue: &Queue, comm: NcclCommunicator) {
        let mut work = fault.ready(queue, &comm);
        thread::sleep(LEAD);
        match fault.act {
            Act::Exit => {
                flush();
                std::process::exit(7);
            }
            Act::Kill => end_by("KILL"),
            Act::Stop => end_by("STOP"),
            Act::Sleep => {
                thread::sleep(LIMIT + Duration::from_secs(3));
                let own = comm.member().rank();
                let failure = comm.failure().expect("the others have given up on this rank");
                let is_named = matches!(&failure, Error::Comm(error) if error.blamed() == [own]);
                assert!(is_named, "{failure}");
                assert!(work.put().is_err(), "a communicator that failed was usable again");
                assert!(comm.synchronize(queue).is_err(), "a communicator that failed was usable again");
            }
            // The communicator is dropped as the stack unwinds.
            Act::Panic => panic!("on purpose"),
            Act::Leave => {
                drop(work);
                drop(comm);
            }
        }
    }
}

fn flush() {
    std::io::stdout().flush().expect("standard output");
}

/// Sends this process a signal that it cannot handle.
fn end_by(signal: &str) -> ! {
    flush();
    let script = format!("kill -s {signal} {}", std::process::id());
    let status = Command::new("/bin/sh").args(["-c", &script]).status();
    // Only a stopped process that is continued gets here.
    eprintln!("{script}: {status:?}");
    loop {
        thread::park();
    }
}
