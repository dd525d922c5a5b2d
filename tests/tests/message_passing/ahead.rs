//! A rank completes a collective and fails in the next one, while other ranks are still in the first: they still complete it.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::transport::Comm;
use gradsync::Error;
use gradsync::comm::{Collectives, CommError, Ranks};

use super::cases::Cases;

/// The number of elements of a broadcast in which the root finishes first, while the other ranks exchange parts of the payload, or read it
/// from the root's mailbox: the most that a mailbox takes at once.
const LEN: usize = 1 << 16;
const BYTES: usize = LEN * size_of::<f32>();
/// The root, which fails in its next call, and the rank that delays its part to all others.
const ROOT: usize = 0;
const SLOW: usize = 1;
/// Longer than the idle time after which a rank checks whether others have failed.
const DELAY: Duration = Duration::from_millis(800);

/// The address of [`SlowMemory`].
static START: AtomicUsize = AtomicUsize::new(0);

/// Memory of zeros; the first access to it takes [`DELAY`].
struct SlowMemory {
    before: libc::sigaction,
}

impl SlowMemory {
    fn new() -> Self {
        let (kind, handler) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, first_access as extern "C" fn(_, _, _));
        // SAFETY: The memory is new, and the handler only makes system calls from which a signal may return.
        unsafe {
            let start = libc::mmap(ptr::null_mut(), BYTES, libc::PROT_NONE, kind, -1, 0);
            assert_ne!(start, libc::MAP_FAILED, "memory");
            START.store(start.expose_provenance(), Ordering::SeqCst);
            let (mut action, mut before): (libc::sigaction, libc::sigaction) = (std::mem::zeroed(), std::mem::zeroed());
            (action.sa_sigaction, action.sa_flags) = (handler as libc::sighandler_t, libc::SA_SIGINFO);
            assert_eq!(libc::sigaction(libc::SIGSEGV, &action, &mut before), 0, "a handler");
            Self { before }
        }
    }

    fn numbers(&mut self) -> &mut [f32] {
        // SAFETY: The memory has `BYTES` zero bytes and belongs to this object alone; the first access to it waits, and is permitted then.
        unsafe { std::slice::from_raw_parts_mut(ptr::with_exposed_provenance_mut(START.load(Ordering::SeqCst)), LEN) }
    }
}

impl Drop for SlowMemory {
    fn drop(&mut self) {
        // SAFETY: The action is the previous one, and nobody uses the memory any more.
        unsafe {
            libc::sigaction(libc::SIGSEGV, &self.before, ptr::null_mut());
            libc::munmap(ptr::with_exposed_provenance_mut(START.load(Ordering::SeqCst)), BYTES);
        }
    }
}

/// Waits and permits the access; any other forbidden access ends the process, as without this handler.
extern "C" fn first_access(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    let start = START.load(Ordering::SeqCst);
    let delay = libc::timespec { tv_sec: 0, tv_nsec: DELAY.as_nanos() as i64 };
    // SAFETY: The calls are permitted in a signal handler, and the memory is ours.
    unsafe {
        if !(start..start + BYTES).contains(&(*info).si_addr().addr()) {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            return;
        }
        libc::nanosleep(&delay, ptr::null_mut());
        libc::mprotect(ptr::with_exposed_provenance_mut(start), BYTES, libc::PROT_READ | libc::PROT_WRITE);
    }
}

fn fails_behind_a_broadcast(comm: &Comm) {
    let rank = comm.rank();
    let (mut own, mut slow) = (vec![rank as f32 + 1.0; LEN], (rank == SLOW).then(SlowMemory::new));
    let data = slow.as_mut().map_or(&mut own[..], SlowMemory::numbers);
    let outcome = comm.broadcast(&mut *data, ROOT);
    if rank == ROOT {
        outcome.expect("all are there");
        // The lengths do not match, and the other ranks hear of the failure at once.
        let refused = comm.all_gather(&[0.0f32; 2], &mut [0.0f32]);
        assert!(matches!(refused, Err(Error::LengthMismatch { .. })), "{refused:?}");
        return;
    }
    outcome.expect("the root had given all its data before it failed");
    assert!(data.iter().all(|&number| number == ROOT as f32 + 1.0));
    let next = comm.barrier();
    let Err(Error::Comm(CommError::InvalidCall { rank, .. })) = next else { panic!("{next:?}") };
    assert_eq!(rank, ROOT);
}

pub(crate) fn run(cases: &mut Cases) {
    // In a group of two ranks, nobody waits for the slow one.
    if cases.world_size() > 2 {
        cases.check_fresh("a rank fails behind a broadcast that others are in", |comm| fails_behind_a_broadcast(&comm));
    }
    cases.done("ahead");
}
