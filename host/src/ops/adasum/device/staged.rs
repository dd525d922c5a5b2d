//! [`Staged`]: Adasum of gradients in device memory, computed by the CPUs over a host transport.
//!
//! The vector passes through pinned memory in steps: while the transport moves the data of one step, the device copies those of the next and
//! the CPU works on those of the previous one. Only this rank's own vector is staged; the peers' data stay in host memory. The tree stages the whole vector instead,
//! since each level needs the result of the one before.

use std::ops::Range;

use crate::buffer::{GradientBuffer, Scratch};
use crate::call_comparison::{all_prepared, same_call};
use crate::comm::Communicator;
use crate::driver::{DeviceSlice, DeviceSliceMut, Pinned, Queue};
use crate::error::{Operation, Result};
use crate::memory::{Cuda, HostBuffer};
use crate::ops::adasum::gram::{Extent, Gram, Shard, Vector, VectorDivision};
use crate::ops::adasum::tree::HostTree;
use crate::ops::adasum::{OPERATION, Strategy};
use crate::ops::{AdasumOptions, AdasumReport, Algorithm};
use crate::slice::{Slice, SliceMut};

/// The number of steps in flight.
const DEPTH: usize = 2;

/// Adasum of all ranks by their CPUs.
#[derive(Debug)]
pub(super) struct Staged<'c> {
    comm: &'c dyn Communicator,
    options: AdasumOptions,
    /// The queue on which the copies are ordered.
    queue: Queue,
    pinned: Pinned,
    steps: Steps,
    report: AdasumReport,
}

/// The algorithm, with its workspace besides pinned memory.
#[derive(Debug)]
enum Steps {
    /// Uses a pinned block for each step in flight, which has the step's piece of every shard; `own` is this rank's shard of its vector, and of the
    /// result, and `received` this rank's part of the other vectors.
    Gram { own: HostBuffer, received: HostBuffer },
    /// Uses one pinned block for the vector.
    Tree(Scratch),
}

impl<'c> Staged<'c> {
    pub(super) fn new(
        comm: &'c dyn Communicator,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
    ) -> Result<Self> {
        let checked = options.algorithm.check_ranks(OPERATION, comm.world_size());
        let operation = Operation::AdasumAllReduce(options);
        same_call(operation, comm, buffer.table(), &[], checked)?;
        all_prepared(operation, comm, Self::prepare(comm, buffer, options))
    }

    /// Prepares this rank's resources, without the other ranks.
    fn prepare(comm: &'c dyn Communicator, buffer: &GradientBuffer<Cuda>, options: AdasumOptions) -> Result<Self> {
        let (queue, table) = (buffer.queue(), buffer.table());
        let (dtype, granularity) = (table.dtype(), options.granularity);
        let bytes = table.arena_len() * dtype.size_bytes();
        let (pinned, steps, report) = if options.algorithm.chosen(comm.world_size(), bytes) == Algorithm::Tree {
            let mut scratch = Scratch::default();
            HostTree::prepare(&mut scratch, dtype, table.arena_len())?;
            (Pinned::new(queue, 1, bytes.max(1))?, Steps::Tree(scratch), AdasumReport::of_tree())
        } else {
            let division = VectorDivision::new(dtype, comm.world_size(), table.shard_len());
            let block_bytes = comm.world_size() * division.longest_piece() * dtype.size_bytes();
            let own = HostBuffer::zeroed(OPERATION, dtype, table.shard_len())?;
            let layers = granularity.layer_count(table.tensor_count());
            let report = AdasumReport::of_gram(vec![0.0; layers * comm.world_size()], layers, 0);
            let received = HostBuffer::zeroed(OPERATION, dtype, division.received_len())?;
            (Pinned::new(queue, DEPTH, block_bytes)?, Steps::Gram { own, received }, report)
        };
        Ok(Self { comm, options, queue: queue.clone(), pinned, steps, report })
    }
}

impl Strategy<Cuda> for Staged<'_> {
    /// The host takes part, and returns when the last copy back to the device is enqueued.
    fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        self.queue.check_same(OPERATION, buffer.queue())?;
        let (table, granularity, comm) = (buffer.table(), self.options.granularity, self.comm);
        let (dtype, shard_len, tensors) = (table.dtype(), table.shard_len(), table.segments().to_vec());
        let Self { pinned, queue, steps, report, .. } = self;
        let (own, received) = match steps {
            Steps::Tree(scratch) => {
                let tree = HostTree::new(comm, None, &tensors, granularity, 0..table.arena_len());
                return in_block(pinned, queue, buffer.as_mut_slice(), |vector| tree.run(vector, scratch));
            }
            Steps::Gram { own, received } => (own, received),
        };
        let range = comm.rank() * shard_len..(comm.rank() + 1) * shard_len;
        let shard = &Shard::new(dtype, comm.world_size(), &tensors, granularity, range);
        let gram = Gram { across: comm, all: comm, shard, extent: Extent::All };
        let (arena, division) = (buffer.as_mut_slice(), shard.division);
        let mut vector = StagedVector { arena, division, rank: comm.rank(), pinned, queue };
        *report = gram.run(own.as_mut_slice(), &mut vector, received.as_mut_slice())?;
        Ok(())
    }

    fn report(&self) -> Result<AdasumReport> {
        Ok(self.report.clone())
    }
}

/// A vector in device memory that is copied to and from the host through pinned memory.
struct StagedVector<'a> {
    arena: DeviceSliceMut<'a>,
    division: VectorDivision,
    rank: usize,
    pinned: &'a Pinned,
    queue: &'a Queue,
}

impl StagedVector<'_> {
    /// The pieces of a step, each with its byte offset in its block.
    fn pieces_in_block(&self, step: usize) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let size = self.division.dtype().size_bytes();
        self.ranges_in_block(step).map(move |range| range.start * size).zip(self.division.pieces(step))
    }

    /// The element range of each piece in the block of a step.
    fn ranges_in_block(&self, step: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        self.division.pieces(step).enumerate().map(|(index, piece)| index * piece.len()..(index + 1) * piece.len())
    }

    /// The address and size of a step's block, once its last copy is over.
    fn block(&self, step: usize) -> Result<(*mut u8, usize)> {
        self.pinned.wait(step % DEPTH)?;
        let len: usize = self.division.pieces(step).map(|piece| piece.len()).sum();
        Ok((self.pinned.block(step % DEPTH), len * self.division.dtype().size_bytes()))
    }
}

/// Copies an arena into the first block, which has the same size, applies `run` to it, and copies the result back.
fn in_block(
    pinned: &Pinned,
    queue: &Queue,
    arena: DeviceSliceMut<'_>,
    run: impl FnOnce(SliceMut<'_>) -> Result<()>,
) -> Result<()> {
    let arena = arena.as_slice();
    // SAFETY: no code reads the block before its mark has passed.
    unsafe { pinned.fetch(queue, 0, 0, arena.address(), bytes(arena)) }?;
    pinned.mark(queue, 0)?;
    pinned.wait(0)?;
    // SAFETY: the block has that many bytes, and no copy uses it any more.
    let vector = unsafe { std::slice::from_raw_parts_mut(pinned.block(0), bytes(arena)) };
    run(SliceMut::of_bytes(arena.dtype(), vector))?;
    // SAFETY: the arena is borrowed mutably; the next write to the block is a copy behind this one.
    unsafe { pinned.store(queue, 0, 0, arena.address(), bytes(arena)) }?;
    Ok(pinned.mark(queue, 0)?)
}

fn bytes(memory: DeviceSlice<'_>) -> usize {
    memory.len() * memory.dtype().size_bytes()
}

impl Vector for StagedVector<'_> {
    fn fetch(&mut self, step: usize) -> Result<()> {
        for (offset, piece) in self.pieces_in_block(step) {
            let from = self.arena.as_slice().range(piece);
            // SAFETY: no code reads the block before its mark has passed.
            unsafe { self.pinned.fetch(self.queue, step % DEPTH, offset, from.address(), bytes(from)) }?;
        }
        Ok(self.pinned.mark(self.queue, step % DEPTH)?)
    }

    fn pieces(&mut self, step: usize, own: SliceMut<'_>) -> Result<Vec<Slice<'_>>> {
        let (start, bytes) = self.block(step)?;
        // SAFETY: the block has that many bytes, and no copy uses it any more.
        let whole = Slice::of_bytes(self.division.dtype(), unsafe { std::slice::from_raw_parts(start, bytes) });
        let mut pieces: Vec<Slice<'_>> = self.ranges_in_block(step).map(|range| whole.range(range)).collect();
        own.as_bytes_mut().copy_from_slice(pieces.remove(self.rank).as_bytes());
        Ok(pieces)
    }

    fn destinations(&mut self, step: usize, own: Slice<'_>) -> Result<Vec<SliceMut<'_>>> {
        let (start, bytes) = self.block(step)?;
        // SAFETY: as above; only this object uses the block.
        let whole = SliceMut::of_bytes(self.division.dtype(), unsafe { std::slice::from_raw_parts_mut(start, bytes) });
        let mut destinations = whole.ranges_mut(self.ranges_in_block(step));
        destinations.remove(self.rank).as_bytes_mut().copy_from_slice(own.as_bytes());
        Ok(destinations)
    }

    fn store(&mut self, step: usize) -> Result<()> {
        for (offset, piece) in self.pieces_in_block(step) {
            let to = self.arena.as_slice().range(piece);
            // SAFETY: the arena is borrowed mutably; no code writes to the block before its mark has passed.
            unsafe { self.pinned.store(self.queue, step % DEPTH, offset, to.address(), bytes(to)) }?;
        }
        Ok(self.pinned.mark(self.queue, step % DEPTH)?)
    }
}
