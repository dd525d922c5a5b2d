//! Ranks as threads of one process: every collective against the oracle, and every way in which a rank can let the others
//! down. Each test runs under a guard, so that a hang is a failure.

mod collectives;
mod failures;
mod mismatches;
mod point_to_point;
mod stress;

/// Powers of two, odd counts, more ranks than this machine has cores.
const WORLD_SIZES: [usize; 8] = [1, 2, 3, 4, 5, 7, 8, 16];
