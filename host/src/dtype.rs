//! The element types as the host names them: `f64`, `f32` and `half`'s `f16` and `bf16`; and [`DataType`], what transports carry.
//!
//! Conversions are the kernels' own formulas (`gradsync_device::math`); here they only get their public names.

use std::fmt;

pub use gradsync_device::abi::{DType, UnknownDType};
use gradsync_device::math::Element as Formula;
use half::{bf16, f16};

use crate::slice::{Slice, SliceMut};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f64 {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A type of gradient elements: `f64`, `f32`, [`struct@f16`] or [`bf16`].
pub trait Element:
    sealed::Sealed + bytemuck::Pod + Default + PartialEq + PartialOrd + fmt::Debug + Send + Sync + 'static
{
    /// Its name at run time.
    const DTYPE: DType;
    /// The type that the kernels know it as; it has the same bits.
    #[doc(hidden)]
    type Storage: Formula;
    /// The dynamically typed form of a slice.
    fn slice(data: &[Self]) -> Slice<'_>;
    /// The dynamically typed form of a mutable slice.
    fn slice_mut(data: &mut [Self]) -> SliceMut<'_>;
    /// The value as `f64`; exact.
    fn to_f64(self) -> f64;
    /// The nearest value of this type, ties to even.
    fn from_f64(value: f64) -> Self;
}

macro_rules! element {
    ($type:ty, $storage:ty, $variant:ident, $value:ident => $wrap:expr, $stored:ident => $unwrap:expr) => {
        impl Element for $type {
            const DTYPE: DType = DType::$variant;
            type Storage = $storage;
            fn slice(data: &[Self]) -> Slice<'_> {
                Slice::$variant(data)
            }
            fn slice_mut(data: &mut [Self]) -> SliceMut<'_> {
                SliceMut::$variant(data)
            }
            fn to_f64(self) -> f64 {
                let $value = self;
                Formula::to_f64($wrap)
            }
            fn from_f64(value: f64) -> Self {
                let $stored = <$storage as Formula>::from_f64(value);
                $unwrap
            }
        }
    };
}
element!(f64, f64, F64, v => v, s => s);
element!(f32, f32, F32, v => v, s => s);
element!(f16, gradsync_device::F16, F16, v => gradsync_device::F16(v.to_bits()), s => f16::from_bits(s.0));
element!(bf16, gradsync_device::BF16, BF16, v => gradsync_device::BF16(v.to_bits()), s => bf16::from_bits(s.0));

/// The types that a transport carries: those of gradients, the integers that NCCL reduces too, and [`I16`](Self::I16), [`U16`](Self::U16) and
/// [`Bool`](Self::Bool), which are moved and never reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs)] // the variants are the types
pub enum DataType {
    F64,
    F32,
    F16,
    BF16,
    I64,
    U64,
    I32,
    U32,
    I8,
    U8,
    I16,
    U16,
    /// A byte that is 0 or 1.
    Bool,
}

impl DataType {
    /// All of them.
    pub const ALL: [DataType; 13] = [
        DataType::F64,
        DataType::F32,
        DataType::F16,
        DataType::BF16,
        DataType::I64,
        DataType::U64,
        DataType::I32,
        DataType::U32,
        DataType::I8,
        DataType::U8,
        DataType::I16,
        DataType::U16,
        DataType::Bool,
    ];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DataType::F64 | DataType::I64 | DataType::U64 => 8,
            DataType::F32 | DataType::I32 | DataType::U32 => 4,
            DataType::F16 | DataType::BF16 | DataType::I16 | DataType::U16 => 2,
            DataType::I8 | DataType::U8 | DataType::Bool => 1,
        }
    }

    /// The same type among those of gradients, if it is one.
    pub const fn float(self) -> Option<DType> {
        match self {
            DataType::F64 => Some(DType::F64),
            DataType::F32 => Some(DType::F32),
            DataType::F16 => Some(DType::F16),
            DataType::BF16 => Some(DType::BF16),
            _ => None,
        }
    }
}

impl From<DType> for DataType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F64 => DataType::F64,
            DType::F32 => DataType::F32,
            DType::F16 => DataType::F16,
            DType::BF16 => DataType::BF16,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DataType::F64 => "f64",
            DataType::F32 => "f32",
            DataType::F16 => "f16",
            DataType::BF16 => "bf16",
            DataType::I64 => "i64",
            DataType::U64 => "u64",
            DataType::I32 => "i32",
            DataType::U32 => "u32",
            DataType::I8 => "i8",
            DataType::U8 => "u8",
            DataType::I16 => "i16",
            DataType::U16 => "u16",
            DataType::Bool => "bool",
        })
    }
}

/// The slice as the kernels' formulas know it.
pub(crate) fn storage<T: Element>(data: &[T]) -> &[T::Storage] {
    // SAFETY: `Storage` is the type itself, or a transparent wrapper of the same 16 bits; each bit pattern is a value.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// As [`storage`], mutably.
pub(crate) fn storage_mut<T: Element>(data: &mut [T]) -> &mut [T::Storage] {
    // SAFETY: as above, and the borrow stays unique.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}
