//! Families of `f64` vectors on which Adasum's rounding errors are visible, with the error bound that gradsync guarantees for them.

use crate::inputs::Random;

/// The largest error of a result of up to 16 ranks in layers of up to 128 elements, in units of `2^-52` of the largest input in magnitude.
///
/// # Derivation
/// The exact path computes in twice the precision and rounds once, so that the error is half a unit in the last place of the result. This
/// is at most `2^-53` of the result; an element of the result of 16 ranks is at most about 16 times the largest input, which gives 8 units.
pub const UNITS: f64 = 8.0;

/// Magnitudes of the ranks' vectors, in turn, with which inner products or their products with weights leave the range of `f64`, though
/// Adasum's result does not: of such vectors, of vectors beside which others vanish, and of both.
pub const OUT_OF_RANGE: [&[f64]; 9] = [
    &[1e-75, 1e90],
    &[1e90, 1e-75, 1.0],
    &[1e160],
    &[1e306],
    &[1e-160, 1e160],
    &[1e-75, 1e300],
    &[1e160, 1e200, 1e250],
    &[1e306, 1e-70, 1e150, 1e-300, 1e40],
    &[1e140, 1e156],
];

/// The largest error of a result whose ranks have [`OUT_OF_RANGE`] magnitudes, in units of `2^-52` of the largest input.
///
/// Products of vectors beyond `1e147` have the precision of sums of `f64`, so that a coefficient errs by about a unit times the ratio of the
/// vectors' norms, and its term by a unit of the longer vector's norm: 32 times its largest element at most, for 1000 elements. The roundings
/// of normally distributed terms mostly cancel.
pub const UNITS_OUT_OF_RANGE: f64 = 32.0;

/// A normally distributed vector of `len` elements for each rank, times the rank's magnitude.
pub fn of_magnitudes(magnitudes: &[f64], ranks: usize, len: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut vectors = Family::Normal.vectors(ranks, len, seed);
    for (vector, &magnitude) in vectors.iter_mut().zip(magnitudes.iter().cycle()) {
        vector.iter_mut().for_each(|element| *element *= magnitude);
    }
    vectors
}

/// A family of vectors.
#[derive(Clone, Copy, Debug)]
pub enum Family {
    /// Normally distributed.
    Normal,
    /// Normally distributed, times a power of two and a bit.
    Scaled(f64),
    /// Each rank has a scale of its own, from `2^-20` to `2^20`.
    Mixed,
    /// Neighbouring ranks have opposite vectors, up to this relative difference; the order within pairs alternates.
    Opposite(f64),
    /// All ranks have the same vector, up to this relative difference.
    Parallel(f64),
    /// Values from 1 to 2: nothing cancels, and results are large.
    Positive,
    /// One element of each vector is by far the largest.
    Spiked,
    /// Small integers including zeros: nodes of the tree cancel exactly.
    Integers,
    /// Every other rank has a zero vector.
    Zeros,
}

impl Family {
    /// All families.
    pub const ALL: [Family; 17] = [
        Family::Normal,
        Family::Scaled(1e-290),
        Family::Scaled(1e-76),
        Family::Scaled(1e-60),
        Family::Scaled(1e60),
        Family::Scaled(1e140),
        Family::Mixed,
        Family::Opposite(1e-2),
        Family::Opposite(1e-7),
        Family::Opposite(1e-11),
        Family::Opposite(1e-15),
        Family::Parallel(1e-3),
        Family::Parallel(1e-14),
        Family::Positive,
        Family::Spiked,
        Family::Integers,
        Family::Zeros,
    ];

    /// A vector of `len` elements for each rank.
    pub fn vectors(self, ranks: usize, len: usize, seed: u64) -> Vec<Vec<f64>> {
        let mut random = Random::new(seed);
        let mut normal = move || {
            // Uniform in (0, 1).
            let mut uniform = || ((random.bits() >> 11) as f64 + 0.5) * 2f64.powi(-53);
            let radius = (-2.0 * uniform().ln()).sqrt();
            radius * (std::f64::consts::TAU * uniform()).cos()
        };
        let base: Vec<f64> = (0..len).map(|_| normal()).collect();
        (0..ranks)
            .map(|rank| {
                let scale = normal().exp2();
                (0..len)
                    .map(|index| match self {
                        Family::Normal => normal(),
                        Family::Scaled(scale) => normal() * scale,
                        Family::Mixed => normal() * 2f64.powi((rank * 23 % 41) as i32 - 20),
                        Family::Opposite(part) => {
                            let sign = if (rank ^ (rank >> 1)) & 1 == 0 { 1.0 } else { -1.0 };
                            sign * base[index] * (1.0 + part * normal())
                        }
                        Family::Parallel(part) => scale * base[index] * (1.0 + part * normal()),
                        Family::Positive => 1.0 + normal().abs().fract(),
                        Family::Spiked => normal() * if index == rank % len { 1e3 } else { 1.0 },
                        Family::Integers => normal().round(),
                        Family::Zeros => normal() * (rank % 2) as f64,
                    })
                    .collect()
            })
            .collect()
    }
}
