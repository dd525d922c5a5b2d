//! One-sided long all-reduces, for ranks that read each other's memory: each rank reduces its part of all ranks' vectors, which it reads
//! directly from the other ranks' memory, and then reads the other parts from the ranks that have reduced them. No rank writes to another
//! rank's memory, and each rank's work is divided among threads.
//!
//! This runs after a call in which ranks have exchanged the addresses of their vectors. Between its steps, all ranks wait for each other,
//! so a rank that was stopped finds the step closed when it resumes; the data that it has read by then are discarded.

use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::thread;
use std::time::Duration;

use rayon::prelude::*;

use super::SetUp;
use super::handshake::{Handshake, Wait};
use super::mailbox::Payload;
use super::remote_memory::Processes;
use super::scratch::Scratch;
use super::transfer::LINE_LEN;
use crate::comm::reduction::Reduction;
use crate::error::{Call, Operation, Result};

/// The shortest vector that is reduced in this way. Shorter ones are faster by chunks in mailboxes, which stay in the caches: for two ranks
/// on two cores 1.8 times at 1 MiB, and 0.75 times from 4 MiB on.
const LEAST_BYTES: usize = 4 << 20;
/// The most ranks that use this way. Four ranks on two cores were slower than by chunks in mailboxes, 1.5 times at 1 MiB and 1.0 times at
/// 64 MiB.
pub(super) const MOST_RANKS: usize = 2;
/// The bytes of a vector that ranks reduce before they wait for each other, so that no rank works for long without detecting failures.
const ROUND_BYTES: usize = 64 << 20;
/// The bytes that are read from a rank at a time; they stay in the caches until they are reduced.
const BLOCK_BYTES: usize = 64 << 10;
/// How long a process may still count as alive after its memory is gone.
const END_TIME: Duration = Duration::from_secs(1);

/// The vectors of all ranks, while all are in the same call.
#[derive(Debug)]
pub(super) struct Vectors<'a> {
    reader: &'a Processes,
    /// The addresses of the vectors, by rank.
    addresses: Vec<u64>,
}

/// A rank whose memory could not be read, and the error.
type Unreadable = (usize, io::Error);

/// This rank's vector, of which several threads use different parts.
#[derive(Clone, Copy)]
struct Own(*mut u8);

// SAFETY: memory that the caller of the collective has borrowed for it, of which each thread uses a range of its own.
unsafe impl Sync for Own {}

impl Own {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

impl Handshake {
    /// The reader of other ranks' vectors of this length, if they are to be reduced in this way; equal on all ranks.
    pub(super) fn reader(&self, bytes: usize) -> Option<&Processes> {
        self.processes().filter(|_| bytes >= LEAST_BYTES)
    }

    /// Agrees on a call, like [`agree`](Self::agree), and exchanges the addresses of the ranks' vectors.
    pub(super) fn agree_on_vectors<'a>(&self, reader: &'a Processes, call: Call, own: &[u8]) -> Result<Vectors<'a>> {
        let own = own.as_ptr().expose_provenance() as u64;
        let told = self.agree_with(call, Payload::for_all(&own.to_le_bytes()))?;
        let address = |(rank, bytes): (usize, &std::borrow::Cow<'_, [u8]>)| match <[u8; 8]>::try_from(&bytes[..]) {
            Ok(bytes) if rank != self.link().rank() => u64::from_le_bytes(bytes),
            _ => own,
        };
        Ok(Vectors { reader, addresses: told.iter().enumerate().map(address).collect() })
    }

    /// Whether every rank can read all vectors. No rank returns before all ranks have called this; by then all vectors hold their
    /// operands.
    pub(super) fn can_read(&self, vectors: &Vectors<'_>, bytes: usize) -> Result<bool> {
        let is_readable = |peer: usize| {
            let mut byte = 0;
            let ends = [vectors.addresses[peer], vectors.addresses[peer] + bytes as u64 - 1];
            // SAFETY: room for a byte.
            ends.into_iter().all(|address| unsafe { vectors.reader.read(peer, address, &mut byte, 1) }.is_ok())
        };
        let own = self.link().others().all(is_readable);
        let mut all = vec![0; self.link().world_size()];
        self.all_gather_confirmed(SetUp::Read.call(), &[u8::from(own)], &mut all)?;
        Ok(!all.contains(&0))
    }

    /// Replaces all ranks' vectors by their reduction.
    ///
    /// # Safety
    /// `own` has `len` elements to read and write, which nothing else uses; lengths agree on all ranks, and the vectors are of this call.
    pub(super) unsafe fn all_reduce_by_reading(
        &self,
        operation: Operation,
        reduction: Reduction<'_>,
        vectors: &Vectors<'_>,
        own: *mut u8,
        len: usize,
    ) -> Result<()> {
        let (rank, world_size, own) = (self.link().rank(), self.link().world_size(), Own(own));
        let longest = ROUND_BYTES / reduction.size_bytes();
        for begin in (0..len).step_by(longest) {
            let round = begin..len.min(begin + longest);
            // SAFETY: the round lies within the vectors; other ranks read their own parts of this rank's vector, and of this part nothing
            // yet.
            let reduced = unsafe { vectors.reduce(reduction, own, part(&round, rank, world_size), rank) };
            self.readable(operation, reduced)?;
            self.wait_for_step(operation)?;
            let size = reduction.size_bytes();
            let others = self.link().others().map(|peer| (peer, part(&round, peer, world_size)));
            for (peer, part) in others {
                // SAFETY: within the vectors; nobody reads these parts of this rank's vector any more.
                let gathered = unsafe { vectors.gather(peer, part.start * size..part.end * size, own) };
                self.readable(operation, gathered)?;
            }
            // After this step, no rank reads this rank's part.
            self.wait_for_step(operation)?;
        }
        Ok(())
    }

    /// Converts a failed read to a failure: of the other rank, if it departs within [`END_TIME`], else of this rank.
    fn readable(&self, operation: Operation, outcome: Result<(), Unreadable>) -> Result<()> {
        let Err((peer, error)) = outcome else { return Ok(()) };
        let mut wait = Wait::new(Some(END_TIME));
        while !wait.is_over() {
            let heard = self.pump(operation).and_then(|()| self.look_for_failure());
            let departed = self.departure(operation, peer).map_or(Ok(()), Err);
            heard.and(departed).map_err(|failure| self.fail(operation, failure))?;
            wait.pause();
        }
        let failure = self.own_failure(operation, format!("it cannot read the memory of rank {peer}: {error}"));
        Err(self.fail(operation, failure))
    }
}

impl Vectors<'_> {
    /// Reduces a part of all vectors into this rank's vector.
    ///
    /// # Safety
    /// The part, in elements, lies within all vectors, and nothing else uses this part of this rank's vector.
    unsafe fn reduce(
        &self,
        reduction: Reduction<'_>,
        own: Own,
        part: Range<usize>,
        rank: usize,
    ) -> Result<(), Unreadable> {
        let (world_size, size) = (self.addresses.len(), reduction.size_bytes());
        let block = BLOCK_BYTES / size;
        in_strips(part, world_size, |strip| {
            let mut room = Scratch::new(world_size * BLOCK_BYTES);
            let room = room.start();
            for begin in strip.clone().step_by(block) {
                let len = block.min(strip.end - begin);
                let (offset, bytes) = (begin * size, len * size);
                let place = |peer: usize| room.wrapping_add(peer * BLOCK_BYTES);
                for peer in (0..world_size).filter(|&peer| peer != rank) {
                    // SAFETY: room for a block of every rank.
                    let read =
                        unsafe { self.reader.read(peer, self.addresses[peer] + offset as u64, place(peer), bytes) };
                    read.map_err(|error| (peer, error))?;
                }
                let input = |peer: usize| if peer == rank { own.at(offset) } else { place(peer) };
                let inputs: Vec<_> = (0..world_size).map(|peer| input(peer).cast_const()).collect();
                // SAFETY: every rank's elements, aligned; the output is one of the inputs, which is the caller's promise.
                unsafe { reduction.run(&inputs, &[own.at(offset)], len) };
            }
            Ok(())
        })
    }

    /// Copies a part, in bytes, of a rank's vector into this rank's.
    ///
    /// # Safety
    /// As [`reduce`](Self::reduce).
    unsafe fn gather(&self, peer: usize, part: Range<usize>, own: Own) -> Result<(), Unreadable> {
        in_strips(part, self.addresses.len(), |strip| {
            let address = self.addresses[peer] + strip.start as u64;
            // SAFETY: as the caller promises.
            let read = unsafe { self.reader.read(peer, address, own.at(strip.start), strip.len()) };
            read.map_err(|error| (peer, error))
        })
    }
}

/// The elements of a round that a rank reduces: whole cache lines, if there are enough.
fn part(round: &Range<usize>, rank: usize, world_size: usize) -> Range<usize> {
    let longest = round.len().div_ceil(world_size).next_multiple_of(LINE_LEN);
    let at = |rank: usize| round.start + round.len().min(rank * longest);
    at(rank)..at(rank + 1)
}

/// Runs `work` on the parts of a range, with as many threads as there are processors for each rank.
fn in_strips(
    range: Range<usize>,
    ranks: usize,
    work: impl Fn(Range<usize>) -> Result<(), Unreadable> + Sync,
) -> Result<(), Unreadable> {
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get) / ranks;
    let threads = threads.min(range.len() / BLOCK_BYTES);
    if threads <= 1 {
        return if range.is_empty() { Ok(()) } else { work(range) };
    }
    let strips: Vec<Range<usize>> = (0..threads).map(|strip| part(&range, strip, threads)).collect();
    strips.into_par_iter().filter(|strip| !strip.is_empty()).try_for_each(&work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_are_all_of_a_round() {
        for (round, world_size) in [(0..1, 3), (5..5 + 64, 2), (0..1000, 7), (100..100 + (1 << 20) + 13, 4)] {
            let parts: Vec<Range<usize>> = (0..world_size).map(|rank| part(&round, rank, world_size)).collect();
            assert_eq!((parts[0].start, parts[world_size - 1].end), (round.start, round.end));
            assert!(parts.windows(2).all(|two| two[0].end == two[1].start), "{parts:?}");
        }
    }

    #[test]
    fn strips_are_all_of_a_range_and_an_error_of_one_is_the_error() {
        for len in [0, 1, 100, 10 * BLOCK_BYTES + 7] {
            let sum = std::sync::atomic::AtomicUsize::new(0);
            let add = |strip: Range<usize>| {
                sum.fetch_add(strip.len(), std::sync::atomic::Ordering::Relaxed);
                Ok(())
            };
            in_strips(3..3 + len, 1, add).unwrap();
            assert_eq!(sum.into_inner(), len);
        }
        let fails = |strip: Range<usize>| match strip.contains(&5) {
            true => Err((1, io::ErrorKind::NotFound.into())),
            false => Ok(()),
        };
        assert_eq!(in_strips(0..10 * BLOCK_BYTES, 1, fails).unwrap_err().0, 1);
    }
}
