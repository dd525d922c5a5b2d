//! MPI's own collectives, and its sum as the baseline of Adasum. MPI has no 16-bit floating-point types, so the baseline adds them with a
//! user-defined operation, which processes one element after the other, in f32; their maxima and minima have no baseline.

use std::ffi::{c_int, c_void};

use ::mpi::collective::{Operation as CollectiveOperation, SystemOperation, UnsafeUserFunction, UnsafeUserOperation};
use ::mpi::ffi::MPI_Datatype;
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::*;
use gradsync::comm::ReduceOp;
use gradsync::{DType, bf16, f16};

use crate::perf::PerfError;
use crate::perf::host::collectives::HostBaseline;
use crate::perf::host::vectors::filled;
use crate::perf::operation::{Operation, Redop, Row};
use crate::perf::record::BaselineName;

const COLUMN: &str = "plain MPI";

pub(super) fn name(operation: Operation) -> BaselineName {
    match operation {
        Operation::Adasum => BaselineName {
            column: "plain MPI's sum",
            full: "plain MPI's sum of as many bytes, f16 and bf16 by an operation given to it",
        },
        _ if operation.reduces() => {
            BaselineName { column: COLUMN, full: "plain MPI, f16 and bf16 by an operation given to it" }
        }
        _ => BaselineName { column: COLUMN, full: COLUMN },
    }
}

/// The operands of a call, in the type that MPI sees.
enum Data {
    F32(Vec<f32>, Vec<f32>),
    F64(Vec<f64>, Vec<f64>),
    /// Bit patterns, and the operation on them.
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
    /// `None` if the count exceeds MPI's integers, and for maxima and minima of 16-bit types.
    pub(super) fn new(world: &'a SimpleCommunicator, row: &Row) -> Result<Option<Self>, PerfError> {
        if i32::try_from(row.bytes()).is_err() {
            return Ok(None);
        }
        let (len, shard) = (row.len, row.shard());
        let op = match row.redop {
            Redop::Reduce(op) => op,
            _ => ReduceOp::Sum,
        };
        if row.types.to.size_bytes() == 2 && matches!(op, ReduceOp::Max | ReduceOp::Min) {
            return Ok(None);
        }
        let (input, output) = match row.operation {
            Operation::AllGather => (shard, len),
            Operation::ReduceScatter => (len, shard),
            _ => (len, len),
        };
        let size = row.types.to.size_bytes();
        let sums = row.operation.reduces() || row.operation == Operation::Adasum;
        let data = match row.types.to {
            _ if !sums => Data::Bytes(filled(input * size, 1)?, filled(output * size, 2)?),
            DType::F32 => Data::F32(filled(input, 1.0)?, filled(output, 2.0)?),
            DType::F64 => Data::F64(filled(input, 1.0)?, filled(output, 2.0)?),
            DType::F16 => halves(add_f16, input, output)?,
            DType::BF16 => halves(add_bf16, input, output)?,
            other => unreachable!("{other} is not measured"),
        };
        Ok(Some(Self { world, operation: row.operation, op, data }))
    }

    /// The predefined MPI operation. A mean is a sum and a division; the division is left out here.
    fn known(&self) -> SystemOperation {
        match self.op {
            ReduceOp::Sum | ReduceOp::Mean => SystemOperation::sum(),
            ReduceOp::Max => SystemOperation::max(),
            ReduceOp::Min => SystemOperation::min(),
            op => unreachable!("{op} is not measured"),
        }
    }

    fn reduce<T: Equivalence>(&self, input: &[T], output: &mut [T], op: impl CollectiveOperation) {
        if self.operation == Operation::ReduceScatter {
            self.world.reduce_scatter_block_into(input, output, op);
        } else {
            self.world.all_reduce_into(input, output, op);
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
        // The operands are moved out of this object during the call, which borrows the rest of it.
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

/// Operands of a 16-bit type, which `add` adds.
fn halves(add: UnsafeUserFunction, input: usize, output: usize) -> Result<Data, PerfError> {
    // SAFETY: `reduce` uses the operation on these operands alone, which have two bytes per element.
    let add = unsafe { UnsafeUserOperation::commutative(add) };
    Ok(Data::Halves(filled(input, 0)?, filled(output, 0)?, add))
}

/// Defines MPI's user function (MPI-4.1, 6.9.5) that adds elements of a 16-bit type.
macro_rules! user_function {
    ($name:ident, $type:ident) => {
        /// # Safety
        /// `input` and `output` hold `*len` elements of the type, as MPI guarantees for operands of that size.
        unsafe extern "C" fn $name(input: *mut c_void, output: *mut c_void, len: *mut c_int, _: *mut MPI_Datatype) {
            // SAFETY: the caller guarantees the lengths and types.
            let (input, output) = unsafe {
                let (len, input, output) = (*len as usize, input.cast::<$type>(), output.cast::<$type>());
                (std::slice::from_raw_parts(input, len), std::slice::from_raw_parts_mut(output, len))
            };
            for (output, input) in output.iter_mut().zip(input) {
                *output = $type::from_f32(input.to_f32() + output.to_f32());
            }
        }
    };
}
user_function!(add_f16, f16);
user_function!(add_bf16, bf16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_function_adds_every_element() {
        let (mut left, mut right) = ([1.0, -2.0, 0.5].map(bf16::from_f32), [0.25, 3.0, 0.5].map(bf16::from_f32));
        let mut len = right.len() as c_int;
        // SAFETY: both sides have the same number of elements.
        unsafe { add_bf16(left.as_mut_ptr().cast(), right.as_mut_ptr().cast(), &mut len, std::ptr::null_mut()) };
        assert_eq!(right, [1.25, 1.0, 1.0].map(bf16::from_f32));
    }
}
