//! MPI's own collectives. MPI has no numbers of two bytes: reductions of f16 and bf16 have no baseline.

use gradsync::DType;
use gradsync::comm::ReduceOp;
use gradsync::comm::mpi::rsmpi::collective::SystemOperation;
use gradsync::comm::mpi::rsmpi::topology::SimpleCommunicator;
use gradsync::comm::mpi::rsmpi::traits::*;

use crate::perf::PerfError;
use crate::perf::host::collectives::HostBaseline;
use crate::perf::operation::{Operation, Redop, Row};
use crate::perf::record::BaselineName;

pub(super) const NAME: BaselineName = BaselineName { column: "plain MPI", full: "plain MPI" };

/// The operands of a call, in the type that MPI is told.
enum Data {
    F32(Vec<f32>, Vec<f32>),
    F64(Vec<f64>, Vec<f64>),
    Bytes(Vec<u8>, Vec<u8>),
}

pub(super) struct Plain<'a> {
    world: &'a SimpleCommunicator,
    operation: Operation,
    op: ReduceOp,
    data: Data,
}

impl<'a> Plain<'a> {
    /// `None` for what MPI does not have, or counts that are beyond its integers.
    pub(super) fn new(world: &'a SimpleCommunicator, row: &Row) -> Option<Self> {
        i32::try_from(row.bytes()).ok()?;
        let (len, shard) = (row.len, row.shard());
        let op = match row.redop {
            Redop::Reduce(op) => op,
            _ => ReduceOp::Sum,
        };
        let (input, output) = match row.operation {
            Operation::AllGather => (shard, len),
            Operation::ReduceScatter => (len, shard),
            _ => (len, len),
        };
        let size = row.types.to.size_bytes();
        let data = match row.types.to {
            _ if !row.operation.reduces() => Data::Bytes(vec![1; input * size], vec![2; output * size]),
            DType::F32 => Data::F32(vec![1.0; input], vec![2.0; output]),
            DType::F64 => Data::F64(vec![1.0; input], vec![2.0; output]),
            DType::F16 | DType::BF16 => return None,
        };
        Some(Self { world, operation: row.operation, op, data })
    }

    fn reduce<T: Equivalence>(&self, input: &[T], output: &mut [T]) {
        // A mean is a sum and a division, which is left out here.
        let op = match self.op {
            ReduceOp::Sum | ReduceOp::Mean => SystemOperation::sum(),
            ReduceOp::Max => SystemOperation::max(),
            ReduceOp::Min => SystemOperation::min(),
        };
        if self.operation == Operation::AllReduce {
            self.world.all_reduce_into(input, output, op);
        } else {
            self.world.reduce_scatter_block_into(input, output, op);
        }
    }

    fn transfer(&self, input: &[u8], output: &mut [u8]) {
        let (rank, ranks) = (self.world.rank(), self.world.size());
        match self.operation {
            Operation::AllGather => self.world.all_gather_into(input, output),
            Operation::AllToAll => self.world.all_to_all_into(input, output),
            _ => {
                let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                super::exchange(self.world, (next, input), (last, output));
            }
        }
    }
}

impl HostBaseline for Plain<'_> {
    fn call(&mut self, _: usize) -> Result<(), PerfError> {
        // The operands leave this object for the call, which borrows the rest of it.
        let mut data = std::mem::replace(&mut self.data, Data::Bytes(Vec::new(), Vec::new()));
        match &mut data {
            Data::F32(input, output) => self.reduce(input, output),
            Data::F64(input, output) => self.reduce(input, output),
            Data::Bytes(input, output) => self.transfer(input, output),
        }
        self.data = data;
        Ok(())
    }
}
