//! Collectives on device memory, each with a baseline, and sums in rank order with plain NCCL on equal memory as the baseline.

use gradsync::GradientBuffer;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Scaling};
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::OrderedAllReduce;

use super::plain::Plain;
use super::vectors::{Vectors, slots, wrong};
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::data::{PERIOD, fill, operand, reduced, tolerance, value};
use crate::perf::host::collectives::Expected;
use crate::perf::operation::{Operation, Redop, Row};
use crate::perf::subject::{Side, Subject};

/// The largest number of sets of buffers.
const MOST_SLOTS: usize = 1024;
/// The largest number of buffers that peers have mapped.
const MOST_MAPPED: usize = 8;

fn op(row: &Row) -> ReduceOp {
    match row.redop {
        Redop::Reduce(op) => op,
        _ => ReduceOp::Sum,
    }
}

/// The baseline of a collective on one rank; it may use the collective's vectors.
pub(super) trait Baseline {
    /// Runs the baseline once.
    fn call(&mut self, row: &Row, input: &mut Vectors, output: &mut Vectors, round: usize) -> Result<(), PerfError>;
}

impl Baseline for &Plain {
    fn call(&mut self, row: &Row, input: &mut Vectors, output: &mut Vectors, round: usize) -> Result<(), PerfError> {
        match row.operation {
            Operation::AllReduce => self.all_reduce(output.slice_mut(round), op(row)),
            Operation::AllGather => self.all_gather(output.slice_mut(round)),
            Operation::ReduceScatter => self.reduce_scatter(input.slice_mut(round), op(row)),
            Operation::AllToAll => self.all_to_all(input.slice(round), output.slice_mut(round)),
            _ => self.send_recv(input.slice(round), output.slice_mut(round)),
        }
    }
}

/// A collective on device memory.
pub(super) struct Collective<'a> {
    comm: &'a dyn Communicator<Cuda>,
    baseline: Box<dyn Baseline + 'a>,
    queue: &'a Queue,
    row: Row,
    input: Vectors,
    output: Vectors,
}

impl<'a> Collective<'a> {
    pub(super) fn new(
        comm: &'a dyn Communicator<Cuda>,
        baseline: Box<dyn Baseline + 'a>,
        queue: &'a Queue,
        row: &Row,
        counts: Counts,
    ) -> Result<Self, PerfError> {
        let slots = slots(queue, counts.working_set, 2 * row.bytes(), MOST_SLOTS)?;
        let (input, output) = match row.operation {
            Operation::AllGather => (row.shard(), row.len),
            Operation::ReduceScatter => (row.len, row.shard()),
            _ => (row.len, row.len),
        };
        let vectors = |len| Vectors::new(queue, row.types.to, len, slots);
        let (input, output) = (vectors(input)?, vectors(output)?);
        let mut collective = Self { comm, baseline, queue, row: *row, input, output };
        collective.prepare()?;
        collective.output.repeat(|_| 0.0)?;
        Ok(collective)
    }

    fn prepare(&mut self) -> Result<(), PerfError> {
        let (rank, ranks, op) = (self.comm.rank(), self.comm.world_size(), op(&self.row));
        self.input.repeat(|index| operand(op, ranks, rank, index))
    }

    fn run(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        let (comm, op, ranks, rank) = (self.comm, op(&self.row), self.comm.world_size(), self.comm.rank());
        let (input, output) = (self.input.slice(round), self.output.slice_mut(round));
        match (self.row.operation, side) {
            (Operation::AllReduce, Side::InPlace) => comm.all_reduce(output, op)?,
            (Operation::AllReduce, _) => comm.all_reduce_into(input, output, op, Scaling::NONE)?,
            (Operation::AllGather, Side::InPlace) => comm.all_gather_in_place(output)?,
            (Operation::AllGather, _) => comm.all_gather(input, output)?,
            (Operation::ReduceScatter, Side::InPlace) => {
                comm.reduce_scatter_in_place(self.input.slice_mut(round), op)?;
            }
            (Operation::ReduceScatter, _) => comm.reduce_scatter(input, output, op)?,
            (Operation::AllToAll, _) => comm.all_to_all(input, output)?,
            _ => comm.send_recv(input, (rank + 1) % ranks, output, (rank + ranks - 1) % ranks)?,
        }
        Ok(())
    }
}

impl Subject for Collective<'_> {
    fn has(&self, side: Side) -> bool {
        use Operation::{AllGather, AllReduce, ReduceScatter};
        match side {
            Side::InPlace => matches!(self.row.operation, AllReduce | AllGather | ReduceScatter),
            Side::OutOfPlace | Side::Baseline => true,
        }
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match side {
            Side::Baseline => self.baseline.call(&self.row, &mut self.input, &mut self.output, round),
            _ => self.run(side, round),
        }
    }

    fn wrong(&mut self, side: Side) -> Result<u64, PerfError> {
        let (rank, ranks, op, shard) = (self.comm.rank(), self.comm.world_size(), op(&self.row), self.row.shard());
        self.prepare()?;
        let is_in_place = side == Side::InPlace;
        match self.row.operation {
            Operation::AllReduce if is_in_place => self.output.repeat(|index| operand(op, ranks, rank, index))?,
            // Each rank's own shard, and elsewhere a value that no rank has.
            Operation::AllGather if is_in_place => {
                self.output.fill(|index| if index / shard == rank { value(rank, index % shard) } else { -1.0 })?;
            }
            _ => self.output.repeat(|_| -1.0)?,
        }
        self.run(side, 0)?;
        self.comm.synchronize(self.queue)?;
        let expected = Expected::new(self.row.operation, op, &self.row, rank, ranks);
        match (self.row.operation, is_in_place) {
            (Operation::ReduceScatter, true) => {
                let own = self.input.slice(0).range(rank * shard..(rank + 1) * shard);
                wrong(own, tolerance(op), |index| expected.at(index))
            }
            _ => self.output.count_wrong(tolerance(op), |index| expected.at(index)),
        }
    }
}

/// Sums in rank order: by kernels that access the peers' buffers, or over NCCL.
pub(super) struct Ordered<'a> {
    comm: &'a NcclCommunicator,
    plain: &'a Plain,
    queue: &'a Queue,
    row: Row,
    buffers: Vec<GradientBuffer<Cuda>>,
    /// One for each buffer that peers have mapped, or one for all buffers.
    reductions: Vec<OrderedAllReduce<'a>>,
    host: GradientBuffer,
}

impl<'a> Ordered<'a> {
    pub(super) fn new(
        comm: &'a NcclCommunicator,
        plain: &'a Plain,
        queue: &'a Queue,
        row: &Row,
        (counts, with_peers): (Counts, bool),
    ) -> Result<Self, PerfError> {
        let dtype = row.types.to;
        let tensors = || [("all", [row.len])];
        let (mut buffers, mut reductions) = (Vec::new(), Vec::new());
        for _ in 0..slots(queue, counts.working_set, row.bytes(), MOST_MAPPED)? {
            let buffer = GradientBuffer::on_queue(queue, dtype, row.ranks, tensors())?;
            if with_peers {
                let reduction = OrderedAllReduce::new(comm, &buffer, op(row))?;
                reductions.push(Some(reduction).filter(OrderedAllReduce::uses_peers).ok_or_else(unreachable_peers)?);
            } else if reductions.is_empty() {
                reductions.push(OrderedAllReduce::over_transport(comm, &buffer, dtype, op(row))?);
            }
            buffers.push(buffer);
        }
        let host = GradientBuffer::new(dtype, row.ranks, tensors())?;
        let mut ordered = Self { comm, plain, queue, row: *row, buffers, reductions, host };
        ordered.prepare()?;
        Ok(ordered)
    }

    fn prepare(&mut self) -> Result<(), PerfError> {
        let (rank, ranks, op) = (self.comm.rank(), self.comm.world_size(), op(&self.row));
        fill(self.host.tensor_mut(0).into_data(), |index| operand(op, ranks, rank, index));
        for buffer in &mut self.buffers {
            buffer.copy_from_host(&self.host)?;
        }
        Ok(())
    }
}

/// The error of every rank if kernels cannot access the peers' memory.
pub(super) fn unreachable_peers() -> PerfError {
    PerfError::Arguments("--transport peer: the GPUs do not reach each other's memory, or are more than eight".into())
}

impl Subject for Ordered<'_> {
    fn has(&self, side: Side) -> bool {
        side != Side::OutOfPlace
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        let place = round % self.buffers.len();
        let buffer = &mut self.buffers[place];
        match side {
            Side::Baseline => self.plain.all_reduce(buffer.tensor_mut(0).into_data(), op(&self.row)),
            _ => {
                let of_buffer = place % self.reductions.len();
                Ok(self.reductions[of_buffer].all_reduce(buffer)?)
            }
        }
    }

    fn wrong(&mut self, side: Side) -> Result<u64, PerfError> {
        let op = op(&self.row);
        self.prepare()?;
        // No rank may write into a buffer while its owner is still filling it.
        self.comm.barrier()?;
        self.call(side, 0)?;
        self.comm.synchronize(self.queue)?;
        let table = reduced(op, self.comm.world_size());
        wrong(self.buffers[0].tensor(0).data(), tolerance(op), |index| table[index % PERIOD])
    }
}
