//! The times for which the launcher waits for ranks.

use std::time::Duration;

/// The interval of checks of the folder of traces, for ranks that report a failure and continue.
pub(super) const LOOK_FOR_TRACES: Duration = Duration::from_millis(200);
/// How long reading and writing of the folders of traces may take beyond that.
pub(super) const READING: Duration = Duration::from_secs(2);
/// The time that a rank has to end by itself which has panicked or lost its connections, as other ranks report. A panic prints a backtrace.
pub(super) const DEPARTURE: Duration = Duration::from_secs(3);
/// The interval of checks of processes that ranks have left behind.
pub(super) const LOOK_FOR_ORPHANS: Duration = Duration::from_millis(20);
/// The time that ranks have to write the requested traces.
pub(super) const TRACES: Duration = Duration::from_millis(500);
/// The time that the last lines of ranks may take after the end of all, if a process holds their pipes.
pub(super) const LAST_LINES: Duration = Duration::from_secs(1);
/// The time after the first failure of a rank during which other ends are examined as its cause.
pub(super) const SIMULTANEOUS: Duration = Duration::from_millis(100);
/// How long launchers wait for each other once all have joined.
pub(super) const AGREEMENT: Duration = Duration::from_secs(60);
/// How long after its own ranks have ended a launcher waits for the record of other machines, whose ranks may use up their grace period.
pub(super) const RECORDS: Duration = Duration::from_secs(5);
/// How long the launcher waits for the end of a process that it has killed.
pub(super) const KILL: Duration = Duration::from_secs(5);
