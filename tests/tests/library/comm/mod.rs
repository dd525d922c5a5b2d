//! Ranks as threads of one process: the cases of every transport, groups of a topology, and every way in which a rank can fail the others.
//! Each test runs under a guard, so that a hang is a failure.

mod element_types;
mod exchange;
mod exchange_at_random;
mod groups;
mod local;
mod local_communicator;
mod local_deadlines;
mod mixed_calls;
