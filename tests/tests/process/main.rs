//! The process transport, without MPI: this program starts itself again for every rank, as the test [`launch::rank`] with a role in a
//! variable.

#![deny(unsafe_code)]
#![cfg(unix)]

mod faults;
mod launch;
mod machines;
#[cfg(target_os = "linux")]
mod namespaces;
mod set_up;
mod suite;
mod threads;
mod transport;
#[cfg(target_os = "linux")]
mod walk;
