//! Adasum over ranks: Gram and Tree, every dtype, per tensor and whole, against the tree of formed vectors in 106-bit
//! arithmetic, within the bound that `gradsync_tests::tolerance::adasum` derives.

mod apart;
mod double;
mod gaps;
mod grid;
mod known;
mod layouts;
mod nodes;
mod nonfinite;
mod object;
mod range;
mod refusals;
