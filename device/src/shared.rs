//! Shared memory, after `cuda_std::shared`: one static array of `f64`, which block-wide reductions use.

use crate::arch;

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
