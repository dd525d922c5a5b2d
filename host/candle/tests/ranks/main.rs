//! Tests of training with candle on threads as ranks. Cases take any communicator, so that other transports can run them too.
//!
//! Where possible, numbers are integers over powers of two, few enough that no sum and no product is rounded: then the ranks' results equal
//! the results of one rank bit for bit, and no tolerance is needed.

mod allocations;
mod data_parallel;
mod gpt;
mod refused;
mod tensor_parallel;

use gradsync::bootstrap::Rendezvous;
use gradsync::comm::Communicator;
use gradsync::comm::process::ProcessCommunicator;
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::tensors::Case;

fn on_ranks_of(world_sizes: &'static [usize], cases: &'static [Case]) {
    guarded(240, move || {
        for case in cases {
            for &world_size in world_sizes {
                println!("{} on {world_size}", case.name);
                on_ranks(world_size, |comm| (case.run)(&comm));
            }
        }
    });
}

/// An owned communicator, the argument of groups.
type Owned = Box<dyn Communicator + Send>;

/// Runs `body` on threads that connect like processes.
fn connected(world_size: usize, body: impl Fn(ProcessCommunicator) + Sync) {
    let rendezvous = Rendezvous::in_process();
    std::thread::scope(|scope| {
        let start = |rank: usize| {
            let (rendezvous, body) = (rendezvous.clone(), &body);
            scope.spawn(move || {
                let member = rendezvous.join(rank, world_size).expect("all join");
                body(ProcessCommunicator::new(member).expect("all connect"));
            })
        };
        let threads: Vec<_> = (0..world_size).map(start).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    });
}

#[test]
fn data_parallel_on_several_ranks() {
    on_ranks_of(&[1, 2, 4], data_parallel::ALL);
}

#[test]
fn refusals_are_errors_of_all_ranks() {
    on_ranks_of(&[2, 3], refused::ALL);
}

#[test]
fn a_gpt_on_several_ranks() {
    on_ranks_of(&[2, 4], &[gpt::GRADIENTS]);
    on_ranks_of(&[2], &[gpt::LEARNS]);
}

#[test]
fn ranks_that_connect_as_processes() {
    guarded(240, || {
        for case in data_parallel::ALL.iter().chain(refused::ALL) {
            println!("{}", case.name);
            connected(2, |comm| (case.run)(&comm));
        }
        connected(2, |comm| tensor_parallel::all(Box::new(comm)));
    });
}

#[test]
fn layers_divided_over_ranks() {
    guarded(120, || {
        for world_size in [1, 2, 4] {
            on_ranks(world_size, |comm| tensor_parallel::all(Box::new(comm)));
        }
    });
}
