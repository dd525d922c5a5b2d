//! Shared memory, after `cuda_std::shared`: one static array of `f64`, which block-wide reductions use, one through which a thread's
//! loads pass where registers are short, and the number of the job that a block works on. Never dynamic: a launch does not say how much there is.

#[cfg(gradsync_sm = "80")]
use crate::abi::{THREADS, VECTOR_BYTES};
use crate::arch;
#[cfg(gradsync_sm = "80")]
use crate::memory;

/// Slots: one for each product of the widest Gram tile and each warp; as many as `arch` declares.
pub(crate) const SHARED_SLOTS: usize = 36 * 8;

/// The block's array of partial sums.
#[derive(Clone, Copy)]
pub(crate) struct Partials(u32);

impl Partials {
    #[inline(always)]
    pub(crate) fn of_block() -> Self {
        Partials(arch::shared_base())
    }

    /// # Safety
    /// `slot < SHARED_SLOTS`, and no other thread may access the slot before the next barrier.
    #[inline(always)]
    pub(crate) unsafe fn write(self, slot: usize, value: f64) {
        // SAFETY: in bounds and unshared by the caller's promise; slots are 8 bytes apart in an aligned array.
        unsafe { arch::shared_store(self.0 + slot as u32 * 8, value) }
    }

    /// # Safety
    /// `slot < SHARED_SLOTS`, written by some thread before the last barrier.
    #[inline(always)]
    pub(crate) unsafe fn read(self, slot: usize) -> f64 {
        // SAFETY: as above.
        unsafe { arch::shared_load(self.0 + slot as u32 * 8) }
    }
}

/// The number of the job that the block has drawn: one thread writes it, all read it.
#[derive(Clone, Copy)]
pub(crate) struct Ticket(u32);

impl Ticket {
    #[inline(always)]
    pub(crate) fn of_block() -> Self {
        Ticket(arch::ticket_base())
    }

    /// # Safety
    /// No other thread may access it before the next barrier.
    #[inline(always)]
    pub(crate) unsafe fn write(self, number: u32) {
        // SAFETY: unshared by the caller's promise, aligned.
        unsafe { arch::shared_store_u32(self.0, number) }
    }

    /// # Safety
    /// Written by some thread before the last barrier.
    #[inline(always)]
    pub(crate) unsafe fn read(self) -> u32 {
        // SAFETY: as above.
        unsafe { arch::shared_load_u32(self.0) }
    }
}

/// A thread's part of the staging memory: eight vectors of 16 bytes for each of two steps, which take turns. No other thread uses it, so
/// that there is nothing to synchronise. For blocks of [`THREADS`].
#[cfg(gradsync_sm = "80")]
#[derive(Clone, Copy)]
pub(crate) struct Staging(u32);

#[cfg(gradsync_sm = "80")]
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
    /// `N` readable elements of 16 bytes together, at an aligned address; what the step before the last one fetched has been read.
    #[inline(always)]
    pub(crate) unsafe fn fetch<T: Copy, const N: usize>(self, step: u32, vector: usize, source: *const T) {
        const { assert!(size_of::<[T; N]>() == VECTOR_BYTES) };
        // SAFETY: the caller's promise; slots are this thread's.
        unsafe { arch::copy_async_16(self.slot(step, vector), source as u64) }
    }

    /// Ends a step: what was fetched since the last call.
    #[inline(always)]
    pub(crate) fn commit(self) {
        arch::commit_async();
    }

    /// Waits for all steps but the last.
    #[inline(always)]
    pub(crate) fn wait_for_all_but_last(self) {
        arch::wait_async_but_last();
    }

    /// What was fetched.
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
