//! Ranks that are told that they are on several machines: they connect by TCP, and transfer small payloads.

use std::process::ExitCode;
use std::time::Instant;

use gradsync::Error;
use gradsync::comm::process::NETWORK_BYTES;
use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp};

use crate::launch::{Launched, turn};
use crate::message_passing::cases::{Cases, DEADLINE};
use crate::message_passing::{collectives, failures, groups, mismatches, words};
use crate::transport::{self, Comm};

/// The number of elements of the longest call.
const LONGEST: usize = NETWORK_BYTES / size_of::<f32>();

fn longest_calls(comm: &Comm) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    assert!(!comm.shares_memory());
    let mut data: Vec<f32> = (0..LONGEST).map(|index| (index % 1013 + rank) as f32).collect();
    comm.all_reduce(&mut data, ReduceOp::Sum).expect("1 MiB");
    let ranks = world_size * (world_size - 1) / 2;
    assert!(data.iter().enumerate().all(|(index, &sum)| sum == (index % 1013 * world_size + ranks) as f32));
    let shard = LONGEST / world_size;
    let mut all = vec![0.0f32; shard * world_size];
    comm.all_gather(&vec![rank as f32; shard], &mut all).expect("all of it is 1 MiB");
    assert!(all.iter().enumerate().all(|(index, &value)| value == (index / shard) as f32));
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let mut received = vec![0.0f32; LONGEST];
    comm.send_recv(&vec![rank as f32; LONGEST], next, &mut received, last).expect("1 MiB each way");
    assert!(received.iter().all(|&value| value == last as f32));
}

/// Every rank refuses the call by itself, at once, with an error that names the limit.
fn too_long(comm: Comm, call: fn(&Comm) -> gradsync::Result<()>) {
    let start = Instant::now();
    let error = call(&comm).expect_err("more than goes between machines");
    assert!(start.elapsed() < DEADLINE / 2, "waited for the deadline");
    match &error {
        Error::InvalidArgument { reason, .. } => {
            let words = ["1048580 bytes", "at most 1048576 between machines", "NCCL and MPI carry gradients"];
            assert!(words.iter().all(|word| reason.contains(word)), "{error}");
        }
        // Another rank refused the call first.
        Error::Comm(CommError::InvalidCall { reason, .. }) => assert!(reason.contains("1048580 bytes"), "{error}"),
        other => panic!("{other:?}"),
    }
}

/// The body of each rank.
pub(crate) fn run() {
    let mut cases = Cases::start().expect("ranks that find each other");
    cases.check("calls of 1 MiB", longest_calls);
    cases.check_fresh("an all-reduce of more", |comm| {
        too_long(comm, |comm| comm.all_reduce(&mut vec![0.0f32; LONGEST + 1], ReduceOp::Sum));
    });
    cases.check_fresh("a transfer of more", |comm| {
        // The last rank is on a machine of its own.
        too_long(comm, |comm| {
            let mut data = vec![0.0f32; LONGEST + 1];
            match comm.rank() {
                0 => comm.send(&data, comm.world_size() - 1),
                rank if rank + 1 == comm.world_size() => comm.recv(&mut data, 0),
                _ => comm.broadcast(&mut data, 0),
            }
        });
    });
    collectives::run_up_to(&mut cases, NETWORK_BYTES);
    mismatches::run(&mut cases);
    failures::run(&mut cases);
    words::run(&mut cases);
    groups::run(&mut cases);
    let summary = transport::fresh();
    assert_eq!(cases.finish(&summary), ExitCode::SUCCESS);
}

/// Starts ranks on nodes of `each` ranks.
fn launch(world_size: usize, each: usize) {
    let _turn = turn();
    let variables = |rank: usize| vec![("GRADSYNC_HOSTID", format!("node {}", rank / each))];
    Launched::start("machines", world_size, variables).finish();
}

#[test]
fn three_machines_of_one_rank() {
    launch(3, 1);
}

#[test]
fn two_machines_of_two_ranks() {
    launch(4, 2);
}
