//! Adasum and ordered sums for ranks that access each other's memory: in one launch each rank sends its peers their shards of its arena,
//! processes its own shard of all arenas, and writes the result into every rank's arena; another launch waits for all ranks.
//!
//! The work of a launch is a list of jobs, which its blocks take in order: the first jobs send; the next wait for the tiles of a chunk and
//! multiply; a few add sums, synchronise with the jobs of the same number on the other ranks and compute weights; the last wait for the
//! weights of a chunk and write its weighted sum. So one layer's results are sent while another's inputs are still received. Only this rank
//! writes its shard of any arena, after receiving it, until the end, when all have written their results. Totals are added in rank order,
//! so that all ranks get the same bits.

mod gram;
mod packets;
mod team;

use super::{for_each_dtype_and_width, kernel};
use crate::abi::{DType, LaunchBounds, MOST_PEERS, PEER_THREADS, Peers, Row, vector_len};
use crate::half::*;
use crate::math::adasum::Pair;
use crate::math::{Element, elementwise};
use crate::peers::{GroupView, Stage};
use crate::{memory, reduce, thread};

/// The first `W` of the addresses; those beyond `count` repeat the first, which costs no memory traffic.
#[inline(always)]
fn pick<T, const W: usize>(addresses: &[u64; 8], count: usize) -> [*mut T; W] {
    core::array::from_fn(|index| addresses[if index < count { index } else { 0 }] as *mut T)
}

/// Writes `of` of the copies' elements at each place of a range to every rank's shard: whole vectors and then the few remaining elements,
/// or, if there is a function `exact`, its results one by one.
#[inline(always)]
unsafe fn write_each<T: Element, const W: usize, const N: usize>(
    peers: &Peers,
    range: reduce::ElementRange,
    of: impl Fn([T; W]) -> T,
    exact: Option<impl Fn([T; W]) -> T>,
) {
    let count = peers.world_size as usize;
    let shards: [*mut T; W] = pick(&peers.shards, count);
    let copies: [*mut T; W] = pick(&peers.copies, count);
    let (block, thread) = (PEER_THREADS as u64, reduce::thread_of_block() as u64);
    let vectors = if exact.is_some() { 0 } else { (range.end - range.begin) / N as u64 };
    let vectors_end = range.begin + vectors * N as u64;
    // SAFETY: the launch provides every shard and its copy over the range, aligned.
    unsafe {
        let mut index = range.begin + thread * N as u64;
        while index < vectors_end {
            let place = index as usize;
            let loaded: [[T; N]; W] = core::array::from_fn(|vector| memory::load(copies[vector].add(place)));
            let results: [T; N] = core::array::from_fn(|lane| of(core::array::from_fn(|vector| loaded[vector][lane])));
            hand_out(shards, count, place, results);
            index += block * N as u64;
        }
        let mut index = vectors_end + thread;
        while index < range.end {
            let place = index as usize;
            let values = core::array::from_fn(|vector| copies[vector].add(place).read());
            let value = if let Some(exact) = &exact { exact(values) } else { of(values) };
            hand_out(shards, count, place, [value]);
            index += block;
        }
    }
}

/// Calls `visit` for each pair of the combination tree of `ranks` ranks on the levels below `level`, lowest first, at most `MOST` levels.
/// The end of a pair may lie behind the last rank; its other fields are exact.
#[inline(always)]
fn for_each_pair_below<const W: usize, const MOST: usize>(ranks: usize, level: usize, mut visit: impl FnMut(Pair)) {
    let mut below = 0;
    while below < MOST {
        let (half, mut begin) = (1 << below, 0);
        while begin + half < W {
            if below < level && begin + half < ranks {
                visit(Pair { begin, middle: begin + half, end: begin + 2 * half });
            }
            begin += 2 * half;
        }
        below += 1;
    }
}

/// The nodes on a level of that tree over one element of the ranks' vectors: each at the index of its first rank.
#[inline(always)]
fn nodes<V: Copy, const W: usize, const MOST: usize>(
    mut values: [V; W],
    ranks: usize,
    level: usize,
    join: impl Fn(Pair, V, V) -> V,
) -> [V; W] {
    for_each_pair_below::<W, MOST>(ranks, level, |pair| {
        values[pair.begin] = join(pair, values[pair.begin], values[pair.middle]);
    });
    values
}

/// The zero that keeps the sign of a zero added to it.
const ZERO: f64 = -0.0;

/// One element's weighted sum, in rank order.
#[inline(always)]
fn weighted<T: Element, const W: usize>(values: [T; W], weights: [f64; W], count: usize) -> f64 {
    let mut total = ZERO;
    let mut rank = 0;
    while rank < W {
        if rank < count {
            total = elementwise::add_weighted(total, weights[rank], values[rank].to_f64());
        }
        rank += 1;
    }
    total
}

/// Writes the same elements to every rank's shard.
#[inline(always)]
unsafe fn hand_out<T: Element, const W: usize, const N: usize>(
    shards: [*mut T; W],
    count: usize,
    index: usize,
    values: [T; N],
) {
    let mut rank = 0;
    while rank < W {
        if rank < count {
            // SAFETY: elements of every shard; for N > 1, the caller's index is a multiple of N behind an aligned start.
            unsafe { memory::store(shards[rank].add(index), values) };
        }
        rank += 1;
    }
}

macro_rules! of_width {
    ($name:literal $T:ident $width:literal $suffix:literal) => {
        kernel!(["peer_reduce_" $name $suffix], LaunchBounds::of_peers($width),
            fn (peers: *const Peers, factor: f64, senders: u64, reducers: u64) {
            const N: usize = vector_len(<$T>::DTYPE, DType::F16);
            let group = GroupView::of(peers);
            let size = size_of::<$T>() as u64;
            loop {
                let group = group.again();
                let peers = group.peers;
                let Some(ticket) = group.draw(senders + reducers) else { return };
                let Some(mut tile) = group.send_or(ticket, senders) else { continue };
                while tile < peers.tiles() {
                    let (begin, end) = peers.tile(tile);
                    group.receive(begin, end);
                    let range = reduce::ElementRange { span: 0, begin: begin / size, end: end / size };
                    let (factors, ranks) = ([factor; $width], peers.world_size as usize);
                    let sum = |values| <$T>::from_f64(weighted(values, factors, ranks));
                    write_each::<$T, $width, N>(peers, range, sum, None::<fn([$T; $width]) -> $T>);
                    tile += reducers;
                }
            }
        });
    };
}

for_each_dtype_and_width!(of_width);

kernel!(["peer_barrier"], LaunchBounds::of_peers(MOST_PEERS), fn (peers: *const Peers) {
    let group = GroupView::of(peers);
    group.signal(Row::End, Stage::END);
    group.wait(Row::End, Stage::END);
    if thread::thread_idx_x() == 0 {
        let runs = group.peers.runs as *mut u32;
        runs.write(runs.read().wrapping_add(1));
        runs.add(1).write(0);
    }
});
