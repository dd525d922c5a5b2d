//! Comparison of numbers between ranks, bit for bit, without sending them.

use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, Ranks};
use crate::error::{Error, Result};
use crate::kernels::cpu;

/// Refuses buffers of the same tensors whose elements differ between ranks; the gaps between tensors are ignored. Errors name the elements
/// by `description`, and end with `advice`.
///
/// # Errors
/// The errors of [`check_fingerprints`].
pub(super) fn check_same_bits(
    operation: &'static str,
    comm: &dyn Communicator,
    (description, advice): (&str, &str),
    buffer: &GradientBuffer,
) -> Result<()> {
    let of_tensors: Vec<u64> =
        (0..buffer.tensor_count()).map(|index| cpu::fingerprint(buffer.tensor(index).data())).collect();
    check_fingerprints(operation, comm, (description, advice), &of_tensors, &|index| buffer.name(index))
}

/// Refuses tensors whose fingerprints differ between ranks. All ranks must have the same number of tensors.
///
/// # Errors
/// [`Error::InvalidArgument`] on every rank, naming the ranks that differ from most of the others, and a tensor; the errors of a
/// collective.
pub(super) fn check_fingerprints<'n, R: Ranks + ?Sized>(
    operation: &'static str,
    comm: &R,
    (description, advice): (&str, &str),
    of_tensors: &[u64],
    name: &dyn Fn(usize) -> &'n str,
) -> Result<()> {
    let count = of_tensors.len();
    let of_ranks = comm.gather_words(&[cpu::fingerprint_of_words(of_tensors)])?;
    if of_ranks.iter().all(|fingerprint| *fingerprint == of_ranks[0]) {
        return Ok(());
    }
    // There may be many tensors: their fingerprints are exchanged only if the ranks differ, to find the tensor.
    let of_tensors = comm.gather_words(of_tensors)?;
    let of_tensors: Vec<&[u64]> = of_tensors.chunks_exact(count).collect();
    // The largest group of equal ranks is taken as correct; among groups of one size, the group with the lowest rank.
    let size = |fingerprint: &u64| of_ranks.iter().filter(|other| *other == fingerprint).count();
    let right = (0..of_ranks.len()).rev().max_by_key(|&rank| size(&of_ranks[rank])).unwrap_or_default();
    let (same, other): (Vec<usize>, Vec<usize>) =
        (0..of_ranks.len()).partition(|&rank| of_ranks[rank] == of_ranks[right]);
    let differs = |index: &usize| of_tensors[other[0]][*index] != of_tensors[right][*index];
    let tensor = (0..count).find(differs).map_or("", name);
    let reason = format!(
        "{description} of {} differ from those of {}; on rank {} {tensor:?} is the first tensor that does. {advice}",
        numbers(&other),
        numbers(&same),
        other[0],
    );
    Err(Error::InvalidArgument { operation, reason })
}

fn numbers(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {ranks:?}"),
    }
}
