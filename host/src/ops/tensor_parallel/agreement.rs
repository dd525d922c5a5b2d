//! [`same_call`]: the ranks say what they are about to do, before any of them does it.
//!
//! It never looks at elements. What is wrong with one rank's call becomes an error on every rank, and nobody waits.

use super::Tensor;
use crate::error::{Error, Result};
use crate::ops::agreement::{gather_texts, hash_of};

/// Refuses ranks whose `call`s differ; the error names two ranks and quotes both.
///
/// One small exchange where they agree, or none where the group remembers the call; the texts themselves travel only
/// where ranks differ.
pub(super) fn same_call<T: Tensor>(operation: &'static str, call: &str, comm: T::Comm<'_>) -> Result<()> {
    if T::world_size(comm) == 1 {
        return Ok(());
    }
    let value = hash_of(call);
    if T::was_agreed(value, comm)? {
        return Ok(());
    }
    let all = T::gather_words(&[value], comm)?;
    let Some(odd) = all.iter().position(|other| *other != all[0]) else {
        T::remember(value, comm);
        return Ok(());
    };
    // Every rank has seen the same numbers, so that every rank comes here.
    let calls = gather_texts(|words| T::gather_words(words, comm), call)?;
    let reason = format!("ranks disagree: rank 0 called {}, rank {odd} called {}", calls[0], calls[odd]);
    Err(Error::InvalidArgument { operation, reason })
}
