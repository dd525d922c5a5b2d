//! One rank of the tests of the MPI transport: `mpirun -n N` starts N of these processes, and `cargo xtask test --only mpi` starts
//! `mpirun`.
//!
//! Every rank goes through the same cases in the same order. A case that fails is named with its rank, and ends the job. Never starts
//! processes itself.

#![deny(unsafe_code)]

mod large;
mod member;
mod rsmpi;
#[cfg(target_os = "linux")]
mod set_up;
mod transport;

use std::panic::{AssertUnwindSafe, catch_unwind};

use gradsync_tests::suite::{Suite, processes};
use transport::Job;

fn main() {
    let mut suite = Suite::new(Job);
    if catch_unwind(AssertUnwindSafe(|| run(&mut suite))).is_err() {
        // `mpirun` ends the job if a rank ends like this. Otherwise the other ranks would wait for it.
        std::process::abort();
    }
    suite.finish();
}

fn run(suite: &mut Suite<Job>) {
    #[cfg(target_os = "linux")]
    if std::env::var_os("GRADSYNC_MPI_LIMITS_ONLY").is_some() {
        return processes::limits::run(suite);
    }
    processes::run(suite);
    rsmpi::run(suite);
    member::run(suite);
    large::run(suite);
    #[cfg(target_os = "linux")]
    set_up::run_last(suite);
}
