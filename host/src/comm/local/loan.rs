//! Memory that the ranks of a group lend each other while each does work of its own on what it got, collectives included.
//!
//! A loan begins with a collective, which all ranks pass or none, and ends with one that compares calls as every other does. But no
//! rank's memory goes back to it before the work of all ranks has ended, however it did: that last wait knows neither failures nor
//! deadlines. It ends because failures and deadlines end the collectives that the others' work may be waiting in.

use super::posts::{Memory, Post};
use super::rendezvous::Rendezvous;
use super::signal::Wait;
use crate::error::{Call, CommError, Departure, Operation, Result};

/// Loans of a group.
#[derive(Debug, Default)]
pub(super) struct Loans {
    /// Ranks whose work on the present one has ended.
    ended: usize,
    /// Number of loans that are over.
    over: u64,
}

impl Rendezvous {
    /// Waits for all ranks, runs `work` on everybody's posts, in which it may call what else there is here, and waits until the work of
    /// all ranks has ended.
    pub(super) fn lend(&self, rank: usize, post: Post, work: impl FnOnce(&[Post]) -> Result<()>) -> Result<()> {
        let operation = post.call.operation;
        let mut posts = Vec::with_capacity(self.world_size());
        self.meet(rank, post, |all| posts.extend_from_slice(all))?;
        // From here on the other ranks use this one's memory.
        let _loan = Loan { rendezvous: self, operation, rank };
        let outcome = work(&posts);
        match &outcome {
            // A rank that works on, and calls what this one does not, is told so.
            Ok(()) => {
                let call = Call::without_data(operation);
                return self.meet(rank, Post { call, input: Memory::NONE, output: Memory::NONE }, |_| ());
            }
            Err(error) => self.fail(CommError::InvalidCall { operation, rank, reason: error.to_string() }),
        }
        outcome
    }
}

/// This rank's part in a loan: dropped when its work has ended, even if that panicked.
struct Loan<'a> {
    rendezvous: &'a Rendezvous,
    operation: Operation,
    rank: usize,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (operation, rank) = (self.operation, self.rank);
            self.rendezvous.fail(CommError::PeerGone { operation, rank, departure: Departure::Panicked });
        }
        let mut state = self.rendezvous.lock();
        let over = state.loans.over;
        state.loans.ended += 1;
        if state.loans.ended == state.world_size() {
            state.loans = Loans { ended: 0, over: over + 1 };
            self.rendezvous.notify();
        }
        let mut wait = Wait::default();
        while state.loans.over == over {
            state = self.rendezvous.wait_for_change(state, &mut wait);
        }
    }
}
