//! The error bound of a reduction computed by a transport: in the dtype of the data, in an unspecified order, with scaling factors.
//!
//! # Derivation
//!
//! The reduction is `g Σ_r f x_r` over P ranks, with real factors `f` and `g`. Let `u` be the unit roundoff of the dtype, and `w` the unit
//! roundoff of the multiplications in a pass over the data: f64 for data of f64, f32 for all others.
//!
//! **Additions.** A sum of P numbers, in any tree, has P − 1 additions, so that no number meets more than P − 1 roundings to the dtype on
//! its way to the root. A transport may accumulate in the next wider precision, of unit roundoff `v`: then the P − 1 roundings are to the
//! wider precision, and fewer roundings are to the dtype, but at least one unless P is 1. The bound counts both, so that it covers either
//! case.
//!
//! **Factors.** A multiplication by a power of two does not round. For f64 and f32, any other factor is rounded itself (`u`), and so is its
//! product (`u`). For f16 and bf16, either the transport multiplies by a factor that is representable in the dtype, which rounds the
//! product (`u`), or a pass rounds the factor and the product to f32 (`2w`) and then to the dtype (`u`). A quotient by P has been rounded
//! in f64 before (at most `w`).
//!
//! With `k` roundings to the dtype, `m` by `w` and P − 1 by `v` on the path of each `x_r` (Higham, section 3.1),
//!
//! > |computed − exact| ≤ ((1 + u)^k (1 + w)^m (1 + v)^(P − 1) − 1) |f g| Σ|x_r|, where (1 + u)^k ≤ 1 + γ_k(u).
//!
//! **Underflow.** The error of a rounding among the subnormals is up to half the smallest number of the dtype instead. There are at most
//! three such roundings for each input before the multiplication by `g`, which scales their errors, and two afterwards. The bound uses the
//! whole smallest number instead of half of it, because later roundings may enlarge such an error.
//!
//! **The oracle** adds and multiplies in about 106 bits and rounds the outcome to `f64`. This rounding counts for the dtype f64 alone: for
//! all others it is far smaller than the difference between `γ` and `k u`.

use super::UNIT;
use crate::oracle::Format;
use crate::oracle::exact::Wide;

/// A factor, as a quotient that need not be representable in any format.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Factor {
    /// The numerator.
    pub numerator: f64,
    /// The denominator: 1, or the number of ranks.
    pub divisor: f64,
}

impl Factor {
    /// The value of the factor.
    fn exact(self) -> Wide {
        Wide::new(self.numerator).div(Wide::new(self.divisor))
    }

    fn magnitude(self) -> f64 {
        (self.numerator / self.divisor).abs()
    }

    /// The numbers of roundings to the dtype and of finer roundings in a multiplication by this factor.
    fn roundings(self, format: Format) -> (usize, usize) {
        if is_power_of_two(self.numerator) && is_power_of_two(self.divisor) {
            return (0, 0);
        }
        match format {
            Format::F64 | Format::F32 => (2, 1),
            Format::F16 | Format::BF16 => (1, 3),
        }
    }
}

fn is_power_of_two(value: f64) -> bool {
    value.is_normal() && value.to_bits() & ((1 << 52) - 1) == 0
}

/// A reduction over ranks with a factor for the inputs and one for the result.
#[derive(Clone, Copy, Debug)]
pub struct ScaledSum {
    format: Format,
    world_size: usize,
    factor: Wide,
    last: f64,
    relative: f64,
}

impl ScaledSum {
    /// A reduction of numbers of `format` over `world_size` ranks.
    pub fn new(format: Format, world_size: usize, first: Factor, last: Factor) -> ScaledSum {
        let ((k_first, m_first), (k_last, m_last)) = (first.roundings(format), last.roundings(format));
        let (single, additions) = (Format::F32.unit_roundoff(), world_size - 1);
        let (of_passes, of_sums) = match format {
            Format::F64 => (UNIT, 0.0),
            Format::F32 => (single, UNIT),
            Format::F16 | Format::BF16 => (single, single),
        };
        let relative = [
            growth(k_first + additions + k_last, format.unit_roundoff()),
            growth(m_first + m_last, of_passes),
            growth(additions, of_sums),
        ];
        // (1 + a) (1 + b) − 1, computed without cancellation.
        let relative = relative.into_iter().fold(0.0, |one, other| one + other + one * other);
        ScaledSum { format, world_size, factor: first.exact().mul(last.exact()), last: last.magnitude(), relative }
    }

    /// The exact result for one element of every rank, and the largest error of a correct result.
    pub fn expect(&self, values: impl Iterator<Item = f64>) -> (f64, f64) {
        let (mut sum, mut magnitude) = (Wide::ZERO, 0.0);
        for value in values {
            sum = sum.add(Wide::new(value));
            magnitude += value.abs();
        }
        let exact = sum.mul(self.factor).value();
        let mut bound = self.relative * self.factor.value().abs() * magnitude;
        if self.relative > 0.0 {
            bound += self.format.smallest() * (3.0 * self.world_size as f64 * self.last.max(1.0) + 2.0);
        }
        if self.relative > 0.0 && self.format == Format::F64 {
            bound += UNIT * exact.abs();
        }
        (exact, bound)
    }
}

/// `γ_k` for the unit roundoff `unit`.
fn growth(roundings: usize, unit: f64) -> f64 {
    let product = roundings as f64 * unit;
    product / (1.0 - product)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::{Random, vector};
    use crate::oracle::elementwise::scale;
    use crate::tolerance::within;

    const ONE: Factor = Factor { numerator: 1.0, divisor: 1.0 };

    /// Adds in the dtype, in a random order.
    fn add(format: Format, mut values: Vec<f64>, random: &mut Random) -> f64 {
        while values.len() > 1 {
            let one = values.swap_remove(random.below(values.len() as u64) as usize);
            let place = random.below(values.len() as u64) as usize;
            values[place] = format.round(values[place] + one);
        }
        values[0]
    }

    /// A product as NCCL computes it: with a factor rounded to the dtype.
    fn multiply(format: Format, value: f64, factor: f64) -> f64 {
        format.round(value * format.round(factor))
    }

    #[test]
    fn scaled_sum_bounds_sums_and_means_in_any_order() {
        let mut random = Random::new(3);
        for format in Format::ALL {
            for world_size in 1..9 {
                let columns = vector(format, world_size * 500, world_size as u64);
                let third = Factor { numerator: 1.0, divisor: world_size as f64 };
                let tenth = Factor { numerator: 0.1, divisor: 1.0 };
                let sum = ScaledSum::new(format, world_size, ONE, ONE);
                let mean_before = ScaledSum::new(format, world_size, third, ONE);
                let mean_after = ScaledSum::new(format, world_size, tenth, third);
                for column in columns.chunks(world_size) {
                    let check = |rule: &ScaledSum, actual: f64| {
                        let (exact, bound) = rule.expect(column.iter().copied());
                        assert!(within(format, actual, exact, bound), "{format:?} {column:?}: {actual:e}, {exact:e}");
                    };
                    check(&sum, add(format, column.to_vec(), &mut random));
                    let wider = if format == Format::F32 || format == Format::F64 { Format::F64 } else { Format::F32 };
                    check(&sum, format.round(add(wider, column.to_vec(), &mut random)));
                    let share = 1.0 / world_size as f64;
                    if matches!(format, Format::F64 | Format::F32) || world_size.is_power_of_two() {
                        let inputs = column.iter().map(|&value| multiply(format, value, share)).collect();
                        check(&mean_before, add(format, inputs, &mut random));
                    }
                    let inputs = column.iter().map(|&value| scale(format, format, value, 0.1)).collect();
                    check(&mean_after, scale(format, format, add(format, inputs, &mut random), share));
                }
            }
        }
    }

    #[test]
    fn scaled_sum_of_one_rank_without_factors_is_exact() {
        for format in Format::ALL {
            let half = Factor { numerator: -0.5, divisor: 4.0 };
            assert_eq!(ScaledSum::new(format, 1, ONE, ONE).expect([3.25].into_iter()), (3.25, 0.0));
            assert_eq!(ScaledSum::new(format, 1, half, ONE).expect([4.0].into_iter()), (-0.5, 0.0));
            let (exact, bound) = ScaledSum::new(format, 2, ONE, ONE).expect([1.0, 2.0].into_iter());
            assert!(exact == 3.0 && bound > 0.0 && bound < 8.0 * format.unit_roundoff(), "{format:?}: {bound:e}");
        }
    }
}
