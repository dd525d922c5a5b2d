//! The example's random numbers: SplitMix64, implemented here so that a seed gives identical splits, batches and initial weights on every
//! machine and with every version of every dependency.
//!
//! Not suitable for values that must be unpredictable.

/// Steele, Lea and Flood's SplitMix64: one 64-bit state, one output a step.
pub(crate) struct SplitMix64 {
    state: u64,
}

impl SplitMix64 {
    /// An independent stream for each (`seed`, `purpose`), so that, for example, the split does not change when a layer becomes wider.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mut mixer = Self { state: seed };
        let state = mixer.next_u64() ^ purpose.wrapping_mul(0xd134_2543_de82_ef95);
        Self { state }
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `-bound..bound`, from the upper 24 bits: every value is exact in f32 before scaling.
    pub(crate) fn uniform(&mut self, bound: f32) -> f32 {
        let unit = (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32;
        (2.0 * unit - 1.0) * bound
    }

    /// Uniform in `0..limit`. Multiply and shift: the bias is below `limit / 2^64`.
    fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next_u64()) * limit as u128) >> 64) as usize
    }

    /// The Fisher-Yates shuffle.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_depends_on_seed_and_purpose_only() {
        let shuffled = |seed, purpose| {
            let mut items: Vec<usize> = (0..100).collect();
            SplitMix64::new(seed, purpose).shuffle(&mut items);
            items
        };
        let first = shuffled(1, 0);
        assert_eq!(first, shuffled(1, 0));
        assert_ne!(first, shuffled(2, 0));
        assert_ne!(first, shuffled(1, 1));
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
    }
}
