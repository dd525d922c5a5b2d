//! How [`Adasum`] reduces gradient buffers in device memory: on the device, over nodes, or staged through the host.
//!
//! The steps are in `plan`, the arithmetic in `kernels`; nothing here depends on a transport. All work is put into the queue of the buffer.

mod gram;
mod hierarchical;
mod on_device;
mod over_peers;
mod staged;
mod tree;

use self::hierarchical::OnNodes;
use self::on_device::OnDevice;
use self::staged::Staged;
use crate::buffer::GradientBuffer;
use crate::comm::Communicator;
use crate::error::Result;
use crate::memory::Cuda;
use crate::ops::adasum::Prepared;
use crate::ops::{Adasum, AdasumMemory, AdasumOptions, Granularity, Nodes, WithinNode};
use crate::plan::reduction::DividedLayers;

const OPERATION: &str = "adasum_all_reduce";

impl AdasumMemory for Cuda {
    fn prepare<'c>(
        comm: &'c dyn Communicator<Self>,
        buffer: &GradientBuffer<Self>,
        options: AdasumOptions,
    ) -> Result<Box<dyn Prepared<Self> + 'c>> {
        Ok(Box::new(OnDevice::new(comm, buffer, options, true)?))
    }

    fn prepare_on_nodes<'c>(
        nodes: Nodes<'c, Self>,
        buffer: &GradientBuffer<Self>,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Box<dyn Prepared<Self> + 'c>> {
        Ok(Box::new(OnNodes::new(nodes, buffer, within_node, options)?))
    }
}

/// On a GPU, every vector, every product and every weight stays on the device, and the host waits for nothing.
///
/// Where the kernels of all ranks, two to eight, reach each other's memory, [`new`](Self::new) needs no transport: in one launch each rank
/// sends the peers their shards, multiplies what it has received, exchanges products, finds the weights and writes the result into every
/// rank's arena, and one waits for all (the tree multiplies and exchanges once a level). The peers' kernels may write to this rank's memory after
/// it has dropped the buffer or this: the memory is used for something else when every rank has dropped its own, and until then it stays
/// occupied.
///
/// Elsewhere [`Algorithm::Gram`](crate::ops::Algorithm::Gram) exchanges the vectors once, forms partial Gram matrices of every layer on each rank's
/// shard, adds them up in one small all-reduce, computes the same weights on every rank, and gathers the shards of the result; any number of ranks
/// up to 4096. [`Algorithm::Tree`](crate::ops::Algorithm::Tree) is upstream's vector halving, distance doubling, for powers of two.
/// [`on_nodes`](Self::on_nodes) reduces inside a node by the transport's reduce-scatter, or by Adasum of the ranks' shards.
///
/// Workspace: the arena without a rank's own shard (Gram, and by peers' memory) or half of it (Tree), and up to 36 numbers of 8 bytes for
/// each chunk ([`plan::chunks`](crate::plan::chunks)) of a rank's shard and of tensors that shards divide, by peers' memory up to 120 for the latter; on nodes at most a shard of the arena of one rank of a node and the products, or with Adasum inside nodes as
/// much as the arena.
impl<'c> Adasum<'c, Cuda> {
    /// Like [`new`](Self::new), with the communicator's own collectives, whatever the ranks' kernels can reach.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over_transport(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
    ) -> Result<Self> {
        OnDevice::new(comm, buffer, options, false).map(Self::of)
    }

    /// Like [`new`](Self::new), by the processors over a transport of host memory: with the bits of buffers there. The host takes part in every
    /// reduction.
    ///
    /// Workspace: as many bytes of the host's memory as the arena has, and of pinned memory a few MiB for every rank, or for the tree as many again.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::OutOfMemory`](crate::Error::OutOfMemory) for memory of the host.
    pub fn staged(comm: &'c dyn Communicator, buffer: &GradientBuffer<Cuda>, options: AdasumOptions) -> Result<Self> {
        Staged::new(comm, buffer, options).map(Self::of)
    }
}

/// The layers of a buffer, as windows of `window_len` elements divide them.
fn layers(buffer: &GradientBuffer<Cuda>, granularity: Granularity, window_len: usize) -> DividedLayers {
    let tensors = buffer.table().segments();
    DividedLayers::new(tensors, granularity.layer_count(tensors.len()), window_len)
}
