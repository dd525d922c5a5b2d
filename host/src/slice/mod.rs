//! Slices in host memory whose element type is known at run time.
//!
//! Slices borrow; nothing here owns data, or knows an operation.

mod element;

use std::ops::Range;

use half::{bf16, f16};

pub use self::element::Element;
pub(crate) use self::element::{storage, storage_mut};

use crate::dtype::DType;
use crate::error::{Error, Result};

/// A borrowed slice of any of the four dtypes.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)] // the variants are the dtypes
pub enum Slice<'a> {
    F64(&'a [f64]),
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

/// A mutably borrowed slice of any of the four dtypes.
#[derive(Debug)]
#[allow(missing_docs)] // the variants are the dtypes
pub enum SliceMut<'a> {
    F64(&'a mut [f64]),
    F32(&'a mut [f32]),
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
}

/// Runs `$body` with `$data` bound to the typed slice inside a [`Slice`] or [`SliceMut`].
macro_rules! with_typed {
    ($kind:ident, $slice:expr, $data:ident => $body:expr) => {
        match $slice {
            $crate::slice::$kind::F64($data) => $body,
            $crate::slice::$kind::F32($data) => $body,
            $crate::slice::$kind::F16($data) => $body,
            $crate::slice::$kind::BF16($data) => $body,
        }
    };
}
pub(crate) use with_typed;

impl<'a> Slice<'a> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        with_typed!(Slice, self, data => data.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Slice::F64(_) => DType::F64,
            Slice::F32(_) => DType::F32,
            Slice::F16(_) => DType::F16,
            Slice::BF16(_) => DType::BF16,
        }
    }

    /// The elements of a range; panics as slicing does when it is out of bounds.
    pub fn range(self, range: Range<usize>) -> Slice<'a> {
        with_typed!(Slice, self, data => Element::slice(&data[range]))
    }

    /// The bytes as elements of a dtype, without the bytes of a last, incomplete element; panics if they are not aligned for it.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_bytes(dtype: DType, bytes: &'a [u8]) -> Self {
        let bytes = &bytes[..bytes.len() / dtype.size_bytes() * dtype.size_bytes()];
        match dtype {
            DType::F64 => Slice::F64(bytemuck::cast_slice(bytes)),
            DType::F32 => Slice::F32(bytemuck::cast_slice(bytes)),
            DType::F16 => Slice::F16(bytemuck::cast_slice(bytes)),
            DType::BF16 => Slice::BF16(bytemuck::cast_slice(bytes)),
        }
    }

    /// The memory of the elements, in the machine's byte order.
    pub fn as_bytes(self) -> &'a [u8] {
        with_typed!(Slice, self, data => bytemuck::cast_slice(data))
    }

    /// The elements, if `T` is their type.
    pub fn typed<T: Element>(self) -> Option<&'a [T]> {
        with_typed!(Slice, self, data => bytemuck_same(data))
    }

    /// A copy of the elements.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`] unless `T` is the type of the elements.
    pub fn to_vec<T: Element>(self) -> Result<Vec<T>> {
        check_dtype::<T>(self.dtype())?;
        Ok(with_typed!(Slice, self, data => bytemuck::cast_slice(data).to_vec()))
    }

    /// All elements as `f64`; the conversion is exact.
    pub fn to_f64_vec(self) -> Vec<f64> {
        with_typed!(Slice, self, data => data.iter().map(|&value| Element::to_f64(value)).collect())
    }
}

/// Refuses a vector of another type than the elements.
pub(crate) fn check_dtype<T: Element>(dtype: DType) -> Result<()> {
    if dtype == T::DTYPE {
        return Ok(());
    }
    let what = "the elements and the vector".into();
    Err(Error::DTypeMismatch { operation: "to_vec", what, left: dtype, right: T::DTYPE })
}

fn bytemuck_same<S: Element, T: Element>(data: &[S]) -> Option<&[T]> {
    (S::DTYPE == T::DTYPE).then(|| bytemuck::cast_slice(data))
}

impl<'a> SliceMut<'a> {
    /// The number of elements.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.as_slice().dtype()
    }

    /// A shared view of the elements.
    pub fn as_slice(&self) -> Slice<'_> {
        with_typed!(SliceMut, self, data => Element::slice(data))
    }

    /// A mutable view of the elements, for a shorter borrow.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        with_typed!(SliceMut, self, data => Element::slice_mut(data))
    }

    /// The elements of a range; panics as slicing does when it is out of bounds.
    pub fn range_mut(self, range: Range<usize>) -> SliceMut<'a> {
        with_typed!(SliceMut, self, data => Element::slice_mut(&mut data[range]))
    }

    /// Splits the elements at `middle`; panics as slicing does when that is out of bounds.
    pub fn split_at_mut(self, middle: usize) -> (SliceMut<'a>, SliceMut<'a>) {
        with_typed!(SliceMut, self, data => {
            let (first, second) = data.split_at_mut(middle);
            (Element::slice_mut(first), Element::slice_mut(second))
        })
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

    /// The bytes as elements of a dtype, to write, without the bytes of a last, incomplete element; panics if they are not aligned for it.
    pub(crate) fn of_bytes(dtype: DType, bytes: &'a mut [u8]) -> Self {
        let whole = bytes.len() / dtype.size_bytes() * dtype.size_bytes();
        let bytes = &mut bytes[..whole];
        match dtype {
            DType::F64 => SliceMut::F64(bytemuck::cast_slice_mut(bytes)),
            DType::F32 => SliceMut::F32(bytemuck::cast_slice_mut(bytes)),
            DType::F16 => SliceMut::F16(bytemuck::cast_slice_mut(bytes)),
            DType::BF16 => SliceMut::BF16(bytemuck::cast_slice_mut(bytes)),
        }
    }

    /// The memory of the elements, in the machine's byte order. Every byte pattern is a value of every dtype.
    pub fn as_bytes_mut(self) -> &'a mut [u8] {
        with_typed!(SliceMut, self, data => bytemuck::cast_slice_mut(data))
    }

    /// The elements, if `T` is their type.
    pub fn typed<T: Element>(self) -> Option<&'a mut [T]> {
        fn same<S: Element, T: Element>(data: &mut [S]) -> Option<&mut [T]> {
            (S::DTYPE == T::DTYPE).then(|| bytemuck::cast_slice_mut(data))
        }
        with_typed!(SliceMut, self, data => same(data))
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
                T::slice(data)
            }
        }

        impl<'a, T: Element, $($generics)*> From<&'a mut $type> for SliceMut<'a> {
            fn from(data: &'a mut $type) -> Self {
                T::slice_mut(data)
            }
        }
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
