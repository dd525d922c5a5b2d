//! A communicator beside the program's own MPI messages.

use gradsync::comm::mpi::MpiCommunicator;
use gradsync::comm::{Collectives, ReduceOp};
use gradsync_tests::suite::Suite;
use mpi::request::WaitGuard;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator as _, Destination, Source};

use crate::transport::Job;

pub(crate) fn run(suite: &mut Suite<Job>) {
    let (rank, world_size) = (suite.rank(), suite.world_size());
    suite.check("beside the program's own messages", |_| {
        let world = SimpleCommunicator::world();
        let comm = MpiCommunicator::from_rsmpi(&world).unwrap();
        let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
        let message = rank as u64;
        mpi::request::scope(|scope| {
            let process = world.process_at_rank(next as i32);
            // The tags equal the transport's; only the separate communicator keeps the messages apart.
            let _sent: Vec<_> = [1, 2]
                .map(|tag| WaitGuard::from(process.immediate_send_with_tag(scope, &message, tag)))
                .into_iter()
                .collect();
            let mut sum = [rank as f64];
            comm.all_reduce(&mut sum, ReduceOp::Sum).expect("a sum of one number");
            assert_eq!(sum, [(0..world_size).sum::<usize>() as f64]);
            for tag in [2, 1] {
                let (received, _) = world.process_at_rank(last as i32).receive_with_tag::<u64>(tag);
                assert_eq!(received, last as u64);
            }
        });
    });
    suite.done("rsmpi");
}
