//! [`combine`]: the weighted sum of any number of vectors, per segment; [`combine_in_place`] overwrites some of the vectors with it.

use std::ops::{Deref, Range};

use super::elementwise::cast_near;
use super::isa::return_on_lanes;
use super::products::{add_weighted, blocks, check_vectors, of_one_type};
use super::tree::{Trees, root};
use super::{BLOCK_LEN, PIECE_LEN, elements, for_each, pieces};
use crate::dtype::{Float, storage, storage_mut, with_float};
use crate::error::{Error, Result, same_len};
use crate::plan::segments;
use crate::slice::{Slice, SliceMut, check_floats, with_typed};

/// Negative zero, which keeps the sign of a zero that is added to it.
pub(super) const NOTHING: f64 = -0.0;

/// Computes `dst[i] = D(Σ w[s][p] × x[p][i])` for every element `i` of every segment `s`: added in `f64` in the order of the vectors,
/// rounded once. `weights` has the shape `segments × P`; elements outside the segments are left unchanged. The dtypes of the vectors and of
/// the destination may all differ.
///
/// # Errors
/// [`Error::LengthMismatch`](crate::Error::LengthMismatch) for vectors, destination or weights of other lengths;
/// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no vectors or bad segments. Nothing is written then.
pub fn combine(dst: SliceMut<'_>, vectors: &[Slice<'_>], weights: &[f64], segments: &[Range<usize>]) -> Result<()> {
    check_vectors("combine", vectors, segments)?;
    same_len("combine", ("destination", dst.len()), ("each vector", vectors[0].len()))?;
    check_floats("combine", dst.as_slice())?;
    same_len("combine", ("weights", weights.len()), ("segments × vectors", segments.len() * vectors.len()))?;
    for_each(pieces(dst, segments), elements(vectors.len(), segments), |(segment, range, piece)| {
        let weights = &weights[segment * vectors.len()..][..vectors.len()];
        with_typed!(piece, piece => with_typed!(vectors[0], first => {
            combine_piece(piece, (vectors, of_one_type(first, vectors)), range, weights);
        }));
    });
    Ok(())
}

/// Computes a piece of [`combine`]'s destination. `alike` are the vectors as typed slices, if they have one dtype.
fn combine_piece<D: Float, S: Float>(
    piece: &mut [D],
    (vectors, alike): (&[Slice<'_>], Option<Vec<&[S]>>),
    range: Range<usize>,
    weights: &[f64],
) {
    let piece = storage_mut(piece);
    if let Some(vectors) = alike {
        let from: Vec<_> = vectors.iter().map(|vector| storage(&vector[range.clone()]).as_ptr()).collect();
        // SAFETY: the destination and the range of every vector have one length, and are borrowed.
        return_on_lanes!(unsafe combine(&[piece.as_mut_ptr()], &from, piece.len(), weights));
    }
    for (block, piece) in blocks(range).zip(piece.chunks_mut(BLOCK_LEN)) {
        cast_near(piece, &weighted_sums(vectors, block, weights));
    }
}

/// A vector of [`combine_in_place`].
pub(crate) enum Operand<'a> {
    /// A vector that is only read.
    Read(Slice<'a>),
    /// A vector that the result replaces.
    Replaced(SliceMut<'a>),
}

impl Operand<'_> {
    fn as_slice(&self) -> Slice<'_> {
        match self {
            Operand::Read(vector) => *vector,
            Operand::Replaced(vector) => vector.as_slice(),
        }
    }
}

/// Writes the result of [`combine`] into every [`Operand::Replaced`]; segments that `trees` selects get the result of
/// [`tree_combine`](super::tree_combine). Elements outside the segments are left unchanged.
///
/// # Errors
/// The errors of these two functions, and [`Error::DTypeMismatch`] for vectors of different dtypes. Nothing is written then.
pub(crate) fn combine_in_place(
    vectors: &mut [Operand<'_>],
    weights: &[f64],
    trees: Option<&Trees>,
    segments: &[Range<usize>],
) -> Result<()> {
    let operation = "combine_in_place";
    let views: Vec<Slice<'_>> = vectors.iter().map(Operand::as_slice).collect();
    check_vectors(operation, &views, segments)?;
    same_len(operation, ("weights", weights.len()), ("segments × vectors", segments.len() * vectors.len()))?;
    if let Some(trees) = trees {
        trees.check(operation, &views, segments)?;
    }
    let dtype = views[0].dtype();
    if let Some(other) = views.iter().find(|view| view.dtype() != dtype) {
        let (what, right) = ("vectors".into(), other.dtype());
        return Err(Error::DTypeMismatch { operation, what, left: dtype, right });
    }
    with_float!(dtype, T => replace::<T>(vectors, weights, trees, segments));
    Ok(())
}

/// A piece of an [`Operand`].
enum OperandPiece<'a, T> {
    Read(&'a [T]),
    Replaced(&'a mut [T]),
}

impl<T> Deref for OperandPiece<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            OperandPiece::Read(piece) => piece,
            OperandPiece::Replaced(piece) => piece,
        }
    }
}

fn replace<T: Float>(vectors: &mut [Operand<'_>], weights: &[f64], trees: Option<&Trees>, segments: &[Range<usize>]) {
    let count = vectors.len();
    let ranges = segments::pieces_of_all(segments, PIECE_LEN);
    let mut of_pieces: Vec<(usize, Vec<OperandPiece<'_, T>>)> =
        ranges.map(|(segment, _)| (segment, Vec::new())).collect();
    for vector in vectors {
        let operands: Vec<OperandPiece<'_, T>> = match vector {
            Operand::Read(vector) => {
                let Some(vector) = vector.typed() else { continue };
                segments::pieces_of_all(segments, PIECE_LEN)
                    .map(|(_, range)| OperandPiece::Read(&vector[range]))
                    .collect()
            }
            Operand::Replaced(vector) => {
                let pieces = pieces(vector.reborrow(), segments).into_iter();
                pieces.filter_map(|(.., piece)| piece.typed().map(OperandPiece::Replaced)).collect()
            }
        };
        for ((_, pieces), operand) in of_pieces.iter_mut().zip(operands) {
            pieces.push(operand);
        }
    }
    for_each(of_pieces, elements(count, segments), |(segment, mut operands)| {
        let tree = trees.and_then(|trees| trees.wanted(segment));
        let weights = &weights[segment * count..][..count];
        match tree {
            Some(tree) => replace_by(&mut operands, |views, block| root(views, block, tree, 1.0)),
            None => replace_by_sums(&mut operands, weights),
        }
    });
}

/// Replaces the operands by their sum with these weights.
fn replace_by_sums<T: Float>(operands: &mut [OperandPiece<'_, T>], weights: &[f64]) {
    let (mut from, mut to) = (Vec::with_capacity(operands.len()), Vec::with_capacity(operands.len()));
    for operand in operands.iter_mut() {
        match operand {
            OperandPiece::Read(piece) => from.push(storage(piece).as_ptr()),
            OperandPiece::Replaced(piece) => {
                let start = storage_mut(piece).as_mut_ptr();
                from.push(start.cast_const());
                to.push(start);
            }
        }
    }
    // SAFETY: all pieces have one length and are borrowed, those to write for this alone.
    return_on_lanes!(unsafe combine(&to, &from, operands[0].len(), weights));
    replace_by(operands, |views, block| weighted_sums(views, block, weights));
}

/// Replaces the operands by the results of blocks of all of them.
fn replace_by<T: Float>(
    operands: &mut [OperandPiece<'_, T>],
    result: impl Fn(&[Slice<'_>], Range<usize>) -> [f64; BLOCK_LEN],
) {
    for block in blocks(0..operands[0].len()) {
        let views: Vec<Slice<'_>> = operands.iter().map(|operand| Slice::from(&**operand)).collect();
        let wide = result(&views, block.clone());
        // Rounded once; the vectors' elements have just been read, and are in the cache.
        let mut result = [T::from_f64(0.0); BLOCK_LEN];
        cast_near(storage_mut(&mut result[..block.len()]), &wide);
        for operand in operands.iter_mut() {
            if let OperandPiece::Replaced(operand) = operand {
                operand[block.clone()].copy_from_slice(&result[..block.len()]);
            }
        }
    }
}

/// Adds the weighted elements of a block of every vector, in the order of the vectors.
fn weighted_sums(vectors: &[Slice<'_>], block: Range<usize>, weights: &[f64]) -> [f64; BLOCK_LEN] {
    let mut sums = [NOTHING; BLOCK_LEN];
    for (vector, &weight) in vectors.iter().zip(weights) {
        with_typed!(vector.range(block.clone()), data => add_weighted(&mut sums, storage(data), weight));
    }
    sums
}

#[cfg(test)]
mod tests {
    use gradsync_device::math::adasum::pairs;
    use gradsync_device::math::elementwise;

    use super::*;
    use crate::kernels::cpu::{isa, tree_combine};

    const RANKS: usize = 5;
    const SEGMENTS: [Range<usize>; 3] = [3..700, 700..701, 900..1333];

    fn vectors<T: Float>() -> Vec<Vec<T>> {
        let value = |rank: usize, index: usize| T::from_f64(((index * 7 + rank * 1000) as f64).sin() * 100.0);
        (0..RANKS).map(|rank| (0..1400).map(|index| value(rank, index)).collect()).collect()
    }

    fn bits<T: Float>(data: &[T]) -> Vec<u64> {
        data.iter().map(|value| value.to_f64().to_bits()).collect()
    }

    fn check<T: Float>() {
        let inputs = vectors::<T>();
        let slices: Vec<Slice<'_>> = inputs.iter().map(Slice::from).collect();
        let weights: Vec<f64> = (0..SEGMENTS.len() * RANKS).map(|index| (index as f64).cos()).collect();

        let mut expected = inputs[0].clone();
        combine(SliceMut::from(&mut expected), &slices, &weights, &SEGMENTS).unwrap();

        // Replaces all vectors but the second, with one segment along its tree.
        let mut trees = Trees::new(RANKS, vec![false, true, true]).unwrap();
        let mut of_trees = vec![1.0; weights.len()];
        for pair in pairs(RANKS) {
            trees.set_pair(pair, &[1.0, 3.0, 4.0].repeat(3), &mut of_trees).unwrap();
        }
        tree_combine(SliceMut::from(&mut expected), &slices, &SEGMENTS, &trees, 1.0).unwrap();
        let mut replaced = inputs.clone();
        let views = replaced.iter_mut().map(|vector| Operand::Replaced(SliceMut::from(vector)));
        let mut operands: Vec<Operand<'_>> = views.collect();
        operands[1] = Operand::Read(Slice::from(&inputs[1]));
        combine_in_place(&mut operands, &weights, Some(&trees), &SEGMENTS).unwrap();
        for (rank, (input, replaced)) in inputs.iter().zip(&replaced).enumerate() {
            let inside = |index: usize| rank != 1 && SEGMENTS.iter().any(|segment| segment.contains(&index));
            let of = |index| if inside(index) { expected[index] } else { input[index] };
            assert_eq!(bits(replaced), bits(&(0..input.len()).map(of).collect::<Vec<T>>()), "{}", T::DTYPE);
        }
    }

    #[test]
    fn combine_in_place_replaces_vectors_by_their_sums() {
        isa::on_each(|| {
            check::<f64>();
            check::<f32>();
            check::<half::f16>();
            check::<half::bf16>();
        });
    }

    #[test]
    fn combine_rounds_sums_of_any_dtype_to_any_other() {
        fn check<S: Float, D: Float>() {
            let inputs = vectors::<S>();
            let slices: Vec<Slice<'_>> = inputs.iter().map(Slice::from).collect();
            let weights: Vec<f64> = (0..SEGMENTS.len() * RANKS).map(|index| (index as f64).cos()).collect();
            let mut expected = vec![D::from_f64(7.0); inputs[0].len()];
            let mut found = expected.clone();
            for (segment, weights) in SEGMENTS.iter().zip(weights.chunks(RANKS)) {
                for index in segment.clone() {
                    let terms = inputs.iter().zip(weights);
                    let sum = terms.fold(NOTHING, |sum, (input, &weight)| {
                        elementwise::add_weighted(sum, weight, input[index].to_f64())
                    });
                    expected[index] = D::from_f64(sum);
                }
            }
            combine(SliceMut::from(&mut found), &slices, &weights, &SEGMENTS).unwrap();
            assert_eq!(bits(&found), bits(&expected), "{} to {}", S::DTYPE, D::DTYPE);
        }
        fn check_from<S: Float>() {
            check::<S, f64>();
            check::<S, f32>();
            check::<S, half::f16>();
            check::<S, half::bf16>();
        }
        isa::on_each(|| {
            check_from::<f64>();
            check_from::<f32>();
            check_from::<half::f16>();
            check_from::<half::bf16>();
        });
    }

    #[test]
    fn combine_rounds_sums_of_several_dtypes_once() {
        let (f64s, f32s) = (vectors::<f64>(), vectors::<f32>());
        let (f16s, bf16s) = (vectors::<half::f16>(), vectors::<half::bf16>());
        let slices = [Slice::from(&f64s[0]), Slice::from(&f32s[1]), Slice::from(&f16s[2]), Slice::from(&bf16s[3])];
        let weights = [0.1, -0.7, 1.3, 0.9];
        let expected = |index: usize| {
            let terms = [f64s[0][index], f32s[1][index].into(), f16s[2][index].to_f64(), bf16s[3][index].to_f64()];
            let add = |sum, (term, weight)| elementwise::add_weighted(sum, weight, term);
            terms.into_iter().zip(weights).fold(NOTHING, add) as f32
        };
        isa::on_each(|| {
            let mut found = vec![0.0_f32; 1400];
            combine(SliceMut::from(&mut found), &slices, &weights, std::slice::from_ref(&(0..1400))).unwrap();
            assert_eq!(bits(&found), bits(&(0..1400).map(expected).collect::<Vec<f32>>()));
        });
    }

    #[test]
    fn combine_keeps_the_signs_of_zeros() {
        fn check<T: Float>() {
            for zero in [0.0, -0.0] {
                let input = vec![T::from_f64(zero); 70];
                let mut found = vec![T::from_f64(1.0); 70];
                let whole = std::slice::from_ref(&(0..70));
                combine(SliceMut::from(&mut found), &[Slice::from(&input); 3], &[0.5; 3], whole).unwrap();
                assert_eq!(bits(&found), bits(&input), "{}", T::DTYPE);
            }
        }
        isa::on_each(|| {
            check::<f64>();
            check::<f32>();
            check::<half::f16>();
            check::<half::bf16>();
        });
    }

    #[test]
    fn combine_in_place_takes_vectors_of_one_dtype() {
        let (wide, mut narrow) = ([0.0f64; 4], [0.0f32; 4]);
        let mut operands = [Operand::Read(Slice::from(&wide[..])), Operand::Replaced(SliceMut::from(&mut narrow[..]))];
        let error = combine_in_place(&mut operands, &[1.0; 2], None, std::slice::from_ref(&(0..4))).unwrap_err();
        assert!(matches!(error, Error::DTypeMismatch { .. }), "{error}");
    }
}
