//! Weighted sums of any number of vectors of one dtype, from memory to memory: each group of all vectors gives one result, which is written
//! to any number of destinations. The sources may be among the destinations.

use gradsync_device::math::Element as Formula;

use super::{GROUP, LaneGroup, Narrow, Wide, on_lanes, prefetch};
use crate::kernels::cpu::combine::NOTHING;

/// The prefetch distance, for any number of vectors at a time.
pub(super) const AHEAD_BYTES: usize = 2048;

on_lanes! {
    /// Writes `D(Σ weights[p] × from[p][i])` to every vector of `to`: added in `f64` in the order of the vectors, rounded once.
    ///
    /// # Safety
    /// All of `from` are valid for reading `len` elements and all of `to` for writing them. Two vectors that overlap are identical, dtypes
    /// included.
    pub(in crate::kernels::cpu) unsafe fn combine<L, D: Formula, S: Formula>(
        to: &[*mut D],
        from: &[*const S],
        len: usize,
        weights: &[f64],
    ) {
        assert_eq!(from.len(), weights.len());
        let end = len / GROUP * GROUP;
        // Memory for 16-bit elements between their dtype and `f64`.
        let is_halfway = L::HALFWAY && size_of::<S>() == 2;
        let mut halfway = vec![[0.0_f32; GROUP]; if is_halfway { from.len() } else { 0 }];
        for first in (0..end).step_by(GROUP) {
            // SAFETY: the caller's promise; the group lies within all vectors, which are read before any is written.
            unsafe {
                let mut sum = Wide::<L>::splat(NOTHING);
                if is_halfway {
                    for (halfway, from) in halfway.iter_mut().zip(from) {
                        let from = from.add(first);
                        prefetch(from, AHEAD_BYTES);
                        Narrow::<L>::load(from).store(halfway.as_mut_ptr(), false);
                    }
                    for (halfway, &weight) in halfway.iter().zip(weights) {
                        sum = sum.add(Wide::load(halfway.as_ptr()).multiply(Wide::splat(weight)));
                    }
                } else {
                    for (from, &weight) in from.iter().zip(weights) {
                        let from = from.add(first);
                        prefetch(from, AHEAD_BYTES);
                        sum = sum.add(Wide::load(from).multiply(Wide::splat(weight)));
                    }
                }
                for to in to {
                    sum.store(to.add(first), false);
                }
            }
        }
        if end < len {
            // SAFETY: as above, for the elements after the last whole group, which are copied into groups.
            unsafe {
                let mut sum = Wide::<L>::splat(NOTHING);
                for (from, &weight) in from.iter().zip(weights) {
                    let mut group = [S::from_f32(0.0); GROUP];
                    group.as_mut_ptr().copy_from_nonoverlapping(from.add(end), len - end);
                    sum = sum.add(Wide::load(group.as_ptr()).multiply(Wide::splat(weight)));
                }
                let mut group = [D::from_f32(0.0); GROUP];
                sum.store(group.as_mut_ptr(), false);
                for to in to {
                    to.add(end).copy_from_nonoverlapping(group.as_ptr(), len - end);
                }
            }
        }
    }
}
