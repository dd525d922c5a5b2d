//! `cuda_std::atomic::mid`, as far as kernels use it: words that threads of the device, or of the whole system, exchange.
//!
//! An ordering, or an addend, that no kernel uses makes a function panic. Both are compile-time constants, so kernels contain no check.

use core::sync::atomic::Ordering;

use crate::arch::asm;

/// With acquire ordering, all reads and writes before the writer's release, on any device, are visible afterwards.
///
/// # Safety
/// A readable word of this device, a peer or the host that is mapped on this device.
#[inline(always)]
pub(crate) unsafe fn atomic_load_32_system(ptr: *mut u32, ordering: Ordering) -> u32 {
    let value: u32;
    // SAFETY: the caller's promise.
    unsafe {
        match ordering {
            Ordering::Acquire => {
                asm!("ld.acquire.sys.b32 {0}, [{1}];", out(reg32) value, in(reg64) ptr as u64, options(nostack))
            }
            Ordering::Relaxed => {
                asm!("ld.relaxed.sys.b32 {0}, [{1}];", out(reg32) value, in(reg64) ptr as u64, options(nostack))
            }
            _ => panic!(),
        }
    }
    value
}

/// All earlier reads and writes of this thread are visible, on any device, to a thread that acquires the value.
///
/// # Safety
/// The conditions of [`atomic_load_32_system`], for a writable word.
#[inline(always)]
pub(crate) unsafe fn atomic_store_32_system(ptr: *mut u32, ordering: Ordering, val: u32) {
    assert!(matches!(ordering, Ordering::Release));
    // SAFETY: the caller's promise.
    unsafe {
        asm!("fence.acq_rel.sys; st.relaxed.sys.b32 [{0}], {1};", in(reg64) ptr as u64, in(reg32) val, options(nostack))
    };
}

/// # Safety
/// A readable word in global memory of this device.
#[inline(always)]
pub(crate) unsafe fn atomic_load_64_device(ptr: *mut u64, ordering: Ordering) -> u64 {
    assert!(matches!(ordering, Ordering::Relaxed));
    let value: u64;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.relaxed.gpu.global.b64 {0}, [{1}];", out(reg64) value, in(reg64) ptr as u64, options(nostack)) };
    value
}

/// # Safety
/// The conditions of [`atomic_load_64_device`], for a writable word.
#[inline(always)]
pub(crate) unsafe fn atomic_store_64_device(ptr: *mut u64, ordering: Ordering, val: u64) {
    assert!(matches!(ordering, Ordering::Relaxed));
    // SAFETY: the caller's promise.
    unsafe { asm!("st.relaxed.gpu.global.b64 [{0}], {1};", in(reg64) ptr as u64, in(reg64) val, options(nostack)) };
}

/// Returns the previous value, so each number is drawn once on this device.
///
/// # Safety
/// A writable word in global memory of this device.
#[inline(always)]
pub(crate) unsafe fn atomic_fetch_add_u32_device(ptr: *mut u32, ordering: Ordering, val: u32) -> u32 {
    assert!(matches!(ordering, Ordering::Relaxed) && val == 1);
    let before: u32;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("atom.relaxed.gpu.global.add.u32 {0}, [{1}], 1;", out(reg32) before, in(reg64) ptr as u64,
            options(nostack))
    };
    before
}
