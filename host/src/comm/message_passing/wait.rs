//! The time of waits: when a rank polls again, checks for failures, and gives up.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// How long a wait spins, and how long it sleeps between two polls afterwards.
const SPIN: Duration = Duration::from_millis(5);
const SLEEP: Duration = Duration::from_micros(100);
/// After this many pauses, a rank that polls mailboxes also receives records, such as failures.
const LISTENS_AFTER: u32 = 16;
/// After this time without progress, a rank checks whether others have failed.
const STALLED: Duration = Duration::from_millis(200);
/// How long a rank still checks for failures after its deadline has passed.
const LAST_LOOKS: Duration = Duration::from_millis(50);

/// The time for which a wait has made no progress.
#[derive(Debug)]
pub(super) struct Stall {
    start: Instant,
    /// When the passing of a deadline was first detected.
    seen_over: Cell<Option<Instant>>,
}

impl Stall {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), seen_over: Cell::new(None) }
    }

    /// Restarts the time after progress.
    pub(super) fn end(&mut self) {
        *self = Self::new();
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Whether it is time to check if others have failed.
    pub(super) fn is_long(&self) -> bool {
        self.elapsed() >= STALLED
    }

    /// Whether the deadline passed at least [`LAST_LOOKS`] ago. This process may itself have been stopped meanwhile, and receives the
    /// records of the other ranks only while it continues to check.
    pub(super) fn is_over(&self, deadline: Duration) -> bool {
        if self.elapsed() < deadline {
            return false;
        }
        let seen = self.seen_over.get().unwrap_or_else(Instant::now);
        self.seen_over.set(Some(seen));
        seen.elapsed() >= LAST_LOOKS
    }
}

/// A wait that spins at first and then sleeps between polls, so that a late rank on the same core can run.
#[derive(Debug)]
pub(in crate::comm) struct Wait {
    stall: Stall,
    deadline: Option<Duration>,
    pauses: u32,
}

impl Wait {
    pub(in crate::comm) fn new(deadline: Option<Duration>) -> Self {
        Wait { stall: Stall::new(), deadline, pauses: 0 }
    }

    /// Whether the deadline has passed.
    pub(in crate::comm) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| self.stall.is_over(deadline))
    }

    /// Whether a rank that polls mailboxes also receives records this time, which takes longer.
    pub(super) fn is_time_to_listen(&self) -> bool {
        self.pauses % LISTENS_AFTER == LISTENS_AFTER - 1 || self.stall.elapsed() >= SPIN
    }

    pub(in crate::comm) fn pause(&mut self) {
        self.pauses = self.pauses.wrapping_add(1);
        if self.stall.elapsed() < SPIN {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
    }
}
