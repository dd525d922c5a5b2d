//! [`DType`]: the element types as one table; [`Element`] and [`Float`]: the Rust types of such elements.
//!
//! Conversions use the kernels' own formulas (`gradsync_device::math`); this module only gives them public names.

use std::fmt;

use gradsync_device::math::Element as Formula;
use half::{bf16, f16};

pub use gradsync_device::abi::{DType, UnknownDType};

mod sealed {
    pub trait Sealed {}
}

/// The number of whole elements in so many bytes. It shifts, because a division by a variable takes longer than the rest of a small call's
/// checks.
#[inline]
pub(crate) fn elements(bytes: usize, dtype: DType) -> usize {
    bytes >> dtype.size_bytes().trailing_zeros()
}

// `elements` relies on it.
const _: () = {
    let mut index = 0;
    while index < DType::ALL.len() {
        assert!(DType::ALL[index].size_bytes().is_power_of_two());
        index += 1;
    }
};

/// A type of elements that transports carry: floating-point numbers, integers of 8 to 64 bits, and `bool`.
pub trait Element: sealed::Sealed + bytemuck::NoUninit + bytemuck::CheckedBitPattern {
    /// The name of the type at run time.
    const DTYPE: DType;
}

/// A type of elements that gradients have and kernels compute with: `f64`, `f32`, [`struct@f16`] or [`bf16`]. Calls that compute take
/// slices of these types ([`Floats`](crate::slice::Floats)), so that Adasum of integers does not compile:
///
/// ```compile_fail,E0277
/// use gradsync::prelude::*;
///
/// fn step(comm: &dyn Communicator, gradients: &mut [i32]) {
///     adasum(comm, gradients);
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no floating-point type",
    note = "elements of other types can be sent, gathered and broadcast, but not added or cast"
)]
pub trait Float: Element + bytemuck::Pod + Default + PartialEq + PartialOrd + fmt::Debug + Send + Sync {
    /// The type with the same bits that the kernels use.
    #[doc(hidden)]
    type Storage: Formula;
    /// The largest finite value.
    const LARGEST: f64;

    /// The value as `f64`; the conversion is exact.
    fn to_f64(self) -> f64 {
        storage(&[self])[0].to_f64()
    }

    /// The nearest value of this type, ties to even.
    fn from_f64(value: f64) -> Self {
        let mut rounded = Self::default();
        storage_mut(std::slice::from_mut(&mut rounded))[0] = Formula::from_f64(value);
        rounded
    }
}

macro_rules! elements {
    ($($type:ty => $variant:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$variant;
        }
    )*};
}
elements!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, u64 => U64, i32 => I32, u32 => U32);
elements!(i16 => I16, u16 => U16, i8 => I8, u8 => U8, bool => Bool);

macro_rules! floats {
    ($($type:ty: $storage:ty, $largest:expr;)*) => {$(
        // `storage` relies on it.
        const _: () = assert!(size_of::<$type>() == size_of::<$storage>() && align_of::<$type>() == align_of::<$storage>());
        impl Float for $type {
            type Storage = $storage;
            const LARGEST: f64 = $largest;
        }
    )*};
}
floats! {
    f64: f64, f64::MAX;
    f32: f32, f32::MAX as f64;
    f16: gradsync_device::F16, f16::MAX.to_f64_const();
    bf16: gradsync_device::BF16, bf16::MAX.to_f64_const();
}

/// Runs `$body` with the alias `$type` for the Rust type of a floating-point dtype. Where a dtype enters the crate it is checked, so that
/// here no other one is found.
macro_rules! with_float {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            $crate::dtype::DType::F64 => {
                type $type = f64;
                $body
            }
            $crate::dtype::DType::F32 => {
                type $type = f32;
                $body
            }
            $crate::dtype::DType::F16 => {
                type $type = half::f16;
                $body
            }
            $crate::dtype::DType::BF16 => {
                type $type = half::bf16;
                $body
            }
            other => unreachable!("{other} is refused where it enters"),
        }
    };
}
pub(crate) use with_float;

/// The elements as the kernels' type.
pub(crate) fn storage<T: Float>(data: &[T]) -> &[T::Storage] {
    // SAFETY: `Storage` is the type itself, or a transparent wrapper of the same 16 bits; each bit pattern is a value.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// The elements as the kernels' type, to write.
pub(crate) fn storage_mut<T: Float>(data: &mut [T]) -> &mut [T::Storage] {
    // SAFETY: as above, and the borrow stays unique.
    unsafe { std::slice::from_raw_parts_mut(data.as_mut_ptr().cast(), data.len()) }
}
