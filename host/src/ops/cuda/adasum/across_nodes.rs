//! [`HierarchicalAdasum`]: a sum, mean or Adasum inside each node, and Adasum of the nodes' results, on shards and on the device.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::gram::Gram;
use super::layer_count;
use super::tree::Tree;
use crate::buffer::DeviceGradientBuffer;
use crate::comm::{DeviceCommunicator, ReduceOp};
use crate::driver::{DeviceBuffer, DeviceSliceMut};
use crate::error::{Error, Result};
use crate::ops::adasum::{Levels, Place, check_grid, check_within};
use crate::ops::{AdasumOptions, AdasumReport, Nodes, WithinNode};

const OPERATION: &str = "hierarchical_adasum_all_reduce";

/// Adasum across nodes of the gradient buffers of all ranks, with its workspace: made once, run at every step.
///
/// Inside a node, a reduce-scatter sums or averages, in the transport's arithmetic, or the ranks' shards combine by Adasum; each rank
/// then exchanges its shard, and nothing else, with the ranks in its place on other nodes, and an all-gather inside the node completes
/// the result. Inner products are added up over all ranks that hold a part of the vectors, so that coefficients belong to whole tensors.
/// With one node that is what the node makes of it. The numerics across nodes, and the choice of an algorithm, are those
/// of [`hierarchical_adasum_all_reduce`](crate::ops::hierarchical_adasum_all_reduce).
///
/// Workspace: two shards of the arena of one rank of a node, and what [`Adasum`](super::Adasum) needs for products; with Adasum inside nodes as
/// much as the arena.
#[derive(Debug)]
pub struct HierarchicalAdasum {
    fingerprint: u64,
    /// Ranks in all, of a node, and nodes.
    sizes: [usize; 3],
    steps: Steps,
}

#[derive(Debug)]
enum Steps {
    /// All ranks at once.
    One(Box<Gram>),
    /// Nodes, and then across them.
    Two(Within, Across),
}

/// The step inside a node: into a shard of its own, or in place.
#[derive(Debug)]
enum Within {
    Reduce(ReduceOp, DeviceBuffer),
    Adasum(Box<Gram>),
}

/// The step across nodes, in place.
#[derive(Debug)]
enum Across {
    /// With one node there is nothing to combine.
    Nothing(AdasumReport),
    Gram(Box<Gram>),
    Tree(Box<Tree>),
}

impl HierarchicalAdasum {
    /// Prepares the reduction of buffers like this one, which were made for all ranks; every rank must call it. The host waits for the
    /// other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on every rank if the groups are no grid of nodes, `within_node` reduces by neither sum nor mean, the
    /// buffer was made for another number of ranks than there are in all, or ranks have other tensors or options;
    /// [`Error::UnsupportedWorldSize`] for the tree over a number of nodes that is no power of two; [`Error::Cuda`], code 2 when memory does not suffice; those of the communicators.
    pub fn new(
        nodes: Nodes<'_, dyn DeviceCommunicator + '_>,
        buffer: &DeviceGradientBuffer,
        within_node: impl Into<WithinNode>,
        options: AdasumOptions,
    ) -> Result<Self> {
        let (Nodes { all, node, across }, within_node) = (nodes, within_node.into());
        let table = buffer.table();
        let places = agree(nodes, table.fingerprint(), within_node, options)?;
        check_within(OPERATION, within_node)?;
        table.check_world_size(OPERATION, all.world_size())?;
        let (len, node_len) = (table.arena_len(), table.arena_len() / node.world_size());
        let gram = |of: &dyn DeviceCommunicator, range| Gram::new(of, buffer, range, options.granularity).map(Box::new);
        let layers = layer_count(options.granularity, table.tensor_count());
        let levels = Levels::choose(OPERATION, within_node, options, &places, len * table.dtype().size_bytes())?;
        let steps = if levels == Levels::One {
            Steps::One(gram(all, 0..len)?)
        } else {
            let within = match within_node {
                WithinNode::Reduce(op) => {
                    Within::Reduce(op, DeviceBuffer::zeroed(buffer.queue(), table.dtype(), node_len)?)
                }
                WithinNode::Adasum => Within::Adasum(gram(node, 0..len)?),
            };
            let own = node.rank() * node_len..(node.rank() + 1) * node_len;
            let is_tree = levels == Levels::TreeOfNodes;
            let across = match across.world_size() {
                1 if is_tree => Across::Nothing(AdasumReport::of_tree()),
                1 => Across::Nothing(AdasumReport::of_one_vector(layers)),
                _ if is_tree => Across::Tree(Box::new(Tree::new(across, buffer, own, options.granularity)?)),
                _ => Across::Gram(gram(across, own)?),
            };
            Steps::Two(within, across)
        };
        Ok(Self { fingerprint: table.fingerprint(), sizes: sizes(nodes), steps })
    }

    /// Replaces every rank's buffer by the result, in place: bitwise the same on every rank. Asynchronous, in the buffer's queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer with other tensors, or groups of other sizes, than this was made for; those of the
    /// communicators. After one of those the contents of the buffer are unspecified.
    pub fn all_reduce(
        &mut self,
        nodes: Nodes<'_, dyn DeviceCommunicator + '_>,
        buffer: &mut DeviceGradientBuffer,
    ) -> Result<()> {
        let refuse = |reason: String| Err(Error::InvalidArgument { operation: OPERATION, reason });
        if buffer.table().fingerprint() != self.fingerprint {
            return refuse("the buffer has other tensors than the one that this was made for".into());
        }
        if sizes(nodes) != self.sizes {
            return refuse(format!(
                "made for {:?} ranks in all, of a node, and nodes; run with {:?}",
                self.sizes,
                sizes(nodes)
            ));
        }
        let Nodes { all, node, across } = nodes;
        let _span = tracing::debug_span!(OPERATION, rank = all.rank(), len = buffer.as_slice().len()).entered();
        let (within, step) = match &mut self.steps {
            Steps::One(gram) => return gram.run(all, all, buffer.as_mut_slice()),
            Steps::Two(within, step) => (within, step),
        };
        let mut combine = |shard: DeviceSliceMut<'_>| match step {
            Across::Nothing(_) => Ok(()),
            Across::Gram(gram) => gram.run(across, all, shard),
            Across::Tree(tree) => tree.run(across, Some(node), shard),
        };
        match within {
            Within::Reduce(op, shard) => {
                node.reduce_scatter(buffer.as_slice(), shard.as_mut_slice(), *op)?;
                combine(shard.as_mut_slice())?;
                node.all_gather(shard.as_slice(), buffer.as_mut_slice())
            }
            Within::Adasum(within) => {
                within.reduce(node, node, buffer.as_mut_slice())?;
                combine(buffer.as_mut_slice().range_mut(within.shard(node)))?;
                node.all_gather_in_place(buffer.as_mut_slice())
            }
        }
    }

    /// What the last reduction did across nodes, with weights of nodes, of ranks where one Gram matrix was taken, or none for the tree; waits
    /// for the queue.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn report(&self) -> Result<AdasumReport> {
        match &self.steps {
            Steps::One(gram) | Steps::Two(_, Across::Gram(gram)) => gram.report(),
            Steps::Two(_, Across::Nothing(report)) => Ok(report.clone()),
            Steps::Two(_, Across::Tree(_)) => Ok(AdasumReport::of_tree()),
        }
    }
}

fn sizes(nodes: Nodes<'_, dyn DeviceCommunicator + '_>) -> [usize; 3] {
    [nodes.all.world_size(), nodes.node.world_size(), nodes.across.world_size()]
}

/// Compares groups, tensors and options over all ranks, and returns every rank's place.
fn agree(
    nodes: Nodes<'_, dyn DeviceCommunicator + '_>,
    fingerprint: u64,
    within_node: WithinNode,
    options: AdasumOptions,
) -> Result<Vec<Place>> {
    let Nodes { all, node, across } = nodes;
    let first = |group: &dyn DeviceCommunicator| Ok::<_, Error>(group.gather_words(&[all.rank() as u64])?[0]);
    let node = (node.rank(), node.world_size(), first(node)?);
    let place = Place::words(node, (across.rank(), across.world_size(), first(across)?));
    let words = all.gather_words(&place)?;
    let places: Vec<Place> = words.chunks_exact(Place::WORDS).map(Place::of_words).collect();
    check_grid(OPERATION, &places)?;
    let mut hasher = DefaultHasher::new();
    (fingerprint, within_node, options).hash(&mut hasher);
    let what = "the names, shapes, order or dtype of their tensors, the world size of their buffers, or options";
    all.agree_on(OPERATION, what, hasher.finish())?;
    Ok(places)
}
