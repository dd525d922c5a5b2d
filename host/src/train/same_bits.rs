//! Whether all ranks hold the same numbers, bit for bit, found out without sending them.

use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, Ranks};
use crate::error::{Error, Result};
use crate::kernels::cpu;

/// Refuses buffers of the same tensors whose elements differ between ranks; the gaps between tensors do not count. Errors
/// call the elements `what`, and end with `advice`.
///
/// # Errors
/// As [`check_fingerprints`].
pub(super) fn check_same_bits(
    operation: &'static str,
    comm: &dyn Communicator,
    (what, advice): (&str, &str),
    buffer: &GradientBuffer,
) -> Result<()> {
    let of_tensors: Vec<u64> =
        (0..buffer.tensor_count()).map(|index| cpu::fingerprint(buffer.tensor(index).data())).collect();
    check_fingerprints(operation, comm, (what, advice), &of_tensors, &|index| buffer.name(index))
}

/// Refuses tensors whose fingerprints differ between ranks, which have equally many of them.
///
/// # Errors
/// [`Error::InvalidArgument`] on every rank, naming the ranks that differ from most of the others, and a tensor; those
/// of a collective.
pub(super) fn check_fingerprints<'n, R: Ranks + ?Sized>(
    operation: &'static str,
    comm: &R,
    (what, advice): (&str, &str),
    of_tensors: &[u64],
    name: &dyn Fn(usize) -> &'n str,
) -> Result<()> {
    let count = of_tensors.len();
    let of_ranks = comm.gather_words(&[cpu::fingerprint_of_words(of_tensors)])?;
    if of_ranks.iter().all(|fingerprint| *fingerprint == of_ranks[0]) {
        return Ok(());
    }
    // There may be many tensors: their fingerprints travel only to find the one that differs.
    let of_tensors = comm.gather_words(of_tensors)?;
    let of_tensors: Vec<&[u64]> = of_tensors.chunks_exact(count).collect();
    // The largest group of equal ranks is taken for right; among groups of one size, that of the lowest rank.
    let size = |fingerprint: &u64| of_ranks.iter().filter(|other| *other == fingerprint).count();
    let right = (0..of_ranks.len()).rev().max_by_key(|&rank| size(&of_ranks[rank])).unwrap_or_default();
    let (same, other): (Vec<usize>, Vec<usize>) =
        (0..of_ranks.len()).partition(|&rank| of_ranks[rank] == of_ranks[right]);
    let differs = |index: &usize| of_tensors[other[0]][*index] != of_tensors[right][*index];
    let tensor = (0..count).find(differs).map_or("", name);
    let reason = format!(
        "{what} of {} differ from those of {}; on rank {} {tensor:?} is the first tensor that does. {advice}",
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
