//! Adasum over ranks of any transport and memory: cases as data, and their comparison with the oracle.

pub mod as_threads;
pub mod case;
pub mod known;
pub mod on_nodes;
