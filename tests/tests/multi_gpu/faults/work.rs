//! What the ranks do together when one of them is lost.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, Communicator, Operation, Ranks, ReduceOp};
use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::AdasumOptions;
use gradsync::{DType, GradientBuffer, Result};

/// Elements: 64 MiB.
const LEN: usize = 16 << 20;

/// Who waits for the lost rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A kernel of NCCL's.
    AllReduce,
    /// Kernels of ours that reach into the peers' memory.
    Adasum,
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
    /// Every rank must call it.
    pub(super) fn new(queue: &Queue, comm: &'c NcclCommunicator, kind: Kind) -> Self {
        let operands = match kind {
            Kind::AllReduce => Operands::AllReduce(DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap()),
            Kind::Adasum => {
                let tensors = [("a", [LEN / 2]), ("b", [LEN / 2])];
                let buffer = GradientBuffer::on_queue(queue, DType::F32, comm.world_size(), tensors).unwrap();
                let adasum = Adasum::new(comm, &buffer, AdasumOptions::default()).unwrap();
                assert!(adasum.uses_peers(), "GPUs of one machine reach each other");
                Operands::Adasum(Box::new((adasum, buffer)))
            }
        };
        Work { queue: queue.clone(), comm, operands }
    }

    /// As errors have it.
    pub(super) fn operation(&self) -> Operation {
        match self.operands {
            Operands::AllReduce(_) => Operation::AllReduce(ReduceOp::Sum),
            Operands::Adasum(..) => Operation::AdasumAllReduce(AdasumOptions::default()),
        }
    }

    /// Puts it into the queue.
    pub(super) fn put(&mut self) -> Result<()> {
        match &mut self.operands {
            Operands::AllReduce(data) => self.comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum),
            Operands::Adasum(operands) => {
                let (adasum, buffer) = &mut **operands;
                adasum.all_reduce(buffer)
            }
        }
    }

    /// Does it, and waits.
    pub(super) fn run(&mut self) -> Result<()> {
        self.put()?;
        self.comm.synchronize(&self.queue)
    }
}
