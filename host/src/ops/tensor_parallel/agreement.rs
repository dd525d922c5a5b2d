//! [`same_call`]: the ranks say what they are about to do, before any of them does it.
//!
//! It never looks at elements. What is wrong with one rank's call becomes an error on every rank, and nobody waits.

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::comm::{Communicator, gather_words};
use crate::error::{Error, Result};

/// Bytes in one number that a communicator carries.
const WORD: usize = size_of::<u64>();

/// Refuses ranks whose `call`s differ; the error names two ranks and quotes both.
///
/// One small exchange where they agree; the texts themselves travel only where they do not.
pub(super) fn same_call(operation: &'static str, comm: &dyn Communicator, call: &str) -> Result<()> {
    if comm.world_size() == 1 {
        return Ok(());
    }
    let mut hasher = DefaultHasher::new();
    call.hash(&mut hasher);
    let words = call.len().div_ceil(WORD) as u64;
    let all = gather_words(comm, &[hasher.finish(), words])?;
    let ranks: Vec<&[u64]> = all.chunks_exact(2).collect();
    let Some(odd) = ranks.iter().position(|rank| rank != &ranks[0]) else {
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
    let texts = gather_words(comm, &text)?;
    let quote = |rank: usize| {
        let words = &texts[rank * longest..(rank + 1) * longest];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned()
    };
    let reason = format!("ranks disagree: rank 0 called {}, rank {odd} called {}", quote(0), quote(odd));
    Err(Error::InvalidArgument { operation, reason })
}
