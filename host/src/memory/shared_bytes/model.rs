//! [`Model`]: shared memory of loom's types. Loom runs the threads of a small program in every order, lets loads return every value that their
//! orderings allow, and panics at accesses to bytes that no ordering separates.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use loom::sync::atomic::{AtomicU64, fence};

use super::SharedBytes;

/// The accesses of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Load,
    Store,
    FetchAdd,
    Exchange,
    FailedExchange,
    Update,
    FailedUpdate,
    /// A fence, which concerns no word.
    Fence,
}

/// A word's accesses of one kind that get another ordering, by which a test shows that the model depends on the right one. A relaxed fence
/// is none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weakened {
    pub(crate) at: usize,
    pub(crate) access: Access,
    pub(crate) to: Ordering,
}

/// Memory with the given words, and with bytes in the given cells, within which accesses are not told apart.
#[derive(Debug)]
pub(crate) struct Model {
    words: Vec<(usize, AtomicU64)>,
    cells: Vec<(Range<usize>, loom::cell::UnsafeCell<()>)>,
    bytes: UnsafeCell<Vec<u8>>,
    weakened: Option<Weakened>,
}

// SAFETY: loom runs all threads of a model in turn on one thread of the system.
unsafe impl Send for Model {}
// SAFETY: as above.
unsafe impl Sync for Model {}

impl Model {
    pub(crate) fn new(
        words: &[usize],
        cells: impl IntoIterator<Item = Range<usize>>,
        weakened: Option<Weakened>,
    ) -> Arc<Self> {
        let words = words.iter().map(|&at| (at, AtomicU64::new(0))).collect();
        let cells: Vec<_> = cells.into_iter().map(|range| (range, loom::cell::UnsafeCell::new(()))).collect();
        let end = cells.iter().map(|(range, _)| range.end).max().unwrap_or(0);
        Arc::new(Self { words, cells, bytes: vec![0; end].into(), weakened })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        &self.words.iter().find(|(word, _)| *word == at).expect("a word of the model").1
    }

    fn order(&self, at: usize, access: Access, order: Ordering) -> Ordering {
        let weakened = self.weakened.filter(|weakened| (weakened.at, weakened.access) == (at, access));
        weakened.map_or(order, |weakened| weakened.to)
    }

    /// Shows an access to these bytes to loom.
    fn touch(&self, at: usize, len: usize, touch: impl Fn(&loom::cell::UnsafeCell<()>)) {
        let mut touched = 0;
        for (range, cell) in &self.cells {
            let common = range.end.min(at + len).saturating_sub(range.start.max(at));
            touched += common;
            if common > 0 {
                touch(cell);
            }
        }
        assert_eq!(touched, len, "bytes {at} to {} are not all in cells of the model", at + len);
    }
}

impl SharedBytes for Arc<Model> {
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).load(self.order(at, Access::Load, order))
    }

    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.word(at).store(value, self.order(at, Access::Store, order));
    }

    fn fetch_add(&self, at: usize, value: u64, order: Ordering) -> u64 {
        self.word(at).fetch_add(value, self.order(at, Access::FetchAdd, order))
    }

    fn compare_exchange(
        &self,
        at: usize,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        let (success, failure) =
            (self.order(at, Access::Exchange, success), self.order(at, Access::FailedExchange, failure));
        self.word(at).compare_exchange(current, new, success, failure)
    }

    fn fetch_update(
        &self,
        at: usize,
        set: Ordering,
        fetch: Ordering,
        change: impl FnMut(u64) -> Option<u64>,
    ) -> Result<u64, u64> {
        let (set, fetch) = (self.order(at, Access::Update, set), self.order(at, Access::FailedUpdate, fetch));
        self.word(at).fetch_update(set, fetch, change)
    }

    #[cfg(unix)]
    fn fence(&self, order: Ordering) {
        match self.weakened.filter(|weakened| weakened.access == Access::Fence) {
            Some(weakened) if weakened.to == Ordering::Relaxed => {}
            Some(weakened) => fence(weakened.to),
            None => fence(order),
        }
    }

    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        self.touch(at, bytes.len(), |cell| cell.with_mut(|_| ()));
        // SAFETY: no other thread runs meanwhile, and the caller promises that nobody borrows these bytes.
        unsafe { (*self.bytes.get()).as_mut_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    unsafe fn bytes(&self, at: usize, len: usize) -> &[u8] {
        self.touch(at, len, |cell| cell.with(|_| ()));
        // SAFETY: within the bytes, by the check above; the caller promises that nobody writes while they are borrowed.
        unsafe { std::slice::from_raw_parts((*self.bytes.get()).as_ptr().add(at), len) }
    }
}

/// Runs a program of threads in every order, or in those with at most so many interruptions of threads that could go on. Prints the number of
/// orders.
pub(crate) fn explore(name: &str, interruptions: Option<usize>, program: impl Fn() + Sync + Send + 'static) {
    let (start, mut builder) = (Instant::now(), loom::model::Builder::new());
    builder.preemption_bound = interruptions;
    let orders = Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counted = orders.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        program();
    });
    println!("{name}: {} orders in {:.1?}", orders.load(Ordering::Relaxed), start.elapsed());
}

/// Asserts that an exploration with a weakened ordering finds an error of the program.
pub(crate) fn assert_is_missed(weakened: &Weakened, explore: impl FnOnce()) {
    let panic = catch_unwind(AssertUnwindSafe(explore)).expect_err(&format!("{weakened:?} is not missed"));
    let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
    let is_found = ["Causality violation", "left == right", "[Some("].iter().any(|start| text.contains(start));
    assert!(is_found && !text.contains("that all"), "{weakened:?}: {text}");
}
