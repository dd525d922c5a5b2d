//! The bootstrap and the control channel: ranks as threads, over connections, and as processes that are stopped and killed. Each test runs
//! under a guard, so that a hang is a failure.

#![deny(unsafe_code)]

mod agreement;
mod announcing;
mod environment;
mod failures;
mod gathering;
mod group;
mod joining;
mod processes;
mod refusals;
#[cfg(target_os = "linux")]
mod resources;
#[cfg(target_os = "linux")]
#[allow(unsafe_code, reason = "a handler of signals")]
mod signals;
mod splitting;
mod unauthenticated;

use std::time::Duration;

/// Odd counts and powers of two, and more ranks than this machine has cores.
const WORLD_SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// A deadline that no test reaches.
const PLENTY: Duration = Duration::from_secs(60);
/// The longest time for an immediate answer on a busy machine; far less than [`PLENTY`].
const AT_ONCE: Duration = Duration::from_secs(15);
