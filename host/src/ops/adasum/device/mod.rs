//! The forms of [`Adasum`] for gradient buffers in device memory: on the device, over nodes, or staged through the host.
//!
//! The steps are in `plan`, the arithmetic in `kernels`; nothing here depends on a transport. All work is enqueued into the queue of the
//! buffer.

mod gram;
mod hierarchical;
mod on_device;
mod one_shot;
mod over_peers;
mod staged;
mod tree;

use self::hierarchical::OnNodes;
use self::on_device::OnDevice;
use self::one_shot::OneShot;
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
        Ok(Box::new(OnDevice::new(comm, buffer, options, Some(OneShot::default_bytes(comm.world_size())))?))
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

/// On a GPU, every vector, product and weight stays on the device, and the host does not wait.
///
/// Where the kernels of all ranks, two to eight, can access each other's memory, [`new`](Self::new) needs no transport. In one launch each
/// rank sends the peers their shards, multiplies the vectors that it has received, exchanges products, computes the weights and writes the
/// result into every rank's arena; a second launch waits for all ranks (the tree multiplies and exchanges once per level). The peers'
/// kernels may write to this rank's memory after it has dropped the buffer or this object: the memory stays occupied until every rank has
/// dropped its own.
///
/// Small arenas are reduced in one shot: one launch sends every rank's vector to all others, and each rank computes the whole result by
/// itself, with the same bits. Its workspace is the vectors of all ranks, and mailboxes of four times that size.
///
/// Elsewhere [`Algorithm::Gram`](crate::ops::Algorithm::Gram) exchanges the vectors once, computes partial Gram matrices of every layer on
/// each rank's shard, adds them in one small all-reduce, computes the same weights on every rank, and gathers the shards of the result, for
/// up to 4096 ranks. [`Algorithm::Tree`](crate::ops::Algorithm::Tree) is ONNX Runtime's vector halving, distance doubling, for powers of
/// two. [`on_nodes`](Self::on_nodes) reduces inside a node by the transport's reduce-scatter, or by Adasum of the ranks' shards.
///
/// The workspace is the arena without a rank's own shard (Gram, and kernels over peers' memory) or half of it (Tree), and up to 36 numbers
/// of 8 bytes for each chunk ([`plan::chunks`](crate::plan::chunks)) of a rank's shard and of tensors that shards divide; kernels over
/// peers' memory need up to 120 for the latter. On nodes it is at most the shard of one rank of a node and the products, or as much as the
/// arena with Adasum inside nodes.
impl<'c> Adasum<'c, Cuda> {
    /// Like [`new`](Self::new), but always uses the communicator's own collectives, even where kernels can access the peers' memory.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn over_transport(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
    ) -> Result<Self> {
        OnDevice::new(comm, buffer, options, None).map(Self::of)
    }

    /// Like [`new`](Self::new), and where kernels can access the peers' memory, arenas of up to `bytes` bytes are reduced in one shot, instead
    /// of up to the measured threshold; 0 means none. Every rank must call it with the same number. Larger arenas than 16 MiB, and the tree,
    /// never are.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`Error::Disagreement`](crate::Error::Disagreement) if ranks differ in the number.
    pub fn with_one_shot_bytes(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
        bytes: usize,
    ) -> Result<Self> {
        OnDevice::new(comm, buffer, options, Some(bytes)).map(Self::of)
    }

    /// Like [`new`](Self::new), but on the CPUs over a transport of host memory, with the same bits as for buffers in host memory. The host
    /// takes part in every reduction.
    ///
    /// The workspace is host memory of the arena's size, and pinned memory: a few MiB for every rank, or the arena's size for the tree.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::OutOfMemory`](crate::Error::OutOfMemory) for host memory.
    pub fn staged(comm: &'c dyn Communicator, buffer: &GradientBuffer<Cuda>, options: AdasumOptions) -> Result<Self> {
        Staged::new(comm, buffer, options).map(Self::of)
    }
}

/// The layers of a buffer, divided into windows of `window_len` elements.
fn layers(buffer: &GradientBuffer<Cuda>, granularity: Granularity, window_len: usize) -> DividedLayers {
    let tensors = buffer.table().segments();
    DividedLayers::new(tensors, granularity.layer_count(tensors.len()), window_len)
}
