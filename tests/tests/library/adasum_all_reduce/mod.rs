//! Adasum over ranks: Gram and Tree, every dtype, per tensor and whole, against the tree of formed vectors in 106-bit
//! arithmetic, within the bound that `gradsync_tests::tolerance::adasum` derives.

mod adasum_prepared;
mod against_oracle;
mod f64_error_bound;
mod gaps;
mod hierarchical_adasum_all_reduce;
mod known_answers;
mod layout_independence;
mod non_finite;
mod out_of_range;
mod refusals;
mod shared_memory;
