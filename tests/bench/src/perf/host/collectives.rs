//! Collectives and Adasum over a communicator on host memory.

use std::ops::Range;

use gradsync::GradientBuffer;
use gradsync::comm::{Collectives, Communicator, ReduceOp, Split};
use gradsync::ops::{AdasumOptions, Algorithm, Nodes, adasum_all_reduce, all_reduce, hierarchical_adasum_all_reduce};
use gradsync::train::BucketMemory;

use super::reducer::Steps;
use super::vectors::{Vectors, slots};
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::data::{PERIOD, adasum, adasum_operand, count_wrong, fill, operand, reduced, tolerance, value};
use crate::perf::nodes::Groups;
use crate::perf::operation::{Operation, Redop, Row};
use crate::perf::output::Output;
use crate::perf::plan::{Place, Section};
use crate::perf::record::{BaselineName, resolved};
use crate::perf::subject::{self, Found, Side, Subject};
use crate::perf::watch;

/// The baseline of a collective on one rank.
pub(crate) trait HostBaseline {
    /// Runs the baseline once.
    fn call(&mut self, round: usize) -> Result<(), PerfError>;
}

/// Creates and names the baseline of a row, if it has one.
pub(crate) trait HostBaselines {
    fn name(&self, operation: Operation) -> BaselineName;
    fn make(&self, row: &Row, counts: Counts) -> Result<Option<Box<dyn HostBaseline + '_>>, PerfError>;
}

/// Measures sections on one rank; every rank must call it. The rows go to rank 0's output.
pub(crate) fn run<C: Communicator + Split>(
    comm: &C,
    sections: &[Section],
    output: &Output,
    baselines: &dyn HostBaselines,
) -> Result<(), PerfError> {
    let is_first = comm.rank() == 0;
    for section in sections {
        let name = baselines.name(section.operation);
        if is_first {
            output.begin(section, name)?;
        }
        for row in &section.rows {
            let _watched = watch::row(row.described());
            let baseline = if output.counts.baseline { baselines.make(row, output.counts)? } else { None };
            let mut collective = Collective::new(comm, section.place, row, output.counts, baseline)?;
            let seconds = subject::time(&mut collective, output.counts, || Ok(comm.barrier()?))?;
            let wrong = subject::check(&mut collective, output.counts)?;
            let row = Row { redop: resolved(row.redop, collective.ran), ..*row };
            drop(collective);
            let found = gather(comm, Found { seconds, wrong })?;
            if is_first {
                output.row(section, &row, &found, name)?;
            }
        }
    }
    Ok(())
}

/// Merges the results of all ranks.
pub(crate) fn gather(comm: &dyn Communicator, own: Found) -> Result<Found, PerfError> {
    let numbers = own.to_numbers();
    let mut all = vec![0.0f64; numbers.len() * comm.world_size()];
    comm.all_gather(&numbers, &mut all)?;
    // This rank's own results are excluded, so that its wrong elements are not counted twice.
    let (rank, size) = (comm.rank(), numbers.len());
    Ok(own.merge(all.chunks(size).enumerate().filter(|(other, _)| *other != rank).map(|(_, numbers)| numbers)))
}

fn op(row: &Row) -> ReduceOp {
    match row.redop {
        Redop::Reduce(op) => op,
        _ => ReduceOp::Sum,
    }
}

/// One rank's part of a row.
pub(crate) struct Collective<'a> {
    comm: &'a dyn Communicator,
    row: Row,
    input: Vectors,
    output: Vectors,
    /// These replace the vectors for Adasum, and for all-reduces in memory that all processes map.
    buffers: Vec<GradientBuffer>,
    steps: Option<Steps<'a>>,
    groups: Option<Groups<Box<dyn Communicator + 'a>>>,
    baseline: Option<Box<dyn HostBaseline + 'a>>,
    /// The algorithm that the last Adasum used.
    ran: Algorithm,
}

impl<'a> Collective<'a> {
    pub(crate) fn new<C: Communicator + Split + 'a>(
        comm: &'a C,
        place: Place,
        row: &Row,
        counts: Counts,
        baseline: Option<Box<dyn HostBaseline + 'a>>,
    ) -> Result<Self, PerfError> {
        let (dtype, len) = (row.types.to, row.len);
        let slots = slots(counts.working_set, row.bytes());
        // Threads access each other's memory of any kind; ranks within a node may have access even if ranks of several nodes do not.
        let may_share = comm.sharing().is_some() || row.nodes().is_some();
        let may_share = may_share && matches!(place, Place::Ranks(transport) if transport.are_processes());
        let is_in_windows = row.operation == Operation::AllReduce && counts.shared_buffers && may_share;
        let (input, output) = match row.operation {
            Operation::AllReduce if is_in_windows => (0, 0),
            Operation::AllReduce => (0, len),
            Operation::AllGather => (row.shard(), len),
            Operation::ReduceScatter => (len, row.shard()),
            Operation::Adasum => (0, 0),
            Operation::Reducer => (len, 0),
            _ => (len, len),
        };
        let buffers = match row.operation {
            Operation::Adasum => {
                let is_shared = may_share && counts.shared_buffers;
                let buffer = |_| if is_shared { shared_gradients(row) } else { gradients(row) };
                (0..slots).map(buffer).collect::<Result<_, _>>()?
            }
            _ if is_in_windows => (0..slots).map(|_| shared_vector(row)).collect::<Result<_, _>>()?,
            _ => Vec::new(),
        };
        let memory = if may_share && counts.shared_buffers { BucketMemory::Shared } else { BucketMemory::Own };
        let steps = || Steps::new(comm, (dtype, op(row)), row.layers.lens(len), memory);
        let steps = (row.operation == Operation::Reducer).then(steps).transpose()?;
        let groups = row.nodes().map(|nodes| Groups::new(comm, comm.rank(), nodes.per_node)).transpose()?;
        let groups = groups.map(|Groups { node, across }| Groups::<Box<dyn Communicator>> {
            node: Box::new(node),
            across: Box::new(across),
        });
        let vectors = |len| Vectors::new(dtype, len, slots);
        let mut collective = Self {
            comm,
            row: *row,
            input: vectors(input)?,
            output: vectors(output)?,
            buffers,
            steps,
            groups,
            baseline,
            ran: Algorithm::Auto,
        };
        collective.prepare();
        collective.output.fill(|_| 0.0);
        Ok(collective)
    }

    /// Writes this rank's operands for every round.
    fn prepare(&mut self) {
        let (rank, ranks, op, row) = (self.comm.rank(), self.comm.world_size(), op(&self.row), self.row);
        match self.row.operation {
            Operation::Adasum => self.buffers.iter_mut().for_each(|buffer| fill_gradients(buffer, &row, rank)),
            Operation::AllReduce => {
                self.output.fill(|index| operand(op, ranks, rank, index));
                for buffer in &mut self.buffers {
                    fill(buffer.tensor_mut(0).into_data(), |index| operand(op, ranks, rank, index));
                }
            }
            _ => self.input.fill(|index| operand(op, ranks, rank, index)),
        }
    }

    fn run(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        let (comm, op, ranks) = (self.comm, op(&self.row), self.comm.world_size());
        if let Some(steps) = &mut self.steps {
            return steps.run(self.input.slice(round));
        }
        match (self.row.operation, side) {
            (Operation::AllReduce, _) if !self.buffers.is_empty() => {
                let place = round % self.buffers.len();
                all_reduce(comm, &mut self.buffers[place], op)?;
            }
            (Operation::AllReduce, _) => comm.all_reduce(self.output.slice_mut(round), op)?,
            (Operation::AllGather, Side::InPlace) => comm.all_gather_in_place(self.output.slice_mut(round))?,
            (Operation::AllGather, _) => comm.all_gather(self.input.slice(round), self.output.slice_mut(round))?,
            (Operation::ReduceScatter, _) => {
                comm.reduce_scatter(self.input.slice(round), self.output.slice_mut(round), op)?;
            }
            (Operation::AllToAll, _) => comm.all_to_all(self.input.slice(round), self.output.slice_mut(round))?,
            (Operation::SendRecv, _) => {
                let (next, last) = ((comm.rank() + 1) % ranks, (comm.rank() + ranks - 1) % ranks);
                comm.send_recv(self.input.slice(round), next, self.output.slice_mut(round), last)?;
            }
            (_, _) => {
                let place = round % self.buffers.len();
                if let (Some(on), Some(Groups { node, across })) = (self.row.nodes(), &self.groups) {
                    let nodes = Nodes { all: comm, node: node.as_ref(), across: across.as_ref() };
                    let buffer = &mut self.buffers[place];
                    return Ok(hierarchical_adasum_all_reduce(nodes, buffer, on.within(), on.options()).map(drop)?);
                }
                let algorithm = match self.row.redop {
                    Redop::Adasum(algorithm) => algorithm,
                    _ => Algorithm::Auto,
                };
                let options = AdasumOptions::default().with_algorithm(algorithm);
                self.ran = adasum_all_reduce(comm, &mut self.buffers[place], options)?.algorithm;
            }
        }
        Ok(())
    }
}

impl Subject for Collective<'_> {
    fn has(&self, side: Side) -> bool {
        match side {
            Side::OutOfPlace => !matches!(self.row.operation, Operation::AllReduce | Operation::Adasum),
            Side::InPlace => {
                matches!(self.row.operation, Operation::AllReduce | Operation::AllGather | Operation::Adasum)
            }
            Side::Baseline => self.baseline.is_some(),
        }
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match (side, &mut self.baseline) {
            (Side::Baseline, Some(baseline)) => baseline.call(round),
            _ => self.run(side, round),
        }
    }

    fn wrong(&mut self, side: Side) -> Result<u64, PerfError> {
        let (rank, ranks, op) = (self.comm.rank(), self.comm.world_size(), op(&self.row));
        self.prepare();
        if (self.row.operation, side) == (Operation::AllGather, Side::InPlace) {
            // Each rank's own shard, and elsewhere a value that no rank has.
            let shard = self.row.shard();
            self.output.fill(|index| if index / shard == rank { value(rank, index % shard) } else { -1.0 });
        } else if self.row.operation != Operation::AllReduce {
            self.output.fill(|_| -1.0);
        }
        self.run(side, 0)?;
        Ok(match self.row.operation {
            Operation::Adasum => wrong_gradients(&self.buffers[0]),
            operation => {
                let expected = Expected::new(operation, op, &self.row, rank, ranks);
                if let Some(steps) = &self.steps {
                    return Ok(steps.count_wrong(tolerance(op), |index| expected.at(index)));
                }
                let found = self.buffers.first().map_or_else(|| self.output.slice(0), |buffer| buffer.tensor(0).data());
                count_wrong(found, tolerance(op), |index| expected.at(index))
            }
        })
    }
}

/// The expected result of a collective on a rank.
pub(crate) struct Expected {
    operation: Operation,
    reduced: [f64; PERIOD],
    shard: usize,
    rank: usize,
    ranks: usize,
}

impl Expected {
    pub(crate) fn new(operation: Operation, op: ReduceOp, row: &Row, rank: usize, ranks: usize) -> Self {
        Self { operation, reduced: reduced(op, ranks), shard: row.shard().max(1), rank, ranks }
    }

    /// The element at an index of the result.
    pub(crate) fn at(&self, index: usize) -> f64 {
        let Self { shard, rank, ranks, .. } = *self;
        match self.operation {
            Operation::AllReduce | Operation::Reducer => self.reduced[index % PERIOD],
            Operation::ReduceScatter => self.reduced[(rank * shard + index) % PERIOD],
            Operation::AllGather => value(index / shard, index % shard),
            Operation::AllToAll => value(index / shard, rank * shard + index % shard),
            _ => value((rank + ranks - 1) % ranks, index),
        }
    }
}

/// A rank's gradient buffer for Adasum.
pub(crate) fn gradients(row: &Row) -> Result<GradientBuffer, PerfError> {
    Ok(GradientBuffer::new(row.types.to, row.ranks, named_tensors(row))?)
}

/// A rank's gradient buffer for Adasum, in memory that processes of one machine can map.
fn shared_gradients(row: &Row) -> Result<GradientBuffer, PerfError> {
    Ok(GradientBuffer::new_shared(row.types.to, row.ranks, named_tensors(row))?)
}

/// A vector in memory that processes of one machine can map, as a buffer of one tensor.
fn shared_vector(row: &Row) -> Result<GradientBuffer, PerfError> {
    Ok(GradientBuffer::new_shared(row.types.to, row.ranks, [("vector", [row.len])])?)
}

fn named_tensors(row: &Row) -> impl Iterator<Item = (String, [usize; 1])> {
    row.layers.lens(row.len).into_iter().enumerate().map(|(tensor, len)| (format!("tensor {tensor}"), [len]))
}

pub(crate) fn fill_gradients(buffer: &mut GradientBuffer, row: &Row, rank: usize) {
    let summed = row.nodes().filter(|nodes| nodes.is_of_sums()).map_or(1, |nodes| nodes.per_node);
    for (tensor, segment) in buffer.segments().to_vec().into_iter().enumerate() {
        fill(buffer.as_mut_slice().range_mut(segment), |index| adasum_operand(tensor, row.ranks, summed, rank, index));
    }
}

/// The number of wrong elements of an Adasum; gaps must still be zero.
pub(crate) fn wrong_gradients(buffer: &GradientBuffer) -> u64 {
    let segments = buffer.segments();
    let tensors: u64 =
        segments.iter().map(|segment| count_wrong(buffer.as_slice().range(segment.clone()), 0.0, adasum)).sum();
    let ends = segments.iter().map(|segment| segment.end);
    let begins = segments.iter().skip(1).map(|segment| segment.start).chain([buffer.len()]);
    let gaps = ends.zip(begins).map(|(end, begin): (usize, usize)| end..begin);
    tensors + gaps.map(|gap: Range<usize>| count_wrong(buffer.as_slice().range(gap), 0.0, |_| 0.0)).sum::<u64>()
}
