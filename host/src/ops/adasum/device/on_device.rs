//! Adasum of all ranks at once on GPUs ([`OnDevice`]): every vector, product and weight stays on the device, and the host does not wait.
//!
//! The steps are in `plan`, the arithmetic in `kernels::cuda`; nothing here depends on a transport.

use std::sync::Arc;

use super::OPERATION;
use super::gram::Gram;
use super::over_peers::Peers;
use super::packets::{Packets, Thresholds};
use super::tree::Tree;
use crate::agreement::{all_prepared, same_plan};
use crate::buffer::{GradientBuffer, TensorTable};
use crate::call::{Value, scope};
use crate::comm::Communicator;
use crate::error::{Operation, Result};
use crate::memory::Cuda;
use crate::ops::adasum::Prepared;
use crate::ops::{AdasumOptions, AdasumReport, Algorithm};

/// Adasum of all ranks at once.
#[derive(Debug)]
pub(super) struct OnDevice<'c> {
    comm: &'c dyn Communicator<Cuda>,
    /// The operation, with its options.
    operation: Operation,
    made_for: Arc<TensorTable>,
    steps: Steps,
}

#[derive(Debug)]
enum Steps {
    /// A world of one rank: its vector is the result.
    Alone(AdasumReport),
    Packets(Box<Packets>),
    Peers(Box<Peers>),
    Gram(Box<Gram>),
    Tree(Box<Tree>),
}

impl Steps {
    /// Prepares the steps over the communicator's own collectives.
    fn without_peers(
        comm: &dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        AdasumOptions { algorithm, granularity }: AdasumOptions,
    ) -> Result<Self> {
        let table = buffer.table();
        let all = 0..table.arena_len();
        Ok(match algorithm {
            Algorithm::Tree if comm.world_size() == 1 => Steps::Alone(AdasumReport::of_tree()),
            Algorithm::Tree => Steps::Tree(Box::new(Tree::new(comm, buffer, all, granularity)?)),
            _ if comm.world_size() == 1 => {
                Steps::Alone(AdasumReport::of_one_vector(granularity.layer_count(table.tensor_count())))
            }
            _ => Steps::Gram(Box::new(Gram::new(comm, buffer, all, granularity)?)),
        })
    }
}

impl<'c> OnDevice<'c> {
    /// Prepares the reduction by kernels over peers' memory, if `with_peers` allows it and the ranks' kernels can access that memory, or
    /// else over the communicator's own collectives. Arenas up to the sizes in `with_peers` are reduced by packets. The tree always uses
    /// collectives.
    pub(super) fn new(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
        with_peers: Option<Thresholds>,
    ) -> Result<Self> {
        let (world_size, table) = (comm.world_size(), buffer.table());
        let operation = Operation::AdasumAllReduce(options);
        let _scope = scope::within(operation);
        let thresholds = with_peers.unwrap_or(Thresholds::NONE);
        let lines = [
            ("packets up to bytes", Value::Number(thresholds.most_bytes)),
            ("one shot up to bytes", Value::Number(thresholds.one_shot_bytes)),
        ];
        same_plan(operation, comm, table, &lines, options.algorithm.check_ranks(OPERATION, world_size))?;
        let bytes = table.arena_len() * table.dtype().size_bytes();
        let options = AdasumOptions { algorithm: options.algorithm.chosen(world_size, bytes), ..options };
        let steps = match thresholds.shots(bytes) {
            _ if with_peers.is_none() || world_size == 1 || options.algorithm == Algorithm::Tree => None,
            Some(shots) => Packets::connect(comm, buffer, (operation, options.granularity), shots)?
                .map(|packets| Steps::Packets(Box::new(packets))),
            None => Peers::connect(comm, buffer, (operation, options.granularity))?
                .map(|peers| Steps::Peers(Box::new(peers))),
        };
        let steps = match steps {
            Some(steps) => steps,
            None => all_prepared(operation, comm, Steps::without_peers(comm, buffer, options))?,
        };
        Ok(Self { comm, operation, made_for: buffer.shared_table(), steps })
    }
}

impl Prepared<Cuda> for OnDevice<'_> {
    fn all_reduce(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        buffer.table().check_made_for(OPERATION, &self.made_for)?;
        let comm = self.comm;
        let _scope = scope::within(self.operation);
        let _span = tracing::debug_span!(OPERATION, rank = comm.rank(), len = buffer.as_slice().len()).entered();
        match &mut self.steps {
            Steps::Alone(_) => Ok(()),
            Steps::Packets(packets) => packets.run(comm, buffer),
            Steps::Peers(peers) => peers.run(comm, buffer),
            Steps::Gram(gram) => gram.run(comm, comm, buffer.as_mut_slice()),
            Steps::Tree(tree) => tree.run(comm, None, buffer.as_mut_slice()),
        }
    }

    fn report(&self) -> Result<AdasumReport> {
        Ok(match &self.steps {
            Steps::Alone(report) => report.clone(),
            Steps::Packets(packets) => packets.report()?,
            Steps::Peers(peers) => peers.report()?,
            Steps::Gram(gram) => gram.report()?,
            Steps::Tree(_) => AdasumReport::of_tree(),
        })
    }

    fn uses_peers(&self) -> bool {
        matches!(self.steps, Steps::Packets(_) | Steps::Peers(_))
    }
}
