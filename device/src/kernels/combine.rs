//! `combine`: the weighted sum of any number of vectors per segment, in `f64` in rank order, rounded once. A thread reads an element of every
//! vector before it writes that of the result, which may be one of them.

use super::{for_each_pair, kernel};
use crate::abi::{DType, LaunchBounds, Span, THREADS, vector_len};
use crate::half::{BF16, F16};
use crate::math::{Element, elementwise};
use crate::{memory, reduce, thread};

/// Vectors between two steps of a thread.
const STRIDE: usize = THREADS as usize;

/// Elements that a thread handles at once: four at most, whose sums leave registers for more steps.
const fn elements(to: DType, from: DType) -> usize {
    let len = vector_len(to, from);
    if len > 4 { 4 } else { len }
}

/// Steps that a thread has under way: as many as fit its registers beside the sums.
const fn steps(from: DType) -> usize {
    if from.size_bytes() == 2 { 4 } else { 2 }
}

/// Vectors that a thread loads before it uses the first, of more than two.
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
        index: u64,
    ) {
        // SAFETY: the launch provides `count` vectors and weights, `rank + G ≤ count`; the caller checked the alignment.
        unsafe {
            let values: [[[S; N]; U]; G] = core::array::from_fn(|vector| {
                let vector = *self.table.add(rank + vector);
                core::array::from_fn(|step| memory::load(vector.add(index as usize + step * STRIDE * N)))
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
    unsafe fn sums<const N: usize, const U: usize, const G: usize>(self, index: u64) -> Sums<N, U> {
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
unsafe fn combine<S: Element, D: Element, const N: usize, const U: usize, const G: usize>(
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
            // A few steps at once keep more of the memory busy.
            let (mut rest, stride) = (chunk, (STRIDE * N) as u64);
            while rest.begin + U as u64 * stride <= rest.end {
                let index = rest.begin + thread::thread_idx_x() as u64 * N as u64;
                let sums = inputs.sums::<N, U, G>(index);
                let mut step = 0;
                while step < U {
                    memory::store(destination.add(index as usize + step * STRIDE * N), sums[step].map(D::from_f64));
                    step += 1;
                }
                rest.begin += U as u64 * stride;
            }
            reduce::walk::<N, THREADS>(rest, |index, count| {
                if count == N {
                    let [totals] = inputs.sums::<N, 1, G>(index);
                    memory::store(destination.add(index as usize), totals.map(D::from_f64));
                } else {
                    destination.add(index as usize).write(D::from_f64(inputs.sum_one(index)));
                }
            });
        } else {
            reduce::walk::<1, THREADS>(chunk, |index, _| {
                destination.add(index as usize).write(D::from_f64(inputs.sum_one(index)));
            });
        }
    }
}

/// As [`combine`], of two vectors: their pointers are read once and no sum waits for others in registers, so that blocks are short.
#[inline(always)]
unsafe fn combine_two<S: Element, D: Element, const N: usize, const U: usize>(
    destination: *mut D,
    vectors: [*const S; 2],
    weights: [f64; 2],
    chunk: reduce::Chunk,
) {
    let start = chunk.begin as usize;
    let sum = |a: S, b: S| {
        let first = elementwise::add_weighted(-0.0, weights[0], a.to_f64());
        D::from_f64(elementwise::add_weighted(first, weights[1], b.to_f64()))
    };
    let [a, b] = vectors;
    // SAFETY: the launch provides the destination and both vectors over the whole chunk.
    unsafe {
        let single =
            |index: u64| destination.add(index as usize).write(sum(*a.add(index as usize), *b.add(index as usize)));
        let aligned = memory::is_aligned::<D, N>(destination.add(start))
            && memory::is_aligned::<S, N>(a.add(start))
            && memory::is_aligned::<S, N>(b.add(start));
        if !aligned {
            return reduce::walk::<1, THREADS>(chunk, |index, _| single(index));
        }
        let at_once = |index: usize, left: [S; N], right: [S; N]| {
            memory::store::<D, N>(destination.add(index), core::array::from_fn(|lane| sum(left[lane], right[lane])));
        };
        let (mut rest, stride) = (chunk, (STRIDE * N) as u64);
        while rest.begin + U as u64 * stride <= rest.end {
            let place = |step: usize| rest.begin as usize + thread::thread_idx_x() as usize * N + step * STRIDE * N;
            let load = |vector: *const S| -> [[S; N]; U] {
                core::array::from_fn(|step| memory::load(vector.add(place(step))))
            };
            let (left, right) = (load(a), load(b));
            let mut step = 0;
            while step < U {
                at_once(place(step), left[step], right[step]);
                step += 1;
            }
            rest.begin += U as u64 * stride;
        }
        reduce::walk::<N, THREADS>(rest, |index, count| {
            if count == N {
                let index = index as usize;
                at_once(index, memory::load(a.add(index)), memory::load(b.add(index)));
            } else {
                single(index);
            }
        });
    }
}

macro_rules! from_to {
    ($from:literal $S:ident $to:literal $D:ident) => {
        kernel!(concat!("combine_", $from, "_", $to), LaunchBounds::COMBINE, fn (
            destination: *mut $D, table: *const *const $S, count: u64, weights: *const f64, cancelled: *const u32,
            spans: *const Span, span_count: u64, chunk_len: u64,
        ) {
            const N: usize = elements(<$D>::DTYPE, <$S>::DTYPE);
            const U: usize = steps(<$S>::DTYPE);
            let block = thread::block_idx_x() as u64;
            let row = reduce::row_of_block(span_count, block, |row| (*spans.add(row as usize)).first_block);
            // What is read here together depends on nothing else that is: one after the other, small launches would wait for each.
            let (span, is_cancelled) = (*spans.add(row as usize), *cancelled.add(row as usize) != 0);
            let weights = weights.add((row * count) as usize);
            let mut chunk = reduce::chunk_in(row, span, block, chunk_len);
            if is_cancelled {
                // Nothing of it is left. Who returned here would wait for the flag before asking for the vectors.
                chunk.end = chunk.begin;
            }
            if count == 2 {
                let (vectors, weights) = ([*table, *table.add(1)], [*weights, *weights.add(1)]);
                return combine_two::<$S, $D, N, U>(destination, vectors, weights, chunk);
            }
            let inputs = Inputs { table, weights, count: count as usize };
            const G: usize = group(<$S>::DTYPE);
            combine::<$S, $D, N, U, G>(destination, inputs, chunk)
        });
    };
}
for_each_pair!(from_to);
