//! The bootstrap and the control channel: ranks as threads, over connections, and as processes that are stopped and killed. Each test runs
//! under a guard, so that a hang is a failure.

#![deny(unsafe_code)]

mod agree;
mod all_gather;
mod announce;
mod group;
mod join;
mod join_refusals;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "a handler of signals")]
mod join_under_signals;
#[cfg(target_os = "linux")]
mod join_without_resources;
mod launch_from_variables;
mod member_failures;
mod member_processes;
mod split;
mod unauthenticated_connections;

use std::time::Duration;

/// Odd counts and powers of two, and more ranks than this machine has cores.
const WORLD_SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// A deadline that no test reaches.
const PLENTY: Duration = Duration::from_secs(60);
/// The longest time for an immediate answer on a busy machine; far less than [`PLENTY`].
const AT_ONCE: Duration = Duration::from_secs(15);
