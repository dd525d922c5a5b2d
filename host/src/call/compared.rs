//! [`Value`]: the values by which ranks compare a call, line by line; and the [`Digest`] of such lines.

use std::fmt;
use std::hash::Hasher;

use sha2::{Digest as _, Sha256};

use super::Operation;
use crate::dtype::DType;

/// The value of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value<'a> {
    Operation(Operation),
    DType(DType),
    Number(usize),
    /// The number of elements of a tensor among several.
    Elements {
        tensor: usize,
        len: usize,
    },
    Shape(&'a [usize]),
    /// A text of the caller.
    Name(&'a str),
    /// A text of this crate.
    Words(&'static str),
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Operation(operation) => write!(f, "{operation}"),
            Value::DType(dtype) => write!(f, "{dtype}"),
            Value::Number(number) => write!(f, "{number}"),
            Value::Elements { tensor, len } => write!(f, "{len} elements in tensor {tensor}"),
            Value::Shape(shape) => write!(f, "shape {shape:?}"),
            Value::Name(name) => write!(f, "{name:?}"),
            Value::Words(words) => f.write_str(words),
        }
    }
}

/// A visitor of lines, given the label of a line and this rank's value. A label follows from the lines before it, so it is the same on
/// two ranks whose earlier lines are the same.
pub(crate) type Visit<'v> = dyn FnMut(fmt::Arguments<'_>, Value<'_>) + 'v;

/// The SHA-256 of lines, which stands for them where ranks compare plans: nobody can make two different lists of lines with one digest,
/// and kernels rely on the compared layouts.
pub(crate) type Digest = [u8; 32];

/// The bytes that [`Hash`](std::hash::Hash) writes for the values of lines. They are different for different lists of values.
#[derive(Debug, Default)]
pub(crate) struct LineBytes(pub(crate) Vec<u8>);

impl LineBytes {
    pub(crate) fn digest(&self) -> Digest {
        Sha256::digest(&self.0).into()
    }
}

impl Hasher for LineBytes {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Never called: [`digest`](Self::digest) is the hash.
    fn finish(&self) -> u64 {
        unreachable!("the bytes are hashed as a whole")
    }
}
