//! Groups: several operations of different kinds at once, transfers in order, and groups that are never submitted.

use gradsync::Error;
use gradsync::comm::{Collectives, ReduceOp, Scaling};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::{Checks, Expected};

use super::Cases;
use crate::checks::reduced;
use crate::placed::Placed;
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case("a group of every kind", || every_kind(cases));
    report.case("transfers of a group meet in order", || in_order(cases));
    report.case("a group dropped half full has not happened", || dropped(cases));
    report.case("an empty group", || {
        gradsync::internal::nccl_group(cases.comm).submit().unwrap();
        assert_works(cases, "an all_reduce after an empty group");
    });
    report.case("a mean that needs a pass of its own", || mean(cases));
}

/// The communicator can still be used.
fn assert_works(cases: &Cases<'_>, label: &str) {
    let inputs = cases.inputs(Format::F32, 257);
    let mut data = Placed::new(&cases.context.queue, &Array::new(Format::F32, &inputs[cases.rank()]), 0);
    cases.comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
    let mut checks = Checks::new(cases.comm);
    checks.same(label, data.read(cases.comm), &reduced(ReduceOp::Sum, Format::F32, Scaling::NONE, &inputs));
    checks.finish();
}

fn every_kind(cases: &Cases<'_>) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    let numbers = |format: Format, len: usize| {
        let inputs = cases.inputs(format, len);
        let own = Array::new(format, &inputs[rank]);
        (inputs, own)
    };
    let (sum_inputs, sum_own) = numbers(Format::F32, 33);
    let (mean_inputs, mean_own) = numbers(Format::F64, 1025);
    let (max_inputs, max_own) = numbers(Format::F16, 70);
    let (shard_inputs, shard_own) = numbers(Format::BF16, 17 * world_size);
    let gather_inputs = cases.patterns(Format::F16, 41);
    let blocks = cases.patterns(Format::F32, 9 * world_size);
    let roots = cases.patterns(Format::BF16, 257);

    let mut sum = Placed::new(queue, &sum_own, 1);
    let mut mean = Placed::new(queue, &mean_own, 0);
    let mut max = Placed::new(queue, &max_own, 1);
    let shard_input = Placed::new(queue, &shard_own, 0);
    let mut shard = Placed::unwritten(queue, Format::BF16, 17, 0);
    let gather_input = Placed::new(queue, &gather_inputs[rank], 0);
    let mut gathered = Placed::unwritten(queue, Format::F16, 41 * world_size, 0);
    let block_input = Placed::new(queue, &blocks[rank], 1);
    let mut block_output = Placed::unwritten(queue, Format::F32, 9 * world_size, 0);
    let mut from_root = Placed::new(queue, &roots[rank], 1);

    let mut group = gradsync::internal::nccl_group(comm);
    group.all_reduce(sum.slice_mut(), ReduceOp::Sum).unwrap();
    group.all_gather(gather_input.slice(), gathered.slice_mut()).unwrap();
    group.all_reduce(mean.slice_mut(), ReduceOp::Mean).unwrap();
    group.broadcast(from_root.slice_mut(), world_size - 1).unwrap();
    group.reduce_scatter(shard_input.slice(), shard.slice_mut(), ReduceOp::Sum).unwrap();
    group.all_to_all(block_input.slice(), block_output.slice_mut()).unwrap();
    group.all_reduce(max.slice_mut(), ReduceOp::Max).unwrap();
    group.submit().unwrap();

    let bits = Expected::bits;
    let none = Scaling::NONE;
    let mut checks = Checks::new(comm);
    checks.same("the sum", sum.read(comm), &reduced(ReduceOp::Sum, Format::F32, none, &sum_inputs));
    checks.same("the mean", mean.read(comm), &reduced(ReduceOp::Mean, Format::F64, none, &mean_inputs));
    checks.same("the maximum", max.read(comm), &reduced(ReduceOp::Max, Format::F16, none, &max_inputs));
    let expected = reduced(ReduceOp::Sum, Format::BF16, none, &shard_inputs).shard(rank, 17);
    checks.own("the shard", shard.read(comm), &expected);
    checks.same("what was gathered", gathered.read(comm), &bits(Array::concat(&gather_inputs)));
    let blocks: Vec<Array> = blocks.iter().map(|block| block.range(rank * 9..(rank + 1) * 9)).collect();
    checks.own("the blocks", block_output.read(comm), &bits(Array::concat(&blocks)));
    checks.same("what the root had", from_root.read(comm), &bits(roots[world_size - 1].clone()));
    checks.finish();
}

/// Three payloads of different lengths and dtypes between each pair of ranks, in one group with a collective among them.
fn in_order(cases: &Cases<'_>) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    const MESSAGES: [(Format, usize); 3] = [(Format::F32, 5), (Format::BF16, 900), (Format::F32, 33)];
    let message = |from: usize, to: usize, (format, len): (Format, usize)| {
        let all = cases.patterns(format, len * world_size);
        all[from].range(to * len..(to + 1) * len)
    };
    let peers: Vec<usize> = (0..world_size).filter(|&peer| peer != rank).collect();
    let each = || peers.iter().flat_map(|&peer| MESSAGES.map(|kind| (peer, kind)));
    let inputs: Vec<Placed> = each().map(|(peer, kind)| Placed::new(queue, &message(rank, peer, kind), 1)).collect();
    let mut outputs: Vec<Placed> = each().map(|(_, (format, len))| Placed::unwritten(queue, format, len, 0)).collect();
    let numbers = cases.inputs(Format::F32, 33);
    let mut sum = Placed::new(queue, &Array::new(Format::F32, &numbers[rank]), 0);

    let mut group = gradsync::internal::nccl_group(comm);
    for ((peer, _), input) in each().zip(&inputs) {
        group.send(input.slice(), peer).unwrap();
    }
    group.all_reduce(sum.slice_mut(), ReduceOp::Sum).unwrap();
    for ((peer, _), output) in each().zip(&mut outputs) {
        group.recv(output.slice_mut(), peer).unwrap();
    }
    group.submit().unwrap();

    let mut checks = Checks::new(comm);
    checks.same("the sum", sum.read(comm), &reduced(ReduceOp::Sum, Format::F32, Scaling::NONE, &numbers));
    for ((peer, kind), output) in each().zip(&outputs) {
        let expected = Expected::bits(message(peer, rank, kind));
        checks.own(format!("{kind:?} from rank {peer}"), output.read(comm), &expected);
    }
    checks.finish();
}

fn dropped(cases: &Cases<'_>) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    let numbers = Array::new(Format::F32, &cases.inputs(Format::F32, 33)[rank]);
    let mut one = Placed::new(queue, &numbers, 0);
    let mut other = Placed::new(queue, &numbers, 1);
    let mut group = gradsync::internal::nccl_group(comm);
    group.all_reduce(one.slice_mut(), ReduceOp::Sum).unwrap();
    group.broadcast(other.slice_mut(), world_size - 1).unwrap();
    drop(group);
    let untouched = Expected::bits(numbers);
    let mut checks = Checks::new(comm);
    checks.own("what would have been reduced", one.read(comm), &untouched);
    checks.own("what would have been overwritten", other.read(comm), &untouched);
    checks.finish();
    assert_works(cases, "an all_reduce after a group that was dropped");
}

/// Where the world size is no power of two, a group refuses means of f16 and bf16, and the communicator stays usable.
fn mean(cases: &Cases<'_>) {
    let (comm, queue, rank, world_size) = (cases.comm, &cases.context.queue, cases.rank(), cases.world_size());
    for format in [Format::F16, Format::BF16] {
        let inputs = cases.inputs(format, 257);
        let mut data = Placed::new(queue, &Array::new(format, &inputs[rank]), 0);
        let mut group = gradsync::internal::nccl_group(comm);
        match group.all_reduce(data.slice_mut(), ReduceOp::Mean) {
            Ok(()) => {
                assert!(world_size.is_power_of_two(), "a mean of {format:?} over {world_size} ranks in a group");
                group.submit().unwrap();
                let mut checks = Checks::new(comm);
                let expected = reduced(ReduceOp::Mean, format, Scaling::NONE, &inputs);
                checks.same(format!("mean of {format:?}"), data.read(comm), &expected);
                checks.finish();
            }
            Err(Error::InvalidArgument { operation: "group", reason }) => {
                assert!(!world_size.is_power_of_two(), "{reason}");
                for part in ["all_reduce(mean)", format.name(), &format!("{world_size} ranks"), "pass of its own"] {
                    assert!(reason.contains(part), "{reason} does not say {part}");
                }
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_works(cases, "an all_reduce after means in groups");
}
