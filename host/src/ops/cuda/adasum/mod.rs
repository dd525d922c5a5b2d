//! Adasum all-reduce on GPUs ([`Adasum`]), with the numerics of [`adasum_all_reduce`](crate::ops::adasum_all_reduce): every vector,
//! every product and every weight stays on the device, and the host waits for nothing.
//!
//! The steps are in `plan`, the arithmetic in `kernels::cuda`; nothing here depends on a transport.

use std::ops::Range;

use super::peers::Connection;
use super::same_plan;
use crate::buffer::DeviceGradientBuffer;
use crate::comm::{Call, DeviceCommunicator, Operation, ReduceOp, Scaling};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu::Coefficients;
use crate::kernels::cuda::{Layers, accumulate};
use crate::ops::{AdasumOptions, AdasumReport, Algorithm, Granularity};
use crate::plan::{segments, tree};

const OPERATION: &str = "adasum_all_reduce";

/// Adasum of the gradient buffers of a group of ranks, with its workspace: made once, run at every step.
///
/// Where the kernels of all ranks, two to eight, reach each other's memory, [`Algorithm::Gram`] per tensor needs no transport: one
/// launch reads the peers' vectors and multiplies, one exchanges the products and finds the weights, one writes the result into every
/// rank's arena, and one waits for all. Elsewhere it exchanges the vectors once, forms partial Gram matrices of every layer on each
/// rank's shard, adds them up in one small all-reduce, computes the same weights on every rank, and gathers the shards of the result;
/// any number of ranks up to 4096.
/// [`Algorithm::Tree`] is upstream's vector halving, distance doubling, for powers of two.
///
/// Workspace: as many bytes as the arena (Gram), or half of it (Tree), and `P(P+1)/2` numbers of 8 bytes for each chunk of at most
/// 16384 elements.
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

/// Gram by kernels that reach into the peers' memory.
#[derive(Debug)]
struct Peers {
    layers: Layers,
    connection: Connection,
}

#[derive(Debug)]
struct Gram {
    layers: Layers,
    shard_len: usize,
    /// The other ranks' vectors in this rank's window, in rank order.
    received: DeviceBuffer,
    /// This rank's window of the result.
    result: DeviceBuffer,
}

#[derive(Debug)]
struct Tree {
    steps: Vec<(tree::Step, Layers)>,
    /// The peer's half.
    theirs: DeviceBuffer,
    /// A peer's sums over its half.
    sums: DeviceBuffer,
}

impl Adasum {
    /// Prepares the reduction of buffers like this one; every rank of `comm` must call it. The host waits for the other ranks.
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
        Self::prepare(comm, buffer, options, |_, _| Ok(None))
    }

    fn prepare(
        comm: &dyn DeviceCommunicator,
        buffer: &DeviceGradientBuffer,
        options: AdasumOptions,
        connect: impl FnOnce(&dyn DeviceCommunicator, &DeviceGradientBuffer) -> Result<Option<Peers>>,
    ) -> Result<Self> {
        let (world_size, table) = (comm.world_size(), buffer.table());
        same_plan(OPERATION, comm, table, options)?;
        if options.algorithm == Algorithm::Tree && !world_size.is_power_of_two() {
            let needs = "a power of two";
            return Err(Error::UnsupportedWorldSize { operation: OPERATION, algorithm: "tree", needs, world_size });
        }
        let queue = buffer.queue();
        let layers = |window: Range<usize>, vectors: usize| {
            let parts = segments::clip(table.segments(), window.clone());
            match options.granularity {
                Granularity::Tensor => Layers::new(queue, window.len(), &parts, vectors),
                Granularity::Whole => Layers::new_shared(queue, window.len(), &parts, vectors),
            }
        };
        let peers = match options {
            AdasumOptions { algorithm: Algorithm::Tree, .. }
            | AdasumOptions { granularity: Granularity::Whole, .. } => None,
            _ if world_size == 1 => None,
            _ => connect(comm, buffer)?,
        };
        if let Some(peers) = peers {
            let steps = Steps::Peers(Box::new(peers));
            return Ok(Self { fingerprint: table.fingerprint(), world_size, steps });
        }
        let steps = match options.algorithm {
            _ if world_size == 1 => {
                let layers = match options.granularity {
                    Granularity::Tensor => table.tensor_count(),
                    Granularity::Whole => table.tensor_count().min(1),
                };
                Steps::Alone(match options.algorithm {
                    Algorithm::Tree => AdasumReport { algorithm: Algorithm::Tree, weights: None, recomputed: 0 },
                    _ => AdasumReport { algorithm: Algorithm::Gram, weights: Some(vec![1.0; layers]), recomputed: 0 },
                })
            }
            Algorithm::Auto | Algorithm::Gram => {
                let (rank, shard_len) = (comm.rank(), table.shard_len());
                Steps::Gram(Box::new(Gram {
                    layers: layers(rank * shard_len..(rank + 1) * shard_len, world_size)?,
                    shard_len,
                    received: DeviceBuffer::zeroed(queue, table.dtype(), shard_len * (world_size - 1))?,
                    result: DeviceBuffer::zeroed(queue, table.dtype(), shard_len)?,
                }))
            }
            Algorithm::Tree => {
                let steps = tree::steps(comm.rank(), world_size, table.arena_len());
                let with_layers = |step: tree::Step| Ok((step.clone(), layers(step.keep, 2)?));
                Steps::Tree(Box::new(Tree {
                    steps: steps.into_iter().map(with_layers).collect::<Result<_>>()?,
                    theirs: DeviceBuffer::zeroed(queue, table.dtype(), table.arena_len().div_ceil(2))?,
                    sums: DeviceBuffer::zeroed(queue, DType::F64, 3 * table.tensor_count())?,
                }))
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
            Steps::Gram(gram) => gram.run(comm, buffer.as_mut_slice()),
            Steps::Tree(tree) => tree.run(comm, buffer.as_mut_slice()),
        }
    }

    /// What the last reduction did; waits for the queue.
    ///
    /// # Errors
    /// [`Error::Cuda`].
    pub fn report(&self) -> Result<AdasumReport> {
        Ok(match &self.steps {
            Steps::Alone(report) => report.clone(),
            Steps::Peers(peers) => gram_report(&peers.layers)?,
            Steps::Gram(gram) => gram_report(&gram.layers)?,
            Steps::Tree(_) => AdasumReport { algorithm: Algorithm::Tree, weights: None, recomputed: 0 },
        })
    }
}

fn gram_report(layers: &Layers) -> Result<AdasumReport> {
    let Coefficients { weights, cancelled } = layers.read_coefficients()?;
    let recomputed = cancelled.into_iter().filter(|&cancelled| cancelled).count();
    Ok(AdasumReport { algorithm: Algorithm::Gram, weights: Some(weights), recomputed })
}

impl Peers {
    /// `None` on every rank if some cannot be reached.
    fn connect(comm: &dyn DeviceCommunicator, buffer: &DeviceGradientBuffer) -> Result<Option<Self>> {
        let (rank, table, queue) = (comm.rank(), buffer.table(), buffer.queue());
        let Some(connection) = Connection::new(comm, buffer, table.tensor_count(), true)? else { return Ok(None) };
        let len = table.shard_len();
        let parts = segments::clip(table.segments(), rank * len..(rank + 1) * len);
        let layers = Layers::new(queue, len, &parts, comm.world_size())?;
        Ok(Some(Self { layers, connection }))
    }

    fn run(&mut self, comm: &dyn DeviceCommunicator, buffer: &mut DeviceGradientBuffer) -> Result<()> {
        self.connection.check(OPERATION, buffer)?;
        let (len, dtype) = (buffer.table().arena_len(), buffer.table().dtype());
        let (layers, group) = (&mut self.layers, &self.connection.group);
        let call = Call::new(Operation::Adasum, len, dtype);
        comm.run_kernels(call, buffer.queue(), &mut || layers.adasum_of_peers(group, dtype))
    }
}

/// Adds sums up over all ranks.
fn add_up(comm: &dyn DeviceCommunicator, totals: DeviceSliceMut<'_>) -> Result<()> {
    comm.all_reduce(totals, ReduceOp::Sum, Scaling::NONE)
}

impl Gram {
    fn run(&mut self, comm: &dyn DeviceCommunicator, arena: DeviceSliceMut<'_>) -> Result<()> {
        let (rank, world_size, len) = (comm.rank(), comm.world_size(), self.shard_len);
        let view = arena.as_slice();
        let shard = |peer: usize| view.range(peer * len..(peer + 1) * len);
        let peers = || (0..world_size).filter(|&peer| peer != rank);

        let mut rest = self.received.as_mut_slice();
        let mut receives = Vec::with_capacity(world_size - 1);
        for peer in peers() {
            let (part, others) = rest.split_at_mut(len);
            receives.push((peer, part));
            rest = others;
        }
        comm.exchange(peers().map(|peer| (peer, shard(peer))).collect(), receives)?;

        // This rank's own vector is read where it lies.
        let received = self.received.as_slice();
        let vectors: Vec<DeviceSlice<'_>> = (0..world_size)
            .map(|peer| match peer {
                _ if peer == rank => shard(rank),
                _ => {
                    let place = if peer < rank { peer } else { peer - 1 };
                    received.range(place * len..(place + 1) * len)
                }
            })
            .collect();
        self.layers.adasum_of_parts(self.result.as_mut_slice(), &vectors, |totals| add_up(comm, totals))?;
        comm.all_gather(self.result.as_slice(), arena)
    }
}

impl Tree {
    fn run(&mut self, comm: &dyn DeviceCommunicator, arena: DeviceSliceMut<'_>) -> Result<()> {
        for (step, layers) in &mut self.steps {
            let theirs = &mut self.theirs.as_mut_slice().range_mut(0..step.keep.len());
            let given = arena.as_slice().range(step.give.clone());
            comm.exchange(vec![(step.peer, given)], vec![(step.peer, theirs.reborrow())])?;

            let (queue, kept) = (given.queue(), arena.as_slice().range(step.keep.clone()));
            let vectors = if step.is_left { [kept, theirs.as_slice()] } else { [theirs.as_slice(), kept] };
            // SAFETY: the arena is borrowed mutably; the kernels read each element of `kept` before they write it, in one thread.
            let result = unsafe { in_place(queue, kept) };
            let sums = &mut self.sums;
            layers.adasum_of_parts(result, &vectors, |totals| group_sum(comm, step.group.len(), totals, sums))?;
        }
        for (step, _) in self.steps.iter().rev() {
            let view = arena.as_slice();
            let (kept, given) = (view.range(step.keep.clone()), view.range(step.give.clone()));
            // SAFETY: the arena is borrowed mutably, and the two halves do not overlap.
            let place = unsafe { in_place(view.queue(), given) };
            comm.exchange(vec![(step.peer, kept)], vec![(step.peer, place)])?;
        }
        Ok(())
    }
}

/// Memory to write, from a view of it.
///
/// # Safety
/// The caller holds the memory mutably, and nothing reads it in a way that the write disturbs.
unsafe fn in_place<'a>(queue: &'a Queue, view: DeviceSlice<'a>) -> DeviceSliceMut<'a> {
    // SAFETY: the caller's promise.
    unsafe { DeviceSliceMut::from_raw_parts(queue, view.address(), view.dtype(), view.len()) }
}

/// Adds sums up over the aligned group of `group_size` consecutive ranks that this rank is in, by recursive doubling: every rank adds
/// the same numbers in the same tree, and addition commutes, so that all get the same bits.
fn group_sum(
    comm: &dyn DeviceCommunicator,
    group_size: usize,
    mut totals: DeviceSliceMut<'_>,
    received: &mut DeviceBuffer,
) -> Result<()> {
    let mut received = received.as_mut_slice().range_mut(0..totals.as_slice().len());
    let mut distance = 1;
    while distance < group_size {
        let peer = comm.rank() ^ distance;
        comm.exchange(vec![(peer, totals.as_slice())], vec![(peer, received.reborrow())])?;
        accumulate(totals.reborrow(), received.as_slice())?;
        distance *= 2;
    }
    Ok(())
}
