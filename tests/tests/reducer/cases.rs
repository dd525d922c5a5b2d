//! The cases that every transport of host memory runs.

use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::tensors::Case;
use gradsync_tests::{reducer, start};

fn on_every_number_of_ranks(cases: &'static [Case]) {
    guarded(240, move || {
        for case in cases {
            for world_size in [1, 2, 3, 4] {
                println!("{} on {world_size}", case.name);
                on_ranks(world_size, |comm| (case.run)(&comm));
            }
        }
    });
}

#[test]
fn reducers_on_every_number_of_ranks() {
    on_every_number_of_ranks(reducer::ALL);
}

#[test]
fn the_same_start_on_every_number_of_ranks() {
    on_every_number_of_ranks(start::ALL);
}
