//! [`Ledger`]: the comparison of calls without waiting for the other ranks.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::call::Digest;
use crate::error::{Error, Operation, Result};

/// The record of calls that ranks compare without waiting for each other: agreements of the ranks, and calls announced to them.
pub trait Ledger {
    /// The agreements of the ranks on operations that are repeated at every step, so that the host waits for each of them once.
    fn agreements(&self) -> &Agreements;

    /// Relies on the earlier agreement with this number, without waiting for other ranks. Ranks that rely on different agreements fail like
    /// ranks with different calls.
    ///
    /// # Errors
    /// The errors of a collective.
    fn recall(&self, agreement: u64) -> Result<()>;

    /// Returns an error in this rank's own operands, after reporting it to the other ranks, as a collective does. It ends the communicator.
    fn refuse(&self, operation: Operation, error: Error) -> Error;

    /// The number of calls of this rank that were sent to the other ranks for comparison.
    fn announced(&self) -> u64;

    /// Whether the first `calls` of [`announced`](Self::announced) are known to match the calls of the other ranks. Does not wait.
    fn is_confirmed(&self, calls: u64) -> bool;

    /// Waits until the first `calls` of [`announced`](Self::announced) are known to match.
    ///
    /// # Errors
    /// The errors of a collective.
    fn confirm(&self, calls: u64) -> Result<()>;
}

/// The plans that all ranks of a group have agreed on, and that need not be compared again; equal on every rank of the group. All ranks
/// make their agreements in the same order, so the number of an agreement identifies its call on every rank.
#[derive(Debug, Default)]
pub struct Agreements(RefCell<HashMap<Digest, u64>>);

impl Agreements {
    /// The number of the agreement on the call with this digest, if there is one.
    pub(crate) fn number_of(&self, call: &Digest) -> Option<u64> {
        self.0.borrow().get(call).copied()
    }

    /// Adds an agreement that all ranks have just made.
    pub(crate) fn add(&self, call: Digest) {
        let mut agreements = self.0.borrow_mut();
        let number = agreements.len() as u64 + 1;
        agreements.entry(call).or_insert(number);
    }
}
