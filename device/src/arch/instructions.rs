//! Machine instructions for kernels that `cuda_std` lacks, one function per instruction: wide and asynchronous loads, an atomic addition
//! without a result, markers for the compiler and the assembler.
//!
//! Nothing here decides anything; `memory`, `shared`, `peers` and `reduce` define the use of these instructions.

use super::asm;

/// The same number, opaque to the compiler: a loop with this bound is not unrolled.
#[inline(always)]
pub(crate) fn opaque(number: u32) -> u32 {
    let same;
    // SAFETY: copies a register.
    unsafe { asm!("mov.b32 {0}, {1};", out(reg32) same, in(reg32) number, options(pure, nomem, nostack)) };
    same
}

/// The same address, opaque to the compiler, at each execution: memory there is loaded anew and not kept in registers around a
/// loop.
#[inline(always)]
pub(crate) fn forget(address: u64) -> u64 {
    let same;
    // SAFETY: copies a register. Not `pure`, so that it stays in the loop.
    unsafe { asm!("mov.b64 {0}, {1};", out(reg64) same, in(reg64) address, options(nomem, nostack)) };
    same
}

/// A bit for each lane of the warp in which the condition holds.
///
/// # Safety
/// All lanes of the warp must execute this together.
#[inline(always)]
pub(crate) unsafe fn ballot(condition: bool) -> u32 {
    let lanes: u32;
    // SAFETY: the caller's promise.
    unsafe {
        asm!("{{ .reg .pred holds; setp.ne.u32 holds, {1}, 0; vote.sync.ballot.b32 {0}, holds, -1; }}", out(reg32) lanes,
            in(reg32) condition as u32, options(nomem, nostack))
    };
    lanes
}

/// A marker for `cargo xtask ptx`, which replaces it by the directives `.maxntid` and `.minnctapersm` and, where `UNROLL` is 0, the pragma
/// `nounroll`: these precede a body, where inline assembly cannot be.
#[inline(always)]
pub(crate) fn launch_bounds<const THREADS: u32, const BLOCKS: u32, const UNROLL: u32>() {
    // SAFETY: no instruction.
    unsafe {
        asm!(".pragma \"gradsync.launch_bounds {0} {1} {2}\";", const THREADS, const BLOCKS, const UNROLL,
            options(nomem, nostack, preserves_flags))
    };
}

/// The block's staging memory: two steps of eight vectors, 16 bytes per thread and vector, for blocks of 128 threads.
#[cfg(feature = "sm_80")]
#[inline(always)]
pub(crate) fn staging_base() -> u32 {
    let base: u32;
    // SAFETY: takes the address of a variable that lives as long as the block; declared in a scope of its own so that
    // inlining the function twice declares two variables, not one name twice.
    unsafe {
        asm!("{{ .shared .align 16 .b8 gradsync_staging[32768]; mov.u32 {0}, gradsync_staging; }}", out(reg32) base,
            options(pure, nomem, nostack))
    };
    base
}

/// `cp.async`, bypassing the first-level cache: 16 bytes of global memory to shared memory, asynchronous until waited for.
///
/// # Safety
/// Both addresses are multiples of 16; the memory at `address` is readable, and the memory at `shared` not used before the wait.
#[cfg(feature = "sm_80")]
#[inline(always)]
pub(crate) unsafe fn copy_async_16(shared: u32, address: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("cp.async.cg.shared.global [{0}], [{1}], 16;", in(reg32) shared, in(reg64) address, options(nostack))
    };
}

/// Ends a group of this thread's asynchronous copies.
#[cfg(feature = "sm_80")]
#[inline(always)]
pub(crate) fn commit_async() {
    // SAFETY: accesses no memory itself.
    unsafe { asm!("cp.async.commit_group;", options(nostack)) };
}

/// Waits for all groups of this thread's asynchronous copies except the last.
#[cfg(feature = "sm_80")]
#[inline(always)]
pub(crate) fn wait_async_but_last() {
    // SAFETY: accesses no memory itself.
    unsafe { asm!("cp.async.wait_group 1;", options(nostack)) };
}

/// # Safety
/// 16 bytes of shared memory at a multiple of 16, written, with no unsynchronised access by another thread.
#[cfg(feature = "sm_80")]
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

/// `fence.acq_rel.gpu`, then `red.relaxed.gpu.add`: adds one. All earlier reads and writes of this thread are visible, on this device, to a
/// thread that acquires the value.
///
/// # Safety
/// A writable word in global memory of this device.
#[inline(always)]
pub(crate) unsafe fn count_release(address: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [{0}], 1;", in(reg64) address as u64, options(nostack))
    };
}

/// Orders all earlier reads and writes of this thread before all its later ones, for every GPU.
#[inline(always)]
pub(crate) fn fence_system() {
    // SAFETY: accesses no memory itself.
    unsafe { asm!("fence.acq_rel.sys;", options(nostack)) };
}

/// Two words of 8 bytes, each of which is read at once; the later one may be older. For memory that any GPU writes meanwhile.
///
/// # Safety
/// 16 readable bytes of global memory at a multiple of 16, of this device or a peer.
#[inline(always)]
pub(crate) unsafe fn load_packet(address: u64) -> [u64; 2] {
    let (a, b): (u64, u64);
    // SAFETY: the caller's promise.
    unsafe {
        asm!("ld.relaxed.sys.global.v2.b64 {{{0}, {1}}}, [{2}];", out(reg64) a, out(reg64) b, in(reg64) address,
            options(nostack))
    };
    [a, b]
}

/// Two words of 8 bytes, each of which is written at once, for readers on any GPU.
///
/// # Safety
/// 16 writable bytes of global memory at a multiple of 16, of this device or a peer.
#[inline(always)]
pub(crate) unsafe fn store_packet(address: u64, words: [u64; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("st.relaxed.sys.global.v2.b64 [{2}], {{{0}, {1}}};", in(reg64) words[0], in(reg64) words[1],
            in(reg64) address, options(nostack))
    };
}
