//! The cases of every transport between processes. The program that includes them provides the transport as its module `transport`, with
//! the communicator type and its constructor.
//!
//! Every rank goes through the same cases in the same order. A case that fails is named with its rank.

pub(crate) mod adasum;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "memory whose first access waits")]
mod ahead;
#[cfg(target_os = "linux")]
mod buckets;
pub(crate) mod cases;
pub(crate) mod collectives;
mod exchange;
pub(crate) mod failures;
pub(crate) mod groups;
#[cfg(target_os = "linux")]
pub(crate) mod limits;
pub(crate) mod mismatches;
mod operations;
mod point_to_point;
#[cfg(target_os = "linux")]
pub(crate) mod set_up;
#[cfg(target_os = "linux")]
pub(crate) mod stopped;
#[cfg(target_os = "linux")]
mod windows;
pub(crate) mod words;

use self::cases::Cases;

/// Runs all cases.
pub(crate) fn run(cases: &mut Cases) {
    collectives::run(cases);
    point_to_point::run(cases);
    exchange::run(cases);
    mismatches::run(cases);
    failures::run(cases);
    #[cfg(target_os = "linux")]
    ahead::run(cases);
    words::run(cases);
    groups::run(cases);
    adasum::run(cases);
    #[cfg(target_os = "linux")]
    windows::run(cases);
    #[cfg(target_os = "linux")]
    limits::run(cases);
    #[cfg(target_os = "linux")]
    buckets::run(cases);
    #[cfg(target_os = "linux")]
    stopped::run(cases);
    #[cfg(target_os = "linux")]
    set_up::run(cases);
    operations::run(cases);
}
