//! Counts the large allocations of this thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The size in bytes from which an allocation is counted: more than the pieces in which transports copy long messages.
pub(crate) const LARGE: usize = 3 << 19;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

fn count(bytes: usize) {
    if bytes >= LARGE {
        // Allocations of a thread that is ending are not counted.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(place, layout, size) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(place, layout) }
    }
}

/// The large allocations of this thread while `body` runs.
pub(crate) fn during<T>(body: impl FnOnce() -> T) -> (T, usize) {
    let before = COUNT.get();
    let result = body();
    (result, COUNT.get() - before)
}
