//! Communicators from creation to end: regular ends, ends with work in progress, several in turn, several at once, on another thread, and
//! by an abort.

use std::rc::Rc;
use std::time::{Duration, Instant};

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, CommError, Communicator, Ranks, ReduceOp};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::ops::{Adasum, AdasumOptions};
use gradsync::train::mean_over_ranks;
use gradsync::{DType, Error, GradientBuffer};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::{Checks, Expected};

use crate::context::Context;
use crate::placed::Placed;
use crate::report::Report;

/// The longest time that counts as immediate on a busy machine; the deadline is several times as long.
const QUICK: Duration = Duration::from_secs(5);

pub(crate) fn run(context: &Context, report: &mut Report) {
    let queue = &context.queue;
    let comm = |generation| context.communicator(generation, &context.options());
    report.case("dropped unused", || drop(comm(0)));
    report.case("five in turn", || {
        for generation in 1..6 {
            assert_works(queue, &comm(generation));
        }
    });
    report.case("two at once", || {
        let (one, other) = (comm(6), comm(7));
        for _ in 0..3 {
            assert_works(queue, &one);
            assert_works(queue, &other);
        }
        drop(one);
        assert_works(queue, &other);
    });
    report.case("dropped with work under way", || {
        let comm = comm(8);
        let mine = vec![context.rank as f32 + 1.0; 16 << 20];
        let mut data = DeviceBuffer::from_host(queue, (&mine).into()).unwrap();
        for _ in 0..3 {
            comm.all_reduce(data.as_mut_slice(), ReduceOp::Max).unwrap();
        }
        drop(comm);
        let mut maxima = mine;
        data.as_slice().copy_to_host((&mut maxima).into()).unwrap();
        assert!(maxima.iter().all(|&value| value == context.world_size as f32));
    });
    report.case("a group dropped half full", || {
        let comm = comm(9);
        // The call is invalid on one rank alone and has no effect.
        if context.rank == 0 {
            let mut data = DeviceBuffer::zeroed(queue, DType::F32, 5).unwrap();
            let mut group = gradsync::internal::nccl_group(&comm);
            group.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
            drop(group);
        }
        assert_works(queue, &comm);
    });
    report.case("on another thread", || {
        let comm = comm(10);
        std::thread::scope(|scope| {
            // A panic on that thread fails this case.
            scope
                .spawn(move || assert_works(queue, &comm))
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    });
    report.case("host data beside device data", || host_data(queue, &comm(100)));
    for (index, is_blocking) in [true, false].into_iter().enumerate() {
        for (place, who) in [context.world_size - 1, 0].into_iter().enumerate() {
            let kind = if is_blocking { "" } else { ", calls that do not block" };
            let name = format!("an abort by {}{kind}", if place == 0 { "the last rank" } else { "rank 0" });
            report.case(&name, || abort(context, who, is_blocking, 11 + 4 * index as u64 + 2 * place as u64));
        }
    }
}

/// Runs an all-reduce and checks its result.
fn assert_works(queue: &Queue, comm: &NcclCommunicator) {
    assert!(comm.failure().is_none(), "a communicator that works has a failure");
    let world_size = comm.world_size();
    let own = Array::new(Format::F32, &[comm.rank() as f64 + 1.0; 1000]);
    let expected = Rc::new(Expected::Values(vec![(world_size * (world_size + 1) / 2) as f64; 1000]));
    let mut data = Placed::new(queue, &own, 0);
    comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
    let mut checks = Checks::new(comm);
    checks.same("an all-reduce", data.read(comm), &expected);
    checks.finish();
}

/// A job without MPI has a communicator of host memory too, for metrics and for Adasum on the CPUs.
fn host_data(queue: &Queue, comm: &NcclCommunicator) {
    let host = comm.host_communicator().unwrap();
    let (rank, world_size) = (comm.rank(), comm.world_size());
    assert_eq!((host.rank(), host.world_size()), (rank, world_size));
    let mut metrics = [rank as f64, 1.0];
    host.all_reduce(&mut metrics, ReduceOp::Sum).unwrap();
    assert_eq!(metrics, [(world_size * (world_size - 1) / 2) as f64, world_size as f64]);
    assert_eq!(mean_over_ranks(comm, rank as f64, 2).unwrap(), Some((world_size - 1) as f64 / 4.0));

    // The gradients of the last rank alone differ from zero, so that they are the result.
    let (tensors, len) = ([("weight", [1000]), ("bias", [7])], 1007);
    let mut gradients = GradientBuffer::on_queue(queue, DType::F32, world_size, tensors).unwrap();
    let own = if rank + 1 == world_size { 3.5f32 } else { 0.0 };
    for tensor in 0..2 {
        let values = vec![own; gradients.tensor(tensor).data().len()];
        gradients.tensor_mut(tensor).copy_from_slice(&values).unwrap();
    }
    let mut adasum = Adasum::staged(host, &gradients, AdasumOptions::default()).unwrap();
    adasum.all_reduce(&mut gradients).unwrap();
    let values = (0..2).flat_map(|tensor| gradients.tensor(tensor).to_vec::<f32>().unwrap());
    let values: Vec<f32> = values.collect();
    assert_eq!(values, vec![3.5; len]);
    // The first communicator is made once, and works beside the second.
    assert!(std::ptr::eq(host, comm.host_communicator().unwrap()));
    assert_works(queue, comm);
    host.barrier().unwrap();
}

/// One rank aborts while the others wait for it inside NCCL.
fn abort(context: &Context, who: usize, is_blocking: bool, generation: u64) {
    let options = context.options().with_checks(false).with_blocking(is_blocking);
    let comm = context.communicator(generation, &options);
    assert_works(&context.queue, &comm);
    let begun = Instant::now();
    if context.rank == who {
        std::thread::sleep(Duration::from_millis(300));
        comm.abort();
    } else {
        let mut data = DeviceBuffer::zeroed(&context.queue, DType::F32, 16 << 20).unwrap();
        // Over a network, NCCL connects inside the call, where the abort may arrive.
        let called = comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum);
        let outcome = called.and_then(|()| comm.synchronize(&context.queue));
        let error = outcome.expect_err("a rank has aborted");
        for error in [error, comm.failure().expect("it has failed")] {
            let is_named = matches!(
                &error,
                Error::Comm(CommError::Transport { rank, reason, .. }) if *rank == who && reason.contains("abort")
            );
            assert!(is_named, "{error:?}, where rank {who} has aborted");
        }
        drop(comm);
    }
    assert!(begun.elapsed() < QUICK, "the end of the communicator took {:?}", begun.elapsed());
    assert_works(&context.queue, &context.communicator(generation + 1, &context.options()));
}
