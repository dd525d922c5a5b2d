//! The GPU's side of `arch`: inline PTX and `core::arch::nvptx`, one function an instruction.
//!
//! `cfg(gradsync_sm = "80")` is set by the PTX builder when the target has the conversions of compute capability 8.0.
//! Nothing here decides anything; `thread`, `warp`, `shared` and `memory` give these instructions their names and rules.

use core::arch::asm;
use core::arch::nvptx;

#[cfg(not(gradsync_sm = "80"))]
use crate::math::rounding;

#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let value: f32;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.f32.f16 {0}, {1};", out(reg32) value, in(reg16) bits, options(pure, nomem, nostack)) };
    value
}

#[inline(always)]
pub(crate) fn f16_to_f64(bits: u16) -> f64 {
    let value: f64;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.f64.f16 {0}, {1};", out(reg64) value, in(reg16) bits, options(pure, nomem, nostack)) };
    value
}

#[inline(always)]
pub(crate) fn f64_to_f16(value: f64) -> u16 {
    let bits: u16;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.rn.f16.f64 {0}, {1};", out(reg16) bits, in(reg64) value, options(pure, nomem, nostack)) };
    bits
}

#[inline(always)]
pub(crate) fn f32_to_f16(value: f32) -> u16 {
    let bits: u16;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.rn.f16.f32 {0}, {1};", out(reg16) bits, in(reg32) value, options(pure, nomem, nostack)) };
    bits
}

/// The instruction exists from compute capability 8.0; before that, the formula. The one for two values, because the assembler may give
/// that for one to the slow unit of 64-bit conversions.
#[inline(always)]
pub(crate) fn f32_to_bf16(value: f32) -> u16 {
    #[cfg(gradsync_sm = "80")]
    {
        let bits: u16;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("{{ .reg .b32 both; cvt.rn.bf16x2.f32 both, 0f00000000, {1}; cvt.u16.u32 {0}, both; }}", out(reg16) bits,
                in(reg32) value, options(pure, nomem, nostack))
        };
        bits
    }
    #[cfg(not(gradsync_sm = "80"))]
    rounding::f32_to_bf16(value)
}

/// Rounded to odd: truncated by the conversion, and the last bit set where that cut something off. Without a branch.
#[inline(always)]
pub(crate) fn f64_to_f32_odd(value: f64) -> f32 {
    let truncated: f32;
    // SAFETY: arithmetic on registers.
    unsafe { asm!("cvt.rz.f32.f64 {0}, {1};", out(reg32) truncated, in(reg64) value, options(pure, nomem, nostack)) };
    // Beyond the largest binary32 that is the largest, whose last bit is set; a NaN stays one.
    let is_cut = truncated as f64 != value;
    f32::from_bits(truncated.to_bits() | is_cut as u32)
}

/// `x × y + z`, rounded once.
#[inline(always)]
pub(crate) fn multiply_add(x: f64, y: f64, z: f64) -> f64 {
    let total: f64;
    // SAFETY: arithmetic on registers.
    unsafe {
        asm!("fma.rn.f64 {0}, {1}, {2}, {3};", out(reg64) total, in(reg64) x, in(reg64) y, in(reg64) z,
            options(pure, nomem, nostack))
    };
    total
}

/// The same number, which the compiler knows nothing of: a loop up to it stays a loop.
#[inline(always)]
pub(crate) fn opaque(number: u32) -> u32 {
    let same;
    // SAFETY: copies a register.
    unsafe { asm!("mov.b32 {0}, {1};", out(reg32) same, in(reg32) number, options(pure, nomem, nostack)) };
    same
}

/// The same address, which the compiler knows nothing of, at each time that it gets here: what lies there is loaded anew and is not kept in
/// registers around a loop.
#[inline(always)]
pub(crate) fn forget(address: u64) -> u64 {
    let same;
    // SAFETY: copies a register. Not `pure`, so that it stays in the loop.
    unsafe { asm!("mov.b64 {0}, {1};", out(reg64) same, in(reg64) address, options(nomem, nostack)) };
    same
}

/// A note to `cargo xtask ptx`, which writes it as the directives `.maxntid` and `.minnctapersm` and, where `UNROLL` is 0, the pragma
/// `nounroll`: those stand before a body, where no inline assembly reaches.
#[inline(always)]
pub(crate) fn launch_bounds<const THREADS: u32, const BLOCKS: u32, const UNROLL: u32>() {
    // SAFETY: no instruction.
    unsafe {
        asm!(".pragma \"gradsync.launch_bounds {0} {1} {2}\";", const THREADS, const BLOCKS, const UNROLL,
            options(nomem, nostack, preserves_flags))
    };
}

#[inline(always)]
pub(crate) fn thread_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_thread_idx_x() as u32 }
}

#[inline(always)]
pub(crate) fn block_idx_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_idx_x() as u32 }
}

#[inline(always)]
pub(crate) fn block_dim_x() -> u32 {
    // SAFETY: reads a special register.
    unsafe { nvptx::_block_dim_x() as u32 }
}

/// `bar.sync 0`.
///
/// # Safety
/// Every thread of the block must get here, or none.
#[inline(always)]
pub(crate) unsafe fn sync_threads() {
    // SAFETY: the caller's promise.
    unsafe { nvptx::_syncthreads() }
}

/// `shfl.sync.bfly` over the whole warp.
///
/// # Safety
/// All 32 lanes must execute this together.
#[inline(always)]
pub(crate) unsafe fn shuffle_xor(value: u32, lane_mask: u32) -> u32 {
    let other: u32;
    // SAFETY: the caller promises a full warp, which the member mask names; no memory is touched.
    unsafe {
        asm!("shfl.sync.bfly.b32 {0}, {1}, {2}, 31, -1;", out(reg32) other, in(reg32) value, in(reg32) lane_mask,
            options(nomem, nostack))
    };
    other
}

/// The block's static shared memory: 36 products for each of 8 warps, in `f64`.
#[inline(always)]
pub(crate) fn shared_base() -> u32 {
    let base: u32;
    // SAFETY: takes the address of a variable that lives as long as the block; declared in a scope of its own so that
    // inlining the function twice declares two variables, not one name twice.
    unsafe {
        asm!("{{ .shared .align 8 .b8 gradsync_partials[2304]; mov.u32 {0}, gradsync_partials; }}", out(reg32) base,
            options(pure, nomem, nostack))
    };
    base
}

/// # Safety
/// `address` must lie in the block's shared memory, aligned to 8 bytes, with no unsynchronised access by another thread.
#[inline(always)]
pub(crate) unsafe fn shared_store(address: u32, value: f64) {
    // SAFETY: the caller's promise.
    unsafe { asm!("st.shared.f64 [{0}], {1};", in(reg32) address, in(reg64) value, options(nostack)) };
}

/// # Safety
/// As [`shared_store`], and the value must have been written.
#[inline(always)]
pub(crate) unsafe fn shared_load(address: u32) -> f64 {
    let value: f64;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.shared.f64 {0}, [{1}];", out(reg64) value, in(reg32) address, options(pure, nostack, readonly)) };
    value
}

/// The place of the block's [`Ticket`](crate::shared::Ticket).
#[inline(always)]
pub(crate) fn ticket_base() -> u32 {
    let base: u32;
    // SAFETY: as for `shared_base`.
    unsafe {
        asm!("{{ .shared .align 4 .b8 gradsync_ticket[4]; mov.u32 {0}, gradsync_ticket; }}", out(reg32) base,
            options(pure, nomem, nostack))
    };
    base
}

/// # Safety
/// As [`shared_store`], aligned to 4 bytes.
#[inline(always)]
pub(crate) unsafe fn shared_store_u32(address: u32, value: u32) {
    // SAFETY: the caller's promise.
    unsafe { asm!("st.shared.u32 [{0}], {1};", in(reg32) address, in(reg32) value, options(nostack)) };
}

/// # Safety
/// As [`shared_load`], aligned to 4 bytes.
#[inline(always)]
pub(crate) unsafe fn shared_load_u32(address: u32) -> u32 {
    let value: u32;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.shared.u32 {0}, [{1}];", out(reg32) value, in(reg32) address, options(pure, nostack, readonly)) };
    value
}

/// The block's staging memory: two steps of eight vectors, 16 bytes a thread and vector, for blocks of 128 threads.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
pub(crate) fn staging_base() -> u32 {
    let base: u32;
    // SAFETY: as for `shared_base`.
    unsafe {
        asm!("{{ .shared .align 16 .b8 gradsync_staging[32768]; mov.u32 {0}, gradsync_staging; }}", out(reg32) base,
            options(pure, nomem, nostack))
    };
    base
}

/// `cp.async`, past the first-level cache: 16 bytes of global memory to shared memory, under way until waited for.
///
/// # Safety
/// Both addresses are multiples of 16; the memory at `address` is readable, and that at `shared` not used before the wait.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
pub(crate) unsafe fn copy_async_16(shared: u32, address: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("cp.async.cg.shared.global [{0}], [{1}], 16;", in(reg32) shared, in(reg64) address, options(nostack))
    };
}

/// Ends a group of this thread's asynchronous copies.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
pub(crate) fn commit_async() {
    // SAFETY: touches no memory of its own.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}

/// Waits for all groups of this thread's asynchronous copies but the last.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
pub(crate) fn wait_async_but_last() {
    // SAFETY: touches no memory of its own.
    unsafe { asm!("cp.async.wait_group 1;", options(nostack)) };
}

/// # Safety
/// 16 bytes of shared memory at a multiple of 16, written, with no unsynchronised access by another thread.
#[cfg(gradsync_sm = "80")]
#[inline(always)]
pub(crate) unsafe fn shared_load_16(address: u32) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller's promise.
    unsafe {
        asm!("ld.shared.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg32) address, options(nostack))
    };
    [a, b, c, d]
}

/// # Safety
/// 16 readable bytes of global memory at a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn load_16(address: u64) -> [u32; 4] {
    let (a, b, c, d): (u32, u32, u32, u32);
    // SAFETY: the caller's promise.
    unsafe {
        asm!("ld.global.v4.b32 {{{0}, {1}, {2}, {3}}}, [{4}];",
            out(reg32) a, out(reg32) b, out(reg32) c, out(reg32) d, in(reg64) address, options(pure, nostack, readonly))
    };
    [a, b, c, d]
}

/// # Safety
/// 8 readable bytes of global memory at a multiple of 8.
#[inline(always)]
pub(crate) unsafe fn load_8(address: u64) -> [u32; 2] {
    let (a, b): (u32, u32);
    // SAFETY: the caller's promise.
    unsafe {
        asm!("ld.global.v2.b32 {{{0}, {1}}}, [{2}];", out(reg32) a, out(reg32) b, in(reg64) address,
            options(pure, nostack, readonly))
    };
    [a, b]
}

/// # Safety
/// 4 readable bytes of global memory at a multiple of 4.
#[inline(always)]
pub(crate) unsafe fn load_4(address: u64) -> [u32; 1] {
    let a: u32;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.global.b32 {0}, [{1}];", out(reg32) a, in(reg64) address, options(pure, nostack, readonly)) };
    [a]
}

/// # Safety
/// 16 writable bytes of global memory at a multiple of 16.
#[inline(always)]
pub(crate) unsafe fn store_16(address: u64, words: [u32; 4]) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("st.global.v4.b32 [{4}], {{{0}, {1}, {2}, {3}}};",
            in(reg32) words[0], in(reg32) words[1], in(reg32) words[2], in(reg32) words[3], in(reg64) address,
            options(nostack))
    };
}

/// # Safety
/// 8 writable bytes of global memory at a multiple of 8.
#[inline(always)]
pub(crate) unsafe fn store_8(address: u64, words: [u32; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("st.global.v2.b32 [{2}], {{{0}, {1}}};", in(reg32) words[0], in(reg32) words[1], in(reg64) address,
            options(nostack))
    };
}

/// # Safety
/// 4 writable bytes of global memory at a multiple of 4.
#[inline(always)]
pub(crate) unsafe fn store_4(address: u64, words: [u32; 1]) {
    // SAFETY: the caller's promise.
    unsafe { asm!("st.global.b32 [{1}], {0};", in(reg32) words[0], in(reg64) address, options(nostack)) };
}

/// `ld.acquire.sys`: what the writer of the value wrote before it, on any device, is seen after it.
///
/// # Safety
/// `address` is a readable `u32`, of this device, a peer or the host, as far as the system maps it here.
#[inline(always)]
pub(crate) unsafe fn load_acquire(address: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.acquire.sys.b32 {0}, [{1}];", out(reg32) value, in(reg64) address, options(nostack)) };
    value
}

/// `ld.relaxed.sys`.
///
/// # Safety
/// As [`load_acquire`].
#[inline(always)]
pub(crate) unsafe fn load_relaxed(address: u64) -> u32 {
    let value: u32;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.relaxed.sys.b32 {0}, [{1}];", out(reg32) value, in(reg64) address, options(nostack)) };
    value
}

/// `ld.relaxed.gpu`, of 64 bits at once.
///
/// # Safety
/// `address` is a readable `u64` in global memory, at a multiple of 8.
#[inline(always)]
pub(crate) unsafe fn load_relaxed_gpu(address: u64) -> u64 {
    let value: u64;
    // SAFETY: the caller's promise.
    unsafe { asm!("ld.relaxed.gpu.global.b64 {0}, [{1}];", out(reg64) value, in(reg64) address, options(nostack)) };
    value
}

/// `st.relaxed.gpu`, of 64 bits at once.
///
/// # Safety
/// As [`load_relaxed_gpu`], writable.
#[inline(always)]
pub(crate) unsafe fn store_relaxed_gpu(address: u64, value: u64) {
    // SAFETY: the caller's promise.
    unsafe { asm!("st.relaxed.gpu.global.b64 [{0}], {1};", in(reg64) address, in(reg64) value, options(nostack)) };
}

/// `fence.acq_rel.sys`, then `st.relaxed.sys`: everything that this thread has seen or written before is seen, on any device, by
/// whoever acquires the value.
///
/// # Safety
/// As [`load_acquire`], writable.
#[inline(always)]
pub(crate) unsafe fn store_release(address: u64, value: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("fence.acq_rel.sys; st.relaxed.sys.b32 [{0}], {1};", in(reg64) address, in(reg32) value,
            options(nostack))
    };
}

/// `fence.acq_rel.gpu`, then `red.relaxed.gpu.add`: adds one; everything that this thread has seen or written before is seen, on this device,
/// by whoever acquires the value.
///
/// # Safety
/// As [`load_acquire`], of this device, writable.
#[inline(always)]
pub(crate) unsafe fn count_release(address: u64) {
    // SAFETY: the caller's promise.
    unsafe { asm!("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [{0}], 1;", in(reg64) address, options(nostack)) };
}

/// `atom.relaxed.gpu.add` of one: gives back what was there before. Each number is drawn once on this device.
///
/// # Safety
/// As [`load_acquire`], of this device, writable.
#[inline(always)]
pub(crate) unsafe fn draw(address: u64) -> u32 {
    let before: u32;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("atom.relaxed.gpu.global.add.u32 {0}, [{1}], 1;", out(reg32) before, in(reg64) address, options(nostack))
    };
    before
}

/// What a panic would become; no kernel contains one, which a test of the PTX asserts.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: ends the kernel with an error that the host sees.
    unsafe { nvptx::trap() }
}
