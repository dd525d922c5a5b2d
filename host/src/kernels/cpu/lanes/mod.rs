//! Loops over registers, written once for AVX2 and AVX-512, where the compiler does not generate good code from the formulas.
//!
//! A conversion of f16 is one instruction here and a dozen in the formula, bf16 is packed directly, elements stay in registers from load to
//! store, and large results are written with non-temporal stores. Every function returns the bits of the formula that it replaces, except
//! for NaN payloads. Only products that are exact are fused with their addition. Elements before or after the whole groups are copied into
//! a group of their own.

mod combine;
mod elementwise;
mod products;
mod x86;

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use gradsync_device::math::Element as Formula;

pub(super) use self::combine::combine;
pub(super) use self::elementwise::{accumulate, add_weighted, cast, cast_near, scale};
pub(super) use self::products::{add_products, add_products_of_chunk};
use crate::dtype::DType;

/// Elements per step of most loops: a cache line of the narrowest dtypes, so that a whole line is written at once.
pub(super) const GROUP: usize = 32;

/// The registers of one instruction set, and their arithmetic. None of these functions loops.
///
/// # Safety
/// All functions require that the machine has the instruction set; pointers are valid for the elements that are loaded or stored.
pub(super) trait Lanes: Copy {
    /// Eight `f64`.
    type Wide: Copy;
    /// Sixteen `f32`.
    type Narrow: Copy;

    /// The number of vectors on each side of a tile of products: the sums of a tile fit into the registers, with what they are added from.
    const SIDE: usize;
    /// Whether widening 16-bit elements of several vectors to `f32` in memory first, and from there to `f64`, takes less time than widening
    /// them in registers.
    const HALFWAY: bool;

    /// Widens eight elements.
    unsafe fn load_wide<T: Formula>(from: *const T) -> Self::Wide;
    /// Widens sixteen elements, which are not `f64`.
    unsafe fn load_narrow<T: Formula>(from: *const T) -> Self::Narrow;

    /// Stores eight `f64`; a non-temporal store, which `stream` selects, must be aligned to the register. So must the following.
    unsafe fn store_wide(value: Self::Wide, to: *mut f64, stream: bool);
    /// Stores sixteen `f32`.
    unsafe fn store_narrow(value: Self::Narrow, to: *mut f32, stream: bool);
    /// Rounds 32 elements to `f16`, to nearest with ties to even, and stores them.
    unsafe fn store_f16(values: [Self::Narrow; 2], to: *mut u16, stream: bool);
    /// Rounds 32 elements to `bf16` by the formula of `f32_to_bf16`, and stores them.
    unsafe fn store_bf16(values: [Self::Narrow; 2], to: *mut u16, stream: bool);

    /// The value in every lane.
    unsafe fn splat_wide(value: f64) -> Self::Wide;
    /// Adds lane by lane.
    unsafe fn add_wide(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Multiplies lane by lane.
    unsafe fn multiply_wide(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// Computes `a × b + c` lane by lane, with one rounding.
    unsafe fn multiply_add(a: Self::Wide, b: Self::Wide, c: Self::Wide) -> Self::Wide;

    /// The value in every lane.
    unsafe fn splat_narrow(value: f32) -> Self::Narrow;
    /// Adds lane by lane.
    unsafe fn add_narrow(a: Self::Narrow, b: Self::Narrow) -> Self::Narrow;
    /// Multiplies lane by lane.
    unsafe fn multiply_narrow(a: Self::Narrow, b: Self::Narrow) -> Self::Narrow;

    /// Rounds to `f32`, to nearest with ties to even.
    unsafe fn nearest(values: [Self::Wide; 2]) -> Self::Narrow;
    /// Truncates to 16 digits and sets the last one if any truncated digit was set (round to odd), so that rounding the result to fewer
    /// digits equals a single rounding (as `f64_to_f32_odd` explains). A subnormal `f32` still holds all 16 digits, down to numbers that
    /// any rounding turns into zero in f16 and bf16. Infinities and NaN are preserved.
    unsafe fn cut(value: Self::Wide) -> Self::Wide;
}

/// A group of elements in the working precision of a pair of dtypes.
///
/// # Safety
/// The conditions of [`Lanes`].
trait LaneGroup: Copy {
    /// Widens a group.
    unsafe fn load<T: Formula>(from: *const T) -> Self;
    /// Rounds a group to `T`, once, and stores it.
    unsafe fn store<T: Formula>(self, to: *mut T, stream: bool);
    /// The factor in every lane.
    unsafe fn splat(factor: f64) -> Self;
    /// Adds lane by lane.
    unsafe fn add(self, other: Self) -> Self;
    /// Multiplies lane by lane.
    unsafe fn multiply(self, other: Self) -> Self;
}

/// A group of `f32`, for pairs without `f64`.
#[derive(Clone, Copy)]
struct Narrow<L: Lanes>([L::Narrow; 2]);

/// A group of `f64`, for pairs with `f64`.
#[derive(Clone, Copy)]
struct Wide<L: Lanes>([L::Wide; 4]);

impl<L: Lanes> LaneGroup for Narrow<L> {
    #[inline(always)]
    unsafe fn load<T: Formula>(from: *const T) -> Self {
        // SAFETY: the caller's promise, here and below.
        unsafe { Narrow([L::load_narrow(from), L::load_narrow(from.add(16))]) }
    }

    #[inline(always)]
    unsafe fn store<T: Formula>(self, to: *mut T, stream: bool) {
        let Narrow([low, high]) = self;
        // SAFETY: as above; `T` has the layout of its dtype.
        unsafe {
            match T::DTYPE {
                DType::F32 => {
                    L::store_narrow(low, to.cast(), stream);
                    L::store_narrow(high, to.add(16).cast(), stream);
                }
                DType::F16 => L::store_f16([low, high], to.cast(), stream),
                DType::BF16 => L::store_bf16([low, high], to.cast(), stream),
                _ => unreachable!("pairs with f64 work in f64"),
            }
        }
    }

    #[inline(always)]
    unsafe fn splat(factor: f64) -> Self {
        // SAFETY: as above.
        unsafe { Narrow([L::splat_narrow(factor as f32); 2]) }
    }

    #[inline(always)]
    unsafe fn add(self, Narrow(other): Self) -> Self {
        // SAFETY: as above.
        unsafe { Narrow([L::add_narrow(self.0[0], other[0]), L::add_narrow(self.0[1], other[1])]) }
    }

    #[inline(always)]
    unsafe fn multiply(self, Narrow(other): Self) -> Self {
        // SAFETY: as above.
        unsafe { Narrow([L::multiply_narrow(self.0[0], other[0]), L::multiply_narrow(self.0[1], other[1])]) }
    }
}

impl<L: Lanes> LaneGroup for Wide<L> {
    #[inline(always)]
    unsafe fn load<T: Formula>(from: *const T) -> Self {
        // SAFETY: the caller's promise, here and below.
        unsafe {
            Wide([
                L::load_wide(from),
                L::load_wide(from.add(8)),
                L::load_wide(from.add(16)),
                L::load_wide(from.add(24)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn store<T: Formula>(self, to: *mut T, stream: bool) {
        let Wide([a, b, c, d]) = self;
        // SAFETY: as above.
        unsafe {
            match T::DTYPE {
                DType::F64 => {
                    for (eight, value) in self.0.into_iter().enumerate() {
                        L::store_wide(value, to.add(eight * 8).cast(), stream);
                    }
                }
                DType::F32 => Narrow::<L>([L::nearest([a, b]), L::nearest([c, d])]).store::<T>(to, stream),
                _ => {
                    let (low, high) = ([L::cut(a), L::cut(b)], [L::cut(c), L::cut(d)]);
                    Narrow::<L>([L::nearest(low), L::nearest(high)]).store::<T>(to, stream);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn splat(factor: f64) -> Self {
        // SAFETY: as above.
        unsafe { Wide([L::splat_wide(factor); 4]) }
    }

    #[inline(always)]
    unsafe fn add(mut self, Wide(other): Self) -> Self {
        for (value, other) in self.0.iter_mut().zip(other) {
            // SAFETY: as above.
            *value = unsafe { L::add_wide(*value, other) };
        }
        self
    }

    #[inline(always)]
    unsafe fn multiply(mut self, Wide(other): Self) -> Self {
        for (value, other) in self.0.iter_mut().zip(other) {
            // SAFETY: as above.
            *value = unsafe { L::multiply_wide(*value, other) };
        }
        self
    }
}

/// Prefetches a group that is `ahead` bytes behind the address into the second-level cache: the groups of several vectors fill the first.
/// Any address may be prefetched, valid or not.
#[inline(always)]
fn prefetch<T>(from: *const T, ahead: usize) {
    for line in (0..GROUP * size_of::<T>()).step_by(64) {
        // SAFETY: prefetching does not access memory, and is in the baseline of the target.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.cast::<i8>().wrapping_add(ahead + line)) };
    }
}

/// Defines a function that is compiled for each instruction set of [`Lanes`], which the body names by the first parameter, and runs with
/// the widest one that this machine has. It returns false, and does nothing, where the machine has none of them. The body is unsafe code;
/// it may use the instruction set.
///
/// The body is inlined into all versions, so everything that it calls must be `#[inline(always)]`. It cannot contain closures that use
/// the instruction set: these may not be inlined, and would then lack the set.
macro_rules! on_lanes {
    (@ [$($head:tt)*] $name:ident<$lanes:ident, $($generic:ident: $bound:path),*>(
        $($argument:ident: $type:ty),* $(,)?
    ) $body:block) => {
        $($head)* $name<$($generic: $bound),*>($($argument: $type),*) -> bool {
            use $crate::kernels::cpu::isa::{Isa, allowed};
            use $crate::kernels::cpu::lanes::{Lanes, x86};

            #[inline(always)]
            unsafe fn body<$lanes: Lanes, $($generic: $bound),*>($($argument: $type),*) $body

            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,f16c,fma")]
            unsafe fn avx2<$($generic: $bound),*>($($argument: $type),*) {
                // SAFETY: the caller's promise.
                unsafe { body::<x86::Avx2, $($generic),*>($($argument),*) }
            }
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,f16c,fma,avx512f,avx512bw,avx512vl")]
            unsafe fn avx512<$($generic: $bound),*>($($argument: $type),*) {
                // SAFETY: the caller's promise.
                unsafe { body::<x86::Avx512, $($generic),*>($($argument),*) }
            }
            match allowed() {
                Isa::Baseline => return false,
                // SAFETY: this machine has the instruction set; the rest is the caller's promise.
                Isa::Avx2 => unsafe { avx2::<$($generic),*>($($argument),*) },
                // SAFETY: as above.
                Isa::Avx512 => unsafe { avx512::<$($generic),*>($($argument),*) },
            }
            true
        }
    };
    ($(#[$doc:meta])* $visibility:vis unsafe fn $($rest:tt)*) => {
        on_lanes!(@ [$(#[$doc])* $visibility unsafe fn] $($rest)*);
    };
    ($(#[$doc:meta])* $visibility:vis fn $($rest:tt)*) => {
        on_lanes!(@ [$(#[$doc])* $visibility fn] $($rest)*);
    };
}
use on_lanes;
