//! The pipeline of a staged collective: in each step, pieces of the data go from the device into a block of pinned memory, are processed
//! there by MPI and the processor, and go back, while the pieces of the next step are in flight.
//!
//! The pipeline does not depend on the collective. After a failure of the device, a rank still does its part of the work, because the
//! other ranks wait for it.

use crate::driver::{CudaError, Pinned, Queue};
use crate::error::Result;

/// The number of steps that are fetched ahead of the one in work.
const AHEAD: usize = 2;

/// A piece of a step: its address on the device, and its offset in the block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

/// The pinned blocks and queues of one call.
pub(super) struct StagedPipeline<'a> {
    pub(super) pinned: &'a Pinned,
    /// The queue that copies pieces from the device; it already waits for the work that `queue` held before the call.
    pub(super) down: &'a Queue,
    /// The operands' queue, which copies pieces back.
    pub(super) queue: &'a Queue,
}

impl StagedPipeline<'_> {
    /// Runs `work` for `count` steps one after another, each in its block: after the copies of the pieces that `input` returns, and
    /// before the copies of the pieces that `output` returns. Returns the first failure of the device, after which the contents of blocks
    /// are unspecified.
    ///
    /// Inputs have been read when this returns; outputs are written in the order of the operands' queue.
    ///
    /// # Errors
    /// The errors of `work`, at once.
    ///
    /// # Safety
    /// Pieces lie within memory of the queues' device, which stays valid until `queue` has passed the call, and the pieces of the outputs
    /// are used only by work in `queue`. No step's output is another's input.
    pub(super) unsafe fn run(
        &self,
        count: usize,
        input: impl Fn(usize) -> Vec<Piece>,
        mut work: impl FnMut(usize, *mut u8) -> Result<()>,
        output: impl Fn(usize) -> Vec<Piece>,
    ) -> Result<Result<(), CudaError>> {
        let block = |step: usize| step % self.pinned.count();
        let fetch = |step: usize| {
            // SAFETY: the caller's promise; the block's last copies are over before these begin.
            unsafe { self.fetch(block(step), input(step)) }
        };
        let mut device = (0..count.min(AHEAD)).try_for_each(fetch);
        for step in 0..count {
            if device.is_ok() && step + AHEAD < count {
                device = fetch(step + AHEAD);
            }
            if device.is_ok() {
                device = self.pinned.wait(block(step));
            }
            work(step, self.pinned.block(block(step)))?;
            if device.is_ok() {
                // SAFETY: the caller's promise; the block is left alone until these copies are over.
                device = unsafe { self.store(block(step), output(step)) };
            }
        }
        Ok(device)
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn fetch(&self, block: usize, pieces: Vec<Piece>) -> Result<(), CudaError> {
        self.pinned.make_queue_wait(self.down, block)?;
        for Piece { address, offset, bytes } in pieces {
            // SAFETY: the caller's promise.
            unsafe { self.pinned.fetch(self.down, block, offset, address, bytes)? };
        }
        self.pinned.mark(self.down, block)
    }

    /// # Safety
    /// As [`run`](Self::run).
    unsafe fn store(&self, block: usize, pieces: Vec<Piece>) -> Result<(), CudaError> {
        for Piece { address, offset, bytes } in pieces {
            // SAFETY: the caller's promise.
            unsafe { self.pinned.store(self.queue, block, offset, address, bytes)? };
        }
        self.pinned.mark(self.queue, block)
    }
}
