//! [`Element`]: the types of gradient elements, `f64`, `f32` and `half`'s `f16` and `bf16`.
//!
//! Conversions use the kernels' own formulas (`gradsync_device::math`); this module only gives them public names.

use std::fmt;

use gradsync_device::math::Element as Formula;
use half::{bf16, f16};

use super::{Slice, SliceMut};
use crate::dtype::DType;

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
    /// The name of the type at run time.
    const DTYPE: DType;
    /// The type with the same bits that the kernels use.
    #[doc(hidden)]
    type Storage: Formula;
    /// The dynamically typed form of a slice.
    fn slice(data: &[Self]) -> Slice<'_>;
    /// The dynamically typed form of a mutable slice.
    fn slice_mut(data: &mut [Self]) -> SliceMut<'_>;
    /// The value as `f64`; the conversion is exact.
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

/// The slice as elements of the kernels' type.
pub(crate) fn storage<T: Element>(data: &[T]) -> &[T::Storage] {
    // SAFETY: `Storage` is the type itself, or a transparent wrapper of the same 16 bits; each bit pattern is a value.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// The mutable slice as elements of the kernels' type.
pub(crate) fn storage_mut<T: Element>(data: &mut [T]) -> &mut [T::Storage] {
    // SAFETY: as above, and the borrow stays unique.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}
