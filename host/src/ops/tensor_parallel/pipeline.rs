//! [`Pipeline`]: operations in sequence, forward and, in reverse order, backward.
//!
//! It knows the trait and no operation. It keeps no tensor, only dtype and shape of the last forward pass.

use super::{OwnedTensor, OwnedTensorMemory, TensorOp};
use crate::call::Value;
use crate::call::{Pass, scope};
use crate::call_comparison::{ComparedCall, agree_once};
use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::{Error, Operation, Result};
use crate::memory::Host;

/// The forward pass that a backward pass has to match.
#[derive(Clone, Debug)]
struct Forward {
    dtype: DType,
    shape: Vec<usize>,
    world_size: usize,
}

/// Operations that run one after the other, and backward in reverse order; a pipeline is an operation itself.
///
/// One backward pass belongs to the last forward pass: operations keep only the data of that pass. Ranks compare the operations' names, the
/// pass and its tensor before any operation runs.
///
/// ```
/// use gradsync::comm::local;
/// use gradsync::ops::tensor_parallel::{AllGather, OwnedTensor, Pipeline, ReduceScatter, TensorOp};
///
/// let outcomes = local::run(2, |comm| {
///     let mut pipeline = Pipeline::new().then(AllGather).then(ReduceScatter);
///     let output = pipeline.forward(OwnedTensor::new(vec![1.0f32; 3], [1, 3])?, &comm)?;
///     pipeline.backward(output, &comm)
/// })?;
/// for gradient in outcomes {
///     assert_eq!(gradient.into_vec::<f32>()?, [4.0; 3]);
/// }
/// # Ok::<(), gradsync::Error>(())
/// ```
pub struct Pipeline<M: OwnedTensorMemory = Host> {
    operations: Vec<Box<dyn TensorOp<M>>>,
    last: Option<Forward>,
}

impl<M: OwnedTensorMemory> Pipeline<M> {
    /// Creates an empty pipeline: the identity. Its uses determine the type of its tensors.
    pub fn new() -> Self {
        Self { operations: Vec::new(), last: None }
    }

    /// Appends an operation. An earlier forward pass becomes invalid.
    #[must_use]
    pub fn then(mut self, operation: impl TensorOp<M> + 'static) -> Self {
        self.operations.push(Box::new(operation));
        self.last = None;
        self
    }

    /// The operations' names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.operations.iter().map(|operation| operation.name())
    }

    fn agree(&self, operation: Operation, tensor: &OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<()> {
        let names: Vec<&str> = self.names().collect();
        let mut lines = vec![("dtype", Value::DType(tensor.dtype())), ("shape", Value::Shape(tensor.shape()))];
        // The last forward pass only matters for a backward pass.
        match &self.last {
            _ if operation == FORWARD => {}
            Some(last) => lines.extend([
                ("pass forward", Value::Words("one")),
                ("dtype of its output", Value::DType(last.dtype)),
                ("shape of its output", Value::Shape(&last.shape)),
                ("number of its ranks", Value::Number(last.world_size)),
            ]),
            None => lines.push(("pass forward", Value::Words("none"))),
        }
        agree_once(
            comm,
            &ComparedCall { lines: &lines, names: ("layer", &names), ..ComparedCall::of(operation) },
            Ok(()),
        )
    }
}

const FORWARD: Operation = Operation::TensorParallel(Pass::PipelineForward);
const BACKWARD: Operation = Operation::TensorParallel(Pass::PipelineBackward);

impl<M: OwnedTensorMemory> Default for Pipeline<M> {
    fn default() -> Self {
        Self::new()
    }
}

impl<M: OwnedTensorMemory> TensorOp<M> for Pipeline<M> {
    fn name(&self) -> &str {
        "Pipeline"
    }

    /// Runs every operation forward, first to last.
    ///
    /// # Errors
    /// [`Error::Disagreement`] if the ranks' pipelines or tensors differ, and the first error of an operation; after an error there is no
    /// forward pass for a backward pass.
    fn forward(&mut self, input: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        self.last = None;
        let _scope = scope::within(FORWARD);
        self.agree(FORWARD, &input, comm)?;
        let output = self.operations.iter_mut().try_fold(input, |tensor, operation| operation.forward(tensor, comm))?;
        let (dtype, shape) = (output.dtype(), output.shape().to_vec());
        self.last = Some(Forward { dtype, shape, world_size: comm.world_size() });
        Ok(output)
    }

    /// Runs every operation backward, last to first.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without a forward pass since the last backward pass, or if that pass had another world size;
    /// [`Error::Disagreement`] if the ranks' pipelines or gradients differ; [`Error::ShapeMismatch`] and [`Error::DTypeMismatch`] for a
    /// gradient that does not match the output of the forward pass, which remains valid for another try; the first error of an operation.
    fn backward(&mut self, gradient: OwnedTensor<M>, comm: &dyn Communicator<M>) -> Result<OwnedTensor<M>> {
        let _scope = scope::within(BACKWARD);
        self.agree(BACKWARD, &gradient, comm)?;
        let operation = BACKWARD.name();
        let refused = |reason| Error::InvalidArgument { operation, reason };
        let Some(last) = &self.last else {
            return Err(refused(
                "there was no pass forward before it: each backward needs a forward of its own".into(),
            ));
        };
        let world_size = comm.world_size();
        if last.world_size != world_size {
            let reason = format!("forward was called over {} ranks, and backward over {world_size}", last.world_size);
            return Err(refused(reason));
        }
        if last.dtype != gradient.dtype() {
            let what = "the output and its gradient".into();
            return Err(Error::DTypeMismatch { operation, what, left: last.dtype, right: gradient.dtype() });
        }
        if last.shape != gradient.shape() {
            let (left, right) = (last.shape.clone(), gradient.shape().to_vec());
            return Err(Error::ShapeMismatch { operation, left, right });
        }
        self.last = None;
        let mut operations = self.operations.iter_mut().rev();
        operations.try_fold(gradient, |tensor, operation| operation.backward(tensor, comm))
    }
}

impl<M: OwnedTensorMemory> std::fmt::Debug for Pipeline<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.names().collect();
        f.debug_struct("Pipeline").field("operations", &names).field("last", &self.last).finish()
    }
}
