//! Results of a case, compared with the other ranks first and with the expected values afterwards.
//!
//! Ranks within tolerance that differ from one another would drift apart in training, so bit-identical results come before any tolerance.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

use gradsync::comm::{Communicator, ReduceOp, Scaling};
use gradsync::memory::Cuda;
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::elementwise::scale;
use gradsync_tests::oracle::reduce::{Op, reduce};
use gradsync_tests::tolerance::transport::{Factor, ScaledSum};
use gradsync_tests::tolerance::{assert_equal, assert_within};

/// The expected content of an array.
#[derive(Clone, Debug)]
pub(crate) enum Expected {
    /// Exactly these bits.
    Bits(Array),
    /// Exactly these numbers, where 0 may have either sign.
    Values(Vec<f64>),
    /// Numbers within these bounds of the exact ones.
    Within { exact: Vec<f64>, bounds: Vec<f64> },
}

impl Expected {
    /// The expectation for the shard of one rank.
    pub(crate) fn shard(&self, rank: usize, len: usize) -> Expected {
        let range = rank * len..(rank + 1) * len;
        match self {
            Expected::Bits(array) => {
                Expected::Bits(Array::from_patterns(array.format(), array.patterns()[range].iter().copied()))
            }
            Expected::Values(values) => Expected::Values(values[range].to_vec()),
            Expected::Within { exact, bounds } => {
                Expected::Within { exact: exact[range.clone()].to_vec(), bounds: bounds[range].to_vec() }
            }
        }
    }

    fn check(&self, what: &str, got: &Array) {
        match self {
            Expected::Bits(array) => assert_same(what, &got.patterns(), &array.patterns()),
            Expected::Values(values) => assert_equal(what, &got.values(), values),
            Expected::Within { exact, bounds } => assert_within(what, got.format(), &got.values(), exact, bounds),
        }
    }
}

/// The reduction with factors of one vector per rank, as [`NcclCommunicator`](gradsync::comm::nccl::NcclCommunicator) documents it. Maxima
/// and minima are exact, with the roundings of the `scale` kernel where there are factors; sums and means are within the bound of
/// [`ScaledSum`]. A mean's `1/P` multiplies the inputs where the dtype is f32 or f64 or P is a power of two; otherwise the next smaller
/// power of two does, and the rest multiplies the result.
pub(crate) fn reduced(op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Rc<Expected> {
    let (len, world_size) = (inputs[0].len(), inputs.len());
    let column = |index: usize| inputs.iter().map(move |input| input[index]);
    let extreme = |op: Op| {
        let scaled = |value: f64, factor: f64| if factor == 1.0 { value } else { scale(format, format, value, factor) };
        let value = |index: usize| {
            let inputs: Vec<f64> = column(index).map(|value| scaled(value, scaling.before)).collect();
            scaled(reduce(op, inputs.into_iter()), scaling.after)
        };
        Expected::Values((0..len).map(value).collect())
    };
    let is_mean = match op {
        ReduceOp::Max => return Rc::new(extreme(Op::Max)),
        ReduceOp::Min => return Rc::new(extreme(Op::Min)),
        ReduceOp::Mean => true,
        ReduceOp::Sum => false,
        _ => unreachable!("{op} is not tested here"),
    };
    let is_first = matches!(format, Format::F64 | Format::F32) || world_size.is_power_of_two();
    let divisor = |is_here: bool| if is_mean && is_here { world_size as f64 } else { 1.0 };
    let shrink = if is_mean && !is_first { 1.0 / world_size.next_power_of_two() as f64 } else { 1.0 };
    let first = Factor { numerator: scaling.before * shrink, divisor: divisor(is_first) };
    let last = Factor { numerator: scaling.after / shrink, divisor: divisor(!is_first) };
    let rule = ScaledSum::new(format, world_size, first, last);
    let (exact, bounds) = (0..len).map(|index| rule.expect(column(index))).unzip();
    Rc::new(Expected::Within { exact, bounds })
}

/// Panics with `what` and the first element that differs.
pub(crate) fn assert_same<T: PartialEq + Debug>(what: &str, got: &[T], expected: &[T]) {
    assert_eq!(got.len(), expected.len(), "{what}: wrong number of elements");
    let different = got.iter().zip(expected).position(|(got, expected)| got != expected);
    if let Some(index) = different {
        panic!("{what}: element {index} of {} is {:x?}, expected {:x?}", got.len(), got[index], expected[index]);
    }
}

/// The results of a case and their pending checks.
pub(crate) struct Checks<'c> {
    comm: &'c dyn Communicator<Cuda>,
    /// The results that must be bit-identical on all ranks: their names and hashes.
    shared: Vec<(String, u64)>,
    checks: Vec<Box<dyn FnOnce() + 'c>>,
}

impl<'c> Checks<'c> {
    /// Results will be compared over `comm`.
    pub(crate) fn new(comm: &'c dyn Communicator<Cuda>) -> Self {
        Checks { comm, shared: Vec::new(), checks: Vec::new() }
    }

    /// Adds a result that is equal on all ranks.
    pub(crate) fn same(&mut self, what: impl Into<String>, got: Array, expected: &Rc<Expected>) {
        let what = what.into();
        self.share(&what, &got.patterns());
        self.own(what, got, expected);
    }

    /// Adds a result of this rank alone.
    pub(crate) fn own(&mut self, what: impl Into<String>, got: Array, expected: &Rc<Expected>) {
        let (what, expected) = (what.into(), expected.clone());
        self.checks.push(Box::new(move || expected.check(&what, &got)));
    }

    /// Like [`same`](Self::same), for lists.
    pub(crate) fn same_list<T>(&mut self, what: impl Into<String>, got: Vec<T>, expected: Vec<T>)
    where
        T: Hash + PartialEq + Debug + 'c,
    {
        let what = what.into();
        self.share(&what, &got);
        self.own_list(what, got, expected);
    }

    /// Like [`own`](Self::own), for lists.
    pub(crate) fn own_list<T: PartialEq + Debug + 'c>(
        &mut self,
        what: impl Into<String>,
        got: Vec<T>,
        expected: Vec<T>,
    ) {
        let what = what.into();
        self.checks.push(Box::new(move || assert_same(&what, &got, &expected)));
    }

    fn share(&mut self, what: &str, bits: &[impl Hash]) {
        let mut hasher = DefaultHasher::new();
        (what, bits).hash(&mut hasher);
        self.shared.push((what.to_owned(), hasher.finish()));
    }

    /// Compares hashes with all ranks, then every result with its expectation. All ranks must call it at the same point.
    pub(crate) fn finish(self) {
        let hashes: Vec<u64> = self.shared.iter().map(|(_, hash)| *hash).collect();
        let all = self.comm.gather_words(&hashes).unwrap();
        for (rank, other) in all.chunks(hashes.len().max(1)).enumerate() {
            if let Some(index) = other.iter().zip(&all).position(|(one, first)| one != first) {
                panic!("{}: rank {rank} differs from rank 0", self.shared[index].0);
            }
        }
        self.checks.into_iter().for_each(|check| check());
    }
}
