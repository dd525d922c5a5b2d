//! [`Vote`]: the message by which a rank describes its step to the other ranks, when all its gradients are in.

use super::report::NonFiniteGradient;
use super::step::Progress;

/// Bits of the first word.
const REFUSES: u64 = 1;
const HAS_DATA: u64 = 2;
/// In place of a parameter: there is none.
const NONE: u64 = u64::MAX;
/// The words before the list of gradients.
const HEAD: usize = 3;

/// A rank's vote: flags; the number of a parameter whose gradient is not finite, and its step; a bit for each gradient that the rank had;
/// and in the first step the order of these gradients.
pub(super) struct Vote<'a>(pub(super) &'a [u64]);

impl Vote<'_> {
    /// The vote of a rank whose gradients are all in.
    pub(super) fn words(progress: &Progress, with_order: bool) -> Vec<u64> {
        let flag = |bit: u64, is_set: bool| if is_set { bit } else { 0 };
        let flags = flag(REFUSES, progress.refusal.is_some()) | flag(HAS_DATA, progress.has_data);
        let (step, parameter) = progress.non_finite.map_or((0, NONE), |(step, owner)| (step, owner as u64));
        let mut words = vec![flags, parameter, step];
        let bits = |owners: &[bool]| owners.iter().rev().fold(0, |word, &bit| word << 1 | u64::from(bit));
        words.extend(progress.present.chunks(u64::BITS as usize).map(bits));
        if with_order {
            words.extend(progress.arrived.iter().map(|&owner| owner as u64));
            let absent = progress.present.len() - progress.arrived.len();
            words.extend(std::iter::repeat_n(NONE, absent));
        }
        words
    }

    pub(super) fn refuses(&self) -> bool {
        self.0[0] & REFUSES != 0
    }

    pub(super) fn has_data(&self) -> bool {
        self.0[0] & HAS_DATA != 0
    }

    /// The first gradient that is not finite on the rank, whose number is `rank`.
    pub(super) fn non_finite(&self, rank: usize) -> Option<NonFiniteGradient> {
        let found = NonFiniteGradient { step: self.0[2], rank: Some(rank), parameter: self.0[1] as usize };
        (self.0[1] != NONE).then_some(found)
    }

    pub(super) fn has(&self, owner: usize) -> bool {
        let bits = u64::BITS as usize;
        self.0[HEAD + owner / bits] >> (owner % bits) & 1 != 0
    }

    /// The owners in the order of their gradients; the list ends with a number beyond the last parameter, if it is shorter than `count`.
    pub(super) fn order(&self, count: usize) -> &[u64] {
        &self.0[self.0.len() - count..]
    }
}
