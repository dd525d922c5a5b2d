//! Adasum all-reduce on GPUs ([`Adasum`]), with the numerics of [`adasum_all_reduce`](crate::ops::adasum_all_reduce): every vector,
//! every product and every weight stays on the device, and the host waits for nothing.
//!
//! The steps are in `plan`, the arithmetic in `kernels::cuda`; nothing here depends on a transport.

use super::OPERATION;
use super::gram::Gram;
use super::over_peers::Peers;
use super::tree::Tree;
use crate::agreement::{all_prepared, same_plan};
use crate::buffer::GradientBuffer;
use crate::call::scope;
use crate::comm::Communicator;
use crate::error::{Error, Operation, Result};
use crate::memory::Cuda;
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
pub struct Adasum<'c> {
    comm: &'c dyn Communicator<Cuda>,
    /// With the options that it was made with.
    operation: Operation,
    fingerprint: u64,
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

impl Steps {
    /// Over the communicator's own collectives.
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

impl<'c> Adasum<'c> {
    /// Prepares the reduction of buffers like this one over the ranks of `comm`; every one of them must call it. The host waits for
    /// the other ranks. Kernels over peers' memory are loaded here. Where the crate has no code of them for the GPU, the driver compiles them the first time on a machine, in up
    /// to a quarter of a second.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the buffer was made for another world size; [`Error::Disagreement`] on every rank if ranks have
    /// other tensors or options; [`Error::UnsupportedWorldSize`] for `Tree` on a number of ranks that is no power of two;
    /// [`Error::Cuda`], code 2 when memory does not suffice. Where that is so on some ranks only, the others fail with an
    /// [`Error::InvalidArgument`] that names one. Errors of the communicator.
    pub fn new(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
    ) -> Result<Self> {
        Self::prepare(comm, buffer, options, true)
    }

    /// Like [`new`](Self::new), with the communicator's own collectives, whatever the ranks' kernels can reach.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn over_transport(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
    ) -> Result<Self> {
        Self::prepare(comm, buffer, options, false)
    }

    fn prepare(
        comm: &'c dyn Communicator<Cuda>,
        buffer: &GradientBuffer<Cuda>,
        options: AdasumOptions,
        with_peers: bool,
    ) -> Result<Self> {
        let (world_size, table) = (comm.world_size(), buffer.table());
        let operation = Operation::AdasumAllReduce(options);
        let _scope = scope::within(operation);
        same_plan(operation, comm, table, &[], options.algorithm.check_ranks(OPERATION, world_size))?;
        let bytes = table.arena_len() * table.dtype().size_bytes();
        let options = AdasumOptions { algorithm: options.algorithm.chosen(world_size, bytes), ..options };
        let peers =
            if with_peers && world_size > 1 { Peers::connect(comm, buffer, (operation, options))? } else { None };
        let steps = match peers {
            Some(peers) => Steps::Peers(Box::new(peers)),
            None => all_prepared(operation, comm, Steps::without_peers(comm, buffer, options))?,
        };
        Ok(Self { comm, operation, fingerprint: table.fingerprint(), steps })
    }

    /// Whether the ranks' kernels reach into each other's memory.
    pub fn uses_peers(&self) -> bool {
        matches!(self.steps, Steps::Peers(_))
    }

    /// Replaces every rank's buffer by the Adasum of all ranks', in place: bitwise the same on every rank and in every run on the same
    /// machines. Asynchronous, in the buffer's queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer with other tensors than this was made for, and where peers reach into it for another buffer
    /// at all; errors of the communicator, after which the contents of the buffer are unspecified.
    pub fn all_reduce(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        if buffer.table().fingerprint() != self.fingerprint {
            let reason = "the buffer has other tensors than the one that this was made for".into();
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        let comm = self.comm;
        let _scope = scope::within(self.operation);
        let _span = tracing::debug_span!(OPERATION, rank = comm.rank(), len = buffer.as_slice().len()).entered();
        match &mut self.steps {
            Steps::Alone(_) => Ok(()),
            Steps::Peers(peers) => peers.run(comm, buffer),
            Steps::Gram(gram) => gram.run(comm, comm, buffer.as_mut_slice()),
            Steps::Tree(tree) => tree.run(comm, None, buffer.as_mut_slice()),
        }
    }

    /// The report of the last reduction; waits for the queue.
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
