//! `combine`: the weighted sum of vectors per segment, in `f64` in rank order, rounded once. A thread reads an element of every vector
//! before it writes the result's; so the result may be one of them. Entry points for some numbers of vectors are faster; results are equal.

use super::{for_each_dtype, for_each_pair, kernel};
use crate::abi::{DType, LaunchBounds, Span, THREADS, vector_len};
use crate::half::*;
use crate::math::{Element, elementwise};
use crate::{memory, reduce, thread};

/// The distance of two steps of a thread in vectors.
const STRIDE: usize = THREADS as usize;

/// The number of elements that a thread handles at once: at most four, whose sums leave registers for more steps.
const fn elements(to: DType, from: DType) -> usize {
    let len = vector_len(to, from);
    if len > 4 { 4 } else { len }
}

/// The number of steps that a thread has in flight: as many as fit its registers.
const fn steps(from: DType) -> usize {
    if from.size_bytes() == 2 { 4 } else { 2 }
}

/// The number of vectors of a group that a thread of [`combine`] loads before it uses the first: as many as fit beside the sums.
const fn group(from: DType) -> usize {
    if from.size_bytes() == 2 { 2 } else { 4 }
}

/// The vectors and weights of one segment.
#[derive(Clone, Copy)]
struct Inputs<S> {
    table: *const *const S,
    weights: *const f64,
    count: usize,
}

/// Sums of one thread: `N` elements at each of `U` places.
type Sums<const N: usize, const U: usize> = [[f64; N]; U];

impl<S: Element> Inputs<S> {
    /// Adds `G` vectors from `rank` on to `totals`; all loads are issued before the first is used.
    #[inline(always)]
    unsafe fn add<const N: usize, const U: usize, const G: usize>(
        self,
        totals: &mut Sums<N, U>,
        rank: usize,
        index: usize,
    ) {
        // SAFETY: the launch provides `count` vectors and weights, `rank + G ≤ count`; the caller checked the alignment.
        unsafe {
            let values: [[[S; N]; U]; G] = core::array::from_fn(|vector| {
                let vector = *self.table.add(rank + vector);
                core::array::from_fn(|step| memory::load(vector.add(index + step * STRIDE * N)))
            });
            let mut vector = 0;
            while vector < G {
                let weight = *self.weights.add(rank + vector);
                let mut step = 0;
                while step < U {
                    let mut lane = 0;
                    while lane < N {
                        let value = values[vector][step][lane].to_f64();
                        totals[step][lane] = elementwise::add_weighted(totals[step][lane], weight, value);
                        lane += 1;
                    }
                    step += 1;
                }
                vector += 1;
            }
        }
    }

    /// The sums at `N` aligned elements at each of `U` places.
    #[inline(always)]
    unsafe fn sums<const N: usize, const U: usize, const G: usize>(self, index: usize) -> Sums<N, U> {
        let mut totals = [[-0.0; N]; U]; // the zero that keeps the sign of a zero added to it
        let mut rank = 0;
        // SAFETY: ranks stay below `count`.
        unsafe {
            while rank + G <= self.count {
                self.add::<N, U, G>(&mut totals, rank, index);
                rank += G;
            }
            if G > 2 && rank + 2 <= self.count {
                self.add::<N, U, 2>(&mut totals, rank, index);
                rank += 2;
            }
            if rank < self.count {
                self.add::<N, U, 1>(&mut totals, rank, index);
            }
        }
        totals
    }

    /// The sum at one element, at any alignment.
    #[inline(always)]
    unsafe fn sum_one(self, index: usize) -> f64 {
        // SAFETY: ranks stay below `count`.
        (0..self.count).fold(-0.0, |total, rank| unsafe {
            let value = (*self.table.add(rank)).add(index).read();
            elementwise::add_weighted(total, *self.weights.add(rank), value.to_f64())
        })
    }
}

/// Walks the elements of a range: calls `steps(index)` for `N` elements at each of `U` places, `vector(index)` for `N`, `single(index)` for
/// one; only the last unless the range `is_aligned` in every vector and in the destination.
#[inline(always)]
fn walk<const N: usize, const U: usize>(
    range: reduce::ElementRange,
    is_aligned: bool,
    steps: impl Fn(usize),
    vector: impl Fn(usize),
    single: impl Fn(usize),
) {
    if !is_aligned {
        return reduce::walk::<1, 1>(range, |index, _| single(index as usize));
    }
    // A few steps at once keep more memory accesses in flight.
    let (mut rest, stride) = (range, (STRIDE * N) as u64);
    while rest.begin + U as u64 * stride <= rest.end {
        steps(rest.begin as usize + thread::thread_idx_x() as usize * N);
        rest.begin += U as u64 * stride;
    }
    reduce::walk::<N, 1>(rest, |index, count| if count == N { vector(index as usize) } else { single(index as usize) });
}

#[inline(always)]
unsafe fn combine<S: Element, D: Element, const N: usize, const U: usize, const G: usize>(
    destination: *mut D,
    inputs: Inputs<S>,
    range: reduce::ElementRange,
) {
    let start = range.begin as usize;
    // SAFETY: the launch provides the destination and every vector over the whole range.
    unsafe {
        let mut is_aligned = memory::is_aligned::<D, N>(destination.add(start));
        for rank in 0..inputs.count {
            is_aligned &= memory::is_aligned::<S, N>((*inputs.table.add(rank)).add(start));
        }
        let store = |index: usize, sums: [f64; N]| memory::store(destination.add(index), sums.map(D::from_f64));
        let steps = |index: usize| {
            let sums = inputs.sums::<N, U, G>(index);
            let mut step = 0;
            while step < U {
                store(index + step * STRIDE * N, sums[step]);
                step += 1;
            }
        };
        let vector = |index: usize| {
            let [sums] = inputs.sums::<N, 1, G>(index);
            store(index, sums);
        };
        let single = |index: usize| destination.add(index).write(D::from_f64(inputs.sum_one(index)));
        walk::<N, U>(range, is_aligned, steps, vector, single);
    }
}

/// Like [`combine`], for `LEAST` to `W` vectors: their pointers are read once and no sums wait in registers, so that blocks are short.
#[inline(always)]
unsafe fn combine_few<S: Element, D: Element, const LEAST: usize, const W: usize, const N: usize, const U: usize>(
    destination: *mut D,
    inputs: Inputs<S>,
    range: reduce::ElementRange,
) {
    let start = range.begin as usize;
    let is_there = |rank: usize| rank < LEAST || rank < inputs.count;
    // For a missing vector the first is read, and not added: it is in the cache then, and a branch around the load would cost more.
    let rank_or_first = |rank: usize| if is_there(rank) { rank } else { 0 };
    // SAFETY: the launch provides the destination and the vectors, `LEAST` to `W`, over the whole range.
    unsafe {
        let vectors: [*const S; W] = core::array::from_fn(|rank| *inputs.table.add(rank_or_first(rank)));
        let weights: [f64; W] = core::array::from_fn(|rank| *inputs.weights.add(rank_or_first(rank)));
        let mut is_aligned = memory::is_aligned::<D, N>(destination.add(start));
        for vector in vectors {
            is_aligned &= memory::is_aligned::<S, N>(vector.add(start));
        }
        let sum = |values: [S; W]| {
            let (mut total, mut rank) = (-0.0, 0);
            while rank < W {
                if is_there(rank) {
                    total = elementwise::add_weighted(total, weights[rank], values[rank].to_f64());
                }
                rank += 1;
            }
            D::from_f64(total)
        };
        let load = |index: usize| -> [[S; N]; W] { vectors.map(|vector| memory::load(vector.add(index))) };
        let store = |index: usize, values: [[S; N]; W]| {
            let sums = core::array::from_fn(|lane| sum(values.map(|vector| vector[lane])));
            memory::store::<D, N>(destination.add(index), sums);
        };
        let steps = |index: usize| {
            let place = |step: usize| index + step * STRIDE * N;
            let values: [[[S; N]; W]; U] = core::array::from_fn(|step| load(place(step)));
            let mut step = 0;
            while step < U {
                store(place(step), values[step]);
                step += 1;
            }
        };
        let vector = |index: usize| store(index, load(index));
        let single = |index: usize| destination.add(index).write(sum(vectors.map(|vector| *vector.add(index))));
        walk::<N, U>(range, is_aligned, steps, vector, single);
    }
}

macro_rules! from_to {
    ($from:literal $S:ident $to:literal $D:ident) => {
        from_to!($from $S $to $D "_p2" COMBINE: combine_few::<$S, $D, 2, 2, N, U>);
        from_to!($from $S $to $D "" COMBINE: combine::<$S, $D, N, U, { group(<$S>::DTYPE) }>);
    };
    ($from:literal $S:ident $to:literal $D:ident $suffix:literal $bounds:ident: $combine:path) => {
        kernel!(["combine_" $from "_" $to $suffix], LaunchBounds::$bounds, fn (
            destination: *mut $D, table: *const *const $S, count: u64, weights: *const f64, cancelled: *const u32,
            spans: *const Span, span_count: u64, block_len: u64,
        ) {
            const N: usize = elements(<$D>::DTYPE, <$S>::DTYPE);
            const U: usize = steps(<$S>::DTYPE);
            let block = thread::block_idx_x() as u64;
            let row = reduce::row_of_block(span_count, block, |row| (*spans.add(row as usize)).first_block);
            // These loads are independent of each other: one after the other, small launches would wait for each.
            let (span, is_cancelled) = (*spans.add(row as usize), *cancelled.add(row as usize) != 0);
            let weights = weights.add((row * count) as usize);
            let mut range = reduce::range_in(row, span, block, block_len);
            if is_cancelled {
                // The rest of the range is empty. An early return would wait for the flag before loading the vectors.
                range.end = range.begin;
            }
            $combine(destination, Inputs { table, weights, count: count as usize }, range);
        });
    };
}
for_each_pair!(from_to);

/// Sums of several vectors into another dtype are too rare for entries of their own.
macro_rules! within {
    ($name:literal $T:ident) => {
        from_to!($name $T $name $T "_p4" COMBINE_OF_FOUR: combine_few::<$T, $T, 3, 4, N, U>);
        // With a minimum of eight, the driver's compiler generates slower code for this.
        from_to!($name $T $name $T "_p8" COMBINE_OF_EIGHT: combine_few::<$T, $T, 7, 8, N, { U / 2 }>);
    };
}
for_each_dtype!(within);
