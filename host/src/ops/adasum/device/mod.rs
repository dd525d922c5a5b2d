//! The strategies of [`Adasum`] for gradient buffers in device memory: on the device, over nodes, or staged through the host.
//!
//! The steps are in `plan`, the arithmetic in `kernels`; nothing here depends on a transport. All work is enqueued into the queue of the
//! buffer.

mod hierarchical;
mod peers;
mod staged;
mod transport;

use self::peers::{MOST_BYTES, Packets, Peers, measured_limits};
use self::staged::Staged;
use self::transport::{DeviceGram, DeviceTree};
use crate::buffer::GradientBuffer;
use crate::call::Value;
use crate::call_comparison::{all_prepared, same_call};
use crate::comm::Communicator;
use crate::error::{Operation, Result};
use crate::kernels::cuda::PacketLimits;
use crate::memory::Cuda;
use crate::ops::adasum::{OPERATION, Strategy};
use crate::ops::{Adasum, AdasumMemory, AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes, WithinNode};
use crate::plan::divided_layers::DividedLayers;

impl AdasumMemory for Cuda {
    fn prepare<'c>(
        comm: &'c dyn Communicator<Self>,
        buffer: &GradientBuffer<Self>,
        options: AdasumOptions,
    ) -> Result<Box<dyn Strategy<Self> + 'c>> {
        choose(comm, buffer, options, Some(measured_limits(comm.world_size())))
    }

    fn prepare_on_nodes<'c>(
        nodes: Nodes<'c, Self>,
        buffer: &GradientBuffer<Self>,
        within_node: WithinNode,
        options: AdasumOptions,
    ) -> Result<Box<dyn Strategy<Self> + 'c>> {
        hierarchical::choose(nodes, buffer, within_node, options)
    }
}

/// On a GPU, every vector, product and weight stays on the device, and the host does not wait.
///
/// Where the kernels of all ranks, two to eight, can access each other's memory, [`new`](Self::new) needs no transport. In one launch each
/// rank sends the peers their shards, multiplies the vectors that it has received, exchanges products, computes the weights and writes the
/// result into every rank's arena; a second launch waits for all ranks. The peers' kernels may write to this rank's memory after it has
/// dropped the buffer or this object: the memory stays occupied until every rank has dropped its own.
///
/// Small arenas are reduced by packets, in one launch that waits for no barrier: in one shot every rank's vector is sent
/// to all others, and each rank computes the whole result; in two shots each rank is sent its shard of all vectors, and sends its shard of
/// the result. The bits are the same, but for those of NaN. Mailboxes have twice the size of all ranks' vectors in one shot, in two shots four
/// times the arena's; the exact path ([`AdasumReport::recomputed`](crate::ops::AdasumReport::recomputed)) needs the other ranks' vectors as workspace.
///
/// Elsewhere [`Algorithm::Gram`](crate::ops::Algorithm::Gram) exchanges the vectors once, computes partial Gram matrices of every layer on
/// each rank's shard, adds them in one small all-reduce, computes the same weights on every rank, and gathers the shards of the result, for
/// up to 4096 ranks. [`on_nodes`](Self::on_nodes) reduces inside a node by the transport's reduce-scatter, or by Adasum of the ranks' shards.
///
/// [`Algorithm::Tree`](crate::ops::Algorithm::Tree) is ONNX Runtime's vector halving, distance doubling, for powers of two. It is the
/// reference and not made for speed: it always exchanges vectors over the transport, also where kernels can access the peers' memory.
///
/// The workspace is the arena without a rank's own shard (Gram, and kernels over peers' memory) or half of it (Tree), and up to 36 numbers
/// of 8 bytes for each chunk of a rank's shard and of tensors that shards divide; kernels over
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
        let operation = Operation::AdasumAllReduce(options);
        Self::prepared(operation, comm.rank(), buffer, || choose(comm, buffer, options, None))
    }

    /// Like [`new`](Self::new), and where kernels can access the peers' memory, arenas of up to `low_latency_bytes` bytes are reduced by
    /// packets, in one shot up to `one_shot_bytes` bytes and in two above: 0 for none, `None` for the measured size. Every rank must call it
    /// with the same numbers. Larger arenas than 16 MiB never are; the tree uses neither packets nor
    /// the peers' memory.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new); [`Error::Disagreement`](crate::Error::Disagreement) if ranks differ in a number.
    pub fn with_low_latency(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
        low_latency_bytes: Option<usize>,
        one_shot_bytes: Option<usize>,
    ) -> Result<Self> {
        let limits = measured_limits(comm.world_size()).or_given(low_latency_bytes, one_shot_bytes);
        let operation = Operation::AdasumAllReduce(options);
        Self::prepared(operation, comm.rank(), buffer, || choose(comm, buffer, options, Some(limits)))
    }

    /// Like [`new`](Self::new), but on the CPUs over a transport of host memory, with the same bits as for buffers in host memory. The host
    /// takes part in every reduction.
    ///
    /// The workspace is host memory of the arena's size, and pinned memory: a few MiB for every rank, or the arena's size for the tree.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`Error::OutOfMemory`](crate::Error::OutOfMemory) for host memory.
    pub fn staged(comm: &'c dyn Communicator, buffer: &GradientBuffer<Cuda>, options: AdasumOptions) -> Result<Self> {
        let operation = Operation::AdasumAllReduce(options);
        Self::prepared(operation, comm.rank(), buffer, || Ok(Box::new(Staged::new(comm, buffer, options)?)))
    }
}

/// A strategy for all ranks at once: by kernels over peers' memory, if `with_peers` allows it and the ranks' kernels can access that memory,
/// or else over the communicator's own collectives. Arenas up to the sizes in `with_peers` are reduced by packets. The tree always uses
/// collectives.
fn choose<'c>(
    comm: &'c dyn Communicator<Cuda>,
    buffer: &GradientBuffer<Cuda>,
    options: AdasumOptions,
    with_peers: Option<PacketLimits>,
) -> Result<Box<dyn Strategy<Cuda> + 'c>> {
    let (world_size, table, granularity) = (comm.world_size(), buffer.table(), options.granularity);
    let operation = Operation::AdasumAllReduce(options);
    let limits = with_peers.unwrap_or(PacketLimits::NONE);
    let lines = [
        ("packets up to bytes", Value::Number(limits.most_bytes)),
        ("one shot up to bytes", Value::Number(limits.one_shot_bytes)),
    ];
    same_call(operation, comm, table, &lines, options.algorithm.check_ranks(OPERATION, world_size))?;
    let bytes = table.arena_len() * table.dtype().size_bytes();
    let is_tree = options.algorithm.chosen(world_size, bytes) == Algorithm::Tree;
    if world_size == 1 {
        let layers = granularity.layer_count(table.tensor_count());
        let report = if is_tree { AdasumReport::of_tree() } else { AdasumReport::of_one_vector(layers) };
        return all_prepared(operation, comm, Ok(Box::new(Alone(report)) as Box<dyn Strategy<Cuda>>));
    }
    if with_peers.is_some() && !is_tree {
        let connected: Option<Box<dyn Strategy<Cuda> + 'c>> = match limits.shots(bytes).filter(|_| bytes <= MOST_BYTES)
        {
            Some(shots) => {
                Packets::connect(comm, buffer, (operation, granularity), shots)?.map(|form| Box::new(form) as _)
            }
            None => Peers::connect(comm, buffer, (operation, granularity))?.map(|form| Box::new(form) as _),
        };
        if let Some(strategy) = connected {
            return Ok(strategy);
        }
    }
    let all = 0..table.arena_len();
    let prepared: Result<Box<dyn Strategy<Cuda> + 'c>> = if is_tree {
        DeviceTree::new(comm, None, buffer, all, granularity).map(|tree| Box::new(tree) as _)
    } else {
        DeviceGram::new(comm, comm, buffer, all, granularity).map(|gram| Box::new(gram) as _)
    };
    all_prepared(operation, comm, prepared)
}

/// A world of one rank: its vector is the result.
#[derive(Debug)]
struct Alone(AdasumReport);

impl Strategy<Cuda> for Alone {
    fn run(&mut self, _: &mut GradientBuffer<Cuda>) -> Result<()> {
        Ok(())
    }

    fn report(&self) -> Result<AdasumReport> {
        Ok(self.0.clone())
    }
}

/// The layers of a buffer, divided into shards of `shard_len` elements.
fn layers(buffer: &GradientBuffer<Cuda>, granularity: Granularity, shard_len: usize) -> DividedLayers {
    let tensors = buffer.table().segments();
    DividedLayers::new(tensors, granularity.layer_count(tensors.len()), shard_len)
}
