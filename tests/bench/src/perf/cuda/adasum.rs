//! Adasum on GPUs, over NCCL or by kernels that access the peers' buffers, compared with the staged mode: through host memory, with the
//! computation on the CPUs.

use gradsync::GradientBuffer;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, Ranks, ReduceOp};
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::{AdasumOptions, Algorithm, Nodes};

use super::collectives::unreachable_peers;
use super::plain::Plain;
use super::vectors::slots;
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::host::collectives::{fill_gradients, gradients, wrong_gradients};
use crate::perf::nodes::Groups;
use crate::perf::operation::{Redop, Row};
use crate::perf::record::BaselineName;
use crate::perf::subject::{Side, Subject};

/// The largest number of buffers with a workspace of their own.
const MOST_WORKSPACES: usize = 8;

/// The baseline of an Adasum.
enum Baseline<'a> {
    /// The staged mode over a transport of host memory.
    Staged(Adasum<'a, Cuda>),
    /// The plain sum of as many bytes, if there is no such transport or its calls cannot be recorded.
    Sum(&'a Plain),
}

/// The name of the baseline, with or without a transport of host memory. Calls through host memory cannot be recorded.
pub(super) fn baseline(host: Option<&dyn Communicator>, counts: Counts) -> BaselineName {
    let full = match host {
        _ if counts.against_sum => "plain NCCL's sum of as many bytes",
        Some(_) if counts.graph_calls == 0 => {
            return BaselineName { column: "staged mode", full: "the staged mode, through host memory" };
        }
        Some(_) => "plain NCCL's sum of as many bytes (the staged mode cannot be recorded)",
        None => "plain NCCL's sum of as many bytes (the staged mode needs MPI, or ranks in one process)",
    };
    BaselineName { column: "plain NCCL's sum", full }
}

/// The groups of ranks for a row with nodes. Every rank must call it.
pub(super) fn groups(comm: &NcclCommunicator, row: &Row) -> Result<Option<Groups<NcclCommunicator>>, PerfError> {
    row.nodes().map(|nodes| Groups::new(comm, comm.rank(), nodes.per_node)).transpose()
}

/// An Adasum of gradient buffers.
pub(super) struct Reduction<'a> {
    comm: &'a NcclCommunicator,
    queue: &'a Queue,
    row: Row,
    buffers: Vec<(GradientBuffer<Cuda>, Adasum<'a, Cuda>)>,
    host: GradientBuffer,
    baseline: Option<Baseline<'a>>,
}

impl<'a> Reduction<'a> {
    pub(super) fn new(
        (comm, queue, plain): (&'a NcclCommunicator, &'a Queue, &'a Plain),
        host_comm: Option<&'a dyn Communicator>,
        groups: Option<&'a Groups<NcclCommunicator>>,
        with_peers: bool,
        row: &Row,
        counts: Counts,
    ) -> Result<Self, PerfError> {
        let algorithm = match row.redop {
            Redop::Adasum(algorithm) => algorithm,
            _ => Algorithm::Auto,
        };
        let options = AdasumOptions::default().with_algorithm(algorithm);
        let lens = row.layers.lens(row.len);
        let mut buffers = Vec::new();
        for _ in 0..slots(queue, counts.working_set, 2 * row.bytes(), MOST_WORKSPACES)? {
            let tensors = lens.iter().enumerate().map(|(tensor, &len)| (format!("tensor {tensor}"), [len]));
            let buffer = GradientBuffer::on_queue(queue, row.types.to, row.ranks, tensors)?;
            if let (Some(on), Some(groups)) = (row.nodes(), groups) {
                let nodes: Nodes<'a, Cuda> = Nodes { all: comm, node: &groups.node, across: &groups.across };
                let adasum = Adasum::on_nodes(nodes, &buffer, on.within(), on.options())?;
                buffers.push((buffer, adasum));
                continue;
            }
            let adasum = if with_peers {
                Adasum::with_low_latency(comm, &buffer, options, counts.low_latency, counts.one_shot)?
            } else {
                Adasum::over_transport(comm, &buffer, options)?
            };
            if with_peers && !adasum.uses_peers() {
                return Err(unreachable_peers());
            }
            buffers.push((buffer, adasum));
        }
        let baseline = match host_comm {
            _ if !counts.baseline => None,
            Some(host) if counts.graph_calls == 0 && !counts.against_sum => {
                let staged = Adasum::staged(host, &buffers[0].0, AdasumOptions::default())?;
                Some(Baseline::Staged(staged))
            }
            _ => Some(Baseline::Sum(plain)),
        };
        let mut reduction = Self { comm, queue, row: *row, buffers, host: gradients(row)?, baseline };
        reduction.prepare()?;
        Ok(reduction)
    }

    /// The algorithm that ran. Waits for the queue.
    pub(super) fn ran(&self) -> Result<Algorithm, PerfError> {
        Ok(self.buffers[0].1.report()?.algorithm)
    }

    fn prepare(&mut self) -> Result<(), PerfError> {
        fill_gradients(&mut self.host, &self.row, self.comm.rank());
        for (buffer, _) in &mut self.buffers {
            buffer.copy_from_host(&self.host)?;
        }
        Ok(())
    }
}

impl Subject for Reduction<'_> {
    fn has(&self, side: Side) -> bool {
        match side {
            Side::OutOfPlace => false,
            Side::InPlace => true,
            Side::Baseline => self.baseline.is_some(),
        }
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        let place = round % self.buffers.len();
        let (buffer, adasum) = &mut self.buffers[place];
        match (side, &mut self.baseline) {
            (Side::Baseline, Some(Baseline::Staged(staged))) => Ok(staged.all_reduce(buffer)?),
            (Side::Baseline, Some(Baseline::Sum(plain))) => plain.all_reduce(buffer.as_mut_slice(), ReduceOp::Sum),
            _ => Ok(adasum.all_reduce(buffer)?),
        }
    }

    fn wrong(&mut self, side: Side) -> Result<u64, PerfError> {
        self.prepare()?;
        // No rank may read a buffer while its owner is still filling it.
        self.comm.barrier()?;
        self.call(side, 0)?;
        self.comm.synchronize(self.queue)?;
        self.buffers[0].0.copy_to_host(&mut self.host)?;
        Ok(wrong_gradients(&self.host))
    }
}
