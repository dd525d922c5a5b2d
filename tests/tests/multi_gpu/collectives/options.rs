//! Communicators with other options: the same calls give the same bits.

use gradsync::Error;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Collectives, CommError, ReduceOp, Scaling};
use gradsync::driver::DeviceBuffer;
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::{Checks, assert_same};

use super::Cases;
use crate::checks::reduced;
use crate::placed::Placed;
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case("calls that are not checked", || {
        compare(cases, 200, &cases.context.options().with_checks(false));
    });
    report.case("calls that do not block", || {
        compare(cases, 201, &cases.context.options().with_blocking(false));
    });
    report.case("calls that are neither checked nor block", || {
        compare(cases, 202, &cases.context.options().with_checks(false).with_blocking(false));
    });
    report.case("many calls that do not block", || many(cases));
    // With another number of blocks NCCL may add in another order.
    report.case("a number of blocks", || {
        let options = cases.context.options().with_min_ctas(Some(4)).with_max_ctas(Some(8));
        sums(cases, &cases.context.communicator(203, &options));
        let options = cases.context.options().with_min_ctas(Some(32));
        sums(cases, &cases.context.communicator(204, &options));
    });
}

/// Ranks that are threads of one process compare their calls in any case, because NCCL would write past the end of the shorter operand.
pub(super) fn of_threads(cases: &Cases<'_>, report: &mut Report) {
    if cases.world_size() == 1 {
        return;
    }
    report.case("counts that differ between threads, without checks", || {
        // This crate's kernels would take the small sum, and they write within their mailboxes, whatever the counts.
        let options = cases.context.options().with_checks(false).with_low_latency_bytes(Some(0));
        let comm = cases.context.communicator(206, &options);
        let mut data = DeviceBuffer::from_host(&cases.context.queue, (&vec![7.0f32; 4096]).into()).unwrap();
        let len = if cases.rank() == 0 { 4 } else { 4096 };
        let error = comm.all_reduce(data.as_mut_slice().split_at_mut(len).0, ReduceOp::Sum).unwrap_err();
        assert!(matches!(error, Error::Comm(CommError::Mismatch { .. })), "{error}");
        let mut host = [0.0f32; 4096];
        data.as_slice().copy_to_host((&mut host[..]).into()).unwrap();
        assert!(host.iter().all(|&number| number == 7.0), "NCCL got a call that does not fit the others'");
    });
}

fn compare(cases: &Cases<'_>, generation: u64, options: &NcclOptions) {
    let comm = cases.context.communicator(generation, options);
    let results = sample(cases, &comm).into_iter().zip(sample(cases, cases.comm));
    for ((label, got), (_, expected)) in results {
        assert_same(&label, &got.patterns(), &expected.patterns());
    }
    sums(cases, &comm);
}

/// Takes some seconds, during which the communicator's monitoring thread often queries NCCL about its background work, at the same time as
/// this thread.
fn many(cases: &Cases<'_>) {
    let options = cases.context.options().with_checks(false).with_blocking(false);
    let comm = cases.context.communicator(205, &options);
    let inputs = cases.inputs(Format::F32, 33 * cases.world_size());
    let input = Placed::new(&cases.context.queue, &Array::new(Format::F32, &inputs[cases.rank()]), 1);
    let mut blocks = Placed::unwritten(&cases.context.queue, Format::F32, 33 * cases.world_size(), 0);
    for _ in 0..4000 {
        comm.all_to_all(input.slice(), blocks.slice_mut()).unwrap();
    }
    let own = cases.rank() * 33..(cases.rank() + 1) * 33;
    let expected = inputs.iter().map(|input| Array::new(Format::F32, input).range(own.clone())).collect::<Vec<_>>();
    assert_same("the last of them", &blocks.read(&comm).patterns(), &Array::concat(&expected).patterns());
}

/// Runs a sum, and compares the ranks' results over the new communicator.
fn sums(cases: &Cases<'_>, comm: &NcclCommunicator) {
    let inputs = cases.inputs(Format::F32, 33);
    let mut data = Placed::new(&cases.context.queue, &Array::new(Format::F32, &inputs[cases.rank()]), 1);
    comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
    let mut checks = Checks::new(comm);
    checks.same("a sum", data.read(comm), &reduced(ReduceOp::Sum, Format::F32, Scaling::NONE, &inputs));
    checks.finish();
}

/// The results of one or more calls of every kind.
fn sample(cases: &Cases<'_>, comm: &NcclCommunicator) -> Vec<(String, Array)> {
    let (queue, rank, world_size) = (&cases.context.queue, cases.rank(), cases.world_size());
    let mut results = Vec::new();
    for format in Format::ALL {
        for len in [1, 257, 4097] {
            let input = Array::new(format, &cases.inputs(format, len)[rank]);
            for (op, scaling) in [
                (ReduceOp::Sum, Scaling::NONE),
                (ReduceOp::Mean, Scaling { before: 0.1, after: 3.0 }),
                (ReduceOp::Max, Scaling { before: -1.0, after: 1.0 }),
            ] {
                let mut data = Placed::new(queue, &input, 0);
                comm.all_reduce_scaled(data.slice_mut(), op, scaling).unwrap();
                results.push((format!("all_reduce({op}) of {len} {format:?}, {scaling:?}"), data.read(comm)));
            }

            let input = Placed::new(queue, &input, 1);
            let mut gathered = Placed::unwritten(queue, format, len * world_size, 0);
            comm.all_gather(input.slice(), gathered.slice_mut()).unwrap();
            results.push((format!("all_gather of {len} {format:?}"), gathered.read(comm)));

            let whole = Array::new(format, &cases.inputs(format, len * world_size)[rank]);
            let whole = Placed::new(queue, &whole, 0);
            let mut shard = Placed::unwritten(queue, format, len, 0);
            comm.reduce_scatter(whole.slice(), shard.slice_mut(), ReduceOp::Sum).unwrap();
            results.push((format!("reduce_scatter of {len} {format:?}"), shard.read(comm)));
            let mut blocks = Placed::unwritten(queue, format, len * world_size, 0);
            comm.all_to_all(whole.slice(), blocks.slice_mut()).unwrap();
            results.push((format!("all_to_all of {len} {format:?}"), blocks.read(comm)));
        }
    }
    let patterns = cases.patterns(Format::BF16, 257);
    let mut from_root = Placed::new(queue, &patterns[rank], 1);
    comm.broadcast(from_root.slice_mut(), world_size / 2).unwrap();
    results.push(("broadcast".into(), from_root.read(comm)));

    let input = Placed::new(queue, &patterns[rank], 0);
    let peers = || (0..world_size).filter(|&peer| peer != rank);
    let mut outputs: Vec<Placed> = peers().map(|_| Placed::unwritten(queue, Format::BF16, 257, 1)).collect();
    let receives = peers().zip(outputs.iter_mut().map(Placed::slice_mut)).collect();
    crate::transfers::exchange(comm, peers().map(|peer| (peer, input.slice())).collect(), receives).unwrap();
    let outputs: Vec<Array> = outputs.iter().map(|output| output.read(comm)).collect();
    if !outputs.is_empty() {
        results.push(("exchange".into(), Array::concat(&outputs)));
    }
    results
}
