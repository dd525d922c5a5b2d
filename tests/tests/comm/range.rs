//! Reductions whose intermediate values leave the range although the result is within it, over threads.

use gradsync_tests::range::ALL;
use gradsync_tests::ranks::{guarded, on_ranks};

#[test]
fn results_in_range_on_every_number_of_ranks() {
    guarded(240, || {
        for case in ALL {
            for world_size in [1, 2, 3, 4, 7] {
                println!("{} on {world_size}", case.name);
                on_ranks(world_size, |comm| (case.run)(&comm));
            }
        }
    });
}
