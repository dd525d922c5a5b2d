//! Device memory that a queue has used and will use again, and pinned memory that tables travel through.
//!
//! Freeing device memory makes the driver wait for the whole device. With collectives under way that can be for ever: the device
//! waits for a peer, whose thread waits for the driver. So a buffer that is dropped goes back to its queue, and the next one of
//! its size takes it over, in the queue's order. Memory goes back to the driver when the queue is dropped or the driver has none.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use cust::sys;

use super::event::{Mark, Timing};
use super::{CudaError, check};

/// The driver's code for memory that does not suffice.
const OUT_OF_MEMORY: u32 = cust::error::CudaError::OutOfMemory as u32;

/// Bytes that a buffer of `bytes` really gets: few different sizes, so that memory is found again.
pub(super) fn size_class(bytes: usize) -> usize {
    const SMALL: usize = 512;
    const LARGE: usize = 2 << 20;
    if bytes < LARGE / 2 { bytes.max(1).next_multiple_of(SMALL) } else { bytes.next_multiple_of(LARGE) }
}

/// Free device memory by size class. The context must be current in every call.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: HashMap<usize, Vec<u64>>,
}

impl Pool {
    pub(super) fn take(&mut self, class: usize) -> Option<u64> {
        self.free.get_mut(&class)?.pop()
    }

    pub(super) fn give(&mut self, class: usize, address: u64) {
        self.free.entry(class).or_default().push(address);
    }

    /// Gives everything back to the driver, which waits for the device.
    pub(super) fn release(&mut self) {
        for address in self.free.drain().flat_map(|(_, addresses)| addresses) {
            // SAFETY: the address came from `allocate`, and nothing refers to it any more.
            if let Err(error) = check("cuMemFree", unsafe { sys::cuMemFree_v2(address) }) {
                tracing::error!(%error, "device memory was not freed");
            }
        }
    }
}

/// New device memory, or `None` where it does not suffice.
pub(super) fn allocate(bytes: usize) -> Result<Option<u64>, CudaError> {
    let mut address = 0;
    // SAFETY: writes one address.
    match check(&format!("cuMemAlloc of {bytes} bytes"), unsafe { sys::cuMemAlloc_v2(&mut address, bytes) }) {
        Ok(()) => Ok(Some(address)),
        Err(error) if error.code == OUT_OF_MEMORY => Ok(None),
        Err(error) => Err(error),
    }
}

/// The refusal of `bytes` bytes.
pub(super) fn out_of_memory(bytes: usize) -> CudaError {
    let text = cust::error::CudaError::OutOfMemory.to_string();
    CudaError { call: format!("cuMemAlloc of {bytes} bytes"), code: OUT_OF_MEMORY, text }
}

/// Pinned host memory that small uploads are written to, so that the copy to the device needs nobody to wait for it.
#[derive(Debug, Default)]
pub(super) struct Staging {
    blocks: Vec<Block>,
}

#[derive(Debug)]
struct Block {
    start: *mut u8,
    bytes: usize,
    /// When the last copy out of it is over.
    copied: Mark,
}

// SAFETY: plain memory behind a lock.
unsafe impl Send for Staging {}

impl Staging {
    /// Puts a copy of `data` to device memory at `address` into the stream; the data may be changed at once. The context must be
    /// current.
    ///
    /// # Safety
    /// There are as many bytes at `address`, of the stream's device, and nothing but work in the stream uses them.
    pub(super) unsafe fn upload(&mut self, stream: sys::CUstream, address: u64, data: &[u8]) -> Result<(), CudaError> {
        let block = self.find(data.len())?;
        // SAFETY: the block has room, and its last copy is over.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), block.start, data.len()) };
        // SAFETY: the block stays until its event has passed; the destination is the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(address, block.start.cast_const().cast::<c_void>(), data.len(), stream)
        })?;
        block.copied.record(stream)
    }

    fn find(&mut self, bytes: usize) -> Result<&mut Block, CudaError> {
        let mut found = None;
        for (index, block) in self.blocks.iter().enumerate() {
            if block.bytes >= bytes && block.copied.is_done()? {
                found = Some(index);
                break;
            }
        }
        let index = match found {
            Some(index) => index,
            None => {
                let bytes = bytes.next_power_of_two().max(1 << 16);
                let copied = Mark::new(Timing::Left)?;
                let mut start = ptr::null_mut();
                // SAFETY: writes one address.
                check("cuMemAllocHost", unsafe { sys::cuMemAllocHost_v2(&mut start, bytes) })?;
                self.blocks.push(Block { start: start.cast(), bytes, copied });
                self.blocks.len() - 1
            }
        };
        Ok(&mut self.blocks[index])
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for block in &self.blocks {
            // SAFETY: allocated in `find`, freed once; the stream is done with it, or is being destroyed too, and the driver waits.
            if let Err(error) = check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(block.start.cast()) }) {
                tracing::error!(%error, "pinned memory was not freed");
            }
        }
    }
}
