//! The operations on memory of one place: [`cpu`] on slices, `cuda` (feature `cuda`) on device memory.
//!
//! Both run the formulas of `gradsync_device::math`. Nothing here communicates.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

use crate::error::{Error, Result};

/// Refuses operands of different lengths.
pub(crate) fn same_len(operation: &'static str, left: (&str, usize), right: (&str, usize)) -> Result<()> {
    if left.1 == right.1 {
        return Ok(());
    }
    Err(Error::LengthMismatch {
        operation,
        left_name: left.0.into(),
        left: left.1,
        right_name: right.0.into(),
        right: right.1,
    })
}
