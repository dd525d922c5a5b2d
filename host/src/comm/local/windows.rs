//! Exposure epochs, in which every rank works on windows of the other ranks' memory and may call collectives.
//!
//! An epoch begins with a collective, which completes on all ranks or on none, and ends with a second one, which is compared like every
//! call. No rank returns before the work of all ranks has ended, with or without an error: this last wait ignores failures and deadlines.
//! It ends because failures and deadlines end the collectives in which the work of other ranks may be waiting.

use super::operands::{CollectiveCall, Region};
use super::rendezvous::{Epochs, Rendezvous};
use super::signal::Wait;
use crate::error::{Call, CommError, Departure, Operation, Result};

impl Rendezvous {
    /// Waits for all ranks, runs `work` on the calls of all ranks, and waits until the work of all ranks has ended. `work` may make any
    /// other call of the group.
    pub(super) fn expose(
        &self,
        rank: usize,
        collective: CollectiveCall,
        work: impl FnOnce(&[CollectiveCall]) -> Result<()>,
    ) -> Result<()> {
        let operation = collective.call.operation;
        let mut calls = Vec::with_capacity(self.world_size());
        self.collective(rank, collective, |all| calls.extend_from_slice(all))?;
        // From here on, the other ranks use this rank's memory.
        let _epoch = ExposureEpoch { rendezvous: self, operation, rank };
        let outcome = work(&calls);
        match &outcome {
            // A rank that is still working and makes a further call gets a mismatch with this call.
            Ok(()) => {
                let call = Call::without_data(operation);
                return self.collective(
                    rank,
                    CollectiveCall { call, input: Region::NONE, output: Region::NONE },
                    |_| (),
                );
            }
            Err(error) => self.fail(CommError::InvalidCall { operation, rank, reason: error.to_string() }),
        }
        outcome
    }
}

/// This rank's part in an exposure epoch: dropped when its work has ended, even if it panicked.
struct ExposureEpoch<'a> {
    rendezvous: &'a Rendezvous,
    operation: Operation,
    rank: usize,
}

impl Drop for ExposureEpoch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (operation, rank) = (self.operation, self.rank);
            self.rendezvous.fail(CommError::PeerGone { operation, rank, departure: Departure::Panicked });
        }
        let mut state = self.rendezvous.lock();
        let over = state.epochs.over;
        state.epochs.ended += 1;
        if state.epochs.ended == self.rendezvous.world_size() {
            state.epochs = Epochs { ended: 0, over: over + 1 };
            self.rendezvous.notify();
        }
        let mut wait = Wait::default();
        while state.epochs.over == over {
            state = self.rendezvous.wait_for_change(state, &mut wait);
        }
    }
}
