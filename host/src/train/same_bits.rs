//! Comparison of numbers between ranks, bit for bit, without sending them.

use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, Ranks};
use crate::error::{Error, Result};
use crate::kernels::KernelMemory;
use crate::kernels::cpu::{Fingerprint, fingerprint_of_words};

/// Refuses buffers of the same tensors whose elements differ between ranks; the gaps between tensors are ignored. Errors name the elements
/// by `description`, and end with `advice`.
///
/// # Errors
/// The errors of [`check_fingerprints`].
pub(super) fn check_same_bits<M: KernelMemory>(
    operation: &'static str,
    comm: &dyn Communicator<M>,
    (description, advice): (&str, &str),
    buffer: &GradientBuffer<M>,
) -> Result<()> {
    let of_tensors: Result<Vec<Fingerprint>> =
        buffer.tensors().map(|(_, tensor)| M::fingerprint(tensor.data())).collect();
    let of_tensors = of_tensors?;
    check_fingerprints(operation, comm, (description, advice), &of_tensors, &|index| buffer.name(index))
}

/// Refuses tensors whose fingerprints differ between ranks, and tensors that are equal on all ranks and not finite. All ranks must have
/// the same number of tensors.
///
/// # Errors
/// [`Error::InvalidArgument`] on every rank, naming the ranks that differ from most of the others, and a tensor; or naming the number that
/// is not finite, and its tensor. The errors of a collective.
pub(super) fn check_fingerprints<'n, R: Ranks + ?Sized>(
    operation: &'static str,
    comm: &R,
    (description, advice): (&str, &str),
    fingerprints: &[Fingerprint],
    name: &dyn Fn(usize) -> &'n str,
) -> Result<()> {
    let of_tensors: Vec<u64> = fingerprints.iter().map(Fingerprint::hash).collect();
    let of_ranks = comm.gather_words(&[fingerprint_of_words(&of_tensors)])?;
    if of_ranks.iter().all(|fingerprint| *fingerprint == of_ranks[0]) {
        return check_finite(operation, description, fingerprints, name);
    }
    // There may be many tensors: their fingerprints are exchanged only if the ranks differ, to find the tensor.
    let count = fingerprints.len();
    let are_finite = fingerprints.iter().map(|fingerprint| u64::from(fingerprint.not_finite().is_none()));
    let own: Vec<u64> = of_tensors.into_iter().chain(are_finite).collect();
    let all = comm.gather_words(&own)?;
    let all: Vec<(&[u64], &[u64])> = all.chunks_exact(2 * count).map(|words| words.split_at(count)).collect();
    // The largest group of equal ranks is taken as correct; among groups of one size, the group with the lowest rank.
    let size = |fingerprint: &u64| of_ranks.iter().filter(|other| *other == fingerprint).count();
    let right = (0..of_ranks.len()).rev().max_by_key(|&rank| size(&of_ranks[rank])).unwrap_or_default();
    let (same, other): (Vec<usize>, Vec<usize>) =
        (0..of_ranks.len()).partition(|&rank| of_ranks[rank] == of_ranks[right]);
    let differs = |index: &usize| all[other[0]].0[*index] != all[right].0[*index];
    let tensor = (0..count).find(differs).map_or("", name);
    let not_finite = (0..count).find_map(|index| {
        let ranks: Vec<usize> = (0..all.len()).filter(|&rank| all[rank].1[index] == 0).collect();
        (!ranks.is_empty()).then(|| format!("; {:?} has NaN or infinities on {}", name(index), numbers(&ranks)))
    });
    let reason = format!(
        "{description} of {} differ from those of {}; on rank {} {tensor:?} is the first tensor that differs{}. {advice}",
        numbers(&other),
        numbers(&same),
        other[0],
        not_finite.unwrap_or_default(),
    );
    Err(Error::InvalidArgument { operation, reason })
}

/// Refuses tensors with NaN or infinities.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the number and its tensor.
pub(super) fn check_finite<'n>(
    operation: &'static str,
    description: &str,
    fingerprints: &[Fingerprint],
    name: &dyn Fn(usize) -> &'n str,
) -> Result<()> {
    let not_finite =
        |(tensor, fingerprint): (usize, &Fingerprint)| fingerprint.not_finite().map(|found| (tensor, found));
    let Some((tensor, (index, value))) = fingerprints.iter().enumerate().find_map(not_finite) else { return Ok(()) };
    let reason = format!(
        "{description} are equal on all ranks but not finite: element {index} of {:?} is {value}. Continue from a checkpoint of an \
         earlier step",
        name(tensor)
    );
    Err(Error::InvalidArgument { operation, reason })
}

/// Ranks in the words of an error.
pub(super) fn numbers(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {ranks:?}"),
    }
}
