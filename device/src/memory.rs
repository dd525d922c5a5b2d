//! Vectors of global memory: a few neighbouring elements per thread, in one instruction if the address is aligned.
//!
//! An element belongs to the same thread whether addresses are aligned or not: only the width of the access changes, so that
//! results never depend on alignment. Nothing here knows an operation.

use crate::arch;

/// Whether `address` can be accessed `N` elements at a time.
#[inline(always)]
pub(crate) fn is_aligned<T, const N: usize>(address: *const T) -> bool {
    address as usize % (size_of::<T>() * N) == 0
}

/// Reads `N` elements at once.
///
/// # Safety
/// `N` readable elements of global memory, at an address for which [`is_aligned`] holds.
#[inline(always)]
pub(crate) unsafe fn load<T: Copy, const N: usize>(address: *const T) -> [T; N] {
    // SAFETY: the caller promises the memory; each branch reads and reinterprets exactly size_of::<[T; N]>() bytes, and
    // every bit pattern is a value of the element types.
    unsafe {
        match size_of::<[T; N]>() {
            16 => reinterpret(arch::load_16(address as u64)),
            8 => reinterpret(arch::load_8(address as u64)),
            4 => reinterpret(arch::load_4(address as u64)),
            _ => load_each(address),
        }
    }
}

/// Writes `N` elements at once.
///
/// # Safety
/// `N` writable elements of global memory, at an address for which [`is_aligned`] holds.
#[inline(always)]
pub(crate) unsafe fn store<T: Copy, const N: usize>(address: *mut T, values: [T; N]) {
    // SAFETY: as for `load`.
    unsafe {
        match size_of::<[T; N]>() {
            16 => arch::store_16(address as u64, reinterpret(values)),
            8 => arch::store_8(address as u64, reinterpret(values)),
            4 => arch::store_4(address as u64, reinterpret(values)),
            _ => {
                let mut index = 0;
                while index < N {
                    address.add(index).write(values[index]);
                    index += 1;
                }
            }
        }
    }
}

/// Reads `N` elements one by one.
///
/// # Safety
/// `N` readable elements at `address`.
#[inline(always)]
pub(crate) unsafe fn load_each<T: Copy, const N: usize>(address: *const T) -> [T; N] {
    // SAFETY: the caller's promise.
    core::array::from_fn(|index| unsafe { address.add(index).read() })
}

/// Reinterprets the bits as another type.
///
/// # Safety
/// `A` and `B` must have the same size, and the bits of `A` must be a value of `B`.
#[inline(always)]
pub(crate) unsafe fn reinterpret<A: Copy, B: Copy>(value: A) -> B {
    // SAFETY: the caller's promise.
    unsafe { core::mem::transmute_copy(&value) }
}
