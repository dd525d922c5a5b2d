//! How long the launcher waits for what ranks do.

use std::time::Duration;

/// How often the folder of traces is looked at, for ranks that report a failure and go on.
pub(super) const LOOK_FOR_TRACES: Duration = Duration::from_millis(200);
/// How long ranks may take to write the traces that they were asked for.
pub(super) const TRACES: Duration = Duration::from_millis(500);
/// How long after the end of a rank its last lines may take, where a process that it has started holds its pipes.
pub(super) const LAST_LINES: Duration = Duration::from_secs(1);
/// How long after the first failure of a rank others that end are looked at as its cause.
pub(super) const SIMULTANEOUS: Duration = Duration::from_millis(100);
/// How long launchers wait for each other once all have joined.
pub(super) const AGREEMENT: Duration = Duration::from_secs(60);
/// How long after its own ranks have ended a launcher waits for the record of other machines, whose ranks may use up their grace period.
pub(super) const RECORDS: Duration = Duration::from_secs(5);
