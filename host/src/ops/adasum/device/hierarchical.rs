//! Adasum on nodes: a sum, mean or Adasum inside each node, and Adasum of the nodes' results, on shards and on the device.

use super::transport::{DeviceGram, DeviceTree};
use crate::buffer::GradientBuffer;
use crate::call_comparison::all_prepared;
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::driver::DeviceSliceMut;
use crate::error::{Operation, Result};
use crate::memory::Cuda;
use crate::ops::adasum::Strategy;
use crate::ops::adasum::hierarchical::{Levels, agree};
use crate::ops::{AdasumOptions, AdasumReport, Granularity, Nodes, WithinNode};

/// A reduction inside nodes, and Adasum across them.
#[derive(Debug)]
struct OnNodes<'c> {
    node: &'c dyn Communicator<Cuda>,
    /// The step inside nodes, unless they have one rank.
    inside: Option<Inside<'c>>,
    across: Across<'c>,
}

/// The step inside a node, in place.
#[derive(Debug)]
enum Inside<'c> {
    Reduce(ReduceOp),
    Adasum(Box<DeviceGram<'c>>),
}

/// The step across nodes, on a shard of a node's results, in place.
#[derive(Debug)]
enum Across<'c> {
    /// There is one node; the report replaces this step.
    OneNode(AdasumReport),
    Gram(Box<DeviceGram<'c>>),
    Tree(DeviceTree<'c>),
}

impl Inside<'_> {
    /// Reduces the arena of every rank of the node.
    fn all_reduce(&mut self, node: &dyn Communicator<Cuda>, arena: DeviceSliceMut<'_>) -> Result<()> {
        match self {
            Inside::Reduce(op) => node.all_reduce(arena, *op),
            Inside::Adasum(gram) => gram.reduce(arena),
        }
    }

    /// Like [`all_reduce`](Self::all_reduce), but keeps only the local shard.
    fn reduce_scatter(&mut self, node: &dyn Communicator<Cuda>, arena: DeviceSliceMut<'_>) -> Result<()> {
        match self {
            Inside::Reduce(op) => node.reduce_scatter_in_place(arena, *op),
            Inside::Adasum(gram) => gram.reduce_scatter(arena),
        }
    }
}

impl<'c> OnNodes<'c> {
    /// Prepares this rank's steps, without the other ranks.
    fn prepare(
        Nodes { all, node, across }: Nodes<'c, Cuda>,
        buffer: &GradientBuffer<Cuda>,
        within_node: WithinNode,
        is_tree: bool,
        granularity: Granularity,
    ) -> Result<Self> {
        let table = buffer.table();
        let (len, node_len) = (table.arena_len(), table.arena_len() / node.world_size());
        let own = node.rank() * node_len..(node.rank() + 1) * node_len;
        let is_divided = node.world_size() > 1;
        let inside = match within_node {
            // One node reduces even if it has one rank.
            _ if !is_divided && across.world_size() > 1 => None,
            WithinNode::Reduce(op) => Some(Inside::Reduce(op)),
            WithinNode::Adasum => {
                Some(Inside::Adasum(Box::new(DeviceGram::new(node, node, buffer, 0..len, granularity)?)))
            }
        };
        let across = match (across.world_size() == 1, is_tree) {
            (true, true) => Across::OneNode(AdasumReport::of_tree()),
            (true, false) => {
                Across::OneNode(AdasumReport::of_one_vector(granularity.layer_count(table.tensor_count())))
            }
            (false, true) => {
                Across::Tree(DeviceTree::new(across, is_divided.then_some(node), buffer, own, granularity)?)
            }
            (false, false) => Across::Gram(Box::new(DeviceGram::new(across, all, buffer, own, granularity)?)),
        };
        Ok(Self { node, inside, across })
    }
}

impl Across<'_> {
    fn reduce(&mut self, shard: DeviceSliceMut<'_>) -> Result<()> {
        match self {
            Across::OneNode(_) => Ok(()),
            Across::Gram(gram) => gram.reduce(shard),
            Across::Tree(tree) => tree.reduce(shard),
        }
    }
}

/// The strategy for these nodes, agreed on and prepared by all ranks.
pub(super) fn choose<'c>(
    nodes: Nodes<'c, Cuda>,
    buffer: &GradientBuffer<Cuda>,
    within_node: WithinNode,
    options: AdasumOptions,
) -> Result<Box<dyn Strategy<Cuda> + 'c>> {
    let (table, granularity) = (buffer.table(), options.granularity);
    let positions = agree(nodes, table, (within_node, options), &[])?;
    let bytes = table.arena_len() * table.dtype().size_bytes();
    let levels = Levels::choose(within_node, options, &positions, bytes)?;
    let prepared: Result<Box<dyn Strategy<Cuda> + 'c>> = if levels == Levels::One {
        DeviceGram::new(nodes.all, nodes.all, buffer, 0..table.arena_len(), granularity).map(|gram| Box::new(gram) as _)
    } else {
        let is_tree = levels == Levels::TreeOfNodes;
        OnNodes::prepare(nodes, buffer, within_node, is_tree, granularity).map(|on_nodes| Box::new(on_nodes) as _)
    };
    all_prepared(Operation::HierarchicalAdasumAllReduce(within_node, options), nodes.all, prepared)
}

impl Strategy<Cuda> for OnNodes<'_> {
    fn run(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        let Self { node, inside, across } = self;
        let mut arena = buffer.as_mut_slice();
        let len = arena.as_slice().len() / node.world_size();
        let own = node.rank() * len..(node.rank() + 1) * len;
        match (inside, across) {
            (None, across) => across.reduce(arena),
            (Some(inside), Across::OneNode(_)) => inside.all_reduce(*node, arena),
            (Some(inside), across) => {
                inside.reduce_scatter(*node, arena.reborrow())?;
                across.reduce(arena.reborrow().range_mut(own))?;
                node.all_gather_in_place(arena)
            }
        }
    }

    fn report(&self) -> Result<AdasumReport> {
        match &self.across {
            Across::OneNode(report) => Ok(report.clone()),
            Across::Gram(gram) => gram.report(),
            Across::Tree(tree) => tree.report(),
        }
    }
}
