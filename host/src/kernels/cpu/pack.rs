//! [`pack`] and [`unpack`]: many tensors into one arena and back, with cast.

use super::cast;
use crate::error::{Error, Result};
use crate::kernels::same_len;
use crate::slice::{Slice, SliceMut};

/// Copies each source to its offset in the arena, casting where dtypes differ; the rest of the arena is left alone.
///
/// # Errors
/// [`Error::LengthMismatch`] unless there is one offset a source, [`Error::InvalidArgument`] naming a source that ends
/// beyond the arena. Nothing is written then.
pub fn pack(dst: SliceMut<'_>, offsets: &[usize], sources: &[Slice<'_>]) -> Result<()> {
    let mut dst = dst;
    check("pack", dst.len(), offsets, sources.iter().map(Slice::len))?;
    for (&offset, source) in offsets.iter().zip(sources) {
        cast(dst.reborrow().range_mut(offset..offset + source.len()), *source)?;
    }
    Ok(())
}

/// Copies each destination from its offset in the arena, casting where dtypes differ.
///
/// # Errors
/// As [`pack`].
pub fn unpack(destinations: &mut [SliceMut<'_>], src: Slice<'_>, offsets: &[usize]) -> Result<()> {
    check("unpack", src.len(), offsets, destinations.iter().map(SliceMut::len))?;
    for (&offset, destination) in offsets.iter().zip(destinations) {
        let range = offset..offset + destination.len();
        cast(destination.reborrow(), src.range(range))?;
    }
    Ok(())
}

fn check(
    operation: &'static str,
    arena: usize,
    offsets: &[usize],
    lens: impl ExactSizeIterator<Item = usize>,
) -> Result<()> {
    same_len(operation, ("offsets", offsets.len()), ("tensors", lens.len()))?;
    for (index, (&offset, len)) in offsets.iter().zip(lens).enumerate() {
        if offset.checked_add(len).is_none_or(|end| end > arena) {
            let reason = format!("tensor {index} of {len} elements at {offset} ends beyond the arena of {arena}");
            return Err(Error::InvalidArgument { operation, reason });
        }
    }
    Ok(())
}
