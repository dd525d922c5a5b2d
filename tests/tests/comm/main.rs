//! Ranks as threads of one process: every collective against the oracle, transfers, groups within groups, and every way in which a rank can
//! fail the others. Each test runs under a guard, so that a hang is a failure.

#![forbid(unsafe_code)]

mod collectives;
mod deadlines;
mod exchange;
mod exchange_failures;
mod failures;
mod groups;
mod mismatches;
mod point_to_point;
mod range;
mod splits;
mod stress;
mod transfer_graphs;
mod windows;
mod words;

use gradsync::comm::{Collectives, Communicator};

/// Powers of two, odd counts, more ranks than this machine has cores.
const WORLD_SIZES: [usize; 8] = [1, 2, 3, 4, 5, 7, 8, 16];

/// The numbers of all ranks, in rank order.
fn gathered(comm: &dyn Communicator, own: usize) -> Vec<usize> {
    let mut all = vec![0.0f64; comm.world_size()];
    comm.all_gather(&[own as f64], &mut all).unwrap();
    all.into_iter().map(|number| number as usize).collect()
}
