//! [`WireSlice`]: elements of any type that transports carry; these are more types than reductions support.

use half::{bf16, f16};

use crate::dtype::DataType;
use crate::slice::{Slice, SliceMut, with_typed};

mod sealed {
    pub trait Sealed {}
}

/// An element type that transports carry: floating-point numbers, integers of 8 to 64 bits, and `bool`.
pub trait WireElement: sealed::Sealed + bytemuck::NoUninit + bytemuck::CheckedBitPattern {
    /// The name of the type at run time.
    const DATA_TYPE: DataType;
}

macro_rules! wire_elements {
    ($($type:ty => $name:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl WireElement for $type {
            const DATA_TYPE: DataType = DataType::$name;
        }
    )*};
}
wire_elements!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, u64 => U64, i32 => I32, u32 => U32);
wire_elements!(i16 => I16, u16 => U16, i8 => I8, u8 => U8, bool => Bool);

/// Elements of one type in host memory to send, as bytes in the machine's order.
#[derive(Clone, Copy, Debug)]
pub struct WireSlice<'a> {
    dtype: DataType,
    bytes: &'a [u8],
}

/// A slice of any wire type to receive into.
#[derive(Debug)]
pub struct WireSliceMut<'a> {
    dtype: DataType,
    bytes: &'a mut [u8],
}

impl<'a> WireSlice<'a> {
    /// The bytes as elements of a type; panics if the last element is incomplete.
    pub(crate) fn of_bytes(dtype: DataType, bytes: &'a [u8]) -> Self {
        assert_eq!(bytes.len() % dtype.size_bytes(), 0, "whole elements of {dtype}");
        Self { dtype, bytes }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The type of every element.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The memory of the elements.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> WireSliceMut<'a> {
    /// The bytes as elements of a type; panics if the last element is incomplete.
    pub(crate) fn of_bytes(dtype: DataType, bytes: &'a mut [u8]) -> Self {
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
        Self { dtype: data.dtype().into(), bytes: data.as_bytes() }
    }
}

impl<'a> From<SliceMut<'a>> for WireSliceMut<'a> {
    fn from(data: SliceMut<'a>) -> Self {
        let dtype = data.dtype().into();
        Self { dtype, bytes: with_typed!(SliceMut, data, data => bytemuck::cast_slice_mut(data)) }
    }
}

/// Converts a slice, an array or a vector of elements.
macro_rules! from_elements {
    ($([$($generics:tt)*] $type:ty),*) => {$(
        impl<'a, T: WireElement, $($generics)*> From<&'a $type> for WireSlice<'a> {
            fn from(data: &'a $type) -> Self {
                Self { dtype: T::DATA_TYPE, bytes: bytemuck::cast_slice(&data[..]) }
            }
        }

        // Not for `bool`: a peer can send bytes that are no `bool`. They are received as bytes.
        impl<'a, T: WireElement + bytemuck::Pod, $($generics)*> From<&'a mut $type> for WireSliceMut<'a> {
            fn from(data: &'a mut $type) -> Self {
                Self { dtype: T::DATA_TYPE, bytes: bytemuck::cast_slice_mut(&mut data[..]) }
            }
        }
    )*};
}
from_elements!([] [T], [const N: usize] [T; N], [] Vec<T>);
