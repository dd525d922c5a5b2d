//! [`Completion`]: the output signal of transfers that may still be pending.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::memory::BundleMemory;
use crate::comm::{Communicator, Ledger};
#[cfg(feature = "cuda")]
use crate::driver::Event;
use crate::error::Result;
use crate::memory::Host;

/// The completion of a transfer and of everything that was in its queue before it; on the host a transfer is complete at once.
///
/// It may be dropped: later work in the queue may use received tensors, and reuse the memory of sent ones. On a GPU a transfer may still
/// fail; wait for it, or for its communicator, before trusting its results.
pub struct Completion<'c, M: BundleMemory = Host> {
    comm: &'c dyn Communicator<M>,
    end: M::End,
    /// The number of calls that had been announced at the time of the transfer.
    announced: u64,
    is_over: Cell<bool>,
}

impl<'c, M: BundleMemory> Completion<'c, M> {
    /// Covers everything that is in the queue now.
    pub(super) fn new(comm: &'c dyn Communicator<M>, queue: &M::Queue) -> Result<Self> {
        Ok(Self {
            comm,
            end: M::end(queue)?,
            announced: comm.ledger().map_or(0, Ledger::announced),
            is_over: Cell::new(false),
        })
    }

    /// The output signal so far: whether the transfer is complete. Does not wait.
    ///
    /// # Errors
    /// The failure of the communicator, and `Error::Cuda` for work that failed while it ran.
    pub fn is_done(&self) -> Result<bool> {
        if self.is_over.get() {
            return Ok(true);
        }
        // A complete transfer may still have matched a wrong one.
        let is_confirmed = || self.comm.ledger().is_none_or(|ledger| ledger.is_confirmed(self.announced));
        let is_over = M::has_passed(&self.end).map(|has_passed| has_passed && is_confirmed());
        // A failure is recorded before waiting work continues, so a check after the query cannot miss it.
        if let Some(failure) = self.comm.failure() {
            return Err(failure);
        }
        self.is_over.set(is_over?);
        Ok(self.is_over.get())
    }

    /// Waits until the transfer is complete; returns the output signal, true.
    ///
    /// # Errors
    /// The errors of [`is_done`](Self::is_done).
    pub fn wait(&self) -> Result<bool> {
        let begun = Instant::now();
        while !self.is_done()? {
            if let (true, Some(ledger)) = (M::has_passed(&self.end)?, self.comm.ledger()) {
                ledger.confirm(self.announced)?;
            }
            // Most waits are short, and a sleeping thread wakes up late.
            if begun.elapsed() < Duration::from_millis(1) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        Ok(true)
    }
}

#[cfg(feature = "cuda")]
impl Completion<'_, crate::memory::Cuda> {
    /// The event in the queue, for another queue to wait for. It passes also if the transfer fails.
    pub fn event(&self) -> &Event {
        &self.end
    }
}

impl<M: BundleMemory> std::fmt::Debug for Completion<'_, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Completion").field("end", &self.end).field("is_over", &self.is_over).finish_non_exhaustive()
    }
}
