//! `gradsync launch`: starts the ranks of a job on this machine, monitors them, and ends all of them when one fails.
//!
//! ```text
//! gradsync launch -n 4 -- ./train --epochs 3
//! ```
//!
//! Ranks find each other by torchrun's variables and a fresh secret ([`environment`]). Each is a process of its own process group, whose output comes
//! through the launcher line by line ([`output`]). What ranks leave behind is ended ([`descendants`]), by a [`guard`] if the launcher is killed.
//! The rank that failed first is found by the order of the ends and the records of calls ([`blame`], [`records`]).
//! On several machines the same command runs on each, and the launchers form a group of their own ([`nodes`]), by which they end together
//! ([`machines`]).

mod affinity;
mod arguments;
mod blame;
mod descendants;
mod environment;
mod generation;
mod guard;
mod machines;
mod nodes;
mod outcome;
mod output;
mod rank;
mod records;
mod secret;
mod signals;
mod status;
mod timing;

use std::process::ExitCode;

use gradsync_cli::messages::{complain, say};

use rustix::process::{Resource, getrlimit};

pub(crate) use self::arguments::{Launch, MOST_RANKS};
use self::descendants::Descendants;
use self::generation::Generation;
pub(crate) use self::guard::Guard;
use self::nodes::Nodes;
use self::outcome::Outcome;
use self::signals::Listener;

impl Launch {
    /// Runs the job to its end. The exit status is the status of the first rank that failed: its exit code, or 128 and the number of the
    /// signal.
    pub(crate) fn run(&self) -> Result<ExitCode, String> {
        let nodes = Nodes::of(self)?;
        self.check_descriptors()?;
        let descendants = Descendants::adopt();
        // Signals are caught before any rank starts, so that one that arrives during the start reaches the ranks.
        let events = Listener::start().map_err(|error| format!("cannot listen for signals: {error}"))?;
        for number in 0..=self.restarts {
            let outcome = Generation::start(self, &nodes, &descendants, number, &events)?.watch()?;
            let code = match outcome {
                Outcome::Succeeded => return Ok(ExitCode::SUCCESS),
                Outcome::Stopped(code) => return Ok(ExitCode::from(code)),
                Outcome::Failed(code) => code,
            };
            if number == self.restarts {
                if number > 0 {
                    complain(format_args!("gave up after {number} of {} restarts", self.restarts));
                }
                return Ok(ExitCode::from(code));
            }
            say("info", format_args!("restart {} of {}: all ranks start again", number + 1, self.restarts));
        }
        unreachable!("the last generation returns")
    }

    /// Each rank takes two pipes, and two log files if there are any.
    fn check_descriptors(&self) -> Result<(), String> {
        /// For the guard, records, several machines, and the start of a process.
        const OTHERS: u64 = 24;
        let open = std::fs::read_dir("/proc/self/fd").map_or(3, |files| files.count() as u64);
        let needed = open + OTHERS + u64::from(self.ranks) * if self.log_dir.is_some() { 4 } else { 2 };
        match getrlimit(Resource::Nofile).current.filter(|&limit| limit < needed) {
            Some(limit) => Err(format!(
                "-n {}: the launcher of so many ranks needs {needed} descriptors, and may have {limit}: raise the limit by `ulimit -n {needed}`",
                self.ranks
            )),
            None => Ok(()),
        }
    }
}
