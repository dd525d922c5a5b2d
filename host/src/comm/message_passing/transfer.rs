//! The data movement of a collective after all ranks have agreed to it: pairwise, in pieces that bound the scratch memory.
//!
//! Reductions exchange the ranks' parts, reduce each part on one rank in rank order, and distribute the results. Ranks that share memory
//! use `pipelined` instead. These functions never wait for a rank that may not have arrived.

use std::ptr;

use super::handshake::Handshake;
use super::link::{Incoming, Outgoing};
#[cfg(all(feature = "cuda", feature = "mpi"))]
use super::link::{Link, Requests};
use super::scratch::Scratch;
use super::stream::Stream;
use crate::comm::reduction::Reduction;
use crate::error::{Operation, Result};

/// The most bytes of all ranks' parts that a reduction holds at a time.
const PIECE_BYTES: usize = 8 << 20;
/// The number of ranks with which data are exchanged at a time.
const BATCH: usize = 8;
/// The most bytes that a broadcast sends to every rank unsplit.
const UNSPLIT_BYTES: usize = 64 << 10;
/// The elements of which parts are multiples, if there are enough: whole cache lines.
pub(super) const LINE_LEN: usize = 64;

/// A collective that all ranks have agreed to.
#[derive(Clone, Copy, Debug)]
pub(in crate::comm) struct AgreedCollective<'a> {
    pub(super) handshake: &'a Handshake,
    pub(in crate::comm) operation: Operation,
}

/// The contract of every function below: operands are valid memory of the stated lengths, used by nothing else until the function
/// returns; lengths agree on all ranks.
impl AgreedCollective<'_> {
    /// # Safety
    /// See above: `data` has `len` elements to read and write.
    pub(super) unsafe fn all_reduce(self, reduction: Reduction<'_>, data: *mut u8, len: usize) -> Result<()> {
        let (world_size, size) = (self.handshake.link().world_size(), reduction.size_bytes());
        if let Some(pipeline) = self.pipeline(size, world_size + 1) {
            // SAFETY: as the caller promises.
            return unsafe { pipeline.all_reduce(reduction, data, len) };
        }
        let part = part_len(len, PIECE_BYTES / size, world_size);
        let mut workspace = Scratch::borrowed(&self.handshake.workspace, world_size * part * size);
        for begin in (0..len).step_by(part * world_size) {
            let (piece, len) = (data.wrapping_add(begin * size), (len - begin).min(part * world_size));
            // SAFETY: the piece lies within the data.
            unsafe { self.all_reduce_piece(reduction, piece, len, part, workspace.start())? };
        }
        Ok(())
    }

    /// Like [`all_reduce`](Self::all_reduce), for one piece, in which every rank has a part of `part` elements to reduce.
    ///
    /// # Safety
    /// See above: `piece` has `len` elements, at most one part a rank, and `room` has room for all parts.
    pub(in crate::comm) unsafe fn all_reduce_piece(
        self,
        reduction: Reduction<'_>,
        piece: *mut u8,
        len: usize,
        part: usize,
        room: *mut u8,
    ) -> Result<()> {
        let (link, size) = (self.handshake.link(), reduction.size_bytes());
        let (rank, world_size) = (link.rank(), link.world_size());
        let range = |peer: usize| (len.min(peer * part), len.min((peer + 1) * part));
        let part_of = |peer: usize| (piece.wrapping_add(range(peer).0 * size), (range(peer).1 - range(peer).0) * size);
        let (own, own_bytes) = part_of(rank);
        let room = |peer: usize| room.wrapping_add(peer * part * size);
        // SAFETY: parts lie within the piece, rooms within the scratch memory, and none overlap.
        unsafe {
            self.pairwise(part_of, |peer| (room(peer), own_bytes))?;
            let input = |peer: usize| if peer == rank { own } else { room(peer) };
            let inputs: Vec<_> = (0..world_size).map(|peer| input(peer).cast_const()).collect();
            reduction.run(&inputs, &[own], own_bytes / size);
            self.pairwise(|_| (own, own_bytes), part_of)
        }
    }

    /// # Safety
    /// See above: `input` has a shard of `len` elements for every rank, and `output` room for one, or is this rank's shard.
    pub(super) unsafe fn reduce_scatter(
        self,
        reduction: Reduction<'_>,
        input: *const u8,
        output: *mut u8,
        len: usize,
    ) -> Result<()> {
        let (world_size, size) = (self.handshake.link().world_size(), reduction.size_bytes());
        if let Some(pipeline) = self.pipeline(size, world_size) {
            // SAFETY: as the caller promises.
            return unsafe { pipeline.reduce_scatter(reduction, input, output, len) };
        }
        let part = (PIECE_BYTES / size / world_size).clamp(1, len.max(1));
        let mut workspace = Scratch::borrowed(&self.handshake.workspace, world_size * part * size);
        for begin in (0..len).step_by(part) {
            let shard = |peer: usize| input.cast_mut().wrapping_add((peer * len + begin) * size);
            let (output, len) = (output.wrapping_add(begin * size), part.min(len - begin));
            // SAFETY: as above.
            unsafe { self.reduce_scatter_piece(reduction, shard, output, len, workspace.start())? };
        }
        Ok(())
    }

    /// Like [`reduce_scatter`](Self::reduce_scatter), for one piece, with every rank's shard at the address that `shard` returns.
    ///
    /// # Safety
    /// See above: `len` elements at each shard and at `output`, which may be this rank's shard; `room` has room for one shard of every
    /// rank.
    pub(in crate::comm) unsafe fn reduce_scatter_piece(
        self,
        reduction: Reduction<'_>,
        shard: impl Fn(usize) -> *mut u8,
        output: *mut u8,
        len: usize,
        room: *mut u8,
    ) -> Result<()> {
        let (link, bytes) = (self.handshake.link(), len * reduction.size_bytes());
        let (rank, world_size) = (link.rank(), link.world_size());
        let room = |peer: usize| room.wrapping_add(peer * bytes);
        // SAFETY: as the caller promises; rooms do not overlap.
        unsafe {
            self.pairwise(|peer| (shard(peer), bytes), |peer| (room(peer), bytes))?;
            let input = |peer: usize| if peer == rank { shard(rank) } else { room(peer) };
            let inputs: Vec<_> = (0..world_size).map(|peer| input(peer).cast_const()).collect();
            reduction.run(&inputs, &[output], len);
        }
        Ok(())
    }

    /// # Safety
    /// See above: `input` has `bytes` bytes, and `output` room for as many of every rank; `input` may be this rank's shard of `output`.
    pub(super) unsafe fn all_gather(self, input: *const u8, output: *mut u8, bytes: usize) -> Result<()> {
        let own = output.wrapping_add(self.handshake.link().rank() * bytes);
        if own.cast_const() != input {
            // SAFETY: as the caller promises; two borrows, one of them mutable, do not overlap.
            unsafe { ptr::copy_nonoverlapping(input, own, bytes) };
        }
        if let Some(pipeline) = self.pipeline(1, 1) {
            // SAFETY: as the caller promises; the own shard is only read.
            return unsafe { pipeline.all_gather(own, output, bytes) };
        }
        // SAFETY: as above.
        unsafe { self.pairwise(|_| (own, bytes), |peer| (output.wrapping_add(peer * bytes), bytes)) }
    }

    /// # Safety
    /// See above: `input` has `bytes` bytes for every rank, and `output` room for as many of every rank; they are the same, or apart.
    pub(super) unsafe fn all_to_all(self, input: *const u8, output: *mut u8, bytes: usize) -> Result<()> {
        let (rank, world_size) = (self.handshake.link().rank(), self.handshake.link().world_size());
        let room = |peer: usize| output.wrapping_add(peer * bytes);
        let is_in_place = input == output.cast_const();
        if !is_in_place {
            // SAFETY: this rank's shards of two borrows, one of them mutable, which do not overlap.
            unsafe { ptr::copy_nonoverlapping(input.add(rank * bytes), room(rank), bytes) };
        }
        if let Some(pipeline) = self.pipeline(1, world_size) {
            // SAFETY: as the caller promises.
            return unsafe { pipeline.all_to_all(input, output, bytes) };
        }
        // Messages have the same lengths on all ranks, of which only some may be in place.
        let copied = if is_in_place { world_size * bytes } else { 0 };
        let mut workspace = Scratch::borrowed(&self.handshake.workspace, copied);
        let from = if is_in_place { workspace.start() } else { input.cast_mut() };
        // SAFETY: as the caller promises; in place, the messages are copies of the shards that are replaced.
        unsafe {
            ptr::copy_nonoverlapping(input, workspace.start(), copied);
            self.pairwise(|peer| (from.wrapping_add(peer * bytes), bytes), |peer| (room(peer), bytes))
        }
    }

    /// Broadcasts from the root to each rank: few bytes unsplit; of many bytes, each rank gets a part and sends it to all others. So a
    /// rank waits only for ranks that it names when the wait times out.
    ///
    /// # Safety
    /// See above: `data` has `bytes` bytes to read on the root, and to write on all other ranks.
    pub(in crate::comm) unsafe fn broadcast(self, data: *mut u8, bytes: usize, root: usize) -> Result<()> {
        if let Some(pipeline) = self.pipeline(1, 1) {
            // SAFETY: as the caller promises.
            return unsafe { pipeline.broadcast(data, bytes, root) };
        }
        let (rank, world_size) = (self.handshake.link().rank(), self.handshake.link().world_size());
        let part = if bytes <= UNSPLIT_BYTES { bytes } else { bytes.div_ceil((world_size - 1).max(1)) };
        // The root has no part; the parts of the other ranks are in rank order, from the rank after the root on.
        let range = |peer: usize| {
            let position = (peer + world_size - root - 1) % world_size;
            let begin = if peer == root || bytes <= UNSPLIT_BYTES { 0 } else { bytes.min(position * part) };
            (data.wrapping_add(begin), if peer == root { 0 } else { part.min(bytes - begin) })
        };
        let is_root = rank == root;
        let nothing = (data, 0);
        // SAFETY: parts lie within the data, as the caller promises.
        unsafe {
            let to = |peer: usize| if peer == root { range(rank) } else { nothing };
            self.pairwise(|peer| if is_root { range(peer) } else { nothing }, to)?;
            if bytes <= UNSPLIT_BYTES || is_root {
                return Ok(());
            }
            self.pairwise(|peer| if peer == root { nothing } else { range(rank) }, range)
        }
    }

    /// Like [`broadcast`](Self::broadcast), but MPI accesses the memory directly. It uses a binomial tree of plain sends and receives,
    /// for which every CUDA-aware MPI accepts device memory.
    ///
    /// # Safety
    /// As for that method.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(in crate::comm) unsafe fn broadcast_tree(self, data: *mut u8, bytes: usize, root: usize) -> Result<()> {
        let link = self.handshake.link();
        let world_size = link.world_size();
        // The position in the tree: the root has position 0, and position p receives from p without its highest bit.
        let position = (link.rank() + world_size - root) % world_size;
        let rank_of = |position: usize| (position + root) % world_size;
        let finish = |receive: &[Incoming], send: &[Outgoing]| {
            let mut requests = Requests::default();
            // SAFETY: as the caller promises, and the messages are over when `finish` returns.
            unsafe { start(link, receive, send, &mut requests) };
            self.finish(requests)
        };
        let height = usize::BITS - position.leading_zeros();
        if height > 0 {
            let peer = rank_of(position - (1 << (height - 1)));
            finish(&[Incoming { peer, start: data, bytes }], &[])?;
        }
        let below =
            (height..usize::BITS - 1).map(|bit| position + (1 << bit)).take_while(|&position| position < world_size);
        let send = below.map(|position| Outgoing { peer: rank_of(position), start: data.cast_const(), bytes });
        finish(&[], &send.collect::<Vec<_>>())
    }

    /// Sends every other rank the memory that `from` returns, and receives into the memory that `to` returns. Messages between two ranks
    /// keep their order. If nothing moves for the deadline, the ranks whose messages are incomplete are late.
    ///
    /// # Safety
    /// Both return valid host memory and its bytes; the receiving memory overlaps nothing.
    pub(in crate::comm) unsafe fn pairwise(
        self,
        from: impl Fn(usize) -> (*mut u8, usize),
        to: impl Fn(usize) -> (*mut u8, usize),
    ) -> Result<()> {
        self.batches(from, to, |receive, send| {
            let link = self.handshake.link();
            // SAFETY: as the caller promises.
            let inward = receive.iter().map(|incoming| unsafe { Stream::inward(link, *incoming) });
            // SAFETY: as the caller promises.
            let outward = send.iter().map(|outgoing| unsafe { Stream::outward(link, *outgoing) });
            self.handshake.finish_streams(self.operation, inward.chain(outward).collect())
        })
    }

    /// Like [`pairwise`](Self::pairwise), but MPI accesses the memory directly, which may be a device's. It has no deadline, because MPI
    /// cannot release memory.
    ///
    /// # Safety
    /// As for that method.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    pub(in crate::comm) unsafe fn pairwise_as_it_is(
        self,
        from: impl Fn(usize) -> (*mut u8, usize),
        to: impl Fn(usize) -> (*mut u8, usize),
    ) -> Result<()> {
        self.batches(from, to, |receive, send| {
            let mut requests = Requests::default();
            // SAFETY: as the caller promises, and the message is over when `finish` returns.
            unsafe { start(self.handshake.link(), receive, send, &mut requests) };
            self.finish(requests)
        })
    }

    /// Waits until all messages are sent and received.
    #[cfg(all(feature = "cuda", feature = "mpi"))]
    fn finish(self, requests: Requests) -> Result<()> {
        let finished = requests.finish(self.handshake.link(), self.handshake.deadline);
        finished.map_err(|error| self.handshake.fail(self.operation, self.handshake.broken(self.operation, error)))
    }

    fn batches(
        self,
        from: impl Fn(usize) -> (*mut u8, usize),
        to: impl Fn(usize) -> (*mut u8, usize),
        exchange: impl Fn(&[Incoming], &[Outgoing]) -> Result<()>,
    ) -> Result<()> {
        let link = self.handshake.link();
        let (rank, world_size) = (link.rank(), link.world_size());
        let steps: Vec<usize> = (1..world_size).collect();
        for steps in steps.chunks(BATCH) {
            let incoming = |step: &usize| {
                let peer = (rank + world_size - step) % world_size;
                let (start, bytes) = to(peer);
                Incoming { peer, start, bytes }
            };
            let outgoing = |step: &usize| {
                let peer = (rank + step) % world_size;
                let (start, bytes) = from(peer);
                Outgoing { peer, start, bytes }
            };
            let receive: Vec<_> = steps.iter().map(incoming).collect();
            let send: Vec<_> = steps.iter().map(outgoing).collect();
            exchange(&receive, &send)?;
        }
        Ok(())
    }
}

/// Starts to receive and to send.
///
/// # Safety
/// As [`Link::send`] and [`Link::receive`].
#[cfg(all(feature = "cuda", feature = "mpi"))]
unsafe fn start(link: &dyn Link, receive: &[Incoming], send: &[Outgoing], requests: &mut Requests) {
    // SAFETY: the caller's promise.
    receive.iter().for_each(|incoming| unsafe { link.receive(*incoming, requests) });
    // SAFETY: as above.
    send.iter().for_each(|outgoing| unsafe { link.send(*outgoing, requests) });
}

/// The number of elements of a piece that one rank reduces: its share of all `len`, limited to its share of `longest`, the elements of a
/// piece.
pub(in crate::comm) fn part_len(len: usize, longest: usize, world_size: usize) -> usize {
    len.div_ceil(world_size).next_multiple_of(LINE_LEN).clamp(1, (longest / world_size).max(1))
}
