//! Adasum over ranks: Gram and Tree, every dtype, per tensor and whole, against the tree of formed vectors in 106-bit
//! arithmetic, within the bound that `gradsync_tests::tolerance::adasum` derives.

mod adasum_prepared;
mod apart;
mod double;
mod gaps;
mod grid;
mod hierarchical_adasum_all_reduce;
mod known;
mod layouts;
mod nonfinite;
mod range;
mod refusals;
