//! Slices in host memory whose element type is known at run time.
//!
//! Slices borrow; nothing here owns data, or knows an operation.

use std::ops::Range;

use crate::dtype::{DType, Element, Float, elements, with_float};
use crate::error::{Error, Result, check_float};

/// A borrowed slice of elements of a type known at run time, in host memory: the argument of collectives and of kernels that only read it.
///
/// Slices, arrays and vectors of any [`Element`] convert to it. Calls that compute take those of a [`Float`] only ([`Floats`]); they refuse a
/// `Slice` of other elements, or of elements that are not aligned, with an error.
#[derive(Clone, Copy)]
pub struct Slice<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// A mutably borrowed slice of elements of a type known at run time, in host memory: the argument of collectives and of kernels that write
/// it. The rules of [`Slice`] apply.
pub struct SliceMut<'a> {
    dtype: DType,
    bytes: &'a mut [u8],
}

/// Runs `$body` with `$data` bound to the elements of a [`Slice`] or [`SliceMut`] as a slice of their Rust type.
macro_rules! with_typed {
    ($slice:expr, $data:ident => $body:expr) => {{
        let slice = $slice;
        $crate::dtype::with_float!(slice.dtype(), Typed => {
            let $data = slice.typed::<Typed>().expect("aligned elements of the slice's own type");
            $body
        })
    }};
}
pub(crate) use with_typed;

impl<'a> Slice<'a> {
    /// The bytes as elements of a type, without the bytes of a last, incomplete element.
    pub fn of_bytes(dtype: DType, bytes: &'a [u8]) -> Self {
        let whole = bytes.len() / dtype.size_bytes() * dtype.size_bytes();
        Self { dtype, bytes: &bytes[..whole] }
    }

    /// The number of elements.
    #[inline]
    pub fn len(&self) -> usize {
        elements(self.bytes.len(), self.dtype)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements of a range; panics as slicing does when it is out of bounds.
    #[inline]
    pub fn range(self, range: Range<usize>) -> Slice<'a> {
        Slice { dtype: self.dtype, bytes: &self.bytes[bytes_of(range, self.len(), self.dtype)] }
    }

    /// The memory of the elements, in the machine's byte order.
    pub fn as_bytes(self) -> &'a [u8] {
        self.bytes
    }

    /// The elements, if `T` is their type, the bytes are aligned for `T`, and all of them are valid values; for `bool`, 0 and 1 are.
    pub fn typed<T: Element>(self) -> Option<&'a [T]> {
        match self.dtype == T::DTYPE {
            true if self.is_empty() => Some(&[]),
            true => bytemuck::checked::try_cast_slice(self.bytes).ok(),
            false => None,
        }
    }

    /// A copy of the elements.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`] unless `T` is the type of the elements.
    pub fn to_vec<T: Element + bytemuck::Pod>(self) -> Result<Vec<T>> {
        check_dtype::<T>("to_vec", self.dtype)?;
        Ok(bytemuck::pod_collect_to_vec(self.bytes))
    }

    /// All elements as `f64`; the conversion is exact. Panics for elements that are no floating-point numbers.
    pub fn to_f64_vec(self) -> Vec<f64> {
        assert!(self.dtype.is_float(), "elements of {} are no floating-point numbers", self.dtype);
        with_float!(self.dtype, T => {
            self.bytes.chunks_exact(size_of::<T>()).map(|bytes| bytemuck::pod_read_unaligned::<T>(bytes).to_f64()).collect()
        })
    }
}

impl<'a> SliceMut<'a> {
    /// Like [`Slice::of_bytes`], to write.
    pub fn of_bytes(dtype: DType, bytes: &'a mut [u8]) -> Self {
        let whole = bytes.len() / dtype.size_bytes() * dtype.size_bytes();
        Self { dtype, bytes: &mut bytes[..whole] }
    }

    /// The number of elements.
    #[inline]
    pub fn len(&self) -> usize {
        elements(self.bytes.len(), self.dtype)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// A shared view of the elements.
    pub fn as_slice(&self) -> Slice<'_> {
        Slice { dtype: self.dtype, bytes: self.bytes }
    }

    /// The elements, to read, for the whole borrow.
    pub(crate) fn into_slice(self) -> Slice<'a> {
        Slice { dtype: self.dtype, bytes: self.bytes }
    }

    /// A mutable view of the elements, for a shorter borrow.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        SliceMut { dtype: self.dtype, bytes: self.bytes }
    }

    /// The elements of a range; panics as slicing does when it is out of bounds.
    #[inline]
    pub fn range_mut(self, range: Range<usize>) -> SliceMut<'a> {
        let bytes = bytes_of(range, self.len(), self.dtype);
        SliceMut { dtype: self.dtype, bytes: &mut self.bytes[bytes] }
    }

    /// Splits the elements at `middle`; panics as slicing does when that is out of bounds.
    #[inline]
    pub fn split_at_mut(self, middle: usize) -> (SliceMut<'a>, SliceMut<'a>) {
        let Range { end, .. } = bytes_of(0..middle, self.len(), self.dtype);
        let (first, second) = self.bytes.split_at_mut(end);
        (SliceMut { dtype: self.dtype, bytes: first }, SliceMut { dtype: self.dtype, bytes: second })
    }

    /// The elements of each range, writable together. The ranges must ascend; panics as slicing does where they overlap or are out of
    /// bounds.
    pub(crate) fn ranges_mut(self, ranges: impl IntoIterator<Item = Range<usize>>) -> Vec<SliceMut<'a>> {
        let (mut rest, mut at, mut found) = (self, 0, Vec::new());
        for range in ranges {
            let (_, from_start) = rest.split_at_mut(range.start - at);
            let (elements, behind) = from_start.split_at_mut(range.len());
            found.push(elements);
            (rest, at) = (behind, range.end);
        }
        found
    }

    /// The memory of the elements, in the machine's byte order. Every byte pattern may be written: the memory is never a
    /// Rust `bool`'s.
    pub fn as_bytes_mut(self) -> &'a mut [u8] {
        self.bytes
    }

    /// The elements, if `T` is their type and the bytes are aligned for `T`.
    pub fn typed<T: Float>(self) -> Option<&'a mut [T]> {
        match self.dtype == T::DTYPE {
            true if self.is_empty() => Some(&mut []),
            true => bytemuck::try_cast_slice_mut(self.bytes).ok(),
            false => None,
        }
    }
}

/// The bytes of a range of `len` elements; panics as slicing does when the range is out of bounds.
#[inline]
fn bytes_of(range: Range<usize>, len: usize, dtype: DType) -> Range<usize> {
    assert!(range.start <= range.end && range.end <= len, "range {range:?} of {len} elements");
    range.start * dtype.size_bytes()..range.end * dtype.size_bytes()
}

/// Refuses elements with which nothing can be computed: other types than floating-point ones, and elements that are not aligned.
pub(crate) fn check_floats(operation: &'static str, data: Slice<'_>) -> Result<()> {
    check_float(operation, data.dtype)?;
    check_aligned(operation, data)
}

/// Refuses elements that are not aligned.
pub(crate) fn check_aligned(operation: &'static str, data: Slice<'_>) -> Result<()> {
    let (address, size) = (data.bytes.as_ptr().addr(), data.dtype.size_bytes());
    // Sizes are powers of two.
    if data.is_empty() || address & (size - 1) == 0 {
        return Ok(());
    }
    let reason = format!("elements of {} at {address:#x} are not aligned to {size} bytes", data.dtype);
    Err(Error::InvalidArgument { operation, reason })
}

/// Refuses a vector or slice of another type than the elements.
pub(crate) fn check_dtype<T: Element>(operation: &'static str, dtype: DType) -> Result<()> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    let what = "the elements and the type asked for".into();
    Err(Error::DTypeMismatch { operation, what, left: dtype, right: T::DTYPE })
}

/// Memory with which a call may compute: its elements are of a [`Float`], or have a type that the call checks when it runs.
///
/// It is a bound of every argument that is added, multiplied or cast, so that such a call with integers does not compile:
///
/// ```compile_fail,E0277
/// use gradsync::prelude::*;
///
/// local::run(2, |comm| adasum(&comm, &mut [1i32, 2]));
/// ```
///
/// A [`SliceMut`] or [`TensorViewMut`](crate::TensorViewMut) may have elements of any type, and is refused with an error:
///
/// ```
/// use gradsync::prelude::*;
///
/// local::run(2, |comm| {
///     let error = adasum(&comm, gradsync::SliceMut::from(&mut [1i32, 2])).expect_err("integers").to_string();
///     assert!(error.contains("elements of i32"), "{error}");
/// })?;
/// # Ok::<(), Error>(())
/// ```
pub trait Floats {}

impl<F: Floats + ?Sized> Floats for &F {}
impl<F: Floats + ?Sized> Floats for &mut F {}
impl Floats for Slice<'_> {}
impl Floats for SliceMut<'_> {}

impl std::fmt::Debug for Slice<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.dtype.is_float() {
            true => write!(f, "{}{:?}", self.dtype, self.to_f64_vec()),
            false => write!(f, "{} in the bytes {:?}", self.dtype, self.bytes),
        }
    }
}

impl std::fmt::Debug for SliceMut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.as_slice().fmt(f)
    }
}

impl<'a> From<&'a mut SliceMut<'_>> for SliceMut<'a> {
    /// A mutable view of the elements, for a shorter borrow.
    fn from(data: &'a mut SliceMut<'_>) -> Self {
        data.reborrow()
    }
}

/// Converts a slice, an array or a vector of elements.
macro_rules! from_elements {
    ($([$($generics:tt)*] $type:ty),*) => {$(
        impl<'a, T: Element, $($generics)*> From<&'a $type> for Slice<'a> {
            fn from(data: &'a $type) -> Self {
                Self { dtype: T::DTYPE, bytes: bytemuck::cast_slice(&data[..]) }
            }
        }

        // Not for `bool`: a peer can send bytes that are no `bool`. They are received as bytes.
        impl<'a, T: Element + bytemuck::Pod, $($generics)*> From<&'a mut $type> for SliceMut<'a> {
            fn from(data: &'a mut $type) -> Self {
                Self { dtype: T::DTYPE, bytes: bytemuck::cast_slice_mut(&mut data[..]) }
            }
        }

        impl<T: Float, $($generics)*> Floats for $type {}
    )*};
}
from_elements!([] [T], [const N: usize] [T; N], [] Vec<T>);

/// The number of elements of a shape; refuses a product beyond the address space.
pub(crate) fn shape_len(operation: &'static str, shape: &[usize]) -> Result<usize> {
    shape.iter().try_fold(1usize, |len, &dim| len.checked_mul(dim)).ok_or_else(|| Error::InvalidArgument {
        operation,
        reason: format!("shape {shape:?} has more elements than memory has addresses"),
    })
}
