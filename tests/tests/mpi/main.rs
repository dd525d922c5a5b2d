//! One rank of the tests of the MPI transport: `mpirun -n N` starts N of it, and `cargo xtask test --only mpi` starts that.
//!
//! Every rank goes through the same cases in the same order. A case that fails is named with its rank; the exit code is 0 only if none
//! failed on any rank. Never starts processes itself.

mod adasum;
#[cfg(target_os = "linux")]
mod ahead;
mod cases;
mod collectives;
mod exchange;
mod failures;
mod groups;
mod large;
#[cfg(target_os = "linux")]
mod limits;
mod member;
mod mismatches;
mod operations;
mod point_to_point;
#[cfg(target_os = "linux")]
mod set_up;
#[cfg(target_os = "linux")]
mod stopped;
#[cfg(target_os = "linux")]
mod windows;
mod words;

use std::process::ExitCode;

use cases::Cases;

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
        limits::run(&mut cases);
        return cases.finish(&cases::fresh());
    }
    collectives::run(&mut cases);
    point_to_point::run(&mut cases);
    exchange::run(&mut cases);
    mismatches::run(&mut cases);
    failures::run(&mut cases);
    #[cfg(target_os = "linux")]
    ahead::run(&mut cases);
    words::run(&mut cases);
    groups::run(&mut cases);
    member::run(&mut cases);
    adasum::run(&mut cases);
    #[cfg(target_os = "linux")]
    windows::run(&mut cases);
    #[cfg(target_os = "linux")]
    limits::run(&mut cases);
    #[cfg(target_os = "linux")]
    stopped::run(&mut cases);
    #[cfg(target_os = "linux")]
    set_up::run(&mut cases);
    operations::run(&mut cases);
    large::run(&mut cases);
    let summary = cases::fresh();
    #[cfg(target_os = "linux")]
    set_up::run_last(&mut cases);
    cases.finish(&summary)
}
