//! The common operation of the ranks when one of them is lost.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, Operation, Ranks, ReduceOp};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::memory::Cuda;
use gradsync::ops::{Adasum, AdasumOptions};
use gradsync::{DType, GradientBuffer, Result};

/// The number of elements, which take 64 MiB.
const LEN: usize = 16 << 20;
/// The number of elements of a small tensor.
const SMALL: usize = 64 << 10;

/// The kernels that wait for the lost rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A kernel of NCCL.
    AllReduce,
    /// Kernels of this crate that access peer memory.
    Adasum,
    /// Kernels of this crate that send packets to peers.
    LowLatency,
}

/// An operation with its communicator and its operands.
pub(super) struct Work<'c> {
    queue: Queue,
    comm: &'c NcclCommunicator,
    operands: Operands<'c>,
}

enum Operands<'c> {
    AllReduce(DeviceBuffer),
    Adasum(Box<(Adasum<'c, Cuda>, GradientBuffer<Cuda>)>),
}

impl<'c> Work<'c> {
    /// Creates the work; every rank must call it.
    pub(super) fn new(queue: &Queue, comm: &'c NcclCommunicator, kind: Kind) -> Self {
        let operands = match kind {
            Kind::AllReduce => Operands::AllReduce(DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap()),
            Kind::Adasum => {
                let tensors = [("a", [LEN / 2]), ("b", [LEN / 2])];
                let buffer = GradientBuffer::on_queue(queue, DType::F32, comm.world_size(), tensors).unwrap();
                let adasum = Adasum::with_low_latency(comm, &buffer, AdasumOptions::default(), Some(0), None).unwrap();
                assert!(adasum.uses_peers(), "GPUs of one machine reach each other");
                Operands::Adasum(Box::new((adasum, buffer)))
            }
            Kind::LowLatency => {
                assert!(comm.low_latency_bytes() >= SMALL * 4, "GPUs of one machine reach each other");
                Operands::AllReduce(DeviceBuffer::zeroed(queue, DType::F32, SMALL).unwrap())
            }
        };
        Work { queue: queue.clone(), comm, operands }
    }

    /// The operation that errors name.
    pub(super) fn operation(&self) -> Operation {
        match self.operands {
            Operands::AllReduce(_) => Operation::AllReduce(ReduceOp::Sum),
            Operands::Adasum(..) => Operation::AdasumAllReduce(AdasumOptions::default()),
        }
    }

    /// Enqueues the operation.
    pub(super) fn put(&mut self) -> Result<()> {
        match &mut self.operands {
            Operands::AllReduce(data) => self.comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum),
            Operands::Adasum(operands) => {
                let (adasum, buffer) = &mut **operands;
                adasum.all_reduce(buffer)
            }
        }
    }

    /// Runs the operation, and waits for it.
    pub(super) fn run(&mut self) -> Result<()> {
        self.put()?;
        self.comm.synchronize(&self.queue)
    }
}
