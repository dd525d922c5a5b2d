//! [`same_call`]: the ranks say what they are about to do, before any of them does it.
//!
//! It never looks at elements. What is wrong with one rank's call becomes an error on every rank, and nobody waits.

use super::Tensor;
use crate::agreement::{Plan, agree_by};
use crate::call::scope;
use crate::error::Result;

/// Refuses ranks whose plans differ.
///
/// One small exchange where they agree, or none where the group remembers the call; texts travel only where ranks
/// differ.
pub(super) fn same_call<T: Tensor>(plan: &Plan<'_>, comm: T::Comm<'_>) -> Result<()> {
    if T::world_size(comm) == 1 {
        return Ok(());
    }
    let value = plan.hash();
    if T::was_agreed(value, comm)? {
        return Ok(());
    }
    let gather = |words: &[u64]| {
        let _comparing = scope::comparing();
        T::gather_words(words, comm)
    };
    agree_by(&gather, plan, Ok(()))?;
    T::remember(value, comm);
    Ok(())
}
