//! [`OnNodes`]: a sum, mean or Adasum inside each node, and Adasum of the nodes' results, on shards and on the device.

use std::sync::Arc;

use super::gram::Gram;
use super::tree::Tree;
use crate::agreement::all_prepared;
use crate::buffer::{GradientBuffer, TensorTable};
use crate::call::scope;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::driver::DeviceSliceMut;
use crate::error::{Error, Operation, Result};
use crate::memory::Cuda;
use crate::ops::adasum::{Levels, Prepared, agree};
use crate::ops::{AdasumOptions, AdasumReport, Granularity, Nodes, WithinNode};

const OPERATION: &str = "hierarchical_adasum_all_reduce";

/// A reduction inside nodes, and Adasum across them.
#[derive(Debug)]
pub(super) struct OnNodes<'c> {
    nodes: Nodes<'c, Cuda>,
    /// The operation, with its options.
    operation: Operation,
    made_for: Arc<TensorTable>,
    steps: Steps,
}

#[derive(Debug)]
enum Steps {
    /// All ranks together, by one Gram matrix.
    AtOnce(Box<Gram>),
    /// Inside the only node; the report replaces the missing step across nodes.
    Inside(Inside, AdasumReport),
    /// Inside nodes, unless they have one rank, and then across nodes.
    Across(Option<Inside>, Across),
}

/// The step inside a node, in place.
#[derive(Debug)]
enum Inside {
    Reduce(ReduceOp),
    Adasum(Box<Gram>),
}

/// The step across nodes, on a shard of a node's results, in place.
#[derive(Debug)]
enum Across {
    Gram(Box<Gram>),
    Tree(Box<Tree>),
}

impl Inside {
    /// Reduces the arena of every rank of the node.
    fn all_reduce(&mut self, node: &dyn Communicator<Cuda>, arena: DeviceSliceMut<'_>) -> Result<()> {
        match self {
            Inside::Reduce(op) => node.all_reduce(arena, *op),
            Inside::Adasum(gram) => gram.run(node, node, arena),
        }
    }

    /// Like [`all_reduce`](Self::all_reduce), but keeps only the local shard.
    fn reduce_scatter(&mut self, node: &dyn Communicator<Cuda>, arena: DeviceSliceMut<'_>) -> Result<()> {
        match self {
            Inside::Reduce(op) => node.reduce_scatter_in_place(arena, *op),
            Inside::Adasum(gram) => gram.reduce(node, node, arena),
        }
    }
}

impl Across {
    fn run(&mut self, nodes: Nodes<'_, Cuda>, shard: DeviceSliceMut<'_>) -> Result<()> {
        let Nodes { all, node, across } = nodes;
        match self {
            Across::Gram(gram) => gram.run(across, all, shard),
            Across::Tree(tree) => tree.run(across, (node.world_size() > 1).then_some(node), shard),
        }
    }
}

impl Steps {
    /// Prepares this rank's steps, without the other ranks.
    fn prepare(
        Nodes { all, node, across }: Nodes<'_, Cuda>,
        buffer: &GradientBuffer<Cuda>,
        within_node: WithinNode,
        levels: Levels,
        granularity: Granularity,
    ) -> Result<Self> {
        let table = buffer.table();
        let (len, node_len) = (table.arena_len(), table.arena_len() / node.world_size());
        let gram = |of: &dyn Communicator<Cuda>, range| Gram::new(of, buffer, range, granularity).map(Box::new);
        let layers = granularity.layer_count(table.tensor_count());
        let inside = || {
            Ok::<_, Error>(match within_node {
                WithinNode::Reduce(op) => Inside::Reduce(op),
                WithinNode::Adasum => Inside::Adasum(gram(node, 0..len)?),
            })
        };
        let own = node.rank() * node_len..(node.rank() + 1) * node_len;
        Ok(match levels {
            Levels::One => Steps::AtOnce(gram(all, 0..len)?),
            _ if across.world_size() == 1 => {
                let is_tree = levels == Levels::TreeOfNodes;
                let report = if is_tree { AdasumReport::of_tree() } else { AdasumReport::of_one_vector(layers) };
                Steps::Inside(inside()?, report)
            }
            _ => {
                let inside = (node.world_size() > 1).then(inside).transpose()?;
                let across = match levels {
                    Levels::TreeOfNodes => Across::Tree(Box::new(Tree::new(across, buffer, own, granularity)?)),
                    _ => Across::Gram(gram(across, own)?),
                };
                Steps::Across(inside, across)
            }
        })
    }
}

impl<'c> OnNodes<'c> {
    pub(super) fn new(
        nodes: Nodes<'c, Cuda>,
        buffer: &GradientBuffer<Cuda>,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Self> {
        let table = buffer.table();
        let operation = Operation::HierarchicalAdasumAllReduce(within_node, options);
        let _scope = scope::within(operation);
        let positions = agree(nodes, table, (within_node, options), &[])?;
        let bytes = table.arena_len() * table.dtype().size_bytes();
        let levels = Levels::choose(OPERATION, within_node, options, &positions, bytes)?;
        let steps = Steps::prepare(nodes, buffer, within_node, levels, options.granularity);
        let steps = all_prepared(operation, nodes.all, steps)?;
        Ok(Self { nodes, operation, made_for: buffer.shared_table(), steps })
    }
}

impl Prepared<Cuda> for OnNodes<'_> {
    fn all_reduce(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        buffer.table().check_made_for(OPERATION, &self.made_for)?;
        let _scope = scope::within(self.operation);
        let nodes = self.nodes;
        let Nodes { all, node, .. } = nodes;
        let mut arena = buffer.as_mut_slice();
        let len = arena.as_slice().len() / node.world_size();
        let own = node.rank() * len..(node.rank() + 1) * len;
        let _span = tracing::debug_span!(OPERATION, rank = all.rank(), len = arena.as_slice().len()).entered();
        match &mut self.steps {
            Steps::AtOnce(gram) => gram.run(all, all, arena),
            Steps::Inside(inside, _) => inside.all_reduce(node, arena),
            Steps::Across(None, across) => across.run(nodes, arena),
            Steps::Across(Some(inside), across) => {
                inside.reduce_scatter(node, arena.reborrow())?;
                across.run(nodes, arena.reborrow().range_mut(own))?;
                node.all_gather_in_place(arena)
            }
        }
    }

    fn report(&self) -> Result<AdasumReport> {
        match &self.steps {
            Steps::AtOnce(gram) | Steps::Across(_, Across::Gram(gram)) => gram.report(),
            Steps::Inside(_, report) => Ok(report.clone()),
            Steps::Across(_, Across::Tree(_)) => Ok(AdasumReport::of_tree()),
        }
    }
}
