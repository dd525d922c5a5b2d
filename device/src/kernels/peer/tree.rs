//! Adasum pair by pair along the tree, for powers of two of ranks: `peer_tree`.
//!
//! Each rank combines its window of all vectors level by level, rounding combined elements to the dtype as if they had been stored. They
//! are not: a later level reads the ranks' vectors again and recombines them, which costs only local memory traffic.

use super::super::adasum::{keep, kept};
use super::super::kernel;
use super::super::products::{add_dots, gram_vector_len};
use super::team::{PairSums, Partials, Team, is_divided};
use super::{coefficients_below, nodes, pick, weighted, write_each};
use crate::abi::{ChunkedSpan, DType, LaunchBounds, PEER_LAYERS, PEER_THREADS, Peers, Span, vector_len};
use crate::half::{BF16, F16};
use crate::math::Element;
use crate::math::adasum::{Coefficients, Pair};
use crate::peers::{Group, Progress, Stage};
use crate::{reduce, thread};

/// The pair with this number on a level; level 0 joins single ranks.
#[inline(always)]
const fn pair(level: usize, number: usize) -> Pair {
    let begin = number << (level + 1);
    Pair { begin, middle: begin + (1 << level), end: begin + (2 << level) }
}

/// The combination of two elements, rounded as if it had been stored.
#[inline(always)]
fn stored<T: Element>((left, right): Coefficients, a: T, b: T) -> T {
    T::from_f64(weighted([a, b], [left, right], 2))
}

/// Processes one level over a chunk: three sums for each of its pairs.
#[inline(always)]
unsafe fn multiply<T: Element, const W: usize, const N: usize, const K: usize, const LEVEL: usize>(
    peers: &Peers,
    tree: *const f64,
    chunk: reduce::Chunk,
) -> [f64; K] {
    let copies = pick(&peers.copies, W).map(|copy: *mut T| copy.cast_const());
    // SAFETY: the launch provides every copy over the chunk, and the coefficients of the levels below.
    unsafe {
        let coefficients =
            coefficients_below::<_, W, LEVEL>(W, LEVEL, (1.0, 1.0), |pair| kept(tree.add(2 * pair.index())));
        reduce::accumulate_aligned::<T, W, N, K, 1, 2>(copies, chunk, |totals, values| {
            let nodes = nodes::<_, W, LEVEL>(values, W, LEVEL, |pair, left, right| {
                stored(coefficients[pair.index()], left, right)
            });
            let mut number = 0;
            while number < K / 3 {
                let sums = [totals[3 * number], totals[3 * number + 1], totals[3 * number + 2]];
                let Pair { begin, middle, .. } = pair(LEVEL, number);
                let sums = add_dots(sums, nodes[begin].to_f64(), nodes[middle].to_f64());
                totals[3 * number] = sums[0];
                totals[3 * number + 1] = sums[1];
                totals[3 * number + 2] = sums[2];
                number += 1;
            }
        })
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal $levels:literal: $($level:literal $K:literal)*) => {
        kernel!(["peer_tree_" $name $suffix], LaunchBounds::of_peers($width), fn (
            peers: *const Peers, tree: *mut f64, partials: *mut f64, chunked: *const ChunkedSpan, span_count: u64,
            blocks: u64, chunks: u64, spans: *const Span, writers: u64, chunk_len: u64, senders: u64,
        ) {
            // The vector length of the kernels that multiply two vectors, so that the bits are the same.
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            const WRITTEN: usize = gram_vector_len(<$T>::DTYPE, $width);
            let partials = Partials { first: partials, spans: chunked, chunks };
            let group = Group::of(peers);
            loop {
                let group = group.again();
                let teams = group.peers.teams() as u64;
                let layer_of = |span: u64| group.peers.layer(span, span_count) as usize;
                let of_layer = |layer: usize| tree.add(layer * 2 * ($width - 1));
                let Some(ticket) = group.draw(senders + $levels * (blocks + teams) + writers) else { return };
                let Some(mut block) = group.send_or(ticket, senders) else { continue };
                $(
                    if block < blocks {
                        let mut stretch = reduce::Stretch::of_block(block, chunked, span_count);
                        if $level == 0 {
                            let size = size_of::<$T>() as u64;
                            let (begin, end) = stretch.rest(stretch.row(chunked));
                            group.receive(begin * size, end * size);
                        } else {
                            let team = layer_of(stretch.span()) / PEER_LAYERS;
                            group.wait_for_count(team, Progress::Weights, $level, $levels);
                        }
                        while let Some(chunk) = stretch.next::<2>(stretch.row(chunked)) {
                            let tree = of_layer(layer_of(stretch.span()));
                            let sums = multiply::<$T, $width, N, $K, $level>(group.peers, tree, chunk);
                            // Other threads may still read the block's shared memory for the preceding chunks.
                            thread::sync_threads();
                            reduce::block_sum::<$K, 2>(0, sums, |product, sum| {
                                let group = group.again();
                                if let Some(number) = stretch.number::<2>(stretch.row_again(chunked)) {
                                    let layer = group.peers.layer(stretch.span(), span_count) as usize;
                                    let kind = PairSums { ranks: $width, level: $level };
                                    partials.keep(group, $width, (layer, number, product), &kind, sum);
                                }
                            });
                        }
                        let layer = layer_of(stretch.span());
                        group.count_multiplied(layer / PEER_LAYERS, is_divided(chunked, layer));
                        continue;
                    }
                    block -= blocks;
                    if block < teams {
                        let team = Team::new(group, block, $width);
                        if $level > 0 {
                            // If this rank has no chunk of these layers, only this wait keeps this level behind the preceding one, on whose
                            // flags it relies.
                            group.wait_for_count(team.number as usize, Progress::Weights, $level, $levels);
                        }
                        let multiplied = team.blocks(chunked, blocks);
                        group.wait_for_count(team.number as usize, Progress::Multiplied, ($level + 1) * multiplied, $levels * multiplied);
                        team.find_coefficients::<$level, $K>(tree, partials);
                        group.count(team.number as usize, Progress::Weights);
                        continue;
                    }
                    block -= teams;
                )*
                let chunk = reduce::chunk(block, spans, span_count, chunk_len);
                let layer = layer_of(chunk.span);
                group.wait_for_count(layer / PEER_LAYERS, Progress::Weights, $levels, $levels);
                let tree = of_layer(layer);
                let kept = |pair: Pair| kept(tree.add(2 * pair.index()));
                let coefficients = coefficients_below::<_, $width, $levels>($width, $levels, (1.0, 1.0), kept);
                let root = |values| {
                    nodes::<_, $width, $levels>(values, $width, $levels, |pair, left, right| stored(coefficients[pair.index()], left, right))[0]
                };
                write_each::<$T, $width, WRITTEN>(group.peers, chunk, root, None::<fn([$T; $width]) -> $T>);
            }
        });
    };
}

macro_rules! of_dtype {
    ($name:literal $T:ident) => {
        of_width!($name $T 2 "_p2" 1: 0 3);
        of_width!($name $T 4 "_p4" 2: 0 6 1 3);
        of_width!($name $T 8 "_p8" 3: 0 12 1 6 2 3);
    };
}
// Not of `f64`, whose squared norms may overflow: only the steps over a transport scale such vectors.
of_dtype!("f32" f32);
of_dtype!("f16" F16);
of_dtype!("bf16" BF16);

impl Team<'_> {
    /// Adds the sums of one level's pairs over all ranks, and stores the coefficients. Each pair has its own memory in the mailboxes, so
    /// that no level waits for the readers of another.
    #[inline(always)]
    unsafe fn find_coefficients<const LEVEL: usize, const K: usize>(self, tree: *mut f64, partials: Partials) {
        // SAFETY: the launch provides the partials of every layer, and mailboxes with memory for all sums.
        unsafe {
            let sums = PairSums { ranks: self.ranks, level: LEVEL };
            self.exchange(partials, K, sums, Stage::of_level(LEVEL));
            let mut item = thread::thread_idx_x() as usize;
            while item < self.count() * (K / 3) {
                let (layer, pair) = (self.first() + item / (K / 3), pair(LEVEL, item % (K / 3)));
                let both = self.coefficients_of(is_divided(partials.spans, layer), layer, pair);
                keep(tree.add(layer * 2 * (self.ranks - 1) + 2 * pair.index()), both);
                item += PEER_THREADS as usize;
            }
        }
    }
}
