//! Whether all ranks hold the same weights, bit for bit.

use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, gather_words};
use crate::error::{Error, Result};
use crate::kernels::cpu;

/// Refuses weights that differ between ranks, which hold the same tensors; the gaps between tensors do not count.
///
/// # Errors
/// [`Error::InvalidArgument`] on every rank, naming the ranks that differ from most of the others, and a tensor; those
/// of a collective.
pub(super) fn check_same(operation: &'static str, comm: &dyn Communicator, weights: &GradientBuffer) -> Result<()> {
    let of_tensors: Vec<u64> =
        (0..weights.tensor_count()).map(|index| cpu::fingerprint(weights.tensor(index).data())).collect();
    let of_ranks = gather_words(comm, &[cpu::fingerprint_of_words(&of_tensors)])?;
    if of_ranks.iter().all(|fingerprint| *fingerprint == of_ranks[0]) {
        return Ok(());
    }
    // There may be many tensors: their fingerprints travel only to find the one that differs.
    let of_tensors = gather_words(comm, &of_tensors)?;
    let of_tensors: Vec<&[u64]> = of_tensors.chunks_exact(weights.tensor_count()).collect();
    // The largest group of equal ranks is taken for right; among groups of one size, that of the lowest rank.
    let size = |fingerprint: &u64| of_ranks.iter().filter(|other| *other == fingerprint).count();
    let right = (0..of_ranks.len()).rev().max_by_key(|&rank| size(&of_ranks[rank])).unwrap_or_default();
    let (same, other): (Vec<usize>, Vec<usize>) =
        (0..of_ranks.len()).partition(|&rank| of_ranks[rank] == of_ranks[right]);
    let differs = |index: &usize| of_tensors[other[0]][*index] != of_tensors[right][*index];
    let tensor = (0..weights.tensor_count()).find(differs).map_or("", |index| weights.name(index));
    let reason = format!(
        "the weights of {} differ from those of {}; on rank {} {tensor:?} is the first tensor that does. Broadcast one \
         rank's weights before the first step",
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
