//! Ranks that are told that they are on several machines: they connect by TCP, and transfer small payloads.

use std::time::Instant;

use gradsync::Error;
use gradsync::comm::{Collectives, CommError, Communicator, ReduceOp};
use gradsync::internal::NETWORK_BYTES;
use gradsync_tests::suite::{DEADLINE, Suite, collectives, error_texts, failures, groups, mismatches};

use crate::launch::{Launch, turn};
use crate::transport::Launched;

/// The number of elements of the longest call.
const LONGEST: usize = NETWORK_BYTES / size_of::<f32>();

fn longest_calls(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    assert!(comm.sharing().is_none());
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
fn too_long(comm: &dyn Communicator, call: fn(&dyn Communicator) -> gradsync::Result<()>) {
    let start = Instant::now();
    let error = call(comm).expect_err("more than goes between machines");
    assert!(start.elapsed() < DEADLINE / 2, "waited for the deadline");
    match &error {
        Error::InvalidArgument { reason, .. } => {
            let words = ["1048580 bytes", "at most 1048576 between machines", "feature `mpi`", "mpiexec", "NCCL"];
            assert!(words.iter().all(|word| reason.contains(word)), "{error}");
        }
        // Another rank refused the call first.
        Error::Comm(CommError::InvalidCall { reason, .. }) => assert!(reason.contains("1048580 bytes"), "{error}"),
        other => panic!("{other:?}"),
    }
}

/// The body of each rank.
pub(crate) fn run() {
    let mut suite = Suite::new(Launched::join());
    suite.check("calls of 1 MiB", |comm| longest_calls(comm));
    suite.check_fresh("an all-reduce of more", |comm| {
        too_long(&comm, |comm| comm.all_reduce(&mut vec![0.0f32; LONGEST + 1], ReduceOp::Sum));
    });
    suite.check_fresh("a transfer of more", |comm| {
        // The last rank is on a machine of its own.
        too_long(&comm, |comm| {
            let mut data = vec![0.0f32; LONGEST + 1];
            match comm.rank() {
                0 => comm.send(&data, comm.world_size() - 1),
                rank if rank + 1 == comm.world_size() => comm.recv(&mut data, 0),
                _ => comm.broadcast(&mut data, 0),
            }
        });
    });
    collectives::run_up_to(&mut suite, NETWORK_BYTES);
    mismatches::run(&mut suite);
    failures::run(&mut suite);
    failures::run_deadlines(&mut suite);
    error_texts::run(&mut suite);
    groups::run(&mut suite);
    suite.finish();
}

/// Starts ranks on nodes of `each` ranks.
fn launch(world_size: usize, each: usize) {
    let _turn = turn();
    let variables = |rank: usize| vec![("GRADSYNC_HOSTID", format!("node {}", rank / each))];
    Launch::start("machines", world_size, variables).finish();
}

#[test]
fn process_communicator_on_three_machines_of_one_rank() {
    launch(3, 1);
}

#[test]
fn process_communicator_on_two_machines_of_two_ranks() {
    launch(4, 2);
}
