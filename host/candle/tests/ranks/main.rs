//! Training with candle on threads as ranks. Cases take any communicator, so that other transports can run them too.
//!
//! Where it is possible, numbers are integers over powers of two, few enough that no sum and no product is ever rounded: then the ranks' results are
//! those of one rank bit for bit, and no tolerance is needed.

mod allocations;
mod data_parallel;
mod gpt;
mod refused;
mod tensor_parallel;

use gradsync::comm::{Communicator, Ranks, local::LocalCommunicator};
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

/// An owned communicator, as groups take it.
type Owned = Box<dyn Communicator + Send>;

fn on_owned(world_size: usize, body: impl Fn(Owned) + Sync + Send + 'static) {
    guarded(120, move || {
        on_ranks(world_size, |comm: LocalCommunicator| {
            assert_eq!(comm.world_size(), world_size);
            body(Box::new(comm));
        });
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
    on_ranks_of(&[2, 4], gpt::ALL);
}

#[test]
fn layers_divided_over_ranks() {
    for world_size in [1, 2, 4] {
        on_owned(world_size, tensor_parallel::all);
    }
}
