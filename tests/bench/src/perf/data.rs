//! The contents of vectors when results are checked: small integers, so that every sum and product is exact in every dtype.
//!
//! Elements repeat with a period of [`PERIOD`], so that the expected values are a table of [`PERIOD`] numbers. All ranks hold different
//! vectors, and shards whose offsets differ by less than the period are different. Ranks from the 64th on hold zeros, because sums over
//! more ranks would not be exact in bf16.

use gradsync::comm::ReduceOp;
use gradsync::internal::kernels::cpu;
use gradsync::{Slice, SliceMut};
use rayon::prelude::*;

/// The period of a vector's elements.
pub(crate) const PERIOD: usize = 61;
const RANKS_WITH_VALUES: usize = 64;
const CHUNK_LEN: usize = 1 << 16;

/// The element at `index` of rank `rank`'s vector: 0, 1 or 2, pseudo-random.
pub(crate) fn value(rank: usize, index: usize) -> f64 {
    if rank >= RANKS_WITH_VALUES {
        return 0.0;
    }
    let mixed = ((index % PERIOD * RANKS_WITH_VALUES + rank) as u32 + 1).wrapping_mul(0x9e37_79b1);
    let mixed = (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca6b);
    f64::from((mixed ^ mixed >> 13) % 3)
}

/// Rank `rank`'s element of a reduction: the value, multiplied by the number of ranks for a mean.
pub(crate) fn operand(op: ReduceOp, ranks: usize, rank: usize, index: usize) -> f64 {
    let factor = if op == ReduceOp::Mean { ranks as f64 } else { 1.0 };
    factor * value(rank, index)
}

/// The reduction of all ranks' operands, by index modulo [`PERIOD`].
pub(crate) fn reduced(op: ReduceOp, ranks: usize) -> [f64; PERIOD] {
    std::array::from_fn(|index| {
        let values = (0..ranks).map(|rank| value(rank, index));
        match op {
            ReduceOp::Sum | ReduceOp::Mean => values.sum(),
            ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
            ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
            _ => unreachable!("{op} is not measured"),
        }
    })
}

/// The relative tolerance of a result: zero, except for means, whose factor is not exact for every number of ranks.
pub(crate) fn tolerance(op: ReduceOp) -> f64 {
    if op == ReduceOp::Mean { 1.0 / 64.0 } else { 0.0 }
}

/// The scaling factor.
pub(crate) const FACTOR: f64 = 2.0;

/// The inner product of the first `len` elements of two ranks' vectors.
pub(crate) fn product(left: usize, right: usize, len: usize) -> f64 {
    let count = |residue: usize| len.saturating_sub(residue).div_ceil(PERIOD) as f64;
    (0..PERIOD).map(|index| count(index) * value(left, index) * value(right, index)).sum()
}

/// The weight of a vector in a weighted sum.
pub(crate) fn weight(vector: usize) -> f64 {
    (vector % 2 + 1) as f64
}

/// The weighted sum of vectors, by index modulo [`PERIOD`].
pub(crate) fn weighted(vectors: usize) -> [f64; PERIOD] {
    std::array::from_fn(|index| (0..vectors).map(|vector| weight(vector) * value(vector, index)).sum())
}

/// A rank's element for Adasum. In tensors of even number, each element is nonzero on one rank alone; the ranks' vectors are hence
/// orthogonal, and their Adasum is their sum. Tensors of odd number are equal on all ranks, and their Adasum is the common vector. If
/// `summed` ranks are added first, one of them holds twice the vector and another its negative, so that Adasum without that sum would
/// differ.
pub(crate) fn adasum_operand(tensor: usize, ranks: usize, summed: usize, rank: usize, index: usize) -> f64 {
    let factor = match (tensor % 2, rank % summed) {
        (0, _) => f64::from(u8::from(index % ranks == rank)),
        _ if summed == 1 => 1.0,
        (_, 0) => 2.0,
        (_, 1) => -1.0,
        _ => 0.0,
    };
    factor * adasum(index)
}

/// The Adasum of all ranks' [`adasum_operand`]s.
pub(crate) fn adasum(index: usize) -> f64 {
    (1 + index % 3) as f64
}

/// Writes every element, using all threads.
pub(crate) fn fill(data: SliceMut<'_>, value: impl Fn(usize) -> f64 + Sync) {
    let (dtype, size) = (data.dtype(), data.dtype().size_bytes());
    data.as_bytes_mut().par_chunks_mut(CHUNK_LEN * size).enumerate().for_each(|(chunk, bytes)| {
        let begin = chunk * CHUNK_LEN;
        let values: Vec<f64> = (begin..begin + bytes.len() / size).map(&value).collect();
        cpu::cast(SliceMut::of_bytes(dtype, bytes), Slice::from(&values)).expect("as many elements");
    });
}

/// The number of elements whose relative error exceeds the tolerance.
pub(crate) fn count_wrong(data: Slice<'_>, tolerance: f64, expected: impl Fn(usize) -> f64 + Sync) -> u64 {
    let wrong = |chunk| {
        let begin = chunk * CHUNK_LEN;
        let found = data.range(begin..data.len().min(begin + CHUNK_LEN)).to_f64_vec();
        let is_wrong = |(index, found): &(usize, &f64)| {
            let expected = expected(begin + index);
            let error = (**found - expected).abs();
            error.is_nan() || error > tolerance * expected.abs()
        };
        found.iter().enumerate().filter(is_wrong).count() as u64
    };
    (0..data.len().div_ceil(CHUNK_LEN)).into_par_iter().map(wrong).sum()
}

/// The number of values in a short list that differ from the expected ones.
pub(crate) fn count_differing(found: &[f64], expected: impl Iterator<Item = f64>) -> u64 {
    let mut expected = expected;
    found.iter().filter(|&&found| expected.next() != Some(found)).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduced_is_exact_in_every_dtype() {
        for ranks in [1, 2, 7, 64, 1000] {
            for table in [reduced(ReduceOp::Sum, ranks), weighted(ranks)] {
                for sum in table {
                    assert_eq!(gradsync::bf16::from_f64(sum).to_f64(), sum, "{ranks} ranks");
                    assert_eq!(gradsync::f16::from_f64(sum).to_f64(), sum, "{ranks} ranks");
                }
            }
        }
    }

    /// The check must detect a rank's data in the position of another rank, or a shard in the position of another shard.
    #[test]
    fn value_differs_between_ranks_and_shards() {
        let vector =
            |rank: usize, begin: usize| (0..PERIOD).map(|index| value(rank, begin + index)).collect::<Vec<_>>();
        for rank in 0..RANKS_WITH_VALUES {
            for other in 0..rank {
                assert_ne!(vector(rank, 0), vector(other, 0), "{rank} and {other}");
            }
            for begin in 1..PERIOD {
                assert_ne!(vector(rank, 0), vector(rank, begin), "{rank} from {begin} on");
            }
        }
        // Without any one of the ranks, the maximum or minimum changes at some index.
        for (op, ranks) in [(ReduceOp::Max, 4), (ReduceOp::Min, 4)] {
            for left_out in 0..ranks {
                let of = |all: bool, index| {
                    let values = (0..ranks).filter(|&rank| all || rank != left_out).map(|rank| value(rank, index));
                    if op == ReduceOp::Max { values.fold(0.0, f64::max) } else { values.fold(9.0, f64::min) }
                };
                assert!((0..PERIOD).any(|index| of(true, index) != of(false, index)), "{op:?} without {left_out}");
            }
        }
    }

    #[test]
    fn product_is_of_the_elements() {
        for len in 0..3 * PERIOD {
            for (left, right) in [(0, 0), (0, 1), (1, 2), (2, 70)] {
                let sum: f64 = (0..len).map(|index| value(left, index) * value(right, index)).sum();
                assert_eq!(product(left, right, len), sum);
            }
        }
    }

    #[test]
    fn count_wrong_counts_wrong_elements() {
        let mut data = vec![0.0f32; 2 * CHUNK_LEN + 5];
        fill((&mut data).into(), |index| value(1, index));
        assert_eq!(count_wrong((&data).into(), 0.0, |index| value(1, index)), 0);
        data[7] += 1.0;
        data[CHUNK_LEN] = f32::NAN;
        assert_eq!(count_wrong((&data).into(), 0.0, |index| value(1, index)), 2);
        let means = [1.0f32, 1.01, 1.1];
        assert_eq!(count_wrong((&means[..]).into(), tolerance(ReduceOp::Mean), |_| 1.0), 1);
    }
}
