//! The signals to the launcher, as events together with the ends of ranks; and signals to ranks.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use std::{fs, io, thread};

use gradsync_cli::output::ends_by_default;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::iterator::Signals;

use super::status::Status;

/// The signals that end a job.
pub(super) const ENDING: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// An event that the launcher waits for.
#[derive(Debug)]
pub(super) enum Event {
    /// A rank of this generation has ended, and is not reaped yet: the generation, the rank's number on this machine, and its status.
    Ended(u32, usize, Status),
    /// A rank of this generation has reported a failure, and may run on: the generation, the rank, and the failure.
    Reported(u32, usize, String),
    /// A rank of this generation cannot write its record of calls: the generation, and the rank with the reason.
    Unwritten(u32, String),
    /// A signal to the launcher.
    Signal(i32),
    /// The outcome of the ranks of all machines: the generation, and the failure if there is one.
    AllMachines(u32, Result<(), String>),
}

/// The events of a job.
#[derive(Debug)]
pub(super) struct Listener {
    sender: Sender<Event>,
    events: Receiver<Event>,
}

impl Listener {
    /// Catches signals from now on. A signal that is ignored stays ignored, as after `nohup`.
    pub(super) fn start() -> io::Result<Self> {
        // A log file beyond the limit of a file's size (`ulimit -f`) is an error then; the flag itself is unused.
        signal_hook::flag::register(SIGXFSZ, Arc::default())?;
        let (sender, events) = channel();
        let caught = ENDING.into_iter().chain([SIGUSR1, SIGUSR2]).filter(|&signal| ends_by_default(signal));
        let mut signals = Signals::new(caught.chain([SIGTSTP, SIGCONT]))?;
        let to = sender.clone();
        // The receiver lives until the end of the process.
        let pass_on = move || signals.forever().for_each(|signal| _ = to.send(Event::Signal(signal)));
        thread::Builder::new().name("signals".into()).spawn(pass_on)?;
        Ok(Listener { sender, events })
    }

    pub(super) fn sender(&self) -> Sender<Event> {
        self.sender.clone()
    }

    /// Puts an event back behind the others.
    pub(super) fn repeat(&self, event: Event) {
        // The receiver is in this object, so sending cannot fail.
        let _ = self.sender.send(event);
    }

    /// The next event, if one arrives within `time`.
    pub(super) fn next(&self, time: Duration) -> Option<Event> {
        match self.events.recv_timeout(time) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("the listener has a sender itself"),
        }
    }

    /// Runs `work`, which waits for other machines, on its own thread. A signal that ends the job ends this process.
    pub(super) fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        const LOOK: Duration = Duration::from_millis(50);
        let worker = thread::spawn(work);
        while !worker.is_finished() {
            match self.next(LOOK) {
                Some(Event::Signal(signal)) if ENDING.contains(&signal) => std::process::exit(128 + signal),
                _ => {}
            }
        }
        worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Sends a signal to a process, or to its whole group as a terminal does. A process that has ended is ignored.
pub(super) fn send(pid: Pid, signal: i32, to_group: bool) {
    // The numbers are from `signal_hook::consts`, or SIGKILL, SIGSTOP.
    let Some(signal) = Signal::from_named_raw(signal) else { return };
    let _ = if to_group { kill_process_group(pid, signal) } else { kill_process(pid, signal) };
}

/// Whether a process handles a signal or ignores it, so that the signal does not end it.
pub(super) fn is_handled(pid: Pid, signal: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let bit = 1u64 << (signal - 1);
    ["SigCgt:", "SigIgn:"].into_iter().filter_map(mask).any(|mask| mask & bit != 0)
}
