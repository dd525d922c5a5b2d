//! What ranks tell each other before any of them begins: what each is about to do, or why it cannot.
//!
//! Whatever is wrong with one rank's call becomes an error on every rank, so that nobody waits for a rank that has refused. For that,
//! nothing that may fail on one rank alone stands between the beginning of a call and its agreement: its outcome is brought along.

use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::buffer::TensorTable;
use crate::comm::Communicator;
#[cfg(feature = "cuda")]
use crate::comm::DeviceCommunicator;
use crate::error::{Error, Result};

/// Bytes in one number that a communicator carries.
const WORD: usize = size_of::<u64>();

/// A group of ranks that show each other numbers: a communicator for either kind of memory.
pub(crate) trait Ranks {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// Every rank's words, in rank order; all ranks bring equally many.
    fn gather(&self, words: &[u64]) -> Result<Vec<u64>>;
}

impl Ranks for dyn Communicator + '_ {
    fn rank(&self) -> usize {
        Communicator::rank(self)
    }

    fn world_size(&self) -> usize {
        Communicator::world_size(self)
    }

    fn gather(&self, words: &[u64]) -> Result<Vec<u64>> {
        crate::comm::gather_words(self, words)
    }
}

#[cfg(feature = "cuda")]
impl Ranks for dyn DeviceCommunicator + '_ {
    fn rank(&self) -> usize {
        DeviceCommunicator::rank(self)
    }

    fn world_size(&self) -> usize {
        DeviceCommunicator::world_size(self)
    }

    fn gather(&self, words: &[u64]) -> Result<Vec<u64>> {
        self.gather_words(words)
    }
}

pub(crate) fn hash_of(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Hands back what this rank has `prepared`, if every rank could prepare its own and all of them bring the same `plan`, which `quote`
/// puts into words. One exchange of two words where all is well; texts travel only where it is not.
///
/// # Errors
/// On a rank that could not prepare, what it failed with, and on the others [`Error::InvalidArgument`] that quotes the first such rank. Where
/// plans differ, [`Error::InvalidArgument`] on every rank that names two ranks and quotes both. Those of the ranks' communicator.
pub(crate) fn agree<R: Ranks + ?Sized, T>(
    operation: &'static str,
    ranks: &R,
    plan: u64,
    quote: &dyn Fn() -> String,
    prepared: Result<T>,
) -> Result<T> {
    let refusal = prepared.as_ref().err().map(ToString::to_string);
    let all = match ranks.gather(&[plan, u64::from(refusal.is_some())]) {
        Ok(all) => all,
        // What this rank could not do is nearer to the cause than what came of it.
        Err(error) => return prepared.and(Err(error)),
    };
    let of_ranks: Vec<&[u64]> = all.chunks_exact(2).collect();
    // Every rank sees the same numbers, so that every rank takes the same way from here on.
    if let Some(refusing) = of_ranks.iter().position(|words| words[1] != 0) {
        let refusals = gather_texts(|words| ranks.gather(words), &refusal.unwrap_or_default());
        prepared?;
        let reason = format!("rank {refusing} refuses: {}", refusals?[refusing]);
        return Err(Error::InvalidArgument { operation, reason });
    }
    let Some(odd) = of_ranks.iter().position(|words| words[0] != of_ranks[0][0]) else { return prepared };
    let quotes = gather_texts(|words| ranks.gather(words), &quote())?;
    let reason = if quotes[0] == quotes[odd] {
        format!("rank 0 and rank {odd} differ in the names, shapes or order of their tensors: both have {}", quotes[0])
    } else {
        format!("rank 0 and rank {odd} differ: rank 0 has {}, rank {odd} has {}", quotes[0], quotes[odd])
    };
    Err(Error::InvalidArgument { operation, reason })
}

/// Refuses ranks whose buffers hold other tensors, or that made other choices, a buffer shared out over another number of ranks than
/// there are, and what this rank has `checked` and found wrong, on every rank. The host waits for the other ranks.
///
/// Counts alone do not tell: tensors of two ranks may lie in another order in arenas of one length.
pub(crate) fn same_plan<R: Ranks + ?Sized>(
    operation: &'static str,
    ranks: &R,
    table: &TensorTable,
    choices: impl Hash + Debug,
    checked: Result<()>,
) -> Result<()> {
    let checked = checked.and_then(|()| table.check_world_size(operation, ranks.world_size()));
    let (count, dtype, world_size) = (table.tensor_count(), table.dtype(), table.world_size());
    let plan = hash_of((table.fingerprint(), &choices));
    let quote = || format!("{count} tensors of {dtype} for {world_size} ranks, with {choices:?}");
    agree(operation, ranks, plan, &quote, checked)
}

/// What this rank has prepared after the ranks' plans were compared, if every rank could prepare its own; an error on every rank if one, say,
/// lacks memory. The host waits for the other ranks.
pub(crate) fn all_prepared<R: Ranks + ?Sized, T>(operation: &'static str, ranks: &R, prepared: Result<T>) -> Result<T> {
    agree(operation, ranks, 0, &String::new, prepared)
}

/// Every rank's text, in rank order.
pub(crate) fn gather_texts(gather: impl Fn(&[u64]) -> Result<Vec<u64>>, text: &str) -> Result<Vec<String>> {
    let lens = gather(&[text.len() as u64])?;
    let longest = lens.iter().max().map_or(0, |len| (*len as usize).div_ceil(WORD));
    let mut words = vec![0; longest];
    for (word, bytes) in words.iter_mut().zip(text.as_bytes().chunks(WORD)) {
        let mut padded = [0; WORD];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
    let all = gather(&words)?;
    let text_of = |(rank, len): (usize, &u64)| {
        let words = &all[rank * longest..(rank + 1) * longest];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).take(*len as usize).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Ok(lens.iter().enumerate().map(text_of).collect())
}
