//! A rank's report about its cases, in lines that the launcher reads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use serde_json::json;

/// The results of one rank.
pub(crate) struct Report {
    /// Whether this rank prints successes; with ranks as threads, one of them prints for all.
    is_speaker: bool,
    pub(crate) has_failed: bool,
}

impl gradsync_tests::suite::Report for Report {
    fn case(&mut self, name: &str, body: impl FnOnce()) {
        self.case(name, body);
    }
}

impl Report {
    pub(crate) fn new(is_speaker: bool) -> Self {
        Report { is_speaker, has_failed: false }
    }

    /// Runs a case, which fails by a panic. After a failure the ranks may be out of step, so the remaining cases are not run here: the
    /// launcher counts them as failed, because no rank reports them.
    pub(crate) fn case(&mut self, name: &str, body: impl FnOnce()) {
        if self.has_failed {
            return;
        }
        let begun = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(body));
        let seconds = begun.elapsed().as_secs_f64();
        match outcome {
            Ok(()) if self.is_speaker => {
                println!("@{}", json!({"case": name, "outcome": "passed", "seconds": seconds}))
            }
            Ok(()) => {}
            Err(panic) => {
                self.has_failed = true;
                let note = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
                    .unwrap_or_else(|| "a panic without a message".into());
                println!("@{}", json!({"case": name, "outcome": "failed", "seconds": seconds, "note": note}));
            }
        }
    }

    /// Reports the reason why a case is not run, which is the same on every rank.
    pub(crate) fn not_run(&self, name: &str, why: &str) {
        if self.is_speaker && !self.has_failed {
            println!("@{}", json!({"case": name, "outcome": "not-run", "seconds": 0.0, "note": why}));
        }
    }
}
