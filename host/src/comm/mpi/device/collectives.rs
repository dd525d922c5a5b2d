//! The collectives of [`MpiDeviceCommunicator`]: for each, the layout of the operands' parts in a step, and the transfer that MPI makes
//! of it; or, on the direct path, a transfer of the operands themselves.
//!
//! Lengths, dtypes and queues have been checked before. The path was chosen when the communicator was made.

use super::staged_pipeline::{Piece, StagedPipeline};
use super::{BLOCK_BYTES, MpiDeviceCommunicator, copy, pointer};
use crate::comm::message_passing::{AgreedCollective, Record, part_len};
use crate::comm::reduction::Reduction;
use crate::comm::{Collective, Operands, Ranks, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSlice, Queue};
use crate::error::{Call, Operation, Result};
use crate::memory::Cuda;

// In all unsafe blocks of `run_checked`, operands are borrowed, later work on them is ordered after the operation, and lengths and queues were
// checked before.
impl MpiDeviceCommunicator {
    /// Runs a collective whose operands were checked.
    pub(super) fn run_checked(&self, collective: Collective<'_, Cuda>) -> Result<()> {
        let (rank, world_size) = (self.rank(), self.world_size());
        // The range of this rank's shard in a vector for input and output.
        let own = |data: DeviceSlice<'_>| {
            let len = data.len() / world_size;
            rank * len..(rank + 1) * len
        };
        let operation = collective.operation();
        match collective {
            Collective::AllReduce { operands, op, scaling } => {
                let (input, output) = operands.views();
                let reduction = Reduction::scaled(input.dtype(), op, scaling);
                // SAFETY: see above.
                unsafe { self.all_reduce_any(operation, input, output, reduction) }
            }
            Collective::WeightedMean { operands, weights } => {
                let (input, output) = operands.views();
                let reduction = Reduction::weighted(input.dtype(), weights);
                // SAFETY: see above.
                unsafe { self.all_reduce_any(operation, input, output, reduction) }
            }
            Collective::ReduceScatter { operands, op } => {
                let is_in_place = matches!(operands, Operands::InPlace(_));
                let (input, output) = operands.views();
                let output = if is_in_place { output.range(own(output)) } else { output };
                // SAFETY: see above.
                unsafe { self.reduce_scatter_any(input, output, op) }
            }
            Collective::AllGather { operands } => {
                let is_in_place = matches!(operands, Operands::InPlace(_));
                let (input, output) = operands.views();
                let input = if is_in_place { input.range(own(input)) } else { input };
                // SAFETY: see above.
                unsafe { self.all_gather_any(input, output) }
            }
            Collective::AllToAll { operands } => {
                let (input, output) = operands.views();
                // SAFETY: see above.
                unsafe { self.all_to_all_any(input, output) }
            }
            // SAFETY: see above.
            Collective::Broadcast { data, root } => unsafe { self.broadcast_any(data.as_slice(), root) },
        }
    }

    /// Runs a staged collective that all ranks have agreed to, step by step, and ends it on all ranks.
    ///
    /// # Safety
    /// As [`StagedPipeline::run`].
    unsafe fn staged(
        &self,
        queue: &Queue,
        transfer: AgreedCollective<'_>,
        count: usize,
        input: impl Fn(usize) -> Vec<Piece>,
        work: impl FnMut(usize, *mut u8) -> Result<()>,
        output: impl Fn(usize) -> Vec<Piece>,
    ) -> Result<()> {
        let pipeline = StagedPipeline { pinned: &self.pinned, down: &self.down, queue };
        // SAFETY: the caller's promise.
        let outcome = unsafe { pipeline.run(count, input, work, output) }?;
        let outcome = outcome.map_err(|error| error.to_string());
        self.comm.ranks.handshake().end_step(transfer.operation, &Record::Closed, outcome)
    }

    /// An all-reduce of `input` into memory of the same length and dtype, which may be the input itself.
    ///
    /// # Safety
    /// Both belong to the same queue; the output is borrowed mutably by the caller, and is the input or disjoint from it.
    unsafe fn all_reduce_any(
        &self,
        operation: Operation,
        input: DeviceSlice<'_>,
        output: DeviceSlice<'_>,
        reduction: Reduction<'_>,
    ) -> Result<()> {
        let (queue, len, dtype, world_size) = (input.queue(), input.len(), input.dtype(), self.world_size());
        self.admit(queue, operation)?;
        let transfer = self.comm.ranks.agree(Call::new(operation, len, dtype))?;
        if world_size == 1 && reduction.keeps_one_rank() {
            // SAFETY: the output is borrowed mutably, and is the input or apart, as the caller promises.
            return unsafe { copy(input, output) };
        }
        let size = dtype.size_bytes();
        let part = part_len(len, BLOCK_BYTES / size, world_size);
        let step_len = part * world_size;
        let range = |index: usize| (index * step_len, step_len.min(len - index * step_len));
        let whole = |data: DeviceSlice<'_>, index: usize| {
            let (begin, len) = range(index);
            vec![Piece { address: data.address() + (begin * size) as u64, offset: 0, bytes: len * size }]
        };
        let mut room = self.room.borrow_mut();
        let work = |index: usize, block: *mut u8| {
            // SAFETY: the block holds the elements of the step, and the room every rank's part of it.
            unsafe { transfer.all_reduce_piece(reduction, block, range(index).1, part, room.start()) }
        };
        let pieces = (|index: usize| whole(input, index), |index: usize| whole(output, index));
        // SAFETY: pieces lie within both; the rest is the caller's promise.
        unsafe { self.staged(queue, transfer, len.div_ceil(step_len), pieces.0, work, pieces.1) }
    }

    /// # Safety
    /// `input` has a shard of `output`'s length for every rank; the output is borrowed mutably by the caller, and is this rank's shard
    /// or apart from the input.
    unsafe fn reduce_scatter_any(&self, input: DeviceSlice<'_>, output: DeviceSlice<'_>, op: ReduceOp) -> Result<()> {
        let (operation, len, dtype) = (Operation::ReduceScatter(op), output.len(), output.dtype());
        let (queue, rank, world_size, size) = (output.queue(), self.rank(), self.world_size(), dtype.size_bytes());
        self.admit(queue, operation)?;
        let transfer = self.comm.ranks.agree(Call::new(operation, len, dtype))?;
        let (part, reduction) = ((BLOCK_BYTES / size / world_size).clamp(1, len.max(1)), Reduction::new(dtype, op));
        let range = |index: usize| (index * part, part.min(len - index * part));
        let fetch = |index: usize| {
            let (begin, len_now) = range(index);
            let piece = |peer: usize| Piece {
                address: input.address() + ((peer * len + begin) * size) as u64,
                offset: peer * part * size,
                bytes: len_now * size,
            };
            (0..world_size).map(piece).collect()
        };
        let store = |index: usize| {
            let (begin, len) = range(index);
            let address = output.address() + (begin * size) as u64;
            vec![Piece { address, offset: rank * part * size, bytes: len * size }]
        };
        let mut room = self.room.borrow_mut();
        let work = |index: usize, block: *mut u8| {
            let shard = |peer: usize| block.wrapping_add(peer * part * size);
            // SAFETY: the block holds every rank's elements of the step, and the room has as much.
            unsafe { transfer.reduce_scatter_piece(reduction, shard, shard(rank), range(index).1, room.start()) }
        };
        // SAFETY: pieces lie within both; the rest is the caller's promise.
        unsafe { self.staged(queue, transfer, len.div_ceil(part), fetch, work, store) }
    }

    /// # Safety
    /// `output` has room for every rank's `input`, is borrowed mutably by the caller, and `input` is this rank's shard of it or apart.
    unsafe fn all_gather_any(&self, input: DeviceSlice<'_>, output: DeviceSlice<'_>) -> Result<()> {
        let (queue, rank, world_size) = (output.queue(), self.rank(), self.world_size());
        let call = Call::new(Operation::AllGather, input.len(), input.dtype());
        let bytes = input.len() * input.dtype().size_bytes();
        let shard = |peer: usize| output.address() + (peer * bytes) as u64;
        let is_in_place = shard(rank) == input.address();
        if self.is_direct {
            let own = output.range(rank * input.len()..(rank + 1) * input.len());
            // SAFETY: the output is borrowed mutably, and the input is this rank's shard of it or apart, as the caller promises.
            unsafe { self.admit_direct(queue, call.operation, Some((input, own))) }?;
            let transfer = self.comm.ranks.agree(call)?;
            // SAFETY: the output has room for all, as the caller promises, and its own shard is only read.
            return unsafe {
                transfer.pairwise_as_it_is(|_| (pointer(shard(rank)), bytes), |peer| (pointer(shard(peer)), bytes))
            };
        }
        self.admit(queue, call.operation)?;
        let transfer = self.comm.ranks.agree(call)?;
        let part = (BLOCK_BYTES / world_size).clamp(1, bytes.max(1));
        let range = |index: usize| (index * part, part.min(bytes - index * part));
        let fetch = |index: usize| {
            let (begin, bytes) = range(index);
            vec![Piece { address: input.address() + begin as u64, offset: rank * part, bytes }]
        };
        let store = |index: usize| {
            let (begin, bytes) = range(index);
            let piece = |peer: usize| Piece { address: shard(peer) + begin as u64, offset: peer * part, bytes };
            (0..world_size).filter(|&peer| !(is_in_place && peer == rank)).map(piece).collect()
        };
        let work = |index: usize, block: *mut u8| {
            let (bytes, part_of) = (range(index).1, |peer: usize| block.wrapping_add(peer * part));
            // SAFETY: the block has room for every rank's part.
            unsafe { transfer.pairwise(|_| (part_of(rank), bytes), |peer| (part_of(peer), bytes)) }
        };
        // SAFETY: pieces lie within both; the rest is the caller's promise.
        unsafe { self.staged(queue, transfer, bytes.div_ceil(part), fetch, work, store) }
    }

    /// # Safety
    /// Both have a shard of the same length for every rank; the output is borrowed mutably by the caller, and is the input or apart
    /// from it.
    unsafe fn all_to_all_any(&self, input: DeviceSlice<'_>, output: DeviceSlice<'_>) -> Result<()> {
        let (queue, rank, world_size) = (output.queue(), self.rank(), self.world_size());
        let call = Call::new(Operation::AllToAll, output.len(), output.dtype());
        let len = output.len() / world_size;
        let bytes = len * output.dtype().size_bytes();
        let from = |peer: usize| input.address() + (peer * bytes) as u64;
        let to = |peer: usize| output.address() + (peer * bytes) as u64;
        if self.is_direct {
            // MPI cannot receive into memory that it still sends.
            let copy = if input.address() == output.address() {
                self.admit(queue, call.operation)?;
                Some(self.refused(call.operation, DeviceBuffer::copy_of(input))?)
            } else {
                None
            };
            let input = copy.as_ref().map_or(input, DeviceBuffer::as_slice);
            let from = |peer: usize| input.address() + (peer * bytes) as u64;
            let own = rank * len..(rank + 1) * len;
            let own = (input.range(own.clone()), output.range(own));
            // SAFETY: the output is borrowed mutably, and apart from the input, as the caller promises.
            unsafe { self.admit_direct(queue, call.operation, Some(own)) }?;
            let transfer = self.comm.ranks.agree(call)?;
            // SAFETY: both have one shard for every rank, as the caller promises.
            return unsafe {
                transfer.pairwise_as_it_is(|peer| (pointer(from(peer)), bytes), |peer| (pointer(to(peer)), bytes))
            };
        }
        self.admit(queue, call.operation)?;
        let transfer = self.comm.ranks.agree(call)?;
        // A block holds the parts of this rank's input for all ranks, followed by the parts of its output. This rank's own part is only
        // in the input.
        let part = (BLOCK_BYTES / 2 / world_size).clamp(1, bytes.max(1));
        let range = |index: usize| (index * part, part.min(bytes - index * part));
        let fetch = |index: usize| {
            let (begin, bytes) = range(index);
            let piece = |peer: usize| Piece { address: from(peer) + begin as u64, offset: peer * part, bytes };
            (0..world_size).map(piece).collect()
        };
        let store = |index: usize| {
            let (begin, bytes) = range(index);
            let offset = |peer: usize| if peer == rank { rank * part } else { (world_size + peer) * part };
            let piece = |peer: usize| Piece { address: to(peer) + begin as u64, offset: offset(peer), bytes };
            (0..world_size).map(piece).collect()
        };
        let work = |index: usize, block: *mut u8| {
            let (bytes, part_of) = (range(index).1, |index: usize| block.wrapping_add(index * part));
            // SAFETY: the block has room for two parts of every rank.
            unsafe { transfer.pairwise(|peer| (part_of(peer), bytes), |peer| (part_of(world_size + peer), bytes)) }
        };
        // SAFETY: pieces lie within both; the rest is the caller's promise.
        unsafe { self.staged(queue, transfer, bytes.div_ceil(part), fetch, work, store) }
    }

    /// # Safety
    /// `data` is borrowed mutably by the caller.
    unsafe fn broadcast_any(&self, data: DeviceSlice<'_>, root: usize) -> Result<()> {
        let (operation, rank) = (Operation::Broadcast { root }, self.rank());
        let (queue, call) = (data.queue(), Call::new(operation, data.len(), data.dtype()));
        let bytes = data.len() * data.dtype().size_bytes();
        if self.is_direct {
            // SAFETY: nothing is copied.
            unsafe { self.admit_direct(queue, operation, None) }?;
            let transfer = self.comm.ranks.agree(call)?;
            // SAFETY: the data of that many bytes.
            return unsafe { transfer.broadcast_tree(pointer(data.address()), bytes, root) };
        }
        self.admit(queue, operation)?;
        let transfer = self.comm.ranks.agree(call)?;
        let range = |index: usize| (index * BLOCK_BYTES, BLOCK_BYTES.min(bytes - index * BLOCK_BYTES));
        let pieces = |is_mine: bool, index: usize| {
            let (begin, bytes) = range(index);
            let piece = Piece { address: data.address() + begin as u64, offset: 0, bytes };
            Vec::from_iter(is_mine.then_some(piece))
        };
        // SAFETY: the block has that many bytes.
        let work = |index: usize, block: *mut u8| unsafe { transfer.broadcast(block, range(index).1, root) };
        let (fetch, store) = (|index| pieces(rank == root, index), |index| pieces(rank != root, index));
        // SAFETY: pieces lie within the data; the rest is the caller's promise.
        unsafe { self.staged(queue, transfer, bytes.div_ceil(BLOCK_BYTES), fetch, work, store) }
    }
}
