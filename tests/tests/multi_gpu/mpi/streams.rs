//! Calls are ordered with the queue of their operands: earlier work in the queue runs before the call, later work runs after it, and memory
//! may be reused at once. Copies on the device keep queues busy, so that a missing order is detected.

use gradsync::DType;
use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, Queue};

use super::Cases;
use crate::ballast::Ballast;
use crate::report::Report;

/// The length exceeds one window.
const LEN: usize = 1_500_007;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let queue = cases.context.queue.clone();
    report.case(&cases.name("behind work and before work, on the communicator's queue"), || ordered(cases, &queue));
    report.case(&cases.name("behind work and before work, on another queue"), || {
        ordered(cases, &Queue::new(queue.ordinal()).unwrap());
    });
    report.case(&cases.name("two queues in turn"), || {
        let other = Queue::new(queue.ordinal()).unwrap();
        for round in 0..10 {
            let queue = if round % 2 == 0 { &queue } else { &other };
            let mut data = fill(queue, number(cases.rank(), round));
            cases.comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
            assert_all(&data, total(cases, round), "the sum");
        }
    });
}

/// A rank's number in a round.
fn number(rank: usize, round: usize) -> f32 {
    (round * 10 + rank + 1) as f32
}

/// The sum of all ranks' numbers.
fn total(cases: &Cases<'_>, round: usize) -> f32 {
    (0..cases.world_size()).map(|rank| number(rank, round)).sum()
}

fn fill(queue: &Queue, value: f32) -> DeviceBuffer {
    DeviceBuffer::from_host(queue, (&vec![value; LEN]).into()).unwrap()
}

#[track_caller]
fn assert_all(data: &DeviceBuffer, expected: f32, what: &str) {
    let mut values = vec![0f32; data.as_slice().len()];
    data.as_slice().copy_to_host((&mut values).into()).unwrap();
    let wrong = values.iter().position(|&value| value != expected);
    assert_eq!(wrong.map(|index| (index, values[index])), None, "{what}, where {expected} is expected");
}

/// In every round the input is written late, and overwritten as soon as the call has returned; the result is copied away, and its memory is
/// overwritten.
fn ordered(cases: &Cases<'_>, queue: &Queue) {
    const ROUNDS: usize = 4;
    let (comm, rank, world_size) = (cases.comm, cases.rank(), cases.world_size());
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let garbage = fill(queue, -1.0);
    let sources: Vec<DeviceBuffer> = (0..ROUNDS).map(|round| fill(queue, number(rank, round))).collect();
    let room = || DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap();
    let (mut input, mut output, mut ballast) = (room(), room(), Ballast::new(queue));
    let (mut sums, mut passed, mut first) = (Vec::new(), Vec::new(), Vec::new());
    for source in &sources {
        let overwrite = |data: &mut DeviceBuffer| data.as_mut_slice().copy_from_device(garbage.as_slice()).unwrap();
        let kept = |data: &DeviceBuffer| {
            let mut kept = room();
            kept.as_mut_slice().copy_from_device(data.as_slice()).unwrap();
            kept
        };
        ballast.put(50);
        input.as_mut_slice().copy_from_device(source.as_slice()).unwrap();
        comm.all_reduce_into(input.as_slice(), output.as_mut_slice(), ReduceOp::Sum, Scaling::NONE).unwrap();
        overwrite(&mut input);
        sums.push(kept(&output));
        overwrite(&mut output);

        if world_size > 1 {
            ballast.put(50);
            input.as_mut_slice().copy_from_device(source.as_slice()).unwrap();
            crate::transfers::exchange(comm, vec![(next, input.as_slice())], vec![(last, output.as_mut_slice())])
                .unwrap();
            overwrite(&mut input);
            passed.push(kept(&output));
            overwrite(&mut output);
        }

        ballast.put(50);
        input.as_mut_slice().copy_from_device(source.as_slice()).unwrap();
        comm.broadcast(input.as_mut_slice(), 0).unwrap();
        first.push(kept(&input));
        overwrite(&mut input);
    }
    comm.synchronize(queue).unwrap();
    for (round, sum) in sums.iter().enumerate() {
        assert_all(sum, total(cases, round), &format!("sum {round}"));
    }
    for (round, data) in passed.iter().enumerate() {
        assert_all(data, number(last, round), &format!("what rank {last} sent in round {round}"));
    }
    for (round, data) in first.iter().enumerate() {
        assert_all(data, number(0, round), &format!("what rank 0 had in round {round}"));
    }
}
