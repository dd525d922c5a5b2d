//! [`same_call`]: the ranks say what they are about to do, before any of them does it.
//!
//! It never looks at elements. What is wrong with one rank's call becomes an error on every rank, and nobody waits.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::Tensor;
use crate::error::{Error, Result};

/// Bytes in one number that a communicator carries.
const WORD: usize = size_of::<u64>();

/// Refuses ranks whose `call`s differ; the error names two ranks and quotes both.
///
/// One small exchange where they agree, or none where the group remembers the call; the texts themselves travel only
/// where ranks differ.
pub(super) fn same_call<T: Tensor>(operation: &'static str, call: &str, comm: T::Comm<'_>) -> Result<()> {
    if T::world_size(comm) == 1 {
        return Ok(());
    }
    let mut hasher = DefaultHasher::new();
    call.hash(&mut hasher);
    let value = hasher.finish();
    if T::was_agreed(value, comm)? {
        return Ok(());
    }
    let words = call.len().div_ceil(WORD) as u64;
    let all = T::gather_words(&[value, words], comm)?;
    let ranks: Vec<&[u64]> = all.chunks_exact(2).collect();
    let Some(odd) = ranks.iter().position(|rank| rank != &ranks[0]) else {
        T::remember(value, comm);
        return Ok(());
    };

    // Every rank has seen the same numbers, so that every rank comes here.
    let longest = ranks.iter().map(|rank| rank[1]).max().unwrap_or(0) as usize;
    let mut text = vec![0; longest];
    for (word, bytes) in text.iter_mut().zip(call.as_bytes().chunks(WORD)) {
        let mut padded = [0; WORD];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(padded);
    }
    let texts = T::gather_words(&text, comm)?;
    let quote = |rank: usize| {
        let words = &texts[rank * longest..(rank + 1) * longest];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    };
    let reason = format!("ranks disagree: rank 0 called {}, rank {odd} called {}", quote(0), quote(odd));
    Err(Error::InvalidArgument { operation, reason })
}
