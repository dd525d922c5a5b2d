//! [`Lane`]: a byte stream from one process to another in shared memory.
//!
//! One process writes and one reads, each under its own lock. The memory stays for as long as either has it mapped.
//!
//! The other process can change everything in the lane at any time. So each end keeps its own counter and publishes a copy, and compares
//! the other's counter with the capacity before it relies on it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::file::Mapped;
use crate::memory::shared_bytes::SharedBytes;

/// The layout of a lane: the writer's counters of written bytes and cancelled offers, the reader's counter of read bytes on another cache
/// line, and the bytes.
const WRITTEN_AT: usize = 0;
const CANCELLED_AT: usize = 8;
const READ_AT: usize = 64;
const HEADER_BYTES: usize = 128;

/// The bytes of a file that one lane takes.
pub(super) fn bytes_of(capacity: usize) -> usize {
    HEADER_BYTES + capacity
}

/// One end of a lane.
#[derive(Debug)]
pub(super) struct Lane<M = Mapped> {
    memory: Arc<M>,
    begin: usize,
    /// The bytes of the stream's buffer, a power of two.
    capacity: usize,
    /// The number of bytes that this end has written or read.
    position: AtomicU64,
}

impl<M: SharedBytes> Lane<M> {
    /// The capacity of the lane.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The lane with index `number` in this memory; all lanes in it have the same capacity.
    pub(super) fn new(memory: Arc<M>, number: usize, capacity: usize) -> Self {
        assert!(capacity.is_power_of_two(), "a capacity of {capacity}");
        Lane { memory, begin: number * bytes_of(capacity), capacity, position: AtomicU64::new(0) }
    }

    /// The number of offers that this end has cancelled, for `single_copy`.
    pub(super) fn cancelled(&self) -> u64 {
        self.memory.load(self.begin + CANCELLED_AT, Ordering::Relaxed)
    }

    /// Counts an offer of this end as cancelled, before any later write to its memory.
    pub(super) fn cancel(&self) {
        self.memory.fetch_add(self.begin + CANCELLED_AT, 1, Ordering::Release);
        self.memory.fence(Ordering::SeqCst);
    }

    /// The number of offers that the other end had cancelled after this end has read all bytes that it has read so far.
    pub(super) fn cancelled_after_reading(&self) -> u64 {
        self.memory.fence(Ordering::SeqCst);
        self.memory.load(self.begin + CANCELLED_AT, Ordering::Acquire)
    }

    fn data(&self) -> usize {
        self.begin + HEADER_BYTES
    }

    /// The number of bytes in the buffer, between these counters.
    fn used(&self, written: u64, read: u64) -> io::Result<usize> {
        let used = written.wrapping_sub(read);
        if used <= self.capacity as u64 {
            return Ok(used as usize);
        }
        let reason = format!("{written} bytes were written to and {read} were read from a lane of {}", self.capacity);
        Err(io::Error::new(io::ErrorKind::InvalidData, reason))
    }

    /// The number of bytes that can be written now.
    fn room(&self) -> io::Result<usize> {
        let written = self.position.load(Ordering::Relaxed);
        Ok(self.capacity - self.used(written, self.memory.load(self.begin + READ_AT, Ordering::Acquire))?)
    }

    /// Writes all parts, one after another, if there is room for all of them. Returns whether there was.
    ///
    /// # Errors
    /// The reader's counter is impossible.
    pub(super) fn write(&self, parts: &[&[u8]]) -> io::Result<bool> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if bytes > self.room()? {
            return Ok(false);
        }
        let mut written = self.position.load(Ordering::Relaxed);
        for part in parts {
            let at = written as usize & (self.capacity - 1);
            let first = part.len().min(self.capacity - at);
            // SAFETY: within the lane, in bytes that the reader has read.
            unsafe {
                self.memory.write(self.data() + at, &part[..first]);
                self.memory.write(self.data(), &part[first..]);
            }
            written += part.len() as u64;
        }
        self.position.store(written, Ordering::Relaxed);
        self.memory.store(self.begin + WRITTEN_AT, written, Ordering::Release);
        Ok(true)
    }

    /// Writes as many of these bytes as there is room for. Returns the number of written bytes.
    ///
    /// # Errors
    /// The errors of [`write`](Self::write).
    pub(super) fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        let some = bytes.len().min(self.room()?);
        Ok(if some > 0 && self.write(&[&bytes[..some]])? { some } else { 0 })
    }

    /// Appends all written bytes to `into`. Returns whether there were any.
    ///
    /// # Errors
    /// The writer's counter is impossible.
    pub(super) fn read(&self, into: &mut Vec<u8>) -> io::Result<bool> {
        let written = self.memory.load(self.begin + WRITTEN_AT, Ordering::Acquire);
        let begin = self.position.load(Ordering::Relaxed);
        let bytes = self.used(written, begin)?;
        if bytes == 0 {
            return Ok(false);
        }
        let at = begin as usize & (self.capacity - 1);
        let first = bytes.min(self.capacity - at);
        // SAFETY: within the lane, in bytes that the writer does not touch before they count as read.
        unsafe {
            into.extend_from_slice(self.memory.bytes(self.data() + at, first));
            into.extend_from_slice(self.memory.bytes(self.data(), bytes - first));
        }
        self.position.store(written, Ordering::Relaxed);
        self.memory.store(self.begin + READ_AT, written, Ordering::Release);
        Ok(true)
    }
}

#[cfg(test)]
mod model;

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::memory::file::{FileHandle, MemoryFile};

    const CAPACITY: usize = 64;

    fn lanes() -> [Lane; 2] {
        let file = MemoryFile::zeroed(3 * bytes_of(CAPACITY)).unwrap();
        let handle = FileHandle::of(file.bytes()).expect("a file");
        let ends = [(); 2].map(|()| Arc::new(handle.map(file.bytes().len()).unwrap()));
        file.leave();
        ends.map(|memory| Lane::new(memory, 1, CAPACITY))
    }

    #[test]
    fn lane_keeps_bytes_in_order_within_its_room() {
        let [writer, reader] = lanes();
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for round in 0..100u8 {
            let part: Vec<u8> = (0..round % 50).map(|index| index ^ round).collect();
            let before = writer.room().unwrap();
            let is_written = writer.write(&[&part, &[round]]).unwrap();
            assert_eq!(is_written, part.len() < before);
            if is_written {
                sent.extend([&part[..], &[round]].concat());
            } else {
                let some = writer.write_some(&part).unwrap();
                let left = before - before.min(part.len());
                assert_eq!((some, writer.room().unwrap()), (before.min(part.len()), left));
                sent.extend(&part[..some]);
            }
            if round % 3 == 0 {
                assert!(reader.read(&mut received).unwrap());
                assert!(!reader.read(&mut received).unwrap());
                assert_eq!(received, sent);
            }
        }
    }

    #[test]
    fn lane_passes_a_stream_between_two_threads_on() {
        let [writer, reader] = lanes();
        let bytes: Vec<u8> = (0..100_000u32).map(|index| (index % 251) as u8).collect();
        let received = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut left = &bytes[..];
                while !left.is_empty() {
                    left = &left[writer.write_some(left).unwrap()..];
                }
            });
            let mut received = Vec::new();
            while received.len() < bytes.len() {
                reader.read(&mut received).unwrap();
            }
            received
        });
        assert!(received == bytes);
    }

    #[test]
    fn lane_turns_counters_of_a_broken_peer_into_errors() {
        for wrong in [CAPACITY as u64 + 6, u64::MAX, 1 << 63] {
            let [writer, reader] = lanes();
            assert!(writer.write(&[&[7; 5]]).unwrap());
            writer.memory.store(writer.begin + WRITTEN_AT, wrong, Ordering::Release);
            let mut received = Vec::new();
            let error = reader.read(&mut received).unwrap_err().to_string();
            assert!(error.contains(&format!("{wrong} bytes were written")) && error.contains("0 were read"), "{error}");
            assert!(received.is_empty());
            // The writer relies on its own counter.
            assert!(writer.write(&[&[8]]).unwrap());
            assert!(reader.read(&mut received).unwrap());
            assert_eq!(received, [7, 7, 7, 7, 7, 8]);
        }
        for wrong in [6, 1 << 63, u64::MAX - CAPACITY as u64] {
            let [writer, reader] = lanes();
            assert!(writer.write(&[&[7; 5]]).unwrap());
            reader.memory.store(reader.begin + READ_AT, wrong, Ordering::Release);
            let error = writer.write(&[&[8]]).unwrap_err().to_string();
            assert!(error.contains("5 bytes were written") && error.contains(&format!("{wrong} were read")), "{error}");
            writer.write_some(&[8; CAPACITY]).unwrap_err();
        }
    }
}
