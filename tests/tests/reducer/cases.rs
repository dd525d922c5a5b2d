//! The cases that every transport of host memory runs.

use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::reducer::ALL;

#[test]
fn every_case_on_every_number_of_ranks() {
    guarded(240, || {
        for case in ALL {
            for world_size in [1, 2, 3, 4] {
                println!("{} on {world_size}", case.name);
                on_ranks(world_size, |comm| (case.run)(&comm));
            }
        }
    });
}
