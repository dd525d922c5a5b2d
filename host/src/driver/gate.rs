//! [`Gate`]: keeps a recording of a queue from beginning or ending between the check of a call for a recording and the call's work.
//!
//! Clones of a queue may be used by several threads, and a recording may begin on one of them at any moment. A call whose work depends on
//! the recording, for example because it may not be recorded, or because the recording has to keep its resources, [holds](Gate::hold) the
//! gate from the check to the end of its work. A recording begins and ends while no call holds the gates of its queues.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The mark of a recording that is just beginning or ending. The bits below count the calls that hold the gate.
const CHANGING: usize = 1 << (usize::BITS - 1);
/// How long a thread that waits yields before it sleeps between attempts.
const SPIN: Duration = Duration::from_millis(1);

thread_local! {
    /// The addresses of the gates that this thread holds, as often as it holds them.
    static HELD: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The calls that hold off recordings of one queue.
#[derive(Debug, Default)]
pub(super) struct Gate(AtomicUsize);

/// A call during which no recording begins or ends in a queue on another thread.
#[must_use = "it holds the gate until it is dropped"]
#[derive(Debug)]
pub(crate) struct Held<'a> {
    gate: &'a Gate,
    /// It is counted for the thread that holds it.
    one_thread: PhantomData<*const ()>,
}

/// The moment in which a recording begins or ends.
#[derive(Debug)]
pub(super) struct Changing<'a>(&'a Gate);

impl Gate {
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Holds off the beginning and the end of a recording. A thread may hold a gate several times.
    pub(super) fn hold(&self) -> Held<'_> {
        let mut begun = None;
        loop {
            let calls = self.0.load(Ordering::Relaxed);
            if calls & CHANGING == 0
                && self.0.compare_exchange_weak(calls, calls + 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                HELD.with_borrow_mut(|held| held.push(self.address()));
                return Held { gate: self, one_thread: PhantomData };
            }
            pause(&mut begun);
        }
    }

    /// Whether this thread holds the gate.
    pub(super) fn is_held_here(&self) -> bool {
        HELD.with_borrow(|held| held.contains(&self.address()))
    }

    fn try_change(&self) -> Option<Changing<'_>> {
        self.0.compare_exchange(0, CHANGING, Ordering::Acquire, Ordering::Relaxed).ok().map(|_| Changing(self))
    }

    /// Waits until no call holds any of these gates, none of which this thread holds, and keeps calls from holding one until the result is
    /// dropped. The gates are different. No gate is kept while another one is waited for, because a call may hold several.
    pub(super) fn change<'a>(gates: &[&'a Gate]) -> Vec<Changing<'a>> {
        let mut begun = None;
        loop {
            let changing: Option<Vec<_>> = gates.iter().map(|gate| gate.try_change()).collect();
            match changing {
                Some(changing) => return changing,
                None => pause(&mut begun),
            }
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let address = self.gate.address();
        HELD.with_borrow_mut(|held| {
            held.iter().rposition(|&other| other == address).map(|index| held.swap_remove(index))
        });
        self.gate.0.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::Release);
    }
}

fn pause(begun: &mut Option<Instant>) {
    if begun.get_or_insert_with(Instant::now).elapsed() < SPIN {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn hold_lets_no_recording_begin() {
        let (gates, is_over) = ([Gate::default(), Gate::default()], AtomicBool::new(false));
        let [one, other] = &gates;
        let outer = one.hold();
        let inner = one.hold();
        assert!(one.is_held_here() && !other.is_held_here());
        assert!(one.try_change().is_none() && other.try_change().is_some());
        std::thread::scope(|scope| {
            let recorder = scope.spawn(|| {
                let changing = Gate::change(&[other, one]);
                assert!(is_over.load(Ordering::SeqCst) && !one.is_held_here());
                std::thread::sleep(Duration::from_millis(20));
                is_over.store(false, Ordering::SeqCst);
                drop(changing);
            });
            std::thread::sleep(Duration::from_millis(20));
            // The recorder keeps no gate while it waits for another one.
            drop(other.hold());
            drop(inner);
            assert!(one.is_held_here());
            is_over.store(true, Ordering::SeqCst);
            drop(outer);
            recorder.join().unwrap();
        });
        assert!(!is_over.load(Ordering::SeqCst) && !one.is_held_here());
        drop(one.hold());
        assert!(one.try_change().is_some());
    }

    #[test]
    fn hold_waits_while_a_recording_begins() {
        let gate = Gate::default();
        let (changing, has_begun) = (Gate::change(&[&gate]), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _held = gate.hold();
                assert!(has_begun.load(Ordering::SeqCst));
            });
            std::thread::sleep(Duration::from_millis(20));
            has_begun.store(true, Ordering::SeqCst);
            drop(changing);
        });
    }
}
