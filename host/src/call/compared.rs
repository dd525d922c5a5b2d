//! [`Value`]: the values by which ranks compare a call, line by line.

use std::fmt;

use super::Operation;
use crate::dtype::DType;

/// The value of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value<'a> {
    Operation(Operation),
    DType(DType),
    Number(usize),
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
            Value::Shape(shape) => write!(f, "shape {shape:?}"),
            Value::Name(name) => write!(f, "{name:?}"),
            Value::Words(words) => f.write_str(words),
        }
    }
}

/// A visitor of lines, given the label of a line and this rank's value. A label follows from the lines before it, so it is the same on
/// two ranks whose earlier lines are the same.
pub(crate) type Visit<'v> = dyn FnMut(fmt::Arguments<'_>, Value<'_>) + 'v;
