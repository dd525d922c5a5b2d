//! The deadline of a measured call: a thread ends the program when a call, or the wait for its work on a GPU, makes no progress.
//!
//! Work that has hung on a GPU cannot be taken back, and its host waits for it without a limit. Plain NCCL, which is a baseline, has no
//! deadline of its own either.

use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use gradsync_cli::messages::complain;

use super::subject::Side;

/// A row that a thread measures.
struct Watched {
    thread: ThreadId,
    row: String,
    side: &'static str,
    since: Instant,
}

static ROWS: Mutex<Vec<Watched>> = Mutex::new(Vec::new());

fn rows() -> MutexGuard<'static, Vec<Watched>> {
    ROWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the thread, once.
pub(crate) fn start(deadline: Duration) {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        thread::spawn(move || {
            loop {
                thread::sleep((deadline / 4).clamp(Duration::from_millis(1), Duration::from_secs(1)));
                let late = rows().iter().find(|row| row.since.elapsed() > deadline).map(|late| {
                    let Watched { row, side, .. } = late;
                    format!("{row}: {side}")
                });
                if let Some(what) = late {
                    end(&format!("{what} has made no progress for {deadline:?} (--deadline): this rank ends"));
                }
            }
        });
    });
}

/// Ends the program at once. Functions that run at a usual exit would wait for the device.
fn end(reason: &str) -> ! {
    complain(reason);
    // SAFETY: it does not return, and no thread's memory is freed before the process is gone.
    unsafe { libc::_exit(1) }
}

/// The row of this thread, until this is dropped.
#[must_use = "the row has ended when this is dropped"]
pub(crate) struct InRow;

/// Watches this thread while it measures a row of this name.
pub(crate) fn row(row: String) -> InRow {
    rows().push(Watched { thread: thread::current().id(), row, side: "its preparation", since: Instant::now() });
    InRow
}

/// Notes progress of this thread, and the side whose work it waits for next.
pub(crate) fn side(side: Side) {
    let thread = thread::current().id();
    if let Some(row) = rows().iter_mut().find(|row| row.thread == thread) {
        row.since = Instant::now();
        row.side = match side {
            Side::OutOfPlace => "the operation out of place",
            Side::InPlace => "the operation in place",
            Side::Baseline => "the baseline",
        };
    }
}

impl Drop for InRow {
    fn drop(&mut self) {
        let thread = thread::current().id();
        rows().retain(|row| row.thread != thread);
    }
}
