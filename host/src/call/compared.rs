//! [`Value`]: what ranks compare of a call, line by line.

use std::fmt;

use super::Operation;
use crate::dtype::DType;

/// What a rank has in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value<'a> {
    Operation(Operation),
    DType(DType),
    Number(usize),
    Shape(&'a [usize]),
    /// Somebody's choice.
    Name(&'a str),
    /// This crate's own words.
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

/// What is done with a line, given its label and what this rank has there. A label says nothing that the lines before do not: it is the same
/// on two ranks whose lines are the same up to there.
pub(crate) type Visit<'v> = dyn FnMut(fmt::Arguments<'_>, Value<'_>) + 'v;
