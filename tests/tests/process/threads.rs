//! Ranks that are threads of one process and connect as processes do.

use std::time::{Duration, Instant};

use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{Collectives, CommError, Departure, Ranks, ReduceOp, Split};
use gradsync::{Error, Result};
use gradsync_tests::ranks::{guarded, on_processes};

const DEADLINE: Duration = Duration::from_secs(20);

fn on_ranks<T: Send>(world_size: usize, body: impl Fn(ProcessCommunicator) -> T + Sync) -> Vec<T> {
    on_processes(world_size, DEADLINE, body)
}

#[test]
fn process_communicator_of_threads_reduces_and_splits() {
    guarded(60, || {
        for world_size in [1, 2, 5] {
            let sums = on_ranks(world_size, |comm| -> Result<(Vec<f32>, f32)> {
                let mut data = vec![comm.rank() as f32; 100_000];
                comm.all_reduce(&mut data, ReduceOp::Sum)?;
                let half = comm.split(Some(comm.rank() as u64 % 2), 0)?.expect("a colour");
                let mut count = [1.0f32];
                half.all_reduce(&mut count, ReduceOp::Sum)?;
                Ok((data, count[0]))
            });
            for (rank, outcome) in sums.into_iter().enumerate() {
                let (data, count) = outcome.unwrap();
                let sum = (world_size * (world_size - 1) / 2) as f32;
                assert!(data.iter().all(|&value| value == sum));
                assert_eq!(count, ((world_size + 1 - rank % 2) / 2) as f32, "rank {rank} of {world_size}");
            }
        }
    });
}

/// A rank that leaves after its last call fails only later calls that need it, and these fail at once.
#[test]
fn process_communicator_of_threads_names_a_rank_that_left() {
    guarded(60, || {
        let start = Instant::now();
        let outcomes = on_ranks(3, |comm| -> Result<()> {
            comm.barrier()?;
            if comm.rank() == 1 {
                return Ok(());
            }
            let mut data = [1.0f32];
            let transfer = if comm.rank() == 0 { comm.send(&data, 2) } else { comm.recv(&mut data, 0) };
            transfer.expect("the one that left takes no part");
            comm.barrier()
        });
        assert!(start.elapsed() < DEADLINE / 2, "waited for the deadline");
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(()) => assert_eq!(rank, 1),
                Err(Error::Comm(CommError::PeerGone { rank: gone, departure, .. })) => {
                    assert_eq!((gone, departure), (1, Departure::Left));
                }
                Err(other) => panic!("{other:?}"),
            }
        }
    });
}
