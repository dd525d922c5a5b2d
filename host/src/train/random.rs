//! [`SplitMix64`] and [`RankSeeds`]: random numbers that are the same on every machine and in every version of this crate.

use twox_hash::XxHash3_64;

/// The increment of the generator's state: 2⁶⁴ over the golden ratio, rounded to odd.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes a word: the output function of SplitMix64.
const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// Derives a seed from a seed and a list of words: `h ← mix((h ⊕ word) + γ)` for each, beginning with `h = mix(seed + γ)`.
pub(super) fn derive(seed: u64, words: &[u64]) -> u64 {
    words.iter().fold(mix(seed.wrapping_add(GAMMA)), |hash, word| mix((hash ^ word).wrapping_add(GAMMA)))
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GAMMA);
        mix(self.0)
    }

    /// A uniform number below `end`: the upper word of a product, repeated while the lower word is below `2⁶⁴ mod end` (Lemire, "Fast
    /// random integer generation in an interval", 2019).
    pub(super) fn below(&mut self, end: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(end);
            if product as u64 >= end.wrapping_neg() % end {
                return (product >> 64) as u64;
            }
        }
    }
}

/// Seeds of random generators on every rank, derived from one seed.
///
/// Ranks need different random numbers for dropout, or each would drop the same activations of its own examples; ranks of one
/// tensor-parallel group have parts of one activation, and need the same numbers. Seeds of different purposes and numbers are unrelated.
///
/// A seed is SplitMix64's mixing function over the seed, the XXH3 (64 bits, seed 0) of the purpose, and the number; it does not change with
/// the version of this crate.
///
/// ```
/// use gradsync::groups::{GroupKind, Sizes, Topology};
/// use gradsync::train::RankSeeds;
///
/// let seeds = RankSeeds::new(42);
/// assert_ne!(seeds.of("dropout", 0), seeds.of("dropout", 1));
/// assert_ne!(seeds.common("init"), seeds.common("shuffle"));
///
/// // Ranks 0 and 1 share each layer.
/// let sizes = Sizes { world: 4, local: 4, data: 2, horizontal: 2, pipeline: 1 };
/// let dropout = |rank| Ok::<_, gradsync::Error>(seeds.of("dropout", Topology::new(rank, sizes)?.group(GroupKind::Horizontal)?.id));
/// assert_eq!(dropout(0)?, dropout(1)?);
/// assert_ne!(dropout(0)?, dropout(2)?);
/// # Ok::<(), gradsync::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RankSeeds {
    seed: u64,
}

impl RankSeeds {
    /// Creates the seeds from the seed of the whole run.
    pub const fn new(seed: u64) -> Self {
        Self { seed }
    }

    /// The seed of the whole run.
    pub const fn seed(self) -> u64 {
        self.seed
    }

    /// A seed that is equal on all ranks.
    pub fn common(self, purpose: &str) -> u64 {
        derive(self.seed, &[XxHash3_64::oneshot(purpose.as_bytes())])
    }

    /// A seed that is equal on ranks with the same number: the rank, or the number of its group among the groups of one kind.
    pub fn of(self, purpose: &str, number: usize) -> u64 {
        derive(self.common(purpose), &[number as u64])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of the reference implementation for this seed.
    #[test]
    fn split_mix64_is_the_published_generator() {
        let mut random = SplitMix64::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
        ];
        assert_eq!([(); 4].map(|()| random.next()), expected);
    }

    #[test]
    fn below_gives_numbers_of_equal_frequency() {
        let mut random = SplitMix64::new(7);
        let mut counts = [0u32; 6];
        (0..60_000).for_each(|_| counts[random.below(6) as usize] += 1);
        // Six standard deviations of a binomial distribution of 60,000 tries at 1/6 are 548.
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 548), "{counts:?}");
        // Half of all words are rejected here, and no number is out of range.
        let end = (1 << 63) + 1;
        assert!((0..1000).all(|_| random.below(end) < end));
        assert_eq!(random.below(1), 0);
    }
}
