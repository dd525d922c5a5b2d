//! Lines about a join that takes long: they say for which ranks it waits, also in a program without a log.

use std::io::Write as _;
use std::time::{Duration, Instant};

/// When the first line is due. Each further line comes after twice the time.
const FIRST: Duration = Duration::from_secs(5);
/// The most ranks that a line names.
const MOST_NAMED: usize = 16;

/// The times of the lines of one join.
#[derive(Debug)]
pub(super) struct Notices {
    start: Instant,
    next: Duration,
}

impl Notices {
    pub(super) fn new() -> Self {
        Notices { start: Instant::now(), next: FIRST }
    }

    /// The time since the start.
    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The time until the next line.
    pub(super) fn left(&self) -> Duration {
        self.next.saturating_sub(self.elapsed())
    }

    /// Whether a line is due. If so, the next one is due later.
    pub(super) fn is_due(&mut self) -> bool {
        let is_due = self.left().is_zero();
        while self.left().is_zero() {
            self.next *= 2;
        }
        is_due
    }
}

/// Logs the line as a warning, if the program keeps a log of warnings, and writes it to standard error otherwise.
pub(super) fn say(line: &str) {
    if tracing::enabled!(tracing::Level::WARN) {
        tracing::warn!("{line}");
    } else {
        // Nothing is left to report a failure to.
        let _ = std::io::stderr().write_all(format!("gradsync: {line}\n").as_bytes());
    }
}

/// The numbers of ranks, in words.
pub(super) fn listed(ranks: &[usize]) -> String {
    let numbers: Vec<String> = ranks.iter().take(MOST_NAMED).map(usize::to_string).collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    match ranks.len().saturating_sub(MOST_NAMED) {
        0 => format!("{word} {}", numbers.join(", ")),
        more => format!("{word} {} and {more} more", numbers.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_due_after_some_seconds_and_then_seldom() {
        let mut notices = Notices::new();
        assert!(!notices.is_due() && notices.left() > FIRST / 2);
        notices.start -= FIRST;
        assert!(notices.is_due() && !notices.is_due());
        assert!(notices.left() > FIRST / 2);
        notices.start -= 100 * FIRST;
        assert!(notices.is_due() && !notices.is_due(), "one line for all that were missed");
        assert!(notices.left() > 20 * FIRST);
    }

    #[test]
    fn listed_counts_many_ranks() {
        assert_eq!(listed(&[3]), "rank 3");
        assert_eq!(listed(&[1, 3]), "ranks 1, 3");
        let all: Vec<usize> = (0..40).collect();
        assert!(listed(&all).ends_with(", 15 and 24 more"), "{}", listed(&all));
    }
}
