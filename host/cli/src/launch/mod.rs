//! `gradsync launch`: starts the ranks of a job on this machine, monitors them, and ends all of them when one fails.
//!
//! ```text
//! gradsync launch -n 4 -- ./train --epochs 3
//! ```
//!
//! Ranks find each other by torchrun's variables and a fresh secret ([`environment`]). Each is a process of its own process group, whose output comes
//! through the launcher line by line ([`output`]). A [`guard`] outlives the launcher by a moment, so that nothing stays even if the launcher is killed.
//! On several machines the same command runs on each, and the launchers form a group of their own ([`nodes`]), by which they end together
//! ([`machines`]).

mod affinity;
mod arguments;
mod environment;
mod generation;
mod guard;
mod machines;
mod nodes;
mod output;
mod rank;
mod secret;
mod signals;
mod status;
mod timing;

use std::process::ExitCode;

use gradsync_cli::messages::{complain, say};

pub(crate) use self::arguments::Launch;
use self::generation::{Generation, Outcome};
pub(crate) use self::guard::Guard;
use self::nodes::Nodes;
use self::signals::Listener;

impl Launch {
    /// Runs the job to its end. The exit status is the status of the first rank that failed: its exit code, or 128 and the number of the
    /// signal.
    pub(crate) fn run(&self) -> Result<ExitCode, String> {
        let nodes = Nodes::of(self)?;
        // Signals are caught before any rank starts, so that one that arrives during the start reaches the ranks.
        let events = Listener::start().map_err(|error| format!("cannot listen for signals: {error}"))?;
        for number in 0..=self.restarts {
            let outcome = Generation::start(self, &nodes, number, &events)?.watch()?;
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
}
