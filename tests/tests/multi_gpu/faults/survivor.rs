//! The remaining ranks: their error, the end of their communicator, and the smaller group.

use std::time::{Duration, Instant};

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, Operation, ReduceOp};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::{CommError, Error};

use super::{Fault, LIMIT, SLACK};
use crate::adasum;
use crate::context::Context;

/// The longest time that a queue may continue after an abort, which ends the kernels that wait for the lost rank.
const DRAIN: Duration = Duration::from_secs(5);
/// The longest time that the end of a communicator may take; after its deadline and 10 s more, it would be abandoned.
const END: Duration = Duration::from_secs(12);

/// Waits in an operation that the lost rank never joins.
pub(super) fn endure(fault: Fault, queue: &Queue, comm: NcclCommunicator) {
    let mut work = fault.ready(queue, &comm);
    let own = Some(work.operation());
    let begun = Instant::now();
    let queued = work.put();
    if !fault.is_cold && !fault.are_threads {
        assert!(queued.is_ok(), "the rank is still there, and nobody has to wait for it: {queued:?}");
    }
    let error = queued.and_then(|()| comm.synchronize(queue)).expect_err("a rank is missing");
    let took = begun.elapsed();
    let error = checked(fault, error);
    assert!(took <= LIMIT + SLACK, "{error}: only after {took:?}");
    if matches!(error, CommError::Timeout { .. }) {
        // Another rank's deadline may have begun a little earlier.
        assert!(took >= LIMIT / 2, "{error}: already after {took:?}");
    }
    assert_eq!(operation(&error), own, "{error}: not this rank's operation");

    let begun = Instant::now();
    let again = checked(fault, work.put().expect_err("it has failed"));
    assert_eq!(operation(&again), own, "{again}: not this rank's operation");
    checked(fault, comm.synchronize(queue).expect_err("it has failed"));
    checked(fault, comm.failure().expect("it has failed"));
    assert!(begun.elapsed() < SLACK, "calls after a failure waited for {:?}", begun.elapsed());

    drain(queue);
    drop(work);
    let begun = Instant::now();
    drop(comm);
    assert!(begun.elapsed() < END, "the end of the communicator took {:?}", begun.elapsed());
}

/// Asserts that the failure is due to the fault.
#[track_caller]
fn checked(fault: Fault, error: Error) -> CommError {
    match error {
        Error::Comm(error) if fault.explains(&error) => error,
        other => panic!("{fault:?} gave {other:?}"),
    }
}

fn operation(error: &CommError) -> Option<Operation> {
    match error {
        CommError::PeerGone { operation, .. } | CommError::Timeout { operation, .. } => Some(*operation),
        _ => None,
    }
}

/// Asserts that all work in the queue ends soon.
fn drain(queue: &Queue) {
    let end = queue.record().unwrap();
    let begun = Instant::now();
    while !end.is_done().unwrap() {
        assert!(begun.elapsed() < DRAIN, "{DRAIN:?} after the abort, the queue still runs");
        std::thread::sleep(Duration::from_millis(5));
    }
    queue.synchronize().unwrap();
}

/// Forms a smaller group of the remaining ranks, and runs an all-reduce and Adasum on it.
pub(super) fn rebuild(context: &Context, gone: usize, generation: u64) {
    let (rank, world_size) = (context.rank - usize::from(context.rank > gone), context.world_size - 1);
    let comm = context.communicator_of(rank, world_size, generation, &context.options());
    let mine: Vec<f32> = (0..100_003).map(|index| (index % 1000 + rank) as f32).collect();
    let mut data = DeviceBuffer::from_host(&context.queue, (&mine).into()).unwrap();
    comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
    comm.synchronize(&context.queue).unwrap();
    let mut sums = vec![0f32; mine.len()];
    data.as_slice().copy_to_host((&mut sums).into()).unwrap();
    for (index, sum) in sums.into_iter().enumerate() {
        let expected = (index % 1000 * world_size + world_size * (world_size - 1) / 2) as f32;
        assert_eq!(sum, expected, "element {index} of the all-reduce over the ranks that are left");
    }
    adasum::check_random(&context.queue, &comm);
}
