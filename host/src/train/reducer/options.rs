//! [`ReducerOptions`]: how a reducer reduces, and what absent gradients and uneven ends mean to it.

use super::super::Reduction;
use super::OPERATION;
use crate::call::{Value, setters};
use crate::comm::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Operation, Result};
use crate::ops::{Algorithm, Granularity};

/// The meaning of a trained parameter that has no gradient on a rank in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AbsentGradients {
    /// It counts as zeros, if another rank has a gradient of it. If no rank has, the parameter is reported as
    /// [skipped](super::GradientState::Skipped).
    #[default]
    Zeros,
    /// An error on every rank, which names the rank and the parameter.
    Error,
}

/// What ranks do in [`Reducer::step_of`](super::Reducer::step_of) when one of them has no more data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnevenEnds {
    /// The others go on; all end when the last has no more data (PyTorch's `Join`).
    #[default]
    Continue,
    /// All end together, as soon as one has no more data.
    Stop,
}

/// Choices of a [`Reducer`](super::Reducer); equal on all ranks. Made from a [`Reduction`], with the defaults of the other fields.
///
/// ```
/// use gradsync::DType;
/// use gradsync::train::{Reduction, ReducerOptions};
///
/// let options = ReducerOptions::from(Reduction::Mean).with_wire_dtype(Some(DType::BF16)).with_bucket_bytes(64 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct ReducerOptions {
    /// The reduction over ranks. Adasum is per tensor. [`Algorithm::Auto`] is decided once, by the bytes of all gradients, so that buckets do not
    /// change the result.
    pub reduction: Reduction,
    /// Whether sums and means are formed in rank order, in `f64`, and rounded once: the same bits whatever the buckets, the machine and the ranks'
    /// timing. On host memory they always are. On GPUs they are the transport's otherwise, and NCCL's depend on the buckets' lengths. False by default.
    pub ordered_sums: bool,
    /// The bytes at which the first bucket of each dtype is full. It is small, so that communication begins early. 1 MiB by default.
    pub first_bucket_bytes: usize,
    /// The bytes at which the other buckets are full. 25 MiB by default.
    pub bucket_bytes: usize,
    /// The dtype in which wider gradients travel; they and their reduction are rounded to it. `None`, the default, for their own.
    pub wire_dtype: Option<DType>,
    /// The meaning of absent gradients: [`AbsentGradients::Zeros`] by default.
    pub absent: AbsentGradients,
    /// What happens when ranks have unequal numbers of batches: [`UnevenEnds::Continue`] by default.
    pub uneven: UnevenEnds,
    /// Whether each rank has gradients of the same parameters in every step (PyTorch's `static_graph`). Ranks then tell each other in the first step
    /// alone which gradients they have, no host waits for another afterwards, and steps on GPUs can be recorded as a graph. A rank that breaks this
    /// promise ends the communicator. False by default.
    pub static_graph: bool,
    /// Whether GPUs reduce in a queue of their own, beside the queue that computes gradients. True by default; without effect on host memory. A program
    /// that has such a queue, and orders it behind each gradient by itself, makes the reducer on that queue, without overlap.
    pub overlap: bool,
    /// Whether buckets in host memory are [shared](crate::GradientBuffer::new_shared), so that ranks which are processes of one machine reduce them where
    /// they lie; results have the same bits. False by default; without effect on GPUs.
    pub shared_memory: bool,
}

impl From<Reduction> for ReducerOptions {
    fn from(reduction: Reduction) -> Self {
        Self {
            reduction,
            ordered_sums: false,
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            wire_dtype: None,
            absent: AbsentGradients::default(),
            uneven: UnevenEnds::default(),
            static_graph: false,
            overlap: true,
            shared_memory: false,
        }
    }
}

impl Default for ReducerOptions {
    fn default() -> Self {
        Reduction::Mean.into()
    }
}

fn words(value: bool) -> Value<'static> {
    Value::Words(if value { "true" } else { "false" })
}

impl ReducerOptions {
    setters! {
        with_reduction(reduction: Reduction),
        with_ordered_sums(ordered_sums: bool),
        with_first_bucket_bytes(first_bucket_bytes: usize),
        with_bucket_bytes(bucket_bytes: usize),
        with_wire_dtype(wire_dtype: Option<DType>),
        with_absent(absent: AbsentGradients),
        with_uneven(uneven: UnevenEnds),
        with_static_graph(static_graph: bool),
        with_overlap(overlap: bool),
        with_shared_memory(shared_memory: bool),
    }

    /// The lines by which ranks compare their options.
    pub(super) fn lines(&self) -> Vec<(String, Value<'static>)> {
        let reduction = match self.reduction {
            Reduction::Mean => Operation::AllReduce(ReduceOp::Mean),
            Reduction::Sum => Operation::AllReduce(ReduceOp::Sum),
            Reduction::Adasum(options) => Operation::AdasumAllReduce(options),
        };
        let absent = match self.absent {
            AbsentGradients::Zeros => "zeros",
            AbsentGradients::Error => "an error",
        };
        let uneven = match self.uneven {
            UnevenEnds::Continue => "continue",
            UnevenEnds::Stop => "stop",
        };
        let lines = [
            ("reduction", Value::Operation(reduction)),
            ("ordered_sums", words(self.ordered_sums)),
            ("first_bucket_bytes", Value::Number(self.first_bucket_bytes)),
            ("bucket_bytes", Value::Number(self.bucket_bytes)),
            ("wire_dtype", self.wire_dtype.map_or(Value::Words("that of the gradients"), Value::DType)),
            ("absent", Value::Words(absent)),
            ("uneven", Value::Words(uneven)),
            ("static_graph", words(self.static_graph)),
            ("overlap", words(self.overlap)),
            ("shared_memory", words(self.shared_memory)),
        ];
        lines.map(|(label, value)| (label.to_owned(), value)).into()
    }

    /// Refuses options whose results would depend on buckets, and an algorithm that cannot run on so many ranks.
    pub(super) fn check(&self, world_size: usize) -> Result<()> {
        let Reduction::Adasum(options) = self.reduction else { return Ok(()) };
        if options.granularity != Granularity::Tensor {
            let reason =
                "Adasum of all tensors as one would depend on the buckets; its granularity must be `Tensor`".into();
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        options.algorithm.check_ranks(OPERATION, world_size)
    }

    /// The reduction, with the algorithm that serves gradients of so many bytes.
    pub(super) fn decided(&self, world_size: usize, bytes: usize, shares_memory: bool) -> Reduction {
        match self.reduction {
            // Ranks that share memory send products only.
            Reduction::Adasum(options) if options.algorithm == Algorithm::Auto && shares_memory => {
                Reduction::Adasum(options.with_algorithm(Algorithm::Gram))
            }
            Reduction::Adasum(options) => {
                Reduction::Adasum(options.with_algorithm(options.algorithm.chosen(world_size, bytes)))
            }
            reduction => reduction,
        }
    }

    /// The dtype in which gradients of this dtype travel; with one rank nothing does.
    pub(super) fn dtype_of(&self, gradient: DType, world_size: usize) -> DType {
        let wire = self.wire_dtype.filter(|_| world_size > 1);
        wire.filter(|wire| wire.size_bytes() < gradient.size_bytes()).unwrap_or(gradient)
    }
}
