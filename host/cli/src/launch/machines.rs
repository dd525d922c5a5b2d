//! What the launchers of several machines tell each other while ranks run: that all have succeeded, a failure, and the ranks' last calls.

use std::time::Duration;

use gradsync::CommError;
use gradsync::bootstrap::Member;
use gradsync::comm::Operation;

use super::timing::AGREEMENT;

/// Bytes of a record that travel at once. An all-gather of the control channel takes 64 KiB.
const PART: usize = 60 << 10;

/// The launchers of one start.
#[derive(Debug)]
pub(super) struct Machines {
    /// Fails with the ranks of a machine. Split off the other one, so that it goes first.
    job: Member,
    /// Is there for the record of calls after that.
    records: Member,
}

impl Machines {
    /// Of launchers that have joined.
    pub(super) fn new(joined: Member) -> gradsync::Result<Self> {
        let job = joined.split(Some(0), joined.rank() as i64, AGREEMENT)?.expect("every launcher has this colour");
        Ok(Self { job, records: joined })
    }

    /// Returns when the ranks of all machines have succeeded; a job may take as long as it likes.
    ///
    /// # Errors
    /// The failure of a machine.
    pub(super) fn wait_for_all(&self) -> Result<(), String> {
        let outcome = self.job.all_gather(b"done", Duration::MAX);
        outcome.map(drop).map_err(|error| self.failure().unwrap_or(error.to_string()))
    }

    /// Tells the other launchers why this machine's ranks end.
    pub(super) fn tell_failure(&self, reason: String) {
        self.job.fail(CommError::Transport { operation: Operation::Exchange, rank: self.job.rank(), reason });
    }

    /// The machine that has failed, and why, as that machine says.
    pub(super) fn failure(&self) -> Option<String> {
        Some(match self.job.failure()? {
            CommError::Transport { rank, reason, .. } => format!("machine {rank}: {reason}"),
            CommError::PeerGone { rank, .. } => format!("machine {rank}: its launcher is gone"),
            other => other.to_string(),
        })
    }

    /// Gives every machine the record of each, in the order of their numbers.
    ///
    /// # Errors
    /// Those of the control channel, if a launcher is gone or takes longer than `deadline`.
    pub(super) fn exchange(&self, record: &[u8], deadline: Duration) -> Result<Vec<Vec<u8>>, CommError> {
        let lengths = self.records.all_gather(&record.len().to_le_bytes(), deadline)?;
        let length = |bytes: &Vec<u8>| bytes[..].try_into().map_or(0, usize::from_le_bytes);
        let longest = lengths.iter().map(length).max().unwrap_or(0);
        let mut records = vec![Vec::new(); lengths.len()];
        for start in (0..longest).step_by(PART) {
            let rest = record.get(start..).unwrap_or(&[]);
            let parts = self.records.all_gather(&rest[..rest.len().min(PART)], AGREEMENT)?;
            records.iter_mut().zip(&parts).for_each(|(record, part)| record.extend_from_slice(part));
        }
        Ok(records)
    }
}
