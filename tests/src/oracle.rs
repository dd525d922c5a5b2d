//! The oracle: every operation of gradsync written again, slowly and plainly, over `f64` vectors.
//!
//! Every value of the four dtypes is exactly representable as an `f64`, so the oracle has one numeric type and rounds where the
//! specification prescribes a rounding. Sums of products run in [`exact::Wide`] (about 106 bits), so that a comparison measures the checked
//! code and not the oracle.
//!
//! This module imports nothing of gradsync or of `half`: it shares no code with the implementation that it checks.

pub mod adasum;
pub mod elementwise;
pub mod exact;
pub mod format;
pub mod optimizer;
pub mod rational;
pub mod reduce;

pub use format::Format;
