//! The block's shared memory: the array of `f64` for block-wide reductions, the number of the job that a block works on, packets that a block's
//! threads leave for its first team, and the staging memory of a thread's loads where registers are short. All of it is static: a launch does not set its size.

#[cfg(feature = "sm_80")]
use crate::abi::{THREADS, VECTOR_BYTES};
#[cfg(feature = "sm_80")]
use crate::arch;
use crate::dialect::shared::array;
#[cfg(feature = "sm_80")]
use crate::memory;

/// The number of slots: one for each product of the widest Gram tile and each of 8 warps.
pub(crate) const SHARED_SLOTS: usize = 36 * 8;

array! {
    /// The block's array of partial sums.
    pub(crate) fn partials() -> "gradsync_partials": [f64; SHARED_SLOTS]
}

array! {
    /// The number of the job that the block has drawn, an array of one: one thread writes it, all read it.
    pub(crate) fn ticket() -> "gradsync_ticket": [u32; 1]
}

/// The number of packets in [`packets`]: one for each of 512 threads and four ranks.
pub(crate) const STAGED_PACKETS: usize = 2048;

array! {
    /// All ranks' packets of a part of a chunk, one for each thread and rank, in words: `[rank][word][packet]`.
    pub(crate) fn packets() -> "gradsync_packets": [u64; 2 * STAGED_PACKETS]
}

/// A thread's part of the staging memory: eight vectors of 16 bytes for each of two steps, which alternate. No other thread uses it, so
/// that no synchronisation is needed. For blocks of [`THREADS`].
#[cfg(feature = "sm_80")]
#[derive(Clone, Copy)]
pub(crate) struct Staging(u32);

#[cfg(feature = "sm_80")]
impl Staging {
    #[inline(always)]
    pub(crate) fn of_thread() -> Self {
        Staging(arch::staging_base() + crate::thread::thread_idx_x() * VECTOR_BYTES as u32)
    }

    #[inline(always)]
    fn slot(self, step: u32, vector: usize) -> u32 {
        self.0 + (step % 2 * 8 + vector as u32) * THREADS * VECTOR_BYTES as u32
    }

    /// Starts to load `N` elements of one of eight vectors.
    ///
    /// # Safety
    /// `N` readable elements of 16 bytes together, at an aligned address; the data of the step before the last have been read.
    #[inline(always)]
    pub(crate) unsafe fn fetch<T: Copy, const N: usize>(self, step: u32, vector: usize, source: *const T) {
        const { assert!(size_of::<[T; N]>() == VECTOR_BYTES) };
        // SAFETY: the caller's promise; slots are this thread's.
        unsafe { arch::copy_async_16(self.slot(step, vector), source as u64) }
    }

    /// Ends a step, which consists of the fetches since the last call.
    #[inline(always)]
    pub(crate) fn commit(self) {
        arch::commit_async();
    }

    /// Waits for all steps except the last.
    #[inline(always)]
    pub(crate) fn wait_for_all_but_last(self) {
        arch::wait_async_but_last();
    }

    /// Reads the fetched elements.
    ///
    /// # Safety
    /// The step has been waited for, and fetched elements of this type.
    #[inline(always)]
    pub(crate) unsafe fn read<T: Copy, const N: usize>(self, step: u32, vector: usize) -> [T; N] {
        const { assert!(size_of::<[T; N]>() == VECTOR_BYTES) };
        // SAFETY: the caller's promise.
        unsafe { memory::reinterpret(arch::shared_load_16(self.slot(step, vector))) }
    }
}
