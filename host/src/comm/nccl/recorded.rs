//! [`Recorded`]: the calls of a communicator in one recording, which ranks compare when they record them and when they launch the graph.
//!
//! NCCL may register the buffers of recorded calls with the peers, whose kernels then write to them directly, up to the writer's count. So
//! recorded calls are compared before NCCL gets them. When a graph is launched, kernels of NCCL exchange the addresses of registered
//! buffers, and none of them starts without such an address: if all ranks launch the same recordings in the same order, then each kernel
//! meets the calls with which it was compared. With a single recording that is certain. With several, a launch waits for its comparison.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::primitive::Primitive;
use super::session::Session;
use super::setup::{is_off, is_on};
use super::watch::End;
use crate::driver::Queue;
use crate::error::{Call, Operation};
use crate::sys::nccl::Version;

/// The first version of NCCL that does not register memory of `cuMemAlloc` by itself.
const UNREGISTERED_SINCE: Version = Version::new(2, 24);
/// The variables by which NCCL registers no buffers of recorded calls, and by which it registers memory of `cuMemAlloc` too.
const GRAPH_REGISTER: &str = "NCCL_GRAPH_REGISTER";
const LEGACY_REGISTER: &str = "NCCL_LEGACY_CUDA_REGISTER";

/// The memory that NCCL may register with the peers when it records a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registered {
    None,
    /// Memory that is not from `cuMemAlloc`: this crate allocates none.
    OtherAllocators,
    All,
}

impl Registered {
    fn by(version: Version, graph_register: Option<&str>, legacy_register: Option<&str>) -> Self {
        if is_off(graph_register) {
            Registered::None
        } else if version < UNREGISTERED_SINCE || is_on(legacy_register) {
            Registered::All
        } else {
            Registered::OtherAllocators
        }
    }
}

/// The recordings of a communicator so far. Ranks record the same collectives in the same order, so a number means the same recording on
/// every rank.
#[derive(Debug)]
pub(super) struct Recordings {
    registered: Registered,
    /// The number of recordings with collectives.
    count: AtomicU64,
    /// The number of recordings with calls of NCCL.
    of_nccl: AtomicU64,
    /// Whether NCCL may have registered a buffer of one of them.
    have_registered: AtomicBool,
    /// Whether some ranks are threads of one process: NCCL then writes to the peer's memory directly, registered or not.
    share_process: bool,
}

impl Recordings {
    pub(super) fn new(version: Version, share_process: bool) -> Self {
        // NCCL sets variables from its configuration files, which it has read by now.
        let variable = |name: &str| std::env::var(name).ok();
        let registered =
            Registered::by(version, variable(GRAPH_REGISTER).as_deref(), variable(LEGACY_REGISTER).as_deref());
        let (count, of_nccl) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { registered, count, of_nccl, have_registered: AtomicBool::new(false), share_process }
    }

    /// Whether a launch with calls of NCCL waits for its comparison. It depends on this rank alone, because a kernel of a peer writes only
    /// to buffers that this rank has registered, and only while this rank's own kernel runs.
    fn launches_wait(&self) -> bool {
        let are_several = self.of_nccl.load(Ordering::Relaxed) > 1 && self.have_registered.load(Ordering::Relaxed);
        self.share_process || are_several
    }

    /// Notes the operands of a recorded call.
    pub(super) fn note_operands(&self, queue: &Queue, primitives: &[Primitive]) {
        let mut addresses = primitives.iter().flat_map(|primitive| primitive.addresses());
        let is_other = |address: u64| !queue.is_of_mem_alloc(address).unwrap_or(false);
        let may_be = match self.registered {
            Registered::None => false,
            Registered::All => true,
            Registered::OtherAllocators => addresses.any(is_other),
        };
        if may_be {
            self.have_registered.store(true, Ordering::Relaxed);
        }
    }
}

/// One recording's part of a communicator; its graph keeps it.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) session: Arc<Session>,
    /// Recorded work needs the communicator.
    _end: Arc<End>,
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    /// The number of the recording, once it has collectives; 0 before.
    recording: u64,
    is_announced: bool,
    are_of_nccl: bool,
    /// The sends and receives by NCCL, which concern two ranks each.
    transfers: Vec<Call>,
}

impl Recorded {
    pub(super) fn new(session: Arc<Session>, end: Arc<End>) -> Self {
        Self { session, _end: end, calls: Mutex::default() }
    }

    /// No foreign code runs under the lock.
    fn lock(&self) -> std::sync::MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds calls. Returns the call by which the ranks compare that all of them record, to be announced before the first collective that
    /// is announced.
    pub(super) fn add(&self, calls: &[Call], by_nccl: bool, are_announced: bool) -> Option<Call> {
        let recordings = &self.session.recordings;
        let mut own = self.lock();
        if by_nccl {
            own.transfers.extend(calls.iter().filter(|call| is_transfer(call)));
            if !std::mem::replace(&mut own.are_of_nccl, true) {
                recordings.of_nccl.fetch_add(1, Ordering::Relaxed);
            }
        }
        if calls.iter().all(is_transfer) {
            return None;
        }
        if own.recording == 0 {
            own.recording = recordings.count.fetch_add(1, Ordering::Relaxed) + 1;
        }
        if !are_announced || std::mem::replace(&mut own.is_announced, true) {
            return None;
        }
        Some(Call::without_data(Operation::Recording { recording: own.recording }))
    }

    /// The number of the recording, the same on all ranks; 0 if it has no collectives.
    pub(super) fn number(&self) -> u64 {
        self.lock().recording
    }

    /// Whether NCCL's kernels are in it.
    pub(super) fn is_of_nccl(&self) -> bool {
        self.lock().are_of_nccl
    }

    /// The sends and receives by NCCL.
    pub(super) fn transfers(&self) -> Vec<Call> {
        self.lock().transfers.clone()
    }

    /// Whether a launch has to wait until the other ranks launch the same recording.
    pub(super) fn launch_waits(&self) -> bool {
        self.is_of_nccl() && self.session.recordings.launches_wait()
    }
}

fn is_transfer(call: &Call) -> bool {
    call.operation.peers() != (None, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_follows_nccls_version_and_variables() {
        let [old, new] = [Version::new(2, 23), Version::new(2, 24)];
        assert_eq!(Registered::by(old, None, None), Registered::All);
        assert_eq!(Registered::by(new, None, None), Registered::OtherAllocators);
        assert_eq!(Registered::by(new, Some("1"), Some("1")), Registered::All);
        assert_eq!(Registered::by(new, Some("1"), Some("0")), Registered::OtherAllocators);
        for version in [old, new] {
            assert_eq!(Registered::by(version, Some("0"), Some("1")), Registered::None);
        }
    }

    #[test]
    fn launches_wait_where_nccl_writes_to_peers() {
        let recordings = |share_process| Recordings::new(Version::new(2, 28), share_process);
        assert!(recordings(true).launches_wait());
        let own = recordings(false);
        own.have_registered.store(true, Ordering::Relaxed);
        assert!(!own.launches_wait());
        own.of_nccl.store(1, Ordering::Relaxed);
        assert!(!own.launches_wait(), "one recording meets no other");
        own.of_nccl.store(2, Ordering::Relaxed);
        assert!(own.launches_wait());
        own.have_registered.store(false, Ordering::Relaxed);
        assert!(!own.launches_wait(), "nothing is registered");
    }
}
