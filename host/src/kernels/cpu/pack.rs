//! [`pack`], [`pack_checked`] and [`unpack`]: copies of many tensors into one arena and back, with casts.

use super::cast;
use super::elementwise::{cast_checked, check_pair};
use crate::error::Result;
use crate::kernels::{Overlap, check_offsets};
use crate::slice::{Slice, SliceMut};

/// Copies each source to its offset in the arena, in elements, with the numerics of [`cast`](super::cast). The rest of the arena is left
/// unchanged.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless there is one offset per source,
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming a source that ends beyond the arena, two that overlap, or elements that
/// [`cast`](super::cast) refuses. Nothing is written then.
pub fn pack(dst: SliceMut<'_>, offsets: &[usize], sources: &[Slice<'_>]) -> Result<()> {
    let mut dst = dst;
    check_offsets("pack", dst.len(), offsets, sources.iter().map(Slice::len), Overlap::Refused)?;
    sources.iter().try_for_each(|source| check_pair("pack", dst.as_slice(), *source))?;
    for (&offset, source) in offsets.iter().zip(sources) {
        cast(dst.reborrow().range_mut(offset..offset + source.len()), *source)?;
    }
    Ok(())
}

/// Like [`pack`], and returns the first source with an element that is NaN or infinite in the arena.
///
/// # Errors
/// The errors of [`pack`].
pub(crate) fn pack_checked(dst: SliceMut<'_>, offsets: &[usize], sources: &[Slice<'_>]) -> Result<Option<usize>> {
    let mut dst = dst;
    check_offsets("pack", dst.len(), offsets, sources.iter().map(Slice::len), Overlap::Refused)?;
    sources.iter().try_for_each(|source| check_pair("pack", dst.as_slice(), *source))?;
    let mut first = None;
    for (index, (&offset, source)) in offsets.iter().zip(sources).enumerate() {
        let is_finite = cast_checked(dst.reborrow().range_mut(offset..offset + source.len()), *source)?;
        first = first.or((!is_finite).then_some(index));
    }
    Ok(first)
}

/// Copies each destination from its offset in the arena, in elements, with the numerics of [`cast`](super::cast).
///
/// # Errors
/// The errors of [`pack`], but ranges in the arena may overlap.
pub fn unpack(destinations: &mut [SliceMut<'_>], src: Slice<'_>, offsets: &[usize]) -> Result<()> {
    check_offsets("unpack", src.len(), offsets, destinations.iter().map(SliceMut::len), Overlap::Allowed)?;
    destinations.iter().try_for_each(|destination| check_pair("unpack", destination.as_slice(), src))?;
    for (&offset, destination) in offsets.iter().zip(destinations) {
        let range = offset..offset + destination.len();
        cast(destination.reborrow(), src.range(range))?;
    }
    Ok(())
}
