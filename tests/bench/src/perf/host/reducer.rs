//! Steps of a reducer with one bucket.

use gradsync::comm::{Communicator, ReduceOp};
use gradsync::train::{BucketMemory, Parameter, Reducer, ReducerOptions, Reduction};
use gradsync::{DType, Slice, TensorView};

use crate::perf::PerfError;
use crate::perf::data::count_wrong;

/// A reducer, and the lengths of its gradients, which lie one after the other in a vector.
pub(super) struct Steps<'a> {
    reducer: Reducer<'a>,
    lens: Vec<usize>,
}

impl<'a> Steps<'a> {
    pub(super) fn new(
        comm: &'a dyn Communicator,
        (dtype, op): (DType, ReduceOp),
        lens: Vec<usize>,
        memory: BucketMemory,
    ) -> Result<Self, PerfError> {
        let reduction = if op == ReduceOp::Mean { Reduction::Mean } else { Reduction::Sum };
        let options = ReducerOptions::from(reduction)
            .with_first_bucket_bytes(usize::MAX)
            .with_bucket_bytes(usize::MAX)
            .with_shared_memory(memory);
        let parameter = |(tensor, &len): (usize, &usize)| Parameter::new(format!("tensor {tensor}"), [len], dtype);
        let parameters: Vec<Parameter> = lens.iter().enumerate().map(parameter).collect();
        Ok(Self { reducer: Reducer::new(comm, parameters, options)?, lens })
    }

    /// Hands in all gradients, and reduces them.
    pub(super) fn run(&mut self, gradients: Slice<'_>) -> Result<(), PerfError> {
        let mut step = self.reducer.step()?;
        let mut begin = 0;
        for (tensor, len) in self.lens.iter().enumerate() {
            let gradient = gradients.range(begin..begin + len);
            step.ready(tensor, TensorView::new(gradient, std::slice::from_ref(len))?)?;
            begin += len;
        }
        let _reduced = step.finish()?;
        Ok(())
    }

    /// The number of wrong elements of the last step's results.
    pub(super) fn count_wrong(&self, tolerance: f64, expected: impl Fn(usize) -> f64 + Sync) -> u64 {
        let mut begin = 0;
        let mut wrong = 0;
        for (tensor, &len) in self.lens.iter().enumerate() {
            let reduced = self.reducer.gradient(tensor).expect("reduced by two ranks or more");
            wrong += count_wrong(reduced.data(), tolerance, |index| expected(begin + index));
            begin += len;
        }
        wrong
    }
}
