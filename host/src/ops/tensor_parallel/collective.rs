//! The three collectives that the operations are made of, on tensors: a sum, a concatenation, and a part of a sum.
//!
//! Each compares the ranks' calls, then checks the shape that they share, then communicates. A group of one hands the
//! tensor back unseen. They know no direction: which of them is the way back of which is said in the parent module. They
//! know no kind of memory either.

use super::Tensor;
use super::agreement::same_call;
use crate::agreement::{Plan, Value};
use crate::call::scope;
use crate::error::{Error, Operation, Pass, Result};

/// The sum of the ranks' tensors, in the memory that was handed over.
pub(super) fn sum<T: Tensor>(pass: Pass, tensor: T, comm: T::Comm<'_>) -> Result<T> {
    if T::world_size(comm) == 1 {
        return Ok(tensor);
    }
    let _scope = scope::within(Operation::TensorParallel(pass));
    agree(pass, &tensor, comm)?;
    tensor.sum(comm)
}

/// The ranks' tensors one after the other along dimension 0.
pub(super) fn concatenate<T: Tensor>(pass: Pass, tensor: T, comm: T::Comm<'_>) -> Result<T> {
    let world_size = T::world_size(comm);
    if world_size == 1 {
        return Ok(tensor);
    }
    let (operation, _scope) = (pass.name(), scope::within(Operation::TensorParallel(pass)));
    agree(pass, &tensor, comm)?;
    let mut shape = tensor.shape().to_vec();
    let grown = shape.first().and_then(|first| first.checked_mul(world_size));
    let Some(grown) = grown else {
        let reason = format!("{world_size} tensors of shape {shape:?} cannot be joined along dimension 0");
        return Err(Error::InvalidArgument { operation, reason });
    };
    shape[0] = grown;
    tensor.concatenate(operation, shape, comm)
}

/// This rank's part, along dimension 0, of the sum of the ranks' tensors.
pub(super) fn sum_part<T: Tensor>(pass: Pass, tensor: T, comm: T::Comm<'_>) -> Result<T> {
    let world_size = T::world_size(comm);
    if world_size == 1 {
        return Ok(tensor);
    }
    let (operation, _scope) = (pass.name(), scope::within(Operation::TensorParallel(pass)));
    agree(pass, &tensor, comm)?;
    let mut shape = tensor.shape().to_vec();
    match shape.first_mut() {
        Some(first) if *first % world_size == 0 => *first /= world_size,
        _ => {
            let reason =
                format!("a tensor of shape {shape:?} has no dimension 0 that {world_size} ranks divide evenly");
            return Err(Error::InvalidArgument { operation, reason });
        }
    }
    tensor.sum_part(operation, shape, comm)
}

fn agree<T: Tensor>(pass: Pass, tensor: &T, comm: T::Comm<'_>) -> Result<()> {
    let lines = [("dtype", Value::DType(tensor.dtype())), ("shape", Value::Shape(tensor.shape()))];
    same_call::<T>(&Plan { lines: &lines, ..Plan::of(Operation::TensorParallel(pass)) }, comm)
}
