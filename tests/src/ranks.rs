//! Ranks for tests: runs a body on each, checks that all results are bit-identical, and turns hangs into failures.
//!
//! Agreement is checked before any comparison with the oracle: ranks that are each within tolerance but differ from one another would
//! diverge in training.

use std::fmt::Debug;
use std::panic::resume_unwind;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

#[cfg(unix)]
use gradsync::bootstrap::Rendezvous;
use gradsync::comm::Communicator;
use gradsync::comm::local::LocalCommunicator;
#[cfg(unix)]
use gradsync::comm::process::ProcessCommunicator;
use gradsync::internal::run_each;

/// The results of all ranks, in rank order; a panic of a rank is the panic of the test.
pub fn on_ranks<T: Send>(world_size: usize, body: impl Fn(LocalCommunicator) -> T + Sync) -> Vec<T> {
    let outcomes =
        run_each(world_size, body).unwrap_or_else(|error| panic!("{world_size} ranks could not start: {error}"));
    assert_eq!(outcomes.len(), world_size, "one outcome per rank");
    let mut results = Vec::new();
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(result) => results.push(result),
            Err(panic) => {
                eprintln!("rank {rank} of {world_size} panicked");
                resume_unwind(panic);
            }
        }
    }
    results
}

/// Runs `body` on threads that connect like separate processes, and returns the results in rank order.
///
/// # Panics
/// If a rank cannot join or connect, or panics.
#[cfg(unix)]
pub fn on_processes<T: Send>(
    world_size: usize,
    deadline: Duration,
    body: impl Fn(ProcessCommunicator) -> T + Sync,
) -> Vec<T> {
    let rendezvous = Rendezvous::in_process();
    thread::scope(|scope| {
        let start = |rank: usize| {
            let (rendezvous, body) = (rendezvous.clone(), &body);
            scope.spawn(move || {
                let member = rendezvous.join(rank, world_size).expect("all join");
                body(ProcessCommunicator::new_within(member, deadline).expect("all connect"))
            })
        };
        let threads: Vec<_> = (0..world_size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// The common result of all ranks; panics with the number of the first rank that differs from rank 0.
pub fn agree<T: PartialEq + Debug>(label: &str, results: Vec<T>) -> T {
    let mut results = results.into_iter();
    let first = results.next().expect("at least one rank");
    for (offset, result) in results.enumerate() {
        assert!(result == first, "{label}: rank {} has {result:?}, rank 0 has {first:?}", offset + 1);
    }
    first
}

/// Runs [`on_ranks`], then [`agree`].
pub fn agreed<T: Send + PartialEq + Debug>(
    label: &str,
    world_size: usize,
    body: impl Fn(LocalCommunicator) -> T + Sync,
) -> T {
    agree(label, on_ranks(world_size, body))
}

/// Runs `body` and panics if it takes longer than `seconds`.
///
/// A body that hangs stays behind on its thread; the test process ends without it.
pub fn guarded<T: Send + 'static>(seconds: u64, body: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, finished) = channel();
    let worker = thread::Builder::new()
        .name(thread::current().name().unwrap_or("test").to_owned())
        .spawn(move || {
            // The receiver is gone only if the time limit has passed already.
            let _ = done.send(body());
        })
        .expect("a thread for the guarded test");
    match finished.recv_timeout(Duration::from_secs(seconds)) {
        Ok(result) => result,
        Err(RecvTimeoutError::Timeout) => panic!("still running after {seconds} s: it hangs"),
        Err(RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => resume_unwind(panic),
            Ok(()) => unreachable!("the worker sends before it ends"),
        },
    }
}

/// Exchanges bytes with peers.
///
/// # Errors
/// The errors of [`Communicator::exchange`].
pub fn exchange_bytes(
    comm: &dyn Communicator,
    sends: &[(usize, &[u8])],
    receives: &mut [(usize, &mut [u8])],
) -> gradsync::Result<()> {
    let sends: Vec<_> = sends.iter().map(|&(peer, bytes)| (peer, bytes.into())).collect();
    let mut receives: Vec<_> = receives.iter_mut().map(|(peer, bytes)| (*peer, (&mut **bytes).into())).collect();
    comm.exchange(&sends, &mut receives)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "it hangs")]
    fn guarded_ends_a_hang() {
        guarded(0, || thread::sleep(Duration::from_secs(5)));
    }

    #[test]
    #[should_panic(expected = "rank 2 has 5, rank 0 has 4")]
    fn agree_names_the_rank_that_differs() {
        agree("x", vec![4, 4, 5]);
    }
}
