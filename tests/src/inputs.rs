//! Seeded inputs of every kind that the tests use, exactly representable in the requested format.
//!
//! The operating system's randomness is never used: running a test again reproduces its failure.

use crate::oracle::Format;

/// A family of input vectors, one per rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Uniform signs and significands, a few binary orders of magnitude.
    Random,
    /// Disjoint supports: element i is nonzero on rank i mod P only.
    Orthogonal,
    /// A power of two times one common vector.
    Parallel,
    /// Ranks 2k and 2k+1 hold exact opposites.
    Opposite,
    /// Rank 2k+1 holds the negative of rank 2k's vector, with each element changed by about this relative amount in a random direction; 0
    /// stands for one unit in the last place.
    NearlyOpposite(f64),
    /// All zero.
    Zero,
    /// One rank in the middle is zero, the others random.
    OneRankZero,
    /// Small integer multiples of the smallest subnormal.
    Subnormal,
    /// Disjoint supports of numbers just below the largest that the operation accepts.
    Huge,
}

impl Kind {
    /// The kinds that every Adasum test covers.
    pub const ADASUM: [Kind; 11] = [
        Kind::Random,
        Kind::Orthogonal,
        Kind::Parallel,
        Kind::Opposite,
        Kind::NearlyOpposite(1e-3),
        Kind::NearlyOpposite(1e-6),
        Kind::NearlyOpposite(0.0),
        Kind::Zero,
        Kind::OneRankZero,
        Kind::Subnormal,
        Kind::Huge,
    ];
}

/// splitmix64: a counter and a mixing function; every seed gives an independent stream.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x2545_f491_4f6c_dd1d).wrapping_add(0x1234_5678_9abc_def1))
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.bits() % end
    }

    /// 1 or -1.
    pub fn sign(&mut self) -> f64 {
        if self.bits() & 1 == 0 { 1.0 } else { -1.0 }
    }

    /// A number of `format` with a magnitude between 1/8 and 4.
    pub fn ordinary(&mut self, format: Format) -> f64 {
        let exponent = self.below(5) as i32 - 3;
        format.round(self.sign() * (1.0 + self.unit()) * 2.0_f64.powi(exponent))
    }
}

/// One vector of ordinary numbers.
pub fn vector(format: Format, len: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.ordinary(format)).collect()
}

/// One vector per rank.
pub fn generate(kind: Kind, format: Format, world_size: usize, len: usize, seed: u64) -> Vec<Vec<f64>> {
    let mut random = Random::new(seed ^ 0x5eed);
    let plain = |rank: usize| vector(format, len, seed.wrapping_mul(1009).wrapping_add(rank as u64));
    let supported = |rank: usize, i: usize| i % world_size == rank;
    (0..world_size)
        .map(|rank| match kind {
            Kind::Random => plain(rank),
            Kind::Orthogonal => keep(plain(rank), |i| supported(rank, i)),
            // The factors are powers of two, so that the products are exact in every format.
            Kind::Parallel => plain(0).into_iter().map(|value| value * 2.0_f64.powi(rank as i32 % 4 - 2)).collect(),
            Kind::Opposite if rank % 2 == 1 => plain(rank - 1).into_iter().map(|value| -value).collect(),
            Kind::NearlyOpposite(gap) if rank % 2 == 1 => plain(rank - 1)
                .into_iter()
                .map(|value| {
                    if gap == 0.0 {
                        -format.next_away(value)
                    } else {
                        format.round(-value * (1.0 + random.sign() * gap))
                    }
                })
                .collect(),
            Kind::Opposite | Kind::NearlyOpposite(_) => plain(rank),
            Kind::Zero => vec![0.0; len],
            Kind::OneRankZero if rank == world_size / 2 => vec![0.0; len],
            Kind::OneRankZero => plain(rank),
            Kind::Subnormal => {
                let steps = 1_u64 << (format.precision() - 1);
                (0..len).map(|_| random.sign() * random.below(steps) as f64 * format.smallest()).collect()
            }
            Kind::Huge => {
                // Adasum computes squares in f64. Larger elements of f64 are scaled, beyond the range of an oracle that computes in it.
                let limit = if format == Format::F64 { 1e150 } else { format.max_finite() };
                let values = (0..len).map(|_| random.sign() * limit * (1.0 - random.unit() / 16.0));
                let rounded = values.map(|value| format.round(value).clamp(-limit, limit)).collect();
                keep(rounded, |i| supported(rank, i))
            }
        })
        .collect()
}

fn keep(values: Vec<f64>, kept: impl Fn(usize) -> bool) -> Vec<f64> {
    values.into_iter().enumerate().map(|(i, value)| if kept(i) { value } else { 0.0 }).collect()
}

/// Numbers at which rounding and propagation are error-prone: zeros, subnormals, the limits, infinities, NaN, and ties.
pub fn edges(format: Format) -> Vec<f64> {
    let mut edges = vec![0.0, f64::INFINITY, f64::NAN, 1.0, 3.0, 65504.0, 65519.0, 65520.0, 65521.0, 1e-8, 6e-8, 1e39];
    for other in Format::ALL {
        let (tiny, max, eps) = (other.smallest(), other.max_finite(), 2.0 * other.unit_roundoff());
        let normal = 2.0_f64.powi(other.min_exponent());
        edges.extend([tiny, 1.5 * tiny, 2.0 * tiny, 2.5 * tiny, 0.5 * tiny, 0.5 * tiny * (1.0 + eps)]);
        edges.extend([normal, normal - tiny, max, max * (1.0 - eps), 1.0 + eps, 1.0 + eps / 2.0, 1.0 + 1.5 * eps]);
        edges.push(max * (1.0 + eps / 4.0));
    }
    let negative: Vec<f64> = edges.iter().map(|value| -value).collect();
    edges.extend(negative);
    edges.into_iter().map(|value| format.round(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generate_gives_values_of_the_format_by_the_seed() {
        for format in Format::ALL {
            for kind in Kind::ADASUM {
                let inputs = generate(kind, format, 3, 50, 9);
                assert_eq!(inputs, generate(kind, format, 3, 50, 9));
                for value in inputs.iter().flatten() {
                    assert_eq!(format.round(*value), *value, "{format:?} {kind:?}");
                }
            }
            assert_ne!(vector(format, 50, 1), vector(format, 50, 2));
        }
    }

    #[test]
    fn generate_keeps_huge_orthogonal_vectors_finite() {
        let inputs = generate(Kind::Huge, Format::F32, 2, 8, 1);
        assert!(inputs[0][0].abs() > 0.9 * f64::from(f32::MAX) && inputs[1][0] == 0.0);
    }
}
