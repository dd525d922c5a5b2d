//! Reductions by one process that can read the tensors of all ranks, for example from their checkpoints, while no rank is running.
//!
//! Vectors are read piece by piece, so that memory use does not grow with their lengths. Adasum computes weights in a first pass over the
//! vectors and combines them in a second; the weights of layers that lose digits to cancellation need a pass for each pair of vectors.
//!
//! ```
//! use std::ops::Range;
//!
//! use gradsync::ops::offline::{OfflineOp, OfflineReduction, Processor, RankTensors};
//! use gradsync::{DType, Error, Slice};
//!
//! /// One tensor of two ranks.
//! struct Deltas([Vec<f32>; 2]);
//!
//! impl RankTensors for Deltas {
//!     fn ranks(&self) -> usize {
//!         self.0.len()
//!     }
//!     fn tensor_count(&self) -> usize {
//!         1
//!     }
//!     fn tensor(&self, _: usize) -> (DType, usize) {
//!         (DType::F32, self.0[0].len())
//!     }
//!     fn read(&self, _: usize, elements: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> Result<(), Error> {
//!         let vectors = self.0.each_ref().map(|vector| Slice::from(&vector[elements.clone()]));
//!         work(&vectors);
//!         Ok(())
//!     }
//! }
//!
//! let deltas = Deltas([vec![1.0, 0.0], vec![0.0, 2.0]]);
//! let mut reduction = OfflineReduction::new(&deltas, OfflineOp::Adasum(Default::default()), 1.0, Processor::Cpu)?;
//! let mut result = Vec::new();
//! let weights = reduction.reduce(0, DType::F32, |piece| {
//!     result.extend(piece.to_f64_vec());
//!     Ok::<_, Error>(())
//! })?;
//! assert_eq!((result, weights), (vec![1.0, 2.0], vec![1.0, 1.0])); // orthogonal vectors are added
//! # Ok::<(), Error>(())
//! ```

mod processor;

use std::ops::Range;

use gradsync_device::math::adasum::{self, Criterion, Pair};

pub use self::processor::Processor;
use super::{AdasumOptions, Algorithm, Granularity};
use crate::buffer::GradientBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu::{self, Trees};
use crate::plan::chunks::{Chunk, LONGEST_CHUNK, SumTable};
use crate::slice::Slice;

const OPERATION: &str = "offline reduction";
/// The number of elements of every rank that are processed at a time: whole chunks of any tensor.
const PIECE_LEN: usize = 1 << 22;
const _: () = assert!(PIECE_LEN % LONGEST_CHUNK == 0);

/// The same tensors of several ranks, as one process reads them.
pub trait RankTensors {
    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// The number of tensors of each rank.
    fn tensor_count(&self) -> usize;

    /// The dtype and the number of elements of tensor `index`, which are the same for every rank.
    fn tensor(&self, index: usize) -> (DType, usize);

    /// Calls `work` once with the `elements` of tensor `index` of every rank, in rank order.
    ///
    /// # Errors
    /// Failures of the storage.
    fn read(&self, index: usize, elements: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> Result<()>;
}

/// The operation over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OfflineOp {
    /// The sum.
    Sum,
    /// The sum divided by the number of ranks.
    Mean,
    /// Adasum, with the numerics of [`adasum_all_reduce`](super::adasum_all_reduce). [`Algorithm::Auto`] is `Gram`. On the CPU, the result
    /// has the bits of ranks with the tensors of each dtype in a [`GradientBuffer`], where all tensors have one dtype or each is a layer of
    /// its own.
    Adasum(AdasumOptions),
}

/// The combination of the ranks: one weight per rank, and a tree where the weights alone would amplify rounding.
#[derive(Clone)]
struct Combination {
    weights: Vec<f64>,
    tree: Option<Trees>,
}

/// A reduction of the tensors of all ranks, one tensor after another.
pub struct OfflineReduction<'a> {
    source: &'a dyn RankTensors,
    op: OfflineOp,
    factor: f64,
    processor: Processor,
    /// The combination of all tensors as one layer, once it has been computed.
    whole: Option<Combination>,
}

impl<'a> OfflineReduction<'a> {
    /// Prepares a reduction whose results are multiplied by `factor`. Reads no elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no ranks, a factor that is not finite, or tensors that exceed the address space;
    /// [`Error::UnsupportedWorldSize`] for the tree over a number of ranks that is no power of two.
    pub fn new(source: &'a dyn RankTensors, op: OfflineOp, factor: f64, processor: Processor) -> Result<Self> {
        if source.ranks() == 0 {
            return Err(refused("there are no ranks".into()));
        }
        if !factor.is_finite() {
            return Err(refused(format!("the factor {factor} is not finite")));
        }
        if let OfflineOp::Adasum(AdasumOptions { algorithm, .. }) = op {
            algorithm.check_ranks(OPERATION, source.ranks())?;
        }
        Ok(Self { source, op, factor, processor, whole: None })
    }

    /// Passes the result of tensor `index` to `take`, piece by piece in order, each element rounded once to `dtype`. Returns the weight of
    /// each rank's tensor in it, the factor included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a tensor that does not exist, or whose dtype or length from [`RankTensors::read`] differs from
    /// [`RankTensors::tensor`]; errors of `read`, of `take`, and of a GPU.
    pub fn reduce<E: From<Error>>(
        &mut self,
        index: usize,
        dtype: DType,
        mut take: impl FnMut(Slice<'_>) -> Result<(), E>,
    ) -> Result<Vec<f64>, E> {
        let count = self.source.tensor_count();
        if index >= count {
            return Err(refused(format!("tensor {index} of {count}")).into());
        }
        let Combination { weights, tree } = self.combination(index)?;
        let (ranks, piece_len) = (self.source.ranks(), self.source.tensor(index).1.min(PIECE_LEN));
        let mut output = GradientBuffer::new(dtype, 1, [("output", [piece_len])])?;
        // A mean is the sum divided, rounded once: this buffer holds its wide sums. Every other operation is one weighted sum.
        let divisor = if self.op == OfflineOp::Mean { ranks as f64 } else { 1.0 };
        let mut wide = match divisor {
            1.0 => None,
            _ => Some(GradientBuffer::new(DType::F64, 1, [("wide", [piece_len])])?),
        };
        let of_ranks: Vec<f64> = weights.iter().map(|weight| weight / divisor * self.factor).collect();
        self.for_each_piece(index..index + 1, |vectors, _| {
            let len = vectors[0].len();
            let mut piece = output.as_mut_slice().range_mut(0..len);
            match (&tree, &mut wide) {
                (Some(tree), _) => cpu::tree_combine(piece, vectors, &[0..len], tree, self.factor)?,
                (None, None) => self.processor.combine(piece, vectors, &of_ranks)?,
                (None, Some(wide)) => {
                    self.processor.combine(wide.as_mut_slice().range_mut(0..len), vectors, &weights)?;
                    let sums = wide.tensor_mut(0).into_data().typed::<f64>().expect("made as f64");
                    sums.iter_mut().for_each(|sum| *sum = *sum / divisor * self.factor);
                    cpu::cast(piece.reborrow(), wide.as_slice().range(0..len))?;
                }
            }
            take(output.as_slice().range(0..len))
        })?;
        Ok(of_ranks)
    }

    /// Computes the combination of the ranks for one tensor.
    fn combination(&mut self, index: usize) -> Result<Combination> {
        match self.op {
            OfflineOp::Sum | OfflineOp::Mean => Ok(Combination { weights: vec![1.0; self.source.ranks()], tree: None }),
            OfflineOp::Adasum(AdasumOptions { algorithm, granularity: Granularity::Tensor }) => {
                self.adasum(algorithm, index..index + 1)
            }
            OfflineOp::Adasum(AdasumOptions { algorithm, granularity: Granularity::Whole }) => {
                let whole = match self.whole.take() {
                    Some(whole) => whole,
                    None => self.adasum(algorithm, 0..self.source.tensor_count())?,
                };
                Ok(self.whole.insert(whole).clone())
            }
        }
    }

    /// Computes the combination of the ranks for several tensors as one vector.
    fn adasum(&self, algorithm: Algorithm, tensors: Range<usize>) -> Result<Combination> {
        if algorithm == Algorithm::Tree { self.rounded_tree(tensors) } else { self.gram(tensors) }
    }

    fn gram(&self, tensors: Range<usize>) -> Result<Combination> {
        let ranks = self.source.ranks();
        // Tensors that form one vector may differ in dtype: the narrowest limits the precision of the result, the widest its range.
        let is_double = tensors.clone().all(|tensor| self.is_double(tensor));
        let len = tensors.clone().map(|tensor| self.source.tensor(tensor).1).sum();
        let mut gram = vec![0.0; adasum::products(ranks)];
        self.for_each_piece(tensors.clone(), |vectors, chunks| self.processor.add_gram(&mut gram, vectors, chunks))?;
        let found = cpu::coefficients_by(&gram, ranks, |_| Criterion::of(is_double, len))?;
        let has_overflowed = tensors.clone().any(|tensor| self.is_double(tensor))
            && cpu::coefficients_by(&gram, ranks, |_| Criterion::Overflow)?.cancelled[0];
        if !found.cancelled[0] && !has_overflowed {
            return Ok(Combination { weights: found.weights, tree: None });
        }
        // The norms have lost their digits to cancellation, so they are recomputed from the vectors. Such layers are rare or short, and the
        // passes over them run on the CPU for every processor, which gives the same bits.
        let mut tree = match is_double || has_overflowed {
            true => Trees::precise(ranks, vec![true], &gram)?,
            false => Trees::new(ranks, vec![true])?,
        };
        let weights = self.weights(&mut tree, tensors)?;
        Ok(Combination { weights, tree: Some(tree) })
    }

    /// Computes the combination of [`Algorithm::Tree`].
    fn rounded_tree(&self, tensors: Range<usize>) -> Result<Combination> {
        let mut tree = Trees::rounded(self.source.ranks(), vec![true])?;
        let weights = self.weights(&mut tree, tensors)?;
        Ok(Combination { weights, tree: Some(tree) })
    }

    /// Computes the coefficients of a tree of one layer, pair by pair, and the weights of all ranks.
    fn weights(&self, tree: &mut Trees, tensors: Range<usize>) -> Result<Vec<f64>> {
        let ranks = self.source.ranks();
        let mut weights = vec![1.0; ranks];
        for pair in adasum::pairs(ranks) {
            let mut sums = self.sums(tree, pair, tensors.clone())?;
            if tensors.clone().any(|tensor| self.is_double(tensor)) && tree.scale_pair(pair, &sums)? {
                sums = self.sums(tree, pair, tensors.clone())?;
            }
            tree.set_pair(pair, &sums, &mut weights)?;
        }
        Ok(weights)
    }

    /// Whether a tensor is of `f64`, whose products may overflow.
    fn is_double(&self, tensor: usize) -> bool {
        self.source.tensor(tensor).0 == DType::F64
    }

    /// Computes the sums of one pair of a tree of one layer.
    fn sums(&self, tree: &Trees, pair: Pair, tensors: Range<usize>) -> Result<Vec<f64>> {
        let mut sums = vec![0.0; tree.sums()];
        self.for_each_piece(tensors, |vectors, chunks| {
            cpu::add_tree_dots(&mut sums, vectors, chunks, tree, pair);
            Ok::<_, Error>(())
        })?;
        Ok(sums)
    }

    /// Calls `work` with every rank's elements of each piece of the tensors, and the piece's chunks, all of one layer.
    fn for_each_piece<E: From<Error>>(
        &self,
        tensors: Range<usize>,
        mut work: impl FnMut(&[Slice<'_>], &[Chunk]) -> Result<(), E>,
    ) -> Result<(), E> {
        for tensor in tensors {
            let len = self.source.tensor(tensor).1;
            let table = SumTable::new(std::slice::from_ref(&(0..len)), 1, 0);
            for begin in (0..len).step_by(PIECE_LEN) {
                let piece = begin..len.min(begin + PIECE_LEN);
                let chunks = table.within(piece.clone());
                read(self.source, tensor, piece, |vectors| work(vectors, &chunks))??;
            }
        }
        Ok(())
    }
}

/// Reads elements of every rank, and returns the result of `work` on them.
fn read<T>(
    source: &dyn RankTensors,
    index: usize,
    elements: Range<usize>,
    work: impl FnOnce(&[Slice<'_>]) -> T,
) -> Result<T> {
    let (mut work, mut outcome) = (Some(work), None);
    let (ranks, dtype, len) = (source.ranks(), source.tensor(index).0, elements.len());
    source.read(index, elements, &mut |vectors| {
        let is_right = vectors.len() == ranks && vectors.iter().all(|own| own.dtype() == dtype && own.len() == len);
        outcome = work.take().filter(|_| is_right).map(|work| work(vectors));
    })?;
    let reason = || format!("tensor {index} was not read once as {len} elements of {dtype} of each of {ranks} ranks");
    outcome.ok_or_else(|| refused(reason()))
}

fn refused(reason: String) -> Error {
    Error::InvalidArgument { operation: OPERATION, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One tensor of three elements, of which `read` passes `len` elements of `given` ranks in each of `calls` calls.
    struct Ranks {
        ranks: usize,
        given: usize,
        len: usize,
        calls: usize,
    }

    const RIGHT: Ranks = Ranks { ranks: 3, given: 3, len: 3, calls: 1 };

    impl RankTensors for Ranks {
        fn ranks(&self) -> usize {
            self.ranks
        }
        fn tensor_count(&self) -> usize {
            1
        }
        fn tensor(&self, _: usize) -> (DType, usize) {
            (DType::F32, 3)
        }
        fn read(&self, _: usize, _: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> Result<()> {
            (0..self.calls).for_each(|_| work(&vec![Slice::from(&[1.0f32, 2.0, 3.0][..self.len]); self.given]));
            Ok(())
        }
    }

    fn reduce(source: &Ranks, op: OfflineOp, factor: f64, index: usize) -> Result<(Vec<f64>, Vec<f64>)> {
        let mut reduction = OfflineReduction::new(source, op, factor, Processor::Cpu)?;
        let mut result = Vec::new();
        let weights = reduction.reduce(index, DType::F64, |piece| {
            result.extend(piece.to_f64_vec());
            Ok::<_, Error>(())
        })?;
        Ok((result, weights))
    }

    #[test]
    fn offline_reduction_sums_means_and_combines_with_a_factor() {
        let adasum = OfflineOp::Adasum(AdasumOptions::default());
        let reduced = |op, factor| reduce(&RIGHT, op, factor, 0).unwrap();
        assert_eq!(reduced(OfflineOp::Sum, 2.0), (vec![6.0, 12.0, 18.0], vec![2.0; 3]));
        assert_eq!(reduced(OfflineOp::Mean, 3.0), (vec![3.0, 6.0, 9.0], vec![1.0 / 3.0 * 3.0; 3]));
        assert_eq!(reduced(adasum, -1.0), (vec![-1.0, -2.0, -3.0], vec![-0.25, -0.25, -0.5]));
    }

    #[test]
    fn offline_reduction_names_each_mistake() {
        let tree = OfflineOp::Adasum(AdasumOptions::default().with_algorithm(Algorithm::Tree));
        let sum = OfflineOp::Sum;
        for (source, op, factor, index, words) in [
            (RIGHT, sum, f64::NAN, 0, "the factor NaN is not finite"),
            (RIGHT, sum, 1.0, 1, "tensor 1 of 1"),
            (RIGHT, tree, 1.0, 0, "a power of two of ranks"),
            (Ranks { ranks: 0, ..RIGHT }, sum, 1.0, 0, "there are no ranks"),
            (Ranks { given: 2, ..RIGHT }, sum, 1.0, 0, "not read once as 3 elements of f32 of each of 3 ranks"),
            (Ranks { len: 2, ..RIGHT }, sum, 1.0, 0, "not read once"),
            (Ranks { calls: 0, ..RIGHT }, sum, 1.0, 0, "not read once"),
            (Ranks { calls: 2, ..RIGHT }, sum, 1.0, 0, "not read once"),
        ] {
            let error = reduce(&source, op, factor, index).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
