//! Results of a case, compared with the other ranks first and with the expected values afterwards.
//!
//! Ranks within tolerance that differ from one another would drift apart in training, so bit-identical results come before any tolerance.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use gradsync::comm::Ranks;

use crate::array::Array;
use crate::tolerance::{assert_equal, assert_within};

/// The expected content of an array.
#[derive(Clone, Debug)]
pub enum Expected {
    /// Exactly these bits.
    Bits(Array),
    /// Exactly these numbers, where 0 may have either sign.
    Values(Vec<f64>),
    /// Numbers within these bounds of the exact ones.
    Within {
        /// The exact numbers.
        exact: Vec<f64>,
        /// The largest errors.
        bounds: Vec<f64>,
    },
}

impl Expected {
    /// Exactly the bits of an array.
    pub fn bits(array: Array) -> Rc<Expected> {
        Rc::new(Expected::Bits(array))
    }

    /// The expectation for the shard of one rank.
    pub fn shard(&self, rank: usize, len: usize) -> Rc<Expected> {
        let range = rank * len..(rank + 1) * len;
        Rc::new(match self {
            Expected::Bits(array) => Expected::Bits(array.range(range)),
            Expected::Values(values) => Expected::Values(values[range].to_vec()),
            Expected::Within { exact, bounds } => {
                Expected::Within { exact: exact[range.clone()].to_vec(), bounds: bounds[range].to_vec() }
            }
        })
    }

    fn check(&self, what: &str, got: &Array) {
        match self {
            Expected::Bits(array) => assert_same(what, &got.patterns(), &array.patterns()),
            Expected::Values(values) => assert_equal(what, &got.values(), values),
            Expected::Within { exact, bounds } => assert_within(what, got.format(), &got.values(), exact, bounds),
        }
    }
}

/// Panics with `what` and the first element that differs.
///
/// # Panics
/// If the lists differ.
pub fn assert_same<T: PartialEq + Debug>(what: &str, got: &[T], expected: &[T]) {
    assert_eq!(got.len(), expected.len(), "{what}: wrong number of elements");
    let different = got.iter().zip(expected).position(|(got, expected)| got != expected);
    if let Some(index) = different {
        panic!("{what}: element {index} of {} is {:x?}, expected {:x?}", got.len(), got[index], expected[index]);
    }
}

/// The results of a case and their pending checks.
pub struct Checks<'c> {
    comm: &'c dyn Ranks,
    /// The results that must be bit-identical on all ranks: their names and hashes.
    shared: Vec<(String, u64)>,
    checks: Vec<Box<dyn FnOnce() + 'c>>,
}

impl<'c> Checks<'c> {
    /// Results will be compared over `comm`.
    pub fn new(comm: &'c dyn Ranks) -> Self {
        Checks { comm, shared: Vec::new(), checks: Vec::new() }
    }

    /// Adds a result that is equal on all ranks.
    pub fn same(&mut self, what: impl Into<String>, got: Array, expected: &Rc<Expected>) {
        let what = what.into();
        self.share(&what, &got.patterns());
        self.own(what, got, expected);
    }

    /// Adds a result of this rank alone.
    pub fn own(&mut self, what: impl Into<String>, got: Array, expected: &Rc<Expected>) {
        let (what, expected) = (what.into(), expected.clone());
        self.checks.push(Box::new(move || expected.check(&what, &got)));
    }

    /// Like [`same`](Self::same), for lists.
    pub fn same_list<T>(&mut self, what: impl Into<String>, got: Vec<T>, expected: Vec<T>)
    where
        T: Hash + PartialEq + Debug + 'c,
    {
        let what = what.into();
        self.share(&what, &got);
        self.own_list(what, got, expected);
    }

    /// Like [`own`](Self::own), for lists.
    pub fn own_list<T: PartialEq + Debug + 'c>(&mut self, what: impl Into<String>, got: Vec<T>, expected: Vec<T>) {
        let what = what.into();
        self.checks.push(Box::new(move || assert_same(&what, &got, &expected)));
    }

    fn share(&mut self, what: &str, bits: &[impl Hash]) {
        let mut hasher = DefaultHasher::new();
        (what, bits).hash(&mut hasher);
        self.shared.push((what.to_owned(), hasher.finish()));
    }

    /// Compares hashes with all ranks, then every result with its expectation. All ranks must call it at the same point.
    ///
    /// # Panics
    /// If a result differs.
    pub fn finish(self) {
        let hashes: Vec<u64> = self.shared.iter().map(|(_, hash)| *hash).collect();
        let all = self.comm.gather_words(&hashes).expect("every rank's hashes");
        for (rank, other) in all.chunks(hashes.len().max(1)).enumerate() {
            if let Some(index) = other.iter().zip(&all).position(|(one, first)| one != first) {
                panic!("{}: rank {rank} differs from rank 0", self.shared[index].0);
            }
        }
        self.checks.into_iter().for_each(|check| check());
    }
}
