//! Kernels on the memory of one rank: [`KernelMemory`], whose functions are called on [`Host`](crate::memory::Host) or `Cuda`.
//!
//! `cpu` and `cuda` (private) implement them by the formulas of `gradsync_device::math`. Nothing here communicates. The operations
//! `zero_gradient`, `accumulate` and `overwrite` in `ops` are these kernels on one tensor of a shape.
//!
//! ```
//! use gradsync::kernels::KernelMemory;
//! use gradsync::memory::Host;
//!
//! let (mut sum, value) = ([1.0f32, 2.0], [0.5f32, f32::NAN]);
//! Host::accumulate((&mut sum).into(), (&value).into())?;
//! assert_eq!(sum[0], 1.5);
//! assert!(!Host::all_finite((&sum).into())?);
//! # Ok::<(), gradsync::Error>(())
//! ```

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod memory;
pub(crate) mod optimizer;

pub use self::memory::KernelMemory;
use crate::error::{Error, Result, same_len};

/// Whether tensors may share elements of an arena: harmless for an arena that is read, a race of launches for one that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overlap {
    Allowed,
    Refused,
}

/// Refuses tensors that end beyond an arena of `arena` elements, or that overlap in it where `overlap` refuses that.
pub(crate) fn check_offsets(
    operation: &'static str,
    arena: usize,
    offsets: &[usize],
    lens: impl ExactSizeIterator<Item = usize>,
    overlap: Overlap,
) -> Result<()> {
    same_len(operation, ("offsets", offsets.len()), ("tensors", lens.len()))?;
    let mut ends = Vec::with_capacity(offsets.len());
    for (index, (&offset, len)) in offsets.iter().zip(lens).enumerate() {
        let Some(end) = offset.checked_add(len).filter(|&end| end <= arena) else {
            let reason = format!("tensor {index} of {len} elements at {offset} ends beyond the arena of {arena}");
            return Err(Error::InvalidArgument { operation, reason });
        };
        if len > 0 {
            ends.push((offset, end, index));
        }
    }
    ends.sort_unstable();
    for pair in ends.windows(2) {
        if overlap == Overlap::Refused && pair[1].0 < pair[0].1 {
            let ((_, end, left), (begin, _, right)) = (pair[0], pair[1]);
            let reason = format!("tensor {right} begins at {begin}, before the end {end} of tensor {left}");
            return Err(Error::InvalidArgument { operation, reason });
        }
    }
    Ok(())
}
