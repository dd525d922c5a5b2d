//! Float-wise kernels on lists of tensors: [`zero_all`], [`cast_all`], [`accumulate_all`].
//!
//! Small tensors are distributed over the threads, and large ones are divided into pieces.

use rayon::prelude::*;

use super::elementwise::check_pair;
use super::{PIECE_LEN, accumulate, cast, has_one_thread, zero};
use crate::error::{Result, same_len};
use crate::slice::{Slice, SliceMut};

/// Sets every element of many tensors to zero. The tensors may differ in dtype.
pub fn zero_all(tensors: &mut [SliceMut<'_>]) {
    if is_small(tensors) {
        tensors.iter_mut().for_each(|tensor| zero(tensor.reborrow()));
    } else {
        tensors.par_iter_mut().for_each(|tensor| zero(tensor.reborrow()));
    }
}

/// Computes `destinations[t] = sources[t]` for many tensors, with the numerics of [`cast`]. Tensors `t` have equal lengths; dtypes may
/// differ.
///
/// # Errors
/// The errors of [`cast`], where a length's names the tensor; nothing is written.
pub fn cast_all(destinations: &mut [SliceMut<'_>], sources: &[Slice<'_>]) -> Result<()> {
    update_all("cast_all", ("destination", destinations), ("source", sources), cast)
}

/// Computes `sums[t] += values[t]` for many tensors, with the numerics of [`accumulate`]. Tensors `t` have equal lengths; dtypes may
/// differ.
///
/// # Errors
/// The errors of [`cast`], where a length's names the tensor; nothing is written.
pub fn accumulate_all(sums: &mut [SliceMut<'_>], values: &[Slice<'_>]) -> Result<()> {
    update_all("accumulate_all", ("sum", sums), ("value", values), accumulate)
}

fn update_all(
    operation: &'static str,
    (left_name, left): (&str, &mut [SliceMut<'_>]),
    (right_name, right): (&str, &[Slice<'_>]),
    update: fn(SliceMut<'_>, Slice<'_>) -> Result<()>,
) -> Result<()> {
    same_len(operation, (&format!("{left_name}s"), left.len()), (&format!("{right_name}s"), right.len()))?;
    for (index, (left, right)) in left.iter().zip(right).enumerate() {
        let name = |name: &str| format!("{name} {index}");
        same_len(operation, (&name(left_name), left.len()), (&name(right_name), right.len()))?;
        check_pair(operation, left.as_slice(), *right)?;
    }
    if is_small(left) {
        return left.iter_mut().zip(right).try_for_each(|(left, right)| update(left.reborrow(), *right));
    }
    left.par_iter_mut().zip(right).try_for_each(|(left, right)| update(left.reborrow(), *right))
}

/// Whether all tensors together are so small that waking other threads would take longer than the work.
fn is_small(tensors: &[SliceMut<'_>]) -> bool {
    has_one_thread() || tensors.iter().map(SliceMut::len).sum::<usize>() <= PIECE_LEN
}
