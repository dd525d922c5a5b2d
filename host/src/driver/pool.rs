//! Device memory that a queue keeps for reuse, and pinned memory through which tables are uploaded.
//!
//! Freeing device memory makes the driver wait for the whole device. With collectives under way that can last for ever: the device waits
//! for a peer, whose thread waits for the driver. So the memory of a dropped buffer returns to its queue, and the next buffer of that size
//! reuses it, in the queue's order. Memory is freed when the queue is dropped or the driver has none left.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use super::event::{Mark, Timing};
use super::{CudaError, check};
use crate::sys::cuda::{self, Status};

/// The size that is allocated for a buffer of `bytes` bytes: one of few sizes, so that memory can be reused.
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

    /// Frees all memory, for which the driver waits for the device.
    pub(super) fn release(&mut self) {
        for address in self.free.drain().flat_map(|(_, addresses)| addresses) {
            // SAFETY: the address came from `allocate`, and nothing refers to it any more.
            if let Err(error) = check("cuMemFree", unsafe { cuda::cuMemFree_v2(address) }) {
                tracing::error!(%error, "device memory was not freed");
            }
        }
    }
}

/// Cached device tables of launches over many tensors, the most recently used first: a training loop uploads the same tables in every step.
#[derive(Debug, Default)]
pub(super) struct Tables {
    kept: Vec<KeptTable>,
}

/// A table on the device. It stays there as long as this or a clone lives: while a launch that reads it is being enqueued, and as long as a
/// graph with such a launch.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    address: u64,
    readers: Arc<()>,
}

impl Table {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

#[derive(Debug)]
struct KeptTable {
    words: Vec<u64>,
    table: Table,
}

impl KeptTable {
    fn is_read(&self) -> bool {
        Arc::strong_count(&self.table.readers) > 1
    }

    fn size_and_address(&self) -> (usize, u64) {
        (size_of_val(&self.words[..]), self.table.address)
    }
}

impl Tables {
    /// The limit of cached tables, not counting those of recorded work.
    const MOST: usize = 64;

    /// Finds the table with these words, and makes it the most recently used.
    pub(super) fn find(&mut self, words: &[u64]) -> Option<Table> {
        let index = self.kept.iter().position(|kept| kept.words == words)?;
        self.kept[..=index].rotate_right(1);
        Some(self.kept[0].table.clone())
    }

    /// Caches a table that was uploaded to this address; returns the size and address of each evicted table.
    pub(super) fn keep(&mut self, words: Vec<u64>, address: u64) -> (Table, Vec<(usize, u64)>) {
        let table = Table { address, readers: Arc::default() };
        self.kept.insert(0, KeptTable { words, table: table.clone() });
        let mut idle = 0;
        let (kept, gone): (Vec<KeptTable>, Vec<KeptTable>) = self.kept.drain(..).partition(|kept| {
            idle += usize::from(!kept.is_read());
            kept.is_read() || idle <= Self::MOST
        });
        self.kept = kept;
        (table, gone.iter().map(KeptTable::size_and_address).collect())
    }

    /// Evicts all tables; returns the size and address of each.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = (usize, u64)> {
        self.kept.drain(..).map(|kept| kept.size_and_address())
    }
}

/// Allocates device memory; `None` if it does not suffice.
pub(super) fn allocate(bytes: usize) -> Result<Option<u64>, CudaError> {
    let mut address = 0;
    // SAFETY: writes one address.
    match check(&format!("cuMemAlloc of {bytes} bytes"), unsafe { cuda::cuMemAlloc_v2(&mut address, bytes) }) {
        Ok(()) => Ok(Some(address)),
        Err(error) if error.code == Status::OUT_OF_MEMORY.0 => Ok(None),
        Err(error) => Err(error),
    }
}

/// The error of an allocation of `bytes` bytes that the driver refused.
pub(super) fn out_of_memory(bytes: usize) -> CudaError {
    CudaError::of(format!("cuMemAlloc of {bytes} bytes"), Status::OUT_OF_MEMORY)
}

/// Pinned host memory for small uploads, so that the host need not wait for the copy to the device.
#[derive(Debug, Default)]
pub(super) struct Staging {
    blocks: Vec<StagingBlock>,
}

#[derive(Debug)]
struct StagingBlock {
    start: *mut u8,
    bytes: usize,
    /// The event after the last copy from the block.
    copied: Mark,
}

// SAFETY: plain memory behind a lock.
unsafe impl Send for Staging {}

impl Staging {
    /// Enqueues into the stream a copy of `data` to device memory at `address`; the data may be changed at once. The context must be
    /// current.
    ///
    /// # Safety
    /// There are as many bytes at `address`, on the stream's device, and only work in the stream uses them.
    pub(super) unsafe fn upload(&mut self, stream: cuda::CUstream, address: u64, data: &[u8]) -> Result<(), CudaError> {
        let block = self.find(data.len())?;
        // SAFETY: the block is large enough, and its last copy is over.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), block.start, data.len()) };
        // SAFETY: the block lives until its event has passed; the destination is the caller's promise.
        check("cuMemcpyHtoDAsync", unsafe {
            cuda::cuMemcpyHtoDAsync_v2(address, block.start.cast_const().cast::<c_void>(), data.len(), stream)
        })?;
        block.copied.record(stream)
    }

    fn find(&mut self, bytes: usize) -> Result<&mut StagingBlock, CudaError> {
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
                check("cuMemAllocHost", unsafe { cuda::cuMemAllocHost_v2(&mut start, bytes) })?;
                self.blocks.push(StagingBlock { start: start.cast(), bytes, copied });
                self.blocks.len() - 1
            }
        };
        Ok(&mut self.blocks[index])
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        for block in &self.blocks {
            // SAFETY: allocated in `find`, freed once; the stream has finished with it, or is being destroyed too, and the driver waits.
            if let Err(error) = check("cuMemFreeHost", unsafe { cuda::cuMemFreeHost(block.start.cast()) }) {
                tracing::error!(%error, "pinned memory was not freed");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Tables;

    fn address(tables: &mut Tables, words: &[u64]) -> Option<u64> {
        tables.find(words).map(|table| table.address())
    }

    /// The addresses of the evicted tables.
    fn keep(tables: &mut Tables, words: &[u64], address: u64) -> Vec<u64> {
        let gone = tables.keep(words.to_vec(), address).1;
        gone.into_iter().map(|(_, address)| address).collect()
    }

    #[test]
    fn tables_in_use_and_of_recordings_stay() {
        let (mut tables, most) = (Tables::default(), Tables::MOST as u64);
        assert_eq!(address(&mut tables, &[0]), None);
        for number in 0..most {
            assert!(keep(&mut tables, &[number, 0], 1000 + number).is_empty());
        }
        let recorded = tables.find(&[0, 0]).unwrap();
        assert_eq!(recorded.address(), 1000);
        assert_eq!(address(&mut tables, &[1, 0]), Some(1001), "used again");
        // One table is recorded, and one is being used for a launch, so there is capacity for two more.
        let (used, gone) = tables.keep(vec![70, 0], 70);
        assert!(gone.is_empty());
        assert!(keep(&mut tables, &[71, 0], 71).is_empty());
        drop(used);
        assert_eq!(tables.keep(vec![72, 0], 72).1, [(16, 1002)]);
        assert_eq!(keep(&mut tables, &[73, 0], 73), [1003]);
        assert_eq!(address(&mut tables, &[2, 0]), None);
        assert_eq!(address(&mut tables, &[1, 0]), Some(1001));
        for number in 0..2 * most {
            keep(&mut tables, &[number, 1, 1], 5000 + number);
        }
        assert_eq!(address(&mut tables, &[1, 0]), None);
        assert_eq!(address(&mut tables, &[0, 0]), Some(1000), "recorded");
    }

    #[test]
    fn tables_of_ended_recordings_are_like_others() {
        let (mut tables, most) = (Tables::default(), Tables::MOST as u64);
        let recordings: Vec<_> = (0..2 * most).map(|number| tables.keep(vec![number], 1000 + number)).collect();
        assert!(recordings.iter().all(|(_, gone)| gone.is_empty()), "all are read");
        // Two recordings read the first table, and one of them stays.
        let other = tables.find(&[0]);
        drop(recordings);
        let oldest: Vec<u64> = (1001..1000 + most).rev().collect();
        assert_eq!(keep(&mut tables, &[2 * most], 1), oldest);
        assert_eq!(address(&mut tables, &[0]), Some(1000));
        drop(other);
        assert_eq!(keep(&mut tables, &[2 * most + 1], 2), [1000 + most + 1, 1000 + most]);
    }
}
