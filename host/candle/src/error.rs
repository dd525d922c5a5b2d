//! [`Error`]: errors of candle and of gradsync, and refusals of this crate.

use std::fmt;

use candle_core::{DType, DeviceLocation};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a call was refused or failed. `Debug` shows the same text as `Display`: programs whose `main` returns a [`Result`] print
/// it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Ranks disagree, are missing or late, or one rank failed, whose error is quoted; the other ranks have this error too.
    #[error(transparent)]
    Gradsync(#[from] gradsync::Error),
    /// candle refused an operation on this rank.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A variable is on a device that the communicator does not support.
    #[error("variable {name:?} is on {found:?}, and the communicator reduces in {wanted}")]
    Device {
        /// The name of the variable.
        name: String,
        /// The device that it is on.
        found: DeviceLocation,
        /// The memory of the communicator and of the other variables.
        wanted: String,
    },
    /// A variable has a type that is not reduced.
    #[error("variable {name:?} has the dtype {dtype:?}, which cannot be reduced: such variables must be left out")]
    DType {
        /// The name of the variable.
        name: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A tensor is not stored as one piece, or shares its storage with another.
    #[error("tensor {name:?} of shape {shape:?} {reason}")]
    Storage {
        /// The name of the variable that it belongs to.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The property that it lacks.
        reason: &'static str,
    },
    /// A number outside its range.
    #[error("{name} is {value}, and must be {needs}")]
    Number {
        /// The parameter.
        name: &'static str,
        /// Its value.
        value: f64,
        /// The condition on it.
        needs: &'static str,
    },
    /// The parameters of a layer do not match it.
    #[error("a layer of tensor parallelism: {0}")]
    Layer(String),
    /// The device computes on a stream that other threads cannot wait for.
    #[error(
        "device {ordinal} computes on the per-thread default stream (0x2), which orders nothing between threads: make it by `Device::new_cuda_with_stream({ordinal})`"
    )]
    PerThreadStream {
        /// The number of the device.
        ordinal: usize,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// For training loops that return candle's errors.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => candle_core::Error::wrap(error),
        }
    }
}

impl Error {
    /// Converts this error for the other ranks, which receive only its text.
    pub(crate) fn into_gradsync(self, operation: &'static str) -> gradsync::Error {
        match self {
            Self::Gradsync(error) => error,
            error => gradsync::Error::InvalidArgument { operation, reason: error.to_string() },
        }
    }
}

/// So that `?` serves a program that makes its queue.
#[cfg(feature = "cuda")]
impl From<gradsync::driver::CudaError> for Error {
    fn from(error: gradsync::driver::CudaError) -> Self {
        Self::Gradsync(error.into())
    }
}
