//! What the tests of gradsync stand on: an oracle, tolerances, inputs, and ranks.
//!
//! - [`oracle`]: the right answers, written again from the specification; imports nothing of gradsync;
//! - [`tolerance`]: how far a correct answer may be off, with the derivation; imports nothing of gradsync;
//! - [`inputs`]: seeded vectors of every kind that matters; imports nothing of gradsync;
//! - [`double`]: families of `f64` vectors that show rounding errors, for the comparison with rational numbers; imports nothing of gradsync;
//! - [`mod@array`]: owned data of any of the four dtypes, handed to gradsync as its slices;
//! - [`collectives`]: what every transport's collectives are tested with;
//! - [`tensors`]: what collectives on many tensors, with factors and with outputs of their own are tested with;
//! - [`transfers`]: what every transport's sends, receives and pipelines are tested with;
//! - [`programs`]: libraries made for a test, and processes of its own;
//! - [`ranks`]: running a body on P ranks, agreement between ranks, and a watchdog;
//! - [`reducer`]: what reducers of gradients are tested with, over every transport;
//! - [`start`]: what the same start and means over ranks are tested with, over every transport;
//! - [`words`]: what the errors of every host transport say.
//!
//! Never published, and never a dependency of anything but tests.

pub mod array;
pub mod collectives;
pub mod double;
pub mod inputs;
pub mod oracle;
pub mod programs;
pub mod ranks;
pub mod reducer;
pub mod start;
pub mod tensors;
pub mod tolerance;
pub mod transfers;
pub mod words;
