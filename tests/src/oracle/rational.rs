//! Adasum of `f64` vectors in rational arithmetic: nothing is rounded, and the error of a result is known exactly.
//!
//! A node of the tree is a vector of integers over one common denominator, times a power of two that all nodes share. Fractions are never
//! reduced to lowest terms: the numbers grow about fivefold with each level, to some ten thousand digits for 16 ranks.

use num_bigint::{BigInt, Sign};

use super::adasum::SMALLEST_SQUARED_NORM;

/// A vector: `numerators / denominator × 2^exponent`.
#[derive(Clone, Debug)]
pub struct Exact {
    numerators: Vec<BigInt>,
    /// Positive.
    denominator: BigInt,
    exponent: i64,
}

/// The Adasum of one layer, given one vector of finite numbers per rank.
pub fn adasum(inputs: &[Vec<f64>]) -> Exact {
    let values = || inputs.iter().flatten();
    let exponent = values().filter(|value| **value != 0.0).map(|&value| parts(value).1).min().unwrap_or(0);
    let mut nodes: Vec<Exact> = inputs
        .iter()
        .map(|input| Exact {
            numerators: input.iter().map(|&value| integer(value, exponent)).collect(),
            denominator: BigInt::from(1),
            exponent,
        })
        .collect();
    while nodes.len() > 1 {
        nodes = nodes.chunks(2).map(|pair| if let [a, b] = pair { combine(a, b) } else { pair[0].clone() }).collect();
    }
    nodes.swap_remove(0)
}

impl Exact {
    /// The largest error of any element of `found`, in multiples of `unit`, which is positive.
    pub fn error_of(&self, found: &[f64], unit: f64) -> f64 {
        assert_eq!(found.len(), self.numerators.len(), "a result of another length");
        let error = |(found, numerator): (&f64, &BigInt)| {
            if !found.is_finite() {
                return f64::INFINITY;
            }
            let (unit, unit_exponent) = parts(unit);
            // As multiples of 2^lowest, all operands are integers.
            let lowest = self.exponent.min(parts(*found).1).min(unit_exponent);
            let difference = integer(*found, lowest) * &self.denominator - (numerator << (self.exponent - lowest));
            let divisor = (BigInt::from(unit) << (unit_exponent - lowest)) * &self.denominator;
            ratio(&difference, &divisor)
        };
        found.iter().zip(&self.numerators).map(error).fold(0.0, f64::max)
    }
}

/// `2^-52` of the largest input in magnitude.
pub fn unit(inputs: &[Vec<f64>]) -> f64 {
    inputs.iter().flatten().fold(0.0_f64, |most, value| most.max(value.abs())) * f64::EPSILON
}

fn combine(a: &Exact, b: &Exact) -> Exact {
    let (dot, a_square, b_square) = (product(a, b), product(a, a), product(b, b));
    // The coefficient of `one` is `1 - (dot / ab) / (2 square / aa)`, with the denominators a and b; it is returned as a fraction.
    let coefficient = |one: &Exact, other: &Exact, square: &BigInt| {
        if !has_coefficient(one, square) {
            return (BigInt::from(1), BigInt::from(1));
        }
        let divisor = BigInt::from(2) * square * &other.denominator;
        (&divisor - &dot * &one.denominator, divisor)
    };
    let (left, left_divisor) = coefficient(a, b, &a_square);
    let (right, right_divisor) = coefficient(b, a, &b_square);
    // Both terms, `left/left_divisor × a` and `right/right_divisor × b`, are brought to a common denominator.
    let (a_divisor, b_divisor) = (left_divisor * &a.denominator, right_divisor * &b.denominator);
    let (a_factor, b_factor) = (left * &b_divisor, right * &a_divisor);
    let terms = a.numerators.iter().zip(&b.numerators);
    Exact {
        numerators: terms.map(|(x, y)| &a_factor * x + &b_factor * y).collect(),
        denominator: a_divisor * b_divisor,
        exponent: a.exponent,
    }
}

/// Whether the squared norm, `square` over the denominator's square, is at least [`SMALLEST_SQUARED_NORM`].
fn has_coefficient(vector: &Exact, square: &BigInt) -> bool {
    let (smallest, exponent) = parts(SMALLEST_SQUARED_NORM);
    let bound = BigInt::from(smallest) * &vector.denominator * &vector.denominator;
    let shift = 2 * vector.exponent - exponent;
    if shift >= 0 { (square << shift) >= bound } else { *square >= (bound << -shift) }
}

fn product(a: &Exact, b: &Exact) -> BigInt {
    a.numerators.iter().zip(&b.numerators).map(|(x, y)| x * y).sum()
}

/// A finite number as an integer times a power of two.
fn parts(value: f64) -> (i64, i64) {
    const DIGITS: u64 = (1 << 52) - 1;
    let (bits, sign) = (value.to_bits(), if value < 0.0 { -1 } else { 1 });
    let (biased, digits) = ((bits >> 52) & 0x7ff, (bits & DIGITS) as i64);
    assert!(biased < 0x7ff, "{value} is not finite");
    if biased == 0 { (sign * digits, -1074) } else { (sign * (digits + (1 << 52)), biased as i64 - 1075) }
}

/// A number as an integer multiple of `2^exponent`; the number must be such a multiple.
fn integer(value: f64, exponent: i64) -> BigInt {
    let (digits, own) = parts(value);
    if digits == 0 { BigInt::from(0) } else { BigInt::from(digits) << (own - exponent) }
}

/// `|numerator / denominator|`, with sixty significant bits.
fn ratio(numerator: &BigInt, denominator: &BigInt) -> f64 {
    if numerator.sign() == Sign::NoSign {
        return 0.0;
    }
    let shift = denominator.bits() as i64 - numerator.bits() as i64 + 62;
    let quotient = if shift >= 0 { (numerator << shift) / denominator } else { numerator / (denominator << -shift) };
    let quotient = i128::try_from(quotient).expect("63 bits or 62").unsigned_abs() as f64;
    quotient * 2f64.powi(-shift.clamp(-900, 900) as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adasum_of_small_vectors_by_hand() {
        let exact = |inputs: &[&[f64]]| adasum(&inputs.iter().map(|input| input.to_vec()).collect::<Vec<_>>());
        // Parallel vectors give their mean, orthogonal ones their sum.
        assert_eq!(exact(&[&[1.0, 2.0], &[3.0, 6.0]]).error_of(&[2.0, 4.0], 1.0), 0.0);
        assert_eq!(exact(&[&[1.0, 0.0], &[0.0, 5.0]]).error_of(&[1.0, 5.0], 1.0), 0.0);
        // (1 - 3/4) (1, 1) + (1 - 3/10) (1, 2) = (0.95, 1.65)
        let error = exact(&[&[1.0, 1.0], &[1.0, 2.0]]).error_of(&[0.95, 1.65], f64::EPSILON);
        assert!(error < 1.0, "{error}");
        // The mean of exact opposites has norm zero, so that the pair rule adds the other vector unchanged.
        assert_eq!(exact(&[&[1.0], &[3.0], &[-2.0], &[-2.0], &[7.0]]).error_of(&[7.0], 1.0), 0.0);
        assert_eq!(exact(&[&[1e-200], &[3e-200]]).error_of(&[4e-200], 1e-216), 0.0, "no coefficient");
        assert_eq!(exact(&[&[1.0], &[1.0]]).error_of(&[1.0 + f64::EPSILON], f64::EPSILON), 1.0);
        assert_eq!(unit(&[vec![0.5, -4.0]]), 4.0 * f64::EPSILON);
    }
}
