//! `combine`: the weighted sum of any number of vectors per segment, in `f64` in rank order, rounded once.

use super::{for_each_pair, kernel};
use crate::abi::{Span, THREADS, vector_len};
use crate::half::{BF16, F16};
use crate::math::{Element, elementwise, pairs};
use crate::{memory, reduce, thread};

/// Vectors between two steps of a thread.
const STRIDE: usize = THREADS as usize;

/// The vectors and weights of one segment.
#[derive(Clone, Copy)]
struct Inputs<S> {
    table: *const *const S,
    weights: *const f64,
    count: usize,
    /// Whether vectors of 16 bits may be widened by moving bits: the weights stay finite where they are scaled to make up for it.
    by_bits: bool,
}

/// Sums of one thread: `N` elements at each of `U` places.
type Sums<const N: usize, const U: usize> = [[f64; N]; U];

impl<S: Element> Inputs<S> {
    #[inline(always)]
    unsafe fn new(table: *const *const S, weights: *const f64, count: usize) -> Self {
        let mut by_bits = pairs::is_paired(S::DTYPE);
        // SAFETY: the launch provides `count` weights.
        (0..count).for_each(|rank| by_bits &= unsafe { (*weights.add(rank)).abs() } < pairs::largest_factor(S::DTYPE));
        Inputs { table, weights, count, by_bits }
    }

    /// Adds `G` vectors from `rank` on to `totals`; all loads are issued before the first is used. Elements of 16 bits are
    /// widened by moving bits; what [`pairs::finite_bits`] says of them is returned.
    #[inline(always)]
    unsafe fn add<const N: usize, const M: usize, const U: usize, const G: usize>(
        self,
        totals: &mut Sums<N, U>,
        rank: usize,
        index: u64,
    ) -> u32 {
        let mut finite = u32::MAX;
        // SAFETY: the launch provides `count` vectors and weights, `rank + G ≤ count`; the caller checked the alignment. Paired elements
        // have 16 bits.
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
                    let (totals, values) = (&mut totals[step], values[vector][step]);
                    if pairs::is_paired(S::DTYPE) {
                        let weight = weight * pairs::rescale(S::DTYPE);
                        let words: [u32; M] = memory::words(values);
                        let mut place = 0;
                        while place < M {
                            finite &= pairs::finite_bits(S::DTYPE, words[place]);
                            let [first, second] = pairs::widen(S::DTYPE, words[place]);
                            totals[2 * place] = elementwise::add_weighted(totals[2 * place], weight, first);
                            totals[2 * place + 1] = elementwise::add_weighted(totals[2 * place + 1], weight, second);
                            place += 1;
                        }
                    } else {
                        let mut lane = 0;
                        while lane < N {
                            totals[lane] = elementwise::add_weighted(totals[lane], weight, values[lane].to_f64());
                            lane += 1;
                        }
                    }
                    step += 1;
                }
                vector += 1;
            }
        }
        finite
    }

    /// Adds all vectors, as [`add`](Self::add).
    #[inline(always)]
    unsafe fn add_all<const N: usize, const M: usize, const U: usize>(self, index: u64) -> (Sums<N, U>, u32) {
        let mut totals = [[-0.0; N]; U]; // the zero that keeps the sign of a zero added to it
        let (mut rank, mut finite) = (0, u32::MAX);
        // SAFETY: ranks stay below `count`.
        unsafe {
            while rank + 4 <= self.count {
                finite &= self.add::<N, M, U, 4>(&mut totals, rank, index);
                rank += 4;
            }
            if rank + 2 <= self.count {
                finite &= self.add::<N, M, U, 2>(&mut totals, rank, index);
                rank += 2;
            }
            if rank < self.count {
                finite &= self.add::<N, M, U, 1>(&mut totals, rank, index);
            }
        }
        (totals, finite)
    }

    /// The sums at `N` aligned elements at each of `U` places; `None` where elements of 16 bits have to be added one by one, because of
    /// infinities, NaN or huge weights.
    #[inline(always)]
    unsafe fn sums<const N: usize, const M: usize, const U: usize>(self, index: u64) -> Option<Sums<N, U>> {
        if pairs::is_paired(S::DTYPE) && !self.by_bits {
            return None;
        }
        // SAFETY: the caller's promise.
        let (totals, finite) = unsafe { self.add_all::<N, M, U>(index) };
        (!pairs::is_paired(S::DTYPE) || pairs::are_finite(finite)).then_some(totals)
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
unsafe fn combine<S: Element, D: Element, const N: usize, const M: usize>(
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
        let (mut rest, stride) = (chunk, (STRIDE * N) as u64);
        let own = |rest: reduce::Chunk| rest.begin + thread::thread_idx_x() as u64 * N as u64;
        if aligned {
            // Two steps at once keep more of the memory busy.
            while rest.begin + 2 * stride <= rest.end {
                let index = own(rest);
                let Some([first, second]) = inputs.sums::<N, M, 2>(index) else { break };
                memory::store(destination.add(index as usize), first.map(D::from_f64));
                memory::store(destination.add((index + stride) as usize), second.map(D::from_f64));
                rest.begin += 2 * stride;
            }
            while own(rest) + N as u64 <= rest.end {
                let index = own(rest);
                let Some([totals]) = inputs.sums::<N, M, 1>(index) else { break };
                memory::store(destination.add(index as usize), totals.map(D::from_f64));
                rest.begin += stride;
            }
        }
        // What is left to this thread, which is little but for unaligned vectors.
        let width = if aligned { N as u64 } else { 1 };
        let mut index = rest.begin + thread::thread_idx_x() as u64 * width;
        while index < rest.end {
            let end = (index + width).min(rest.end);
            for element in index..end {
                destination.add(element as usize).write(D::from_f64(inputs.sum_one(element)));
            }
            index += STRIDE as u64 * width;
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
            const M: usize = N / 2;
            combine::<$S, $D, N, M>(destination, Inputs::new(table, weights, count as usize), chunk)
        });
    };
}
for_each_pair!(from_to);
