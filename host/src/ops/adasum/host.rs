//! Adasum of gradient buffers in host memory: of all ranks at once, or inside nodes and across them.

use super::gram::{self, Extent, Gram, Shard};
use super::hierarchical::{self, Levels, agree};
use super::tree::{self, HostTree};
use super::{AdasumMemory, AdasumOptions, AdasumReport, Algorithm, Nodes, OPERATION, Strategy, WithinNode};
use crate::buffer::{BufferParts, GradientBuffer};
use crate::call::Value;
use crate::call_comparison::same_call;
use crate::comm::{Collectives, Communicator};
use crate::error::{Error, Operation, Result};
use crate::memory::Host;

impl AdasumMemory for Host {
    fn prepare<'c>(
        comm: &'c dyn Communicator,
        buffer: &GradientBuffer,
        options: AdasumOptions,
    ) -> Result<Box<dyn Strategy<Self> + 'c>> {
        let checked = options.algorithm.check_ranks(OPERATION, comm.world_size());
        let memory = [("memory", Value::Words(buffer.memory_kind()))];
        same_call(Operation::AdasumAllReduce(options), comm, buffer.table(), &memory, checked)?;
        Ok(OnHost::boxed(Ranks::All(comm), buffer, options, (options.algorithm, comm.world_size())))
    }

    fn prepare_on_nodes<'c>(
        nodes: Nodes<'c>,
        buffer: &GradientBuffer,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Box<dyn Strategy<Self> + 'c>> {
        let memory = [("memory", Value::Words(buffer.memory_kind()))];
        let positions = agree(nodes, buffer.table(), (within_node, options), &memory)?;
        let levels = Levels::choose(within_node, options, &positions, buffer.as_slice().as_bytes().len())?;
        let reported = match levels {
            Levels::One => (Algorithm::Gram, nodes.all.world_size()),
            Levels::GramOfNodes => (Algorithm::Gram, nodes.across.world_size()),
            Levels::TreeOfNodes => (Algorithm::Tree, nodes.across.world_size()),
        };
        Ok(OnHost::boxed(Ranks::OnNodes(nodes, within_node, levels), buffer, options, reported))
    }
}

/// A reduction in host memory.
#[derive(Debug)]
struct OnHost<'c> {
    ranks: Ranks<'c>,
    options: AdasumOptions,
    /// The kind of the buffers' memory, on which the ranks have agreed.
    memory: &'static str,
    /// The report of the last reduction.
    report: AdasumReport,
}

/// The ranks, and the levels at which they combine.
#[derive(Debug)]
enum Ranks<'c> {
    All(&'c dyn Communicator),
    OnNodes(Nodes<'c>, WithinNode, Levels),
}

impl<'c> OnHost<'c> {
    /// `reported` has the algorithm and the number of vectors of the report before the first reduction.
    fn boxed(
        ranks: Ranks<'c>,
        buffer: &GradientBuffer,
        options: AdasumOptions,
        reported: (Algorithm, usize),
    ) -> Box<dyn Strategy<Host> + 'c> {
        let layers = options.granularity.layer_count(buffer.tensor_count());
        let report = match reported {
            (Algorithm::Tree, _) => AdasumReport::of_tree(),
            (_, vectors) => AdasumReport::of_gram(vec![0.0; layers * vectors], layers, 0),
        };
        Box::new(Self { ranks, options, memory: buffer.memory_kind(), report })
    }
}

impl Strategy<Host> for OnHost<'_> {
    fn run(&mut self, buffer: &mut GradientBuffer) -> Result<()> {
        let (made_for, found) = (self.memory, buffer.memory_kind());
        if made_for != found {
            let operation = if let Ranks::All(_) = self.ranks { OPERATION } else { hierarchical::OPERATION };
            let reason = format!("the buffer is in {found}, and this was made for {made_for}");
            return Err(Error::InvalidArgument { operation, reason });
        }
        self.report = match self.ranks {
            Ranks::All(comm) => of_all_ranks(comm, buffer.parts_mut(), self.options)?,
            Ranks::OnNodes(nodes, within_node, levels) => {
                on_nodes(nodes, buffer.parts_mut(), within_node, self.options, levels)?
            }
        };
        Ok(())
    }

    fn report(&self) -> Result<AdasumReport> {
        Ok(self.report.clone())
    }
}

fn of_all_ranks(comm: &dyn Communicator, mut parts: BufferParts<'_>, options: AdasumOptions) -> Result<AdasumReport> {
    let bytes = parts.arena.len() * parts.arena.dtype().size_bytes();
    match options.algorithm.chosen(comm.world_size(), bytes) {
        Algorithm::Tree => {
            if options.algorithm == Algorithm::Auto {
                // In shared memory only products are exchanged, so their number is no reason for a tree.
                if let Some(report) = gram::shared_memory(comm, &mut parts, options.granularity)? {
                    return Ok(report);
                }
            }
            tree::in_place(comm, parts, options.granularity)
        }
        _ => gram::in_place(comm, parts, options.granularity, Extent::All),
    }
}

fn on_nodes(
    Nodes { all, node, across }: Nodes<'_>,
    parts: BufferParts<'_>,
    within_node: WithinNode,
    options: AdasumOptions,
    levels: Levels,
) -> Result<AdasumReport> {
    if levels == Levels::One {
        return gram::in_place(all, parts, options.granularity, Extent::All);
    }
    let is_tree = levels == Levels::TreeOfNodes;
    if node.world_size() == 1 {
        // A node with one rank: its vector is the rank's vector.
        return if is_tree {
            tree::in_place(across, parts, options.granularity)
        } else {
            gram::in_place(across, parts, options.granularity, Extent::All)
        };
    }
    let BufferParts { mut arena, tensors, scratch } = parts;
    if across.world_size() == 1 {
        let layers = options.granularity.layer_count(tensors.len());
        match within_node {
            WithinNode::Reduce(op) => node.all_reduce(arena, op)?,
            WithinNode::Adasum => {
                let parts = BufferParts { arena, tensors, scratch };
                gram::in_place(node, parts, options.granularity, Extent::All)?;
            }
        }
        return Ok(if is_tree { AdasumReport::of_tree() } else { AdasumReport::of_one_vector(layers) });
    }

    let node_len = arena.len() / node.world_size();
    let mut shard = scratch.take(hierarchical::OPERATION, arena.dtype(), node_len)?;
    match within_node {
        WithinNode::Reduce(op) => node.reduce_scatter(arena.as_slice(), shard.as_mut_slice(), op)?,
        WithinNode::Adasum => {
            let parts = BufferParts { arena: arena.reborrow(), tensors, scratch };
            gram::in_place(node, parts, options.granularity, Extent::Own)?;
            let own = arena.as_slice().range(node.rank() * node_len..(node.rank() + 1) * node_len);
            shard.as_mut_slice().as_bytes_mut().copy_from_slice(own.as_bytes());
        }
    }

    // The range of the nodes' results that this rank combines: its shard, which the tree divides further.
    let range = node.rank() * node_len..(node.rank() + 1) * node_len;
    let report = if is_tree {
        HostTree::new(across, Some(node), tensors, options.granularity, range).run(shard.as_mut_slice(), scratch)?;
        AdasumReport::of_tree()
    } else {
        let len = node_len / across.world_size();
        let begin = range.start + across.rank() * len;
        let of_rank = &Shard::new(arena.dtype(), across.world_size(), tensors, options.granularity, begin..begin + len);
        Gram { across, all, shard: of_rank, extent: Extent::All }.run_on_host(shard.as_mut_slice(), scratch)?
    };
    node.all_gather(shard.as_slice(), arena.reborrow())?;
    scratch.give([shard]);
    Ok(report)
}
