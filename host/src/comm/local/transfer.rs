//! How data move in the local transport: each rank's share of a collective, on buffers that all ranks have posted.
//!
//! Called between the two meetings of `rendezvous` only, when every rank's buffers are there and all calls agree. Ranks write
//! to disjoint places, so that no order between them matters.

use std::ops::Range;
use std::ptr;

use gradsync_device::math::Element as Formula;

use super::rendezvous::{Memory, Post};
use crate::comm::ReduceOp;
use crate::dtype::{DType, DataType};
use crate::kernels::cpu::isa::vectorized;

/// Elements reduced at a time, small enough for the first-level cache.
const BLOCK_LEN: usize = 512;

/// Rank `rank` reduces the `rank`-th part of all outputs and writes the result to all of them.
pub(super) fn all_reduce(posts: &[Post], rank: usize, op: ReduceOp) {
    let call = posts[0].call;
    if posts.len() == 1 {
        return;
    }
    // Parts of whole cache lines, so that no two ranks write to the same one.
    let part = call.len.div_ceil(posts.len()).next_multiple_of(64);
    let range = call.len.min(rank * part)..call.len.min((rank + 1) * part);
    let outputs: Vec<_> = posts.iter().map(|post| post.output.start).collect();
    reduce(call.dtype, &outputs, &outputs, range, 0, op);
}

/// Rank `rank` reduces shard `rank` of all inputs into its output.
pub(super) fn reduce_scatter(posts: &[Post], rank: usize, op: ReduceOp) {
    let call = posts[0].call;
    let inputs: Vec<_> = posts.iter().map(|post| post.input.start).collect();
    reduce(
        call.dtype,
        &inputs,
        &[posts[rank].output.start],
        rank * call.len..(rank + 1) * call.len,
        rank * call.len,
        op,
    );
}

/// Rank `rank` fills its output with everybody's input.
pub(super) fn all_gather(posts: &[Post], rank: usize) {
    for (peer, post) in posts.iter().enumerate() {
        copy(post.input, posts[rank].output.shard(peer, post.input.bytes));
    }
}

/// Rank `rank` fills its output with everybody's shard for it.
pub(super) fn all_to_all(posts: &[Post], rank: usize) {
    let shard = posts[rank].output.bytes / posts.len();
    for (peer, post) in posts.iter().enumerate() {
        copy(post.input.shard(rank, shard), posts[rank].output.shard(peer, shard));
    }
}

/// Every rank but the root copies the root's data.
pub(super) fn broadcast(posts: &[Post], rank: usize, root: usize) {
    if rank != root {
        copy(posts[root].output, posts[rank].output);
    }
}

fn copy(from: Memory, to: Memory) {
    debug_assert_eq!(from.bytes, to.bytes);
    // A shard that is gathered in place is its own destination.
    if from.start != to.start {
        // SAFETY: both were posted by ranks that wait; lengths agree by the compared calls; the ranges of one rank never
        // overlap, since its input and output are separate borrows, or distinct shards of one.
        unsafe { ptr::copy_nonoverlapping(from.start, to.start, to.bytes) };
    }
}

/// Reduces the elements `range` of all `inputs` and writes them to each of `outputs`, `shift` elements earlier.
fn reduce(
    dtype: Option<DataType>,
    inputs: &[*mut u8],
    outputs: &[*mut u8],
    range: Range<usize>,
    shift: usize,
    op: ReduceOp,
) {
    match dtype.and_then(DataType::float).expect("a reduction has data of a gradient's type") {
        DType::F64 => reduce_typed::<f64>(inputs, outputs, range, shift, op),
        DType::F32 => reduce_typed::<f32>(inputs, outputs, range, shift, op),
        DType::F16 => reduce_typed::<gradsync_device::F16>(inputs, outputs, range, shift, op),
        DType::BF16 => reduce_typed::<gradsync_device::BF16>(inputs, outputs, range, shift, op),
    }
}

fn reduce_typed<T: Formula>(inputs: &[*mut u8], outputs: &[*mut u8], range: Range<usize>, shift: usize, op: ReduceOp) {
    let end = range.end;
    for begin in range.step_by(BLOCK_LEN) {
        let len = (end - begin).min(BLOCK_LEN);
        let mut totals = [0.0; BLOCK_LEN];
        let totals = &mut totals[..len];
        for (rank, input) in inputs.iter().enumerate() {
            // SAFETY: the range lies within every input, by the compared counts; its owner waits, and the elements of this
            // range are written by this rank alone, after all of them have been read.
            let values = unsafe { std::slice::from_raw_parts(input.cast::<T>().add(begin), len) };
            match op {
                _ if rank == 0 => widen_block(totals, values),
                ReduceOp::Sum | ReduceOp::Mean => add_block(totals, values),
                ReduceOp::Max => max_block(totals, values),
                ReduceOp::Min => min_block(totals, values),
            }
        }
        if op == ReduceOp::Mean {
            let world_size = inputs.len() as f64;
            totals.iter_mut().for_each(|total| *total /= world_size);
        }
        for output in outputs {
            // SAFETY: as above; the slices of the inputs are gone.
            let values = unsafe { std::slice::from_raw_parts_mut(output.cast::<T>().add(begin - shift), len) };
            narrow_block(values, totals);
        }
    }
}

vectorized! {
    fn widen_block<T: Formula>(totals: &mut [f64], values: &[T]) {
        totals.iter_mut().zip(values).for_each(|(total, value)| *total = value.to_f64());
    }

    fn add_block<T: Formula>(totals: &mut [f64], values: &[T]) {
        totals.iter_mut().zip(values).for_each(|(total, value)| *total += value.to_f64());
    }

    fn max_block<T: Formula>(totals: &mut [f64], values: &[T]) {
        let pairs = totals.iter_mut().zip(values.iter().map(|value| value.to_f64()));
        pairs.for_each(|(total, value)| *total = first_if(*total, value, *total >= value));
    }

    fn min_block<T: Formula>(totals: &mut [f64], values: &[T]) {
        let pairs = totals.iter_mut().zip(values.iter().map(|value| value.to_f64()));
        pairs.for_each(|(total, value)| *total = first_if(*total, value, *total <= value));
    }

    fn narrow_block<T: Formula>(values: &mut [T], totals: &[f64]) {
        values.iter_mut().zip(totals).for_each(|(value, &total)| *value = T::from_f64(total));
    }
}

/// The one that is chosen, or NaN if either is: a NaN `second` is never smaller or larger, so it is never passed over.
#[inline(always)]
fn first_if(first: f64, second: f64, is_first: bool) -> f64 {
    if first.is_nan() || is_first { first } else { second }
}
