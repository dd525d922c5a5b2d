//! The waits of this process's threads for work on devices. Work that other libraries have enqueued is no call of a communicator, and only
//! these waits tell that it does not end.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::DeviceWait;
use super::process::start_tracing;
use super::recorder::Now;

struct TimedWait {
    number: u64,
    device: u32,
    since: Instant,
}

static WAITS: Mutex<Vec<TimedWait>> = Mutex::new(Vec::new());

/// No user code runs under the lock, so a poisoned one still guards consistent state.
fn lock() -> MutexGuard<'static, Vec<TimedWait>> {
    WAITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A wait, until this is dropped.
#[must_use = "the wait is over when this is dropped"]
pub(crate) struct Waiting(Option<u64>);

/// Records that this thread waits for work on a device, if traces are written.
pub(crate) fn waiting_for_device(device: u32) -> Waiting {
    if start_tracing().is_none() {
        return Waiting(None);
    }
    let mut waits = lock();
    let number = waits.last().map_or(0, |last| last.number + 1);
    waits.push(TimedWait { number, device, since: Instant::now() });
    Waiting(Some(number))
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(number) = self.0 {
            lock().retain(|wait| wait.number != number);
        }
    }
}

/// The waits in progress, longest first.
pub(super) fn waits(now: Now) -> Vec<DeviceWait> {
    lock().iter().map(|wait| DeviceWait { device: wait.device, since: now.seconds_of(wait.since) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timed_wait_is_listed_until_it_is_dropped() {
        let wait = |device: u32| {
            lock().push(TimedWait { number: device.into(), device, since: Instant::now() });
            Waiting(Some(device.into()))
        };
        let of = |device| waits(Now::new()).iter().any(|wait| wait.device == device);
        let (first, second) = (wait(901), wait(902));
        assert!(of(901) && of(902));
        drop(first);
        assert!(!of(901) && of(902));
        drop(second);
        assert!(!of(902));
    }
}
