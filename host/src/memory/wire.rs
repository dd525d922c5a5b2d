//! [`WireSlice`]: elements of any type that transports carry; these are more types than reductions support.

use crate::dtype::{DType, Element, elements};
use crate::slice::{Slice, SliceMut};

/// Elements of one type in host memory to send, as bytes in the machine's order.
#[derive(Clone, Copy, Debug)]
pub struct WireSlice<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// A slice of any wire type to receive into.
#[derive(Debug)]
pub struct WireSliceMut<'a> {
    dtype: DType,
    bytes: &'a mut [u8],
}

impl<'a> WireSlice<'a> {
    /// The bytes as elements of a type; panics if the last element is incomplete.
    pub(crate) fn of_bytes(dtype: DType, bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len() % dtype.size_bytes(), 0, "whole elements of {dtype}");
        Self { dtype, bytes }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        elements(self.bytes.len(), self.dtype)
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory of the elements.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> WireSliceMut<'a> {
    /// The bytes as elements of a type; panics if the last element is incomplete.
    pub(crate) fn of_bytes(dtype: DType, bytes: &'a mut [u8]) -> Self {
        assert_eq!(bytes.len() % dtype.size_bytes(), 0, "whole elements of {dtype}");
        Self { dtype, bytes }
    }

    /// The elements, to read.
    pub fn as_wire(&self) -> WireSlice<'_> {
        WireSlice { dtype: self.dtype, bytes: self.bytes }
    }

    /// The memory of the elements, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }
}

impl<'a> From<Slice<'a>> for WireSlice<'a> {
    fn from(data: Slice<'a>) -> Self {
        Self { dtype: data.dtype(), bytes: data.as_bytes() }
    }
}

impl<'a> From<SliceMut<'a>> for WireSliceMut<'a> {
    fn from(data: SliceMut<'a>) -> Self {
        Self { dtype: data.dtype(), bytes: data.as_bytes_mut() }
    }
}

/// Converts a slice, an array or a vector of elements.
macro_rules! from_elements {
    ($([$($generics:tt)*] $type:ty),*) => {$(
        impl<'a, T: Element, $($generics)*> From<&'a $type> for WireSlice<'a> {
            fn from(data: &'a $type) -> Self {
                Self { dtype: T::DTYPE, bytes: bytemuck::cast_slice(&data[..]) }
            }
        }

        // Not for `bool`: a peer can send bytes that are no `bool`. They are received as bytes.
        impl<'a, T: Element + bytemuck::Pod, $($generics)*> From<&'a mut $type> for WireSliceMut<'a> {
            fn from(data: &'a mut $type) -> Self {
                Self { dtype: T::DTYPE, bytes: bytemuck::cast_slice_mut(&mut data[..]) }
            }
        }
    )*};
}
from_elements!([] [T], [const N: usize] [T; N], [] Vec<T>);
