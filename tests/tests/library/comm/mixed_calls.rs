//! Many small calls in a random order that all ranks share, which reveals a lost wake-up or a slot that is reused too early.

use gradsync::comm::ReduceOp;
use gradsync::comm::{Collectives, Communicator};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{Random, vector};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::reduce::{self, Op};
use gradsync_tests::ranks::{guarded, on_ranks};

/// Makes one call chosen by `random`, which is in the same state on every rank, and checks its result at once.
fn step(comm: &dyn Communicator, random: &mut Random, round: usize) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let format = Format::ALL[random.below(4) as usize];
    let len = random.below(40) as usize;
    let seed = random.bits() % 1_000_000;
    let input = |rank: usize, len: usize| vector(format, len, seed + rank as u64);
    let all = |len: usize| -> Vec<Vec<f64>> { (0..world_size).map(|rank| input(rank, len)).collect() };
    // A single rank has no peer to exchange with.
    let (what, got, expected) = match random.below(if world_size > 1 { 6 } else { 5 }) {
        0 => {
            let mut data = Array::new(format, &input(rank, len));
            comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
            ("all_reduce", data.values(), reduce::all_reduce(Op::Sum, format, &all(len)))
        }
        1 => {
            let mut data = Array::unwritten(format, len * world_size);
            comm.all_gather(Array::new(format, &input(rank, len)).slice(), data.slice_mut()).unwrap();
            ("all_gather", data.values(), all(len).concat())
        }
        2 => {
            let mut data = Array::unwritten(format, len * world_size);
            let source = Array::new(format, &input(rank, len * world_size));
            comm.all_to_all(source.slice(), data.slice_mut()).unwrap();
            ("all_to_all", data.values(), reduce::all_to_all(&all(len * world_size), rank))
        }
        3 => {
            let root = random.below(world_size as u64) as usize;
            let mut data = Array::new(format, &input(rank, len));
            comm.broadcast(data.slice_mut(), root).unwrap();
            ("broadcast", data.values(), input(root, len))
        }
        4 => {
            let mut data = Array::unwritten(format, len);
            let source = Array::new(format, &input(rank, len * world_size));
            comm.reduce_scatter(source.slice(), data.slice_mut(), ReduceOp::Max).unwrap();
            let whole = reduce::all_reduce(Op::Max, format, &all(len * world_size));
            ("reduce_scatter", data.values(), whole[rank * len..(rank + 1) * len].to_vec())
        }
        _ => {
            let shift = 1 + random.below(world_size as u64 - 1) as usize;
            let (to, from) = ((rank + shift) % world_size, (rank + world_size - shift) % world_size);
            let mut data = Array::unwritten(format, len);
            comm.send_recv(Array::new(format, &input(rank, len)).slice(), to, data.slice_mut(), from).unwrap();
            ("send_recv", data.values(), input(from, len))
        }
    };
    assert_eq!(got, expected, "round {round}, {what} of {len} {format:?} on rank {rank} of {world_size}");
}

#[test]
fn local_communicator_takes_thousands_of_mixed_calls() {
    guarded(60, || {
        for (world_size, rounds) in [(1, 500), (2, 3000), (5, 1500), (8, 1000), (16, 400)] {
            on_ranks(world_size, |comm| {
                let mut random = Random::new(world_size as u64);
                for round in 0..rounds {
                    step(&comm, &mut random, round);
                }
            });
        }
    });
}

#[test]
fn local_communicator_keeps_groups_at_once_apart() {
    guarded(60, || {
        std::thread::scope(|scope| {
            for group in 0..6_u64 {
                scope.spawn(move || {
                    on_ranks(3, |comm| {
                        let mut random = Random::new(group);
                        for round in 0..300 {
                            step(&comm, &mut random, round);
                        }
                    });
                });
            }
        });
    });
}
