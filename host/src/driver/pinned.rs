//! [`Pinned`]: page-locked host memory in equal blocks, through which data are copied between a device and the host block by block, without
//! unnecessary waits.
//!
//! Every block has an event after its last copy. The transport decides how the blocks are used.

use std::cell::Cell;
use std::ffi::c_void;
use std::ptr;

use super::event::{Mark, Timing};
use super::{CudaError, Queue, check};
use crate::sys::cuda;

/// Page-locked memory of the host, from and to which devices copy.
#[derive(Debug)]
pub(crate) struct Pinned {
    start: *mut u8,
    block_bytes: usize,
    /// For each block an event after its last copies.
    copied: Vec<Mark>,
    queue: Queue,
    /// Whether the memory stays for as long as the process lives, because a transport may still use it.
    is_left: Cell<bool>,
}

// SAFETY: memory behind a pointer, and handles of the driver, all of which may be used from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates `count` blocks of `block_bytes` bytes each, for copies of `queue`'s device.
    pub(crate) fn new(queue: &Queue, count: usize, block_bytes: usize) -> Result<Self, CudaError> {
        queue.make_current()?;
        let copied = (0..count).map(|_| Mark::new(Timing::Left)).collect::<Result<_, _>>()?;
        let mut start: *mut c_void = ptr::null_mut();
        let bytes = count * block_bytes;
        // SAFETY: writes one address.
        check(&format!("cuMemAllocHost of {bytes} bytes"), unsafe { cuda::cuMemAllocHost_v2(&mut start, bytes) })?;
        Ok(Self { start: start.cast(), block_bytes, copied, queue: queue.clone(), is_left: Cell::new(false) })
    }

    pub(crate) fn count(&self) -> usize {
        self.copied.len()
    }

    /// The start of a block, a multiple of `block_bytes` behind the start of a page. The host accesses the block only after waiting for its
    /// copies.
    pub(crate) fn block(&self, index: usize) -> *mut u8 {
        assert!(index < self.count(), "block {index} of {}", self.count());
        self.start.wrapping_add(index * self.block_bytes)
    }

    /// Enqueues into `queue` a copy of device memory to an offset in a block.
    ///
    /// # Safety
    /// There are `bytes` bytes at `address`, on the queue's device, until the queue has passed the copy. Until then nothing else uses that
    /// part of the block.
    pub(crate) unsafe fn fetch(
        &self,
        queue: &Queue,
        index: usize,
        offset: usize,
        address: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let pointer = self.pointer(index, offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        let _held = queue.hold();
        self.queue.make_current()?;
        queue.refuse_capture("a copy to pinned memory")?;
        // SAFETY: the range lies in the block; the rest is the caller's promise.
        check("cuMemcpyDtoHAsync", unsafe {
            cuda::cuMemcpyDtoHAsync_v2(pointer.cast(), address, bytes, queue.raw_stream())
        })
    }

    /// Enqueues into `queue` a copy of a part of a block to device memory.
    ///
    /// # Safety
    /// The conditions of [`fetch`](Self::fetch); besides, only work in the queue's order uses the device memory.
    pub(crate) unsafe fn store(
        &self,
        queue: &Queue,
        index: usize,
        offset: usize,
        address: u64,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let pointer = self.pointer(index, offset, bytes);
        if bytes == 0 {
            return Ok(());
        }
        let _held = queue.hold();
        self.queue.make_current()?;
        queue.refuse_capture("a copy from pinned memory")?;
        // SAFETY: the range lies in the block; the rest is the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe {
            cuda::cuMemcpyHtoDAsync_v2(address, pointer.cast_const().cast(), bytes, queue.raw_stream())
        })
    }

    fn pointer(&self, index: usize, offset: usize, bytes: usize) -> *mut u8 {
        assert!(
            offset + bytes <= self.block_bytes,
            "{bytes} bytes from {offset} on in a block of {}",
            self.block_bytes
        );
        self.block(index).wrapping_add(offset)
    }

    /// Records that a block's last copies are in `queue`.
    pub(crate) fn mark(&self, queue: &Queue, index: usize) -> Result<(), CudaError> {
        self.queue.make_current()?;
        self.copied[index].record(queue.raw_stream())
    }

    /// Whether a block's copies are over. Does not wait.
    pub(crate) fn is_done(&self, index: usize) -> Result<bool, CudaError> {
        self.queue.make_current()?;
        self.copied[index].is_done()
    }

    /// Waits until a block's copies are over.
    pub(crate) fn wait(&self, index: usize) -> Result<(), CudaError> {
        self.queue.make_current()?;
        self.copied[index].wait()
    }
}

/// Methods for transports with queues of their own besides the caller's.
#[cfg(feature = "mpi")]
impl Pinned {
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Keeps the memory for as long as the process lives, because the transport may go on using a block after its call has ended.
    pub(crate) fn leave(&self) {
        self.is_left.set(true);
    }

    /// Makes later work of `queue` wait for a block's last copies. The host does not wait.
    pub(crate) fn make_queue_wait(&self, queue: &Queue, index: usize) -> Result<(), CudaError> {
        self.queue.make_current()?;
        self.copied[index].make_stream_wait(queue.raw_stream())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(error) = self.queue.make_current() {
            tracing::error!(%error, "pinned memory was not freed");
            std::mem::take(&mut self.copied).into_iter().for_each(std::mem::forget);
            return;
        }
        for mark in &self.copied {
            // A failed device does not write to the memory any more.
            if let Err(error) = mark.wait() {
                tracing::warn!(%error, "waiting for the last copies of pinned memory");
            }
        }
        if self.is_left.get() {
            return;
        }
        // SAFETY: allocated in `new`, freed once, and no copy uses it any more.
        if let Err(error) = check("cuMemFreeHost", unsafe { cuda::cuMemFreeHost(self.start.cast()) }) {
            tracing::error!(%error, "pinned memory was not freed");
        }
    }
}
