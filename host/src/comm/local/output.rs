//! [`RankOutput`]: the types that a rank of [`run`](super::run) may return.

use half::{bf16, f16};

use crate::buffer::GradientBuffer;
use crate::error::{Error, Result};

/// The return type of a rank of [`run`](super::run): a [`Result`], whose error the caller of `run` gets, or a plain value.
///
/// Plain values are numbers, `bool`, `char`, `()`, strings, [`GradientBuffer`]s, and vectors, arrays, boxes, options and tuples of any types. A
/// value of another type is returned as `Ok(value)`.
#[diagnostic::on_unimplemented(
    message = "a rank of `local::run` cannot return `{Self}`",
    note = "return a value of this type as `Ok(value)`",
    note = "ranks whose error is another type than `gradsync::Error` are run by `local::try_run`"
)]
pub trait RankOutput {
    /// The type of the value.
    type Value: Send;

    /// The value, or the error of the rank.
    ///
    /// # Errors
    /// The error that the rank returned.
    fn into_result(self) -> Result<Self::Value>;
}

// This is the only implementation for results, so that the compiler infers the type of the error in a closure that ends in `Ok(value)`.
impl<T: Send> RankOutput for Result<T, Error> {
    type Value = T;

    fn into_result(self) -> Result<T> {
        self
    }
}

macro_rules! plain_values {
    ($([$($generics:tt)*] $type:ty),* $(,)?) => {$(
        impl<$($generics)*> RankOutput for $type {
            type Value = Self;

            fn into_result(self) -> Result<Self> {
                Ok(self)
            }
        }
    )*};
}
plain_values!(
    [] (), [] bool, [] char, [] String, [] &'static str, [] GradientBuffer,
    [] u8, [] u16, [] u32, [] u64, [] usize, [] i8, [] i16, [] i32, [] i64, [] isize, [] f16, [] bf16, [] f32, [] f64,
    [T: Send] Vec<T>, [T: Send, const N: usize] [T; N], [T: Send] Box<T>, [T: Send] Option<T>,
    [A: Send, B: Send] (A, B), [A: Send, B: Send, C: Send] (A, B, C), [A: Send, B: Send, C: Send, D: Send] (A, B, C, D),
);
