//! Ranks as threads of one process: the cases of every transport, groups of a topology, and every way in which a rank can fail the others.
//! Each test runs under a guard, so that a hang is a failure.

mod deadlines;
mod elements;
mod exchange;
mod groups;
mod local;
mod stress;
mod suite;
mod transfer_graphs;
