//! One rank of the tests of the MPI transport: `mpirun -n N` starts N of these processes, and `cargo xtask test --only mpi` starts
//! `mpirun`.
//!
//! Every rank goes through the same cases in the same order. A case that fails is named with its rank; the exit code is 0 only if none
//! failed on any rank. Never starts processes itself.

#![deny(unsafe_code)]

mod large;
mod member;
#[path = "../message_passing/mod.rs"]
mod message_passing;
mod rsmpi;
#[cfg(target_os = "linux")]
mod set_up;
mod transport;

use std::process::ExitCode;

use message_passing::cases::Cases;

fn main() -> ExitCode {
    let mut cases = match Cases::start() {
        Ok(cases) => cases,
        Err(error) => {
            eprintln!("cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    #[cfg(target_os = "linux")]
    if std::env::var_os("GRADSYNC_MPI_LIMITS_ONLY").is_some() {
        message_passing::limits::run(&mut cases);
        return cases.finish(&transport::fresh());
    }
    message_passing::run(&mut cases);
    rsmpi::run(&mut cases);
    member::run(&mut cases);
    large::run(&mut cases);
    let summary = transport::fresh();
    #[cfg(target_os = "linux")]
    set_up::run_last(&mut cases);
    cases.finish(&summary)
}
