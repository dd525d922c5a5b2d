//! Reductions over ranks (sum, mean, max, min of one value per rank), and the data-moving collectives as index arithmetic.
//!
//! Sums run in rank order in `f64` and are rounded once, as the specification says, so that results are compared for equality.

use super::exact::Wide;
use super::format::{Format, power_of_two};

/// The reduction operation over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Sum.
    Sum,
    /// Sum divided by the number of ranks.
    Mean,
    /// Maximum; NaN if any is NaN.
    Max,
    /// Minimum; NaN if any is NaN.
    Min,
}

impl Op {
    /// All four.
    pub const ALL: [Op; 4] = [Op::Sum, Op::Mean, Op::Max, Op::Min];
}

/// The reduction of one element over ranks, in `f64`, before the rounding to the dtype.
///
/// The mean is correctly rounded; an implementation may multiply by a rounded `1/P` instead, see [`crate::tolerance::mean`].
pub fn reduce(op: Op, values: impl Iterator<Item = f64> + Clone) -> f64 {
    let count = values.clone().count() as f64;
    match op {
        Op::Sum => within_range(values, |values| values.reduce(|sum, value| sum + value).unwrap_or(0.0)),
        Op::Mean => within_range(values, |values| {
            let sum = values.fold(Wide::ZERO, |sum, value| sum.add(Wide::new(value)));
            sum.div(Wide::new(count)).value()
        }),
        Op::Max => values.reduce(|best, value| pick(best, value, value > best)).unwrap_or(f64::NEG_INFINITY),
        Op::Min => values.reduce(|best, value| pick(best, value, value < best)).unwrap_or(f64::INFINITY),
    }
}

/// A sum or a mean that no overflow on the way changes: of the values that are not finite, if there are any, or of smaller numbers.
fn within_range<I: Iterator<Item = f64> + Clone>(
    values: I,
    reduce: impl Fn(&mut dyn Iterator<Item = f64>) -> f64,
) -> f64 {
    let plain = reduce(&mut values.clone());
    if plain.is_finite() {
        return plain;
    }
    if values.clone().any(|value| !value.is_finite()) {
        return reduce(&mut values.filter(|value| !value.is_finite()));
    }
    let down = power_of_two(-100);
    reduce(&mut values.map(|value| value * down)) / down
}

fn pick(best: f64, value: f64, better: bool) -> f64 {
    if best.is_nan() || value.is_nan() {
        f64::NAN
    } else if better {
        value
    } else {
        best
    }
}

/// The all-reduce of one vector per rank, rounded once to `format`.
pub fn all_reduce(op: Op, format: Format, inputs: &[Vec<f64>]) -> Vec<f64> {
    let len = inputs.first().map_or(0, Vec::len);
    (0..len).map(|i| format.round(reduce(op, inputs.iter().map(|input| input[i])))).collect()
}

/// The result on rank `rank` of an all-to-all: block `rank` of every rank, in rank order.
pub fn all_to_all(inputs: &[Vec<f64>], rank: usize) -> Vec<f64> {
    let block = inputs[rank].len() / inputs.len();
    inputs.iter().flat_map(|input| input[rank * block..(rank + 1) * block].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reduce_lets_nan_win_in_either_order() {
        for op in [Op::Max, Op::Min] {
            assert!(reduce(op, [1.0, f64::NAN, 2.0].into_iter()).is_nan());
            assert!(reduce(op, [f64::NAN, 1.0].into_iter()).is_nan());
        }
        assert_eq!(reduce(Op::Max, [1.0, 3.0, 2.0].into_iter()), 3.0);
        assert_eq!(reduce(Op::Mean, [1.0, 2.0].into_iter()), 1.5);
    }
}
