//! Adasum all-reduce on GPUs ([`Adasum`]), with the numerics of [`adasum_all_reduce`](crate::ops::adasum_all_reduce): every vector,
//! every product and every weight stays on the device, and the host waits for nothing.
//!
//! The steps are in `plan`, the arithmetic in `kernels::cuda`; nothing here depends on a transport.

use super::gram::Gram;
use super::over_peers::Peers;
use super::tree::Tree;
use super::{OPERATION, layer_count};
use crate::buffer::DeviceGradientBuffer;
use crate::comm::DeviceCommunicator;
use crate::error::{Error, Result};
use crate::ops::cuda::same_plan;
use crate::ops::{AdasumOptions, AdasumReport, Algorithm};

/// Adasum of the gradient buffers of a group of ranks, with its workspace: made once, run at every step.
///
/// Where the kernels of all ranks, two to eight, reach each other's memory, Adasum needs no transport: in one launch each rank
/// sends the peers their shards, multiplies what it has received, exchanges products, finds the weights and writes the result into every
/// rank's arena, and one waits for all (the tree multiplies and exchanges once a level). The peers' kernels may write to this rank's memory after
/// it has dropped the buffer or this: the memory is used for something else when every rank has dropped its own, and until then it stays
/// occupied.
///
/// Elsewhere [`Algorithm::Gram`] exchanges the vectors once, forms partial Gram matrices of every layer on each rank's shard, adds them up
/// in one small all-reduce, computes the same weights on every rank, and gathers the shards of the result; any number of ranks up to 4096.
/// [`Algorithm::Tree`] is upstream's vector halving, distance doubling, for powers of two.
///
/// Workspace: the arena without a rank's own shard (Gram, and by peers' memory) or half of it (Tree), and up to 36 numbers of 8 bytes for
/// each chunk of 2048 elements or more.
#[derive(Debug)]
pub struct Adasum {
    fingerprint: u64,
    world_size: usize,
    steps: Steps,
}

#[derive(Debug)]
enum Steps {
    /// A world of one: its vector is its own result.
    Alone(AdasumReport),
    Peers(Box<Peers>),
    Gram(Box<Gram>),
    Tree(Box<Tree>),
}

impl Adasum {
    /// Prepares the reduction of buffers like this one; every rank of `comm` must call it. The host waits for the other ranks. Kernels over peers'
    /// memory are loaded here. Where the crate has no code of them for the GPU, the driver compiles them the first time on a machine, in up
    /// to a quarter of a second.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the buffer was made for another world size, or ranks have other tensors or options (on every rank,
    /// naming two that differ); [`Error::UnsupportedWorldSize`] for `Tree` on a number of ranks that is no power of two;
    /// [`Error::Cuda`], code 2 when memory does not suffice; those of the communicator.
    pub fn new(comm: &dyn DeviceCommunicator, buffer: &DeviceGradientBuffer, options: AdasumOptions) -> Result<Self> {
        Self::prepare(comm, buffer, options, Peers::connect)
    }

    /// As [`new`](Self::new), with the communicator's own collectives, whatever the ranks' kernels can reach.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over_transport(
        comm: &dyn DeviceCommunicator,
        buffer: &DeviceGradientBuffer,
        options: AdasumOptions,
    ) -> Result<Self> {
        Self::prepare(comm, buffer, options, |_, _, _| Ok(None))
    }

    fn prepare(
        comm: &dyn DeviceCommunicator,
        buffer: &DeviceGradientBuffer,
        options: AdasumOptions,
        connect: impl FnOnce(&dyn DeviceCommunicator, &DeviceGradientBuffer, AdasumOptions) -> Result<Option<Peers>>,
    ) -> Result<Self> {
        let (world_size, table) = (comm.world_size(), buffer.table());
        same_plan(OPERATION, comm, table, options)?;
        options.algorithm.check_ranks(OPERATION, world_size)?;
        let bytes = table.arena_len() * table.dtype().size_bytes();
        let options = AdasumOptions { algorithm: options.algorithm.chosen(world_size, bytes), ..options };
        let peers = if world_size == 1 { None } else { connect(comm, buffer, options)? };
        if let Some(peers) = peers {
            let steps = Steps::Peers(Box::new(peers));
            return Ok(Self { fingerprint: table.fingerprint(), world_size, steps });
        }
        let steps = match options.algorithm {
            _ if world_size == 1 => {
                let layers = layer_count(options.granularity, table.tensor_count());
                Steps::Alone(match options.algorithm {
                    Algorithm::Tree => AdasumReport::of_tree(),
                    _ => AdasumReport::of_one_vector(layers),
                })
            }
            Algorithm::Auto | Algorithm::Gram => {
                Steps::Gram(Box::new(Gram::new(comm, buffer, 0..table.arena_len(), options.granularity)?))
            }
            Algorithm::Tree => {
                Steps::Tree(Box::new(Tree::new(comm, buffer, 0..table.arena_len(), options.granularity)?))
            }
        };
        Ok(Self { fingerprint: table.fingerprint(), world_size, steps })
    }

    /// Whether the ranks' kernels reach into each other's memory.
    pub fn uses_peers(&self) -> bool {
        matches!(self.steps, Steps::Peers(_))
    }

    /// Replaces every rank's buffer by the Adasum of all ranks', in place: bitwise the same on every rank and in every run on the same
    /// machines. Asynchronous, in the buffer's queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer with other tensors than this was made for, where peers reach into it for another buffer
    /// at all, or another communicator's number of ranks;
    /// those of the communicator. After one of those the contents of the buffer are unspecified.
    pub fn all_reduce(&mut self, comm: &dyn DeviceCommunicator, buffer: &mut DeviceGradientBuffer) -> Result<()> {
        let refuse = |reason: &str| Err(Error::InvalidArgument { operation: OPERATION, reason: reason.into() });
        if buffer.table().fingerprint() != self.fingerprint {
            return refuse("the buffer has other tensors than the one that this was made for");
        }
        if comm.world_size() != self.world_size {
            return refuse("the communicator has another number of ranks than the one that this was made for");
        }
        let _span = tracing::debug_span!(OPERATION, rank = comm.rank(), len = buffer.as_slice().len()).entered();
        match &mut self.steps {
            Steps::Alone(_) => Ok(()),
            Steps::Peers(peers) => peers.run(comm, buffer),
            Steps::Gram(gram) => gram.run(comm, comm, buffer.as_mut_slice()),
            Steps::Tree(tree) => tree.run(comm, None, buffer.as_mut_slice()),
        }
    }

    /// What the last reduction did; waits for the queue.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn report(&self) -> Result<AdasumReport> {
        Ok(match &self.steps {
            Steps::Alone(report) => report.clone(),
            Steps::Peers(peers) => peers.report()?,
            Steps::Gram(gram) => gram.report()?,
            Steps::Tree(_) => AdasumReport::of_tree(),
        })
    }
}
