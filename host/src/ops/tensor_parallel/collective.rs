//! The three collectives on tensors from which the operations are built: a sum, a concatenation, and a part of a sum.
//!
//! Each compares the ranks' calls, then checks the common shape, then communicates. A group of one rank returns the tensor unchanged. They
//! do not depend on the direction or on the kind of memory: the parent module defines which of them is the adjoint of which.

use super::tensor::{OwnedTensor, OwnedTensorMemory};
use crate::call::Value;
use crate::call::scope;
use crate::call_comparison::{ComparedCall, agree_once};
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::error::{Error, Operation, Pass, Result};

/// The sum of the ranks' tensors, in the memory of the argument.
pub(super) fn sum<M: OwnedTensorMemory>(
    pass: Pass,
    mut tensor: OwnedTensor<M>,
    comm: &dyn Communicator<M>,
) -> Result<OwnedTensor<M>> {
    if comm.world_size() == 1 {
        return Ok(tensor);
    }
    let _scope = scope::within(Operation::TensorParallel(pass));
    agree(pass, &tensor, comm)?;
    comm.all_reduce(tensor.as_mut_slice(), ReduceOp::Sum)?;
    Ok(tensor)
}

/// The ranks' tensors concatenated along dimension 0.
pub(super) fn concatenate<M: OwnedTensorMemory>(
    pass: Pass,
    tensor: OwnedTensor<M>,
    comm: &dyn Communicator<M>,
) -> Result<OwnedTensor<M>> {
    let world_size = comm.world_size();
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
    let mut output = tensor.unwritten(operation, shape)?;
    comm.all_gather(tensor.as_slice(), output.as_mut_slice())?;
    Ok(output)
}

/// This rank's part, along dimension 0, of the sum of the ranks' tensors.
pub(super) fn sum_part<M: OwnedTensorMemory>(
    pass: Pass,
    tensor: OwnedTensor<M>,
    comm: &dyn Communicator<M>,
) -> Result<OwnedTensor<M>> {
    let world_size = comm.world_size();
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
    let mut output = tensor.unwritten(operation, shape)?;
    comm.reduce_scatter(tensor.as_slice(), output.as_mut_slice(), ReduceOp::Sum)?;
    Ok(output)
}

fn agree<M: OwnedTensorMemory>(pass: Pass, tensor: &OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<()> {
    let lines = [("dtype", Value::DType(tensor.dtype())), ("shape", Value::Shape(tensor.shape()))];
    agree_once(comm, &ComparedCall { lines: &lines, ..ComparedCall::of(Operation::TensorParallel(pass)) }, Ok(()))
}
