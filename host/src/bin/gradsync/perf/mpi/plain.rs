//! MPI's own collectives. MPI has no numbers of two bytes: those are reduced by an operation that MPI is given, which goes through them one
//! after the other, as Horovod does it.

use std::ffi::{c_int, c_void};

use gradsync::comm::ReduceOp;
use gradsync::comm::mpi::rsmpi::collective::{
    Operation as CollectiveOperation, SystemOperation, UnsafeUserFunction, UnsafeUserOperation,
};
use gradsync::comm::mpi::rsmpi::ffi::MPI_Datatype;
use gradsync::comm::mpi::rsmpi::topology::SimpleCommunicator;
use gradsync::comm::mpi::rsmpi::traits::*;

use gradsync::{DType, Element};
use half::{bf16, f16};

use crate::perf::PerfError;
use crate::perf::host::collectives::HostBaseline;
use crate::perf::host::vectors::filled;
use crate::perf::operation::{Operation, Redop, Row};
use crate::perf::record::BaselineName;

const COLUMN: &str = "plain MPI";

pub(super) fn name(operation: Operation) -> BaselineName {
    let full = if operation.reduces() { "plain MPI, f16 and bf16 by an operation given to it" } else { COLUMN };
    BaselineName { column: COLUMN, full }
}

/// The operands of a call, in the type that MPI is told.
enum Data {
    F32(Vec<f32>, Vec<f32>),
    F64(Vec<f64>, Vec<f64>),
    /// Bits, and what joins them.
    Halves(Vec<u16>, Vec<u16>, UnsafeUserOperation),
    Bytes(Vec<u8>, Vec<u8>),
}

pub(super) struct Plain<'a> {
    world: &'a SimpleCommunicator,
    operation: Operation,
    op: ReduceOp,
    data: Data,
}

impl<'a> Plain<'a> {
    /// `None` for counts that are beyond MPI's integers.
    pub(super) fn new(world: &'a SimpleCommunicator, row: &Row) -> Result<Option<Self>, PerfError> {
        if i32::try_from(row.bytes()).is_err() {
            return Ok(None);
        }
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
            _ if !row.operation.reduces() => Data::Bytes(filled(input * size, 1)?, filled(output * size, 2)?),
            DType::F32 => Data::F32(filled(input, 1.0)?, filled(output, 2.0)?),
            DType::F64 => Data::F64(filled(input, 1.0)?, filled(output, 2.0)?),
            DType::F16 => halves::<f16>(op, (input, output))?,
            DType::BF16 => halves::<bf16>(op, (input, output))?,
        };
        Ok(Some(Self { world, operation: row.operation, op, data }))
    }

    /// The operation of MPI's own. A mean is a sum and a division, which is left out here.
    fn known(&self) -> SystemOperation {
        match self.op {
            ReduceOp::Sum | ReduceOp::Mean => SystemOperation::sum(),
            ReduceOp::Max => SystemOperation::max(),
            ReduceOp::Min => SystemOperation::min(),
        }
    }

    fn reduce<T: Equivalence>(&self, input: &[T], output: &mut [T], op: impl CollectiveOperation) {
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
            Data::F32(input, output) => self.reduce(input, output, self.known()),
            Data::F64(input, output) => self.reduce(input, output, self.known()),
            Data::Halves(input, output, op) => self.reduce(input, output, &*op),
            Data::Bytes(input, output) => self.transfer(input, output),
        }
        self.data = data;
        Ok(())
    }
}

/// Operands of 16 bits; `T` says of which kind.
fn halves<T: Element>(op: ReduceOp, (input, output): (usize, usize)) -> Result<Data, PerfError> {
    let join: UnsafeUserFunction = match op {
        ReduceOp::Sum | ReduceOp::Mean => join::<T, Add>,
        ReduceOp::Max => join::<T, Max>,
        ReduceOp::Min => join::<T, Min>,
    };
    let one: u16 = bytemuck::cast(T::from_f64(1.0));
    // SAFETY: `reduce` uses it on these operands alone, which have two bytes an element.
    Ok(Data::Halves(filled(input, one)?, filled(output, 0)?, unsafe { UnsafeUserOperation::commutative(join) }))
}

/// How two numbers become one.
trait Join {
    fn join(left: f64, right: f64) -> f64;
}

struct Add;
struct Max;
struct Min;

impl Join for Add {
    fn join(left: f64, right: f64) -> f64 {
        left + right
    }
}

impl Join for Max {
    fn join(left: f64, right: f64) -> f64 {
        left.max(right)
    }
}

impl Join for Min {
    fn join(left: f64, right: f64) -> f64 {
        left.min(right)
    }
}

/// MPI's user function (MPI-4.1, 6.9.5).
///
/// # Safety
/// `input` and `output` hold `*len` elements of type `T`, as MPI promises for operands that it was told are of that size.
unsafe extern "C" fn join<T: Element, J: Join>(
    input: *mut c_void,
    output: *mut c_void,
    len: *mut c_int,
    _: *mut MPI_Datatype,
) {
    // SAFETY: the caller's promise.
    let (input, output) = unsafe {
        let len = *len as usize;
        (std::slice::from_raw_parts(input.cast::<T>(), len), std::slice::from_raw_parts_mut(output.cast::<T>(), len))
    };
    for (output, input) in output.iter_mut().zip(input) {
        *output = T::from_f64(J::join(input.to_f64(), output.to_f64()));
    }
}
