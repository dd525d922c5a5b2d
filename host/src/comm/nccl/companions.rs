//! [`Companions`]: the ranks of a communicator that are threads of this process, whose parts of the communicator end together.
//!
//! NCCL 2.32 releases the parts of all ranks of a process when the last of them is destroyed or aborted, and hangs if some were destroyed
//! and others aborted. So the part of a rank that is done waits here for the last rank, which then ends all of them alike.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::sys::nccl::Comm;

/// One rank's part of a communicator, which may move to another thread.
#[derive(Debug)]
pub(super) struct Handle(pub(super) Comm);

// SAFETY: NCCL's communicators may be used from any thread, by one thread at a time.
unsafe impl Send for Handle {}

/// The ranks of one communicator in this process.
#[derive(Debug)]
pub(super) struct Companions {
    ranks: usize,
    ended: Mutex<Ended>,
}

/// The ranks that have ended their part.
#[derive(Debug, Default)]
struct Ended {
    ranks: usize,
    has_aborted: bool,
    /// The parts of ranks that are done.
    done: Vec<Handle>,
}

/// The communicators of this process, by NCCL's unique id.
static COMMUNICATORS: Mutex<BTreeMap<Vec<u8>, Weak<Companions>>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Companions {
    /// The ranks of the communicator with this unique id in this process, of which there are `ranks`. Each of them calls
    /// [`end`](Self::end) once.
    pub(super) fn of(unique_id: &[u8], ranks: usize) -> Arc<Self> {
        let mut communicators = lock(&COMMUNICATORS);
        communicators.retain(|_, companions| companions.strong_count() > 0);
        if let Some(companions) = communicators.get(unique_id).and_then(Weak::upgrade) {
            return companions;
        }
        let companions = Arc::new(Self { ranks, ended: Mutex::default() });
        communicators.insert(unique_id.to_vec(), Arc::downgrade(&companions));
        companions
    }

    /// Ends one rank's part by `end_one`, which is told whether to destroy it instead of aborting it. An abort is immediate, because
    /// kernels may wait for it; parts that are done are ended by the last rank.
    pub(super) fn end(&self, handle: Comm, is_healthy: bool, end_one: impl Fn(Comm, bool)) {
        if !is_healthy {
            end_one(handle, false);
        }
        let (done, is_healthy) = {
            let mut ended = lock(&self.ended);
            ended.ranks += 1;
            if is_healthy {
                ended.done.push(Handle(handle));
            }
            ended.has_aborted |= !is_healthy;
            if ended.ranks < self.ranks {
                return;
            }
            (std::mem::take(&mut ended.done), !ended.has_aborted)
        };
        done.into_iter().for_each(|Handle(handle)| end_one(handle, is_healthy));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ptr::without_provenance_mut;

    use super::*;

    /// The parts that are ended when ranks end one after the other, each healthy or not: the part's number, and whether it is destroyed.
    fn ends(id: &[u8], healthy: &[bool]) -> Vec<Vec<(usize, bool)>> {
        let ranks = healthy.len();
        let companions: Vec<_> = healthy.iter().map(|_| Companions::of(id, ranks)).collect();
        let end = |(rank, &is_healthy): (usize, &bool)| {
            let ended = RefCell::new(Vec::new());
            companions[rank].end(without_provenance_mut(rank), is_healthy, |handle, is_destroyed| {
                ended.borrow_mut().push((handle.addr(), is_destroyed));
            });
            ended.into_inner()
        };
        healthy.iter().enumerate().map(end).collect()
    }

    #[test]
    fn companions_end_alike_by_the_last_rank() {
        assert_eq!(ends(b"alone", &[true]), [[(0, true)]]);
        assert_eq!(ends(b"alone", &[false]), [[(0, false)]], "an id that is free again");
        assert_eq!(ends(b"all done", &[true, true, true]), [vec![], vec![], vec![(0, true), (1, true), (2, true)]]);
        assert_eq!(ends(b"one left", &[true, false]), [vec![], vec![(1, false), (0, false)]]);
        assert_eq!(ends(b"one failed", &[false, true, true]), [vec![(0, false)], vec![], vec![(1, false), (2, false)]]);
    }
}
