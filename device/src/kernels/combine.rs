//! `combine`: the weighted sum of any number of vectors per segment, in `f64` in rank order, rounded once.

use super::{for_each_pair, kernel};
use crate::abi::{Span, vector_len};
use crate::half::{BF16, F16};
use crate::math::{Element, elementwise};
use crate::{memory, reduce};

/// The vectors and weights of one segment.
#[derive(Clone, Copy)]
struct Inputs<S> {
    table: *const *const S,
    weights: *const f64,
    count: usize,
}

impl<S: Element> Inputs<S> {
    /// Adds `G` vectors from `rank` on to `totals`, `N` elements each; all loads are issued before the first is used.
    #[inline(always)]
    unsafe fn add<const N: usize, const G: usize>(self, totals: &mut [f64; N], rank: usize, index: u64) {
        // SAFETY: the launch provides `count` vectors and weights, `rank + G ≤ count`; the caller checked the alignment.
        unsafe {
            let values: [[S; N]; G] =
                core::array::from_fn(|vector| memory::load((*self.table.add(rank + vector)).add(index as usize)));
            let mut vector = 0;
            while vector < G {
                let weight = *self.weights.add(rank + vector);
                let mut lane = 0;
                while lane < N {
                    totals[lane] = elementwise::add_weighted(totals[lane], weight, values[vector][lane].to_f64());
                    lane += 1;
                }
                vector += 1;
            }
        }
    }

    /// The sum at `N` aligned elements.
    #[inline(always)]
    unsafe fn sum<const N: usize>(self, index: u64) -> [f64; N] {
        let mut totals = [-0.0; N]; // the zero that keeps the sign of a zero added to it
        let mut rank = 0;
        // SAFETY: ranks stay below `count`.
        unsafe {
            while rank + 4 <= self.count {
                self.add::<N, 4>(&mut totals, rank, index);
                rank += 4;
            }
            if rank + 2 <= self.count {
                self.add::<N, 2>(&mut totals, rank, index);
                rank += 2;
            }
            if rank < self.count {
                self.add::<N, 1>(&mut totals, rank, index);
            }
        }
        totals
    }

    /// The sum at one element, wherever it lies.
    #[inline(always)]
    unsafe fn sum_one(self, index: u64) -> f64 {
        // SAFETY: ranks stay below `count`.
        (0..self.count).fold(-0.0, |total, rank| unsafe {
            let value = (*self.table.add(rank)).add(index as usize).read();
            elementwise::add_weighted(total, *self.weights.add(rank), value.to_f64())
        })
    }
}

#[inline(always)]
unsafe fn combine<S: Element, D: Element, const N: usize>(
    destination: *mut D,
    inputs: Inputs<S>,
    chunk: reduce::Chunk,
) {
    let start = chunk.begin as usize;
    // SAFETY: the launch provides the destination and every vector over the whole chunk.
    unsafe {
        let mut aligned = memory::is_aligned::<D, N>(destination.add(start));
        for rank in 0..inputs.count {
            aligned &= memory::is_aligned::<S, N>((*inputs.table.add(rank)).add(start));
        }
        if aligned {
            reduce::walk::<N>(chunk, |index, count| {
                if count == N {
                    let totals = inputs.sum::<N>(index);
                    memory::store(destination.add(index as usize), totals.map(D::from_f64));
                } else {
                    destination.add(index as usize).write(D::from_f64(inputs.sum_one(index)));
                }
            });
        } else {
            reduce::walk::<1>(chunk, |index, _| {
                destination.add(index as usize).write(D::from_f64(inputs.sum_one(index)));
            });
        }
    }
}

macro_rules! from_to {
    ($from:literal $S:ident $to:literal $D:ident) => {
        kernel!(concat!("combine_", $from, "_", $to), fn (
            destination: *mut $D, table: *const *const $S, count: u64, weights: *const f64,
            spans: *const Span, span_count: u64, chunk_len: u64,
        ) {
            const N: usize = vector_len(<$D>::DTYPE, <$S>::DTYPE);
            let chunk = reduce::chunk_of_block(spans, span_count, chunk_len);
            let weights = weights.add((chunk.span * count) as usize);
            combine::<$S, $D, N>(destination, Inputs { table, weights, count: count as usize }, chunk)
        });
    };
}
for_each_pair!(from_to);
