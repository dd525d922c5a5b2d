//! The data movement of the local transport: each rank's share of a collective, on the registered buffers of all ranks.
//!
//! These functions run only in the second phase of `rendezvous`, when every rank's buffers are registered and all calls match. Ranks
//! write to disjoint ranges, so their order does not matter.

use std::ops::Range;
use std::ptr;

use super::operands::{CollectiveCall, Region};
use crate::comm::reduction::Reduction;

/// Rank `rank` reduces the `rank`-th part of all outputs and writes the result to all of them.
pub(super) fn all_reduce(calls: &[CollectiveCall], rank: usize, reduction: Reduction<'_>) {
    let CollectiveCall { call, input, output } = calls[0];
    if calls.len() == 1 && input.start == output.start && reduction.keeps_one_rank() {
        return;
    }
    // Parts are whole cache lines, so that no two ranks write to the same line.
    let part = call.len.div_ceil(calls.len()).next_multiple_of(64);
    let range = call.len.min(rank * part)..call.len.min((rank + 1) * part);
    let inputs: Vec<_> = calls.iter().map(|collective| collective.input.start).collect();
    let outputs: Vec<_> = calls.iter().map(|collective| collective.output.start).collect();
    reduce(reduction, &inputs, &outputs, range);
}

/// Rank `rank` reduces shard `rank` of all inputs into its output.
pub(super) fn reduce_scatter(calls: &[CollectiveCall], rank: usize, reduction: Reduction<'_>) {
    let call = calls[0].call;
    let inputs: Vec<_> = calls.iter().map(|collective| collective.input.start).collect();
    let shift = rank * call.len * reduction.size_bytes();
    // `reduce` offsets all pointers by the range's start, so the output pointer is shifted back as if the output were a whole input.
    let output = calls[rank].output.start.wrapping_sub(shift);
    reduce(reduction, &inputs, &[output], rank * call.len..(rank + 1) * call.len);
}

/// Rank `rank` fills its output with every rank's input.
pub(super) fn all_gather(calls: &[CollectiveCall], rank: usize) {
    for (peer, collective) in calls.iter().enumerate() {
        copy(collective.input, calls[rank].output.shard(peer, collective.input.bytes));
    }
}

/// Rank `rank` moves its own shard, and half of the bytes that it exchanges with each other rank, in both directions: an operand in place
/// may only be overwritten after it was read.
pub(super) fn all_to_all(calls: &[CollectiveCall], rank: usize) {
    let shard = calls[rank].output.bytes / calls.len();
    let own = &calls[rank];
    copy(own.input.shard(rank, shard), own.output.shard(rank, shard));
    for (peer, other) in calls.iter().enumerate().filter(|(peer, _)| *peer != rank) {
        let half = if rank < peer { 0..shard / 2 } else { shard / 2..shard };
        let own = [own.input, own.output].map(|whole| whole.shard(peer, shard).range(half.clone()));
        let other = [other.input, other.output].map(|whole| whole.shard(rank, shard).range(half.clone()));
        exchange(own, other);
    }
}

/// Copies the input of each of two ranks to the output of the other; either may be in place.
fn exchange([input, output]: [Region; 2], [other_input, other_output]: [Region; 2]) {
    match (input.start == output.start, other_input.start == other_output.start) {
        // SAFETY: as in `copy`; the two regions belong to two ranks, each of which has borrowed its own mutably.
        (true, true) => unsafe { ptr::swap_nonoverlapping(output.start, other_output.start, output.bytes) },
        (true, false) => {
            copy(input, other_output);
            copy(other_input, output);
        }
        (false, _) => {
            copy(other_input, output);
            copy(input, other_output);
        }
    }
}

/// Every rank but the root copies the root's data.
pub(super) fn broadcast(calls: &[CollectiveCall], rank: usize, root: usize) {
    if rank != root {
        copy(calls[root].output, calls[rank].output);
    }
}

fn copy(from: Region, to: Region) {
    debug_assert_eq!(from.bytes, to.bytes);
    // A shard that is gathered in place is its own destination.
    if from.start != to.start {
        // SAFETY: both were registered by ranks that wait; lengths agree by the compared calls; the ranges of one rank never
        // overlap, since its input and output are separate borrows, or distinct shards of one.
        unsafe { ptr::copy_nonoverlapping(from.start, to.start, to.bytes) };
    }
}

/// Reduces the elements `range` of all `inputs` and writes them to the same places of `outputs`.
fn reduce(reduction: Reduction<'_>, inputs: &[*mut u8], outputs: &[*mut u8], range: Range<usize>) {
    let start = range.start * reduction.size_bytes();
    let inputs: Vec<_> = inputs.iter().map(|input| input.wrapping_add(start).cast_const()).collect();
    let outputs: Vec<_> = outputs.iter().map(|output| output.wrapping_add(start)).collect();
    // SAFETY: the range lies within every buffer, by the compared counts; their owners wait, and the elements of this range are
    // written by this rank alone. An output is an input of the same rank, or a buffer of its own.
    unsafe { reduction.run(&inputs, &outputs, range.len()) };
}
