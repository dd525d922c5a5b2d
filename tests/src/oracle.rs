//! What the right answer is: every operation of gradsync written again, slowly and obviously, over plain `f64` vectors.
//!
//! A value of any of the four dtypes is an `f64` without loss, so the oracle has one numeric type and rounds where the
//! specification says that something is rounded. Sums of products run in [`exact::Wide`] (about 106 bits), so that a
//! comparison measures the checked code and not the oracle.
//!
//! This module never imports anything of gradsync or of `half`: it shares no code with what it checks.

pub mod adasum;
pub mod elementwise;
pub mod exact;
pub mod format;
pub mod rational;
pub mod reduce;

pub use format::Format;
