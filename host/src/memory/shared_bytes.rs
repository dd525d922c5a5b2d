//! [`SharedBytes`]: memory that several ranks have mapped, in the form that the protocols of mailboxes and lanes use: atomic words, and bytes
//! that the words guard.
//!
//! [`Mapped`] implements it for processes. The tests' `Model` implements it with loom's types, which run the same protocols with threads in
//! every order and report unordered accesses to bytes.

use std::sync::atomic::{AtomicU64, Ordering};

use super::file::Mapped;

#[cfg(test)]
pub(crate) mod model;

/// Memory with atomic words and with bytes, both named by their distance from its start. Words are aligned, lie within the memory, and are
/// only ever accessed as words; the functions have the contracts of [`AtomicU64`].
pub(crate) trait SharedBytes {
    fn load(&self, at: usize, order: Ordering) -> u64;

    fn store(&self, at: usize, value: u64, order: Ordering);

    fn fetch_add(&self, at: usize, value: u64, order: Ordering) -> u64;

    fn compare_exchange(
        &self,
        at: usize,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;

    fn fetch_update(
        &self,
        at: usize,
        set: Ordering,
        fetch: Ordering,
        change: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64>;

    /// Orders this rank's accesses to any memory, as [`std::sync::atomic::fence`].
    #[cfg(unix)]
    fn fence(&self, order: Ordering);

    /// Writes these bytes.
    ///
    /// # Safety
    /// The bytes lie within the memory, and no other rank accesses them meanwhile.
    unsafe fn write(&self, at: usize, bytes: &[u8]);

    /// Borrows `len` bytes.
    ///
    /// # Safety
    /// The bytes lie within the memory, and no rank writes to them while they are borrowed.
    unsafe fn bytes(&self, at: usize, len: usize) -> &[u8];
}

impl Mapped {
    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: the trait's promise: within the memory, aligned, and only ever accessed as an atomic.
        unsafe { &*self.start().wrapping_add(at).cast() }
    }
}

impl SharedBytes for Mapped {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).load(order)
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }

    fn fetch_add(&self, at: usize, value: u64, order: Ordering) -> u64 {
        self.word(at).fetch_add(value, order)
    }

    fn compare_exchange(
        &self,
        at: usize,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.word(at).compare_exchange(current, new, success, failure)
    }

    fn fetch_update(
        &self,
        at: usize,
        set: Ordering,
        fetch: Ordering,
        change: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        self.word(at).fetch_update(set, fetch, change)
    }

    #[cfg(unix)]
    fn fence(&self, order: Ordering) {
        std::sync::atomic::fence(order);
    }

    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start().add(at), bytes.len()) }
    }

    unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start().add(at), len) }
    }
}
