//! Notification of the threads of a group when their shared state changes: waiting threads spin for a while, and then sleep until they
//! are woken.
//!
//! Waking a sleeping thread takes longer than a small collective. This module knows only the lock around the shared state.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a wait spins before it sleeps. Waking a thread takes some 50 µs; ranks with equal parts of a large collective finish
/// within this time of each other.
const AWAKE: Duration = Duration::from_millis(1);

/// A condition variable with spinning, notified after every change of the shared state.
#[derive(Debug, Default)]
pub(super) struct Signal {
    changes: AtomicU64,
    condvar: Condvar,
}

/// The state of one wait across all checks of its condition.
#[derive(Debug, Default)]
pub(super) struct Wait {
    /// When the wait began to spin; set by the first call of [`Signal::wait`].
    awake_since: Option<Instant>,
}

impl Signal {
    /// Wakes all threads after a change that was made under the lock.
    pub(super) fn notify(&self) {
        self.changes.fetch_add(1, Ordering::Release);
        self.condvar.notify_all();
    }

    /// Waits for a change, or until `limit` has passed if there is one. May return spuriously, so the caller checks its condition again.
    pub(super) fn wait<'a, T>(
        &self,
        lock: impl FnOnce() -> MutexGuard<'a, T>,
        guard: MutexGuard<'a, T>,
        wait: &mut Wait,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, T> {
        let seen = self.changes.load(Ordering::Acquire);
        let awake_since = *wait.awake_since.get_or_insert_with(Instant::now);
        let awake = limit.map_or(AWAKE, |limit| limit.min(AWAKE));
        if awake_since.elapsed() < awake {
            drop(guard);
            while self.changes.load(Ordering::Acquire) == seen && awake_since.elapsed() < awake {
                // Yielding lets a late thread on the same core run.
                std::thread::yield_now();
            }
            return lock();
        }
        // No change can have occurred since the caller's check, because it would have needed the lock.
        match limit {
            Some(limit) => self.condvar.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0,
            None => self.condvar.wait(guard).unwrap_or_else(PoisonError::into_inner),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Two threads pass a number back and forth, with delays that are shorter than, about equal to, and longer than the spinning time.
    #[test]
    fn wait_misses_no_change_awake_or_asleep() {
        const ROUNDS: u32 = 400;
        let shared = Arc::new((Mutex::new(0), Signal::default()));
        let (sender, receiver) = channel();
        for own in 0..2 {
            let (shared, sender) = (shared.clone(), sender.clone());
            std::thread::spawn(move || {
                let (number, signal) = &*shared;
                for round in (own..ROUNDS).step_by(2) {
                    let mut wait = Wait::default();
                    let mut guard = number.lock().unwrap();
                    while *guard != round {
                        guard = signal.wait(|| number.lock().unwrap(), guard, &mut wait, None);
                    }
                    drop(guard);
                    // The delays range from zero to twice the spinning time of the other thread.
                    std::thread::sleep(AWAKE * (round % 9) / 4);
                    *number.lock().unwrap() += 1;
                    signal.notify();
                }
                sender.send(own).unwrap();
            });
        }
        let mut ended: Vec<u32> = (0..2)
            .map(|_| receiver.recv_timeout(Duration::from_secs(60)).expect("both threads come to their end"))
            .collect();
        ended.sort_unstable();
        assert_eq!((ended, *shared.0.lock().unwrap()), (vec![0, 1], ROUNDS));
    }

    #[test]
    fn wait_ends_at_its_limit() {
        let (lock, signal) = (Mutex::new(()), Signal::default());
        for limit in [AWAKE / 4, AWAKE * 4] {
            let (start, mut wait, mut guard) = (Instant::now(), Wait::default(), lock.lock().unwrap());
            while start.elapsed() < limit {
                guard =
                    signal.wait(|| lock.lock().unwrap(), guard, &mut wait, Some(limit.saturating_sub(start.elapsed())));
            }
            drop(guard);
            assert!(start.elapsed() < limit + Duration::from_secs(5), "{:?}", start.elapsed());
        }
    }
}
