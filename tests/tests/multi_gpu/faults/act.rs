//! What the lost rank does, and what the others' errors say about it.

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

/// What a rank does in place of its part of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Ends its process as programs do.
    Exit,
    /// Has its process killed.
    Kill,
    /// Has its process stopped, for ever.
    Stop,
    /// Sleeps until well after the deadline.
    Sleep,
    /// Panics, and its process goes on.
    Panic,
    /// Drops its communicator in good order.
    Leave,
}

/// How long the others have to get into the collective.
const LEAD: Duration = Duration::from_millis(500);

impl Act {
    /// Whether a failure that names the right rank says the right thing about it.
    pub(super) fn explains(self, error: &CommError) -> bool {
        let has_gone = |how| matches!(error, CommError::PeerGone { departure, .. } if *departure == how);
        let is_late = matches!(error, CommError::Timeout { deadline, .. } if *deadline == LIMIT);
        match self {
            // The connection breaks at the end of the process, behind all that libraries do at its exit.
            Act::Exit => has_gone(Departure::Lost) || is_late,
            Act::Kill => has_gone(Departure::Lost),
            Act::Stop | Act::Sleep => is_late,
            Act::Panic => has_gone(Departure::Panicked),
            // NCCL may keep a rank that destroys its communicator until the others of its machine end theirs.
            Act::Leave => has_gone(Departure::Left) || is_late,
        }
    }

    /// Does it on a thread of its own, which alone panics where that is what it does. Comes back only in a process that
    /// goes on.
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
            // The communicator goes as the stack unwinds.
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

/// Has this process sent a signal that it cannot handle.
fn end_by(signal: &str) -> ! {
    flush();
    let script = format!("kill -s {signal} {}", std::process::id());
    let status = Command::new("/bin/sh").args(["-c", &script]).status();
    // Only a stopped process gets here, if somebody makes it go on.
    eprintln!("{script}: {status:?}");
    loop {
        thread::park();
    }
}
