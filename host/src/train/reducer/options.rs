//! [`ReducerOptions`]: the options of a reducer, including its treatment of absent gradients and of unequal numbers of batches.

use super::super::Reduction;
use super::OPERATION;
use crate::call::{Value, setters};
use crate::comm::ReduceOp;
use crate::dtype::DType;
use crate::error::{Error, Operation, Result, check_float};
use crate::ops::{Algorithm, Granularity};

/// The treatment of a trained parameter without a gradient on a rank in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AbsentGradients {
    /// It counts as zeros, if another rank has a gradient of it. If no rank has one, the parameter is reported as
    /// [skipped](super::GradientState::Skipped). A rank that has examples and no gradient at all, while another rank has one, is an error
    /// on every rank, which names it: its loss does not depend on the parameters.
    #[default]
    Zeros,
    /// Like `Zeros`, also for ranks that have no gradient at all: they contribute zeros to the step.
    ZerosOfWholeRanks,
    /// An error on every rank, which names the rank and the parameter.
    Error,
}

/// The treatment of gradients with NaN or infinities, as they are sent: a number beyond the range of the wire's dtype is an infinity.
///
/// On host memory they are found while gradients are copied into buckets; gradients that were computed in their bucket or added up over
/// micro-batches are read once more, and so are the results of sums and of Adasum, which can leave the range of their dtype though all
/// gradients are finite. On GPUs each bucket is read once more before its reduction. A single rank has no buckets: its gradients are read,
/// but on a GPU only if they are not merely reported. Steps of a recorded graph are not checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NonFinite {
    /// The step goes on, and its result is what the reduction makes of these numbers. The next step begins with [`Error::NotFinite`] on
    /// every rank, once; on GPUs, whose hosts do not wait, a later step does, or ends with it. No step follows the last one of a program:
    /// on host memory a warning in the log (`tracing`) tells of it. After [`Reducer::update`](super::Reducer::update) the optimizer's
    /// report or error tells of it instead. With [`static_graph`](ReducerOptions::static_graph) on GPUs the ranks do not hear of each
    /// other's gradients: the error of the rank that has these numbers ends the communicator.
    #[default]
    Report,
    /// [`Error::NotFinite`] ends this step on every rank, without a result. On GPUs the host waits for the gradients of each step.
    Error,
    /// The step ends without gradients on every rank, so that the optimizer changes nothing
    /// ([`Reduced::non_finite`](super::Reduced::non_finite)). On GPUs the host waits for the gradients of each step.
    Skip,
    /// Nothing looks at them, and no bucket is read for it: for an [`Optimizer`](super::super::Optimizer), which skips such steps on every rank by
    /// itself and lowers the scale of its loss.
    Leave,
}

impl NonFinite {
    /// Whether the outcome of a step depends on its numbers, so that a host waits for them.
    pub(crate) fn waits(self) -> bool {
        matches!(self, NonFinite::Error | NonFinite::Skip)
    }
}

/// The behaviour of [`Reducer::step_of`](super::Reducer::step_of) when one rank has no more data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum UnevenEnds {
    /// The other ranks continue; all end when the last one has no more data (PyTorch's `Join`).
    #[default]
    Continue,
    /// All ranks end together, as soon as one has no more data.
    Stop,
}

/// The memory of a reducer's buckets on the host, whose kind changes no bit of a result.
///
/// Ranks that are processes of one machine reduce buckets in place where these are [shared](crate::GradientBuffer::new_shared), several
/// times as fast. Each bucket then takes a descriptor of its process; all its memory is reserved when the bucket is made, and a child of
/// `fork` shares it with its parent. The page "Deployment" says how a stopped rank ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BucketMemory {
    /// Shared on all ranks, if they can map each other's memory ([`Communicator::sharing`](crate::comm::Communicator::sharing)) and every
    /// rank gets such memory from its system; otherwise each rank's own, without an error. Threads need no shared buckets, and use their own.
    #[default]
    Automatic,
    /// Like `Automatic`, but an error on every rank if ranks cannot share buckets.
    Shared,
    /// Each rank's own.
    Own,
}

/// Options of a [`Reducer`](super::Reducer); equal on all ranks. They are created from a [`Reduction`], with defaults for the other fields.
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
    /// The reduction over ranks. Adasum is per tensor. [`Algorithm::Auto`] is resolved once, by the size of all gradients, so that buckets
    /// do not change the result.
    pub reduction: Reduction,
    /// Whether sums and means are computed in rank order, in `f64`, and rounded once: the bits do not depend on the buckets, the machine or
    /// the ranks' timing. On host memory they always are. On GPUs the transport adds otherwise, and NCCL's sums depend on the buckets'
    /// lengths. False by default.
    pub ordered_sums: bool,
    /// The size in bytes at which the first bucket of each dtype is full. It is small, so that communication begins early. 1 MiB by
    /// default.
    pub first_bucket_bytes: usize,
    /// The size in bytes at which the other buckets are full. 25 MiB by default.
    pub bucket_bytes: usize,
    /// The dtype in which wider gradients are sent; they and their reduction are rounded to it. `None`, the default, sends them in their
    /// own.
    pub wire_dtype: Option<DType>,
    /// The treatment of absent gradients: [`AbsentGradients::Zeros`] by default.
    pub absent: AbsentGradients,
    /// The treatment of gradients with NaN or infinities: [`NonFinite::Report`] by default.
    pub non_finite: NonFinite,
    /// The treatment of unequal numbers of batches: [`UnevenEnds::Continue`] by default.
    pub uneven: UnevenEnds,
    /// Whether each rank has gradients of the same parameters in every step (PyTorch's `static_graph`). Ranks then exchange the lists of
    /// their gradients in the first step alone, no host waits for another afterwards, and steps on GPUs can be recorded as a graph. A rank
    /// that violates this ends the communicator. False by default.
    pub static_graph: bool,
    /// Whether GPUs reduce in a separate queue, besides the queue that computes gradients. True by default; without effect on host memory.
    /// A program with its own queue for reductions, which it orders behind each gradient, creates the reducer on that queue, without
    /// overlap.
    pub overlap: bool,
    /// Whether buckets in host memory are shared: [`BucketMemory::Automatic`] by default; without effect on GPUs.
    pub shared_memory: BucketMemory,
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
            non_finite: NonFinite::default(),
            uneven: UnevenEnds::default(),
            static_graph: false,
            overlap: true,
            shared_memory: BucketMemory::default(),
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
        with_non_finite(non_finite: NonFinite),
        with_uneven(uneven: UnevenEnds),
        with_static_graph(static_graph: bool),
        with_overlap(overlap: bool),
        with_shared_memory(shared_memory: BucketMemory),
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
            AbsentGradients::ZerosOfWholeRanks => "zeros of whole ranks",
            AbsentGradients::Error => "an error",
        };
        let non_finite = match self.non_finite {
            NonFinite::Report => "a report",
            NonFinite::Error => "an error",
            NonFinite::Skip => "a skipped step",
            NonFinite::Leave => "left to the optimizer",
        };
        let uneven = match self.uneven {
            UnevenEnds::Continue => "continue",
            UnevenEnds::Stop => "stop",
        };
        let shared_memory = match self.shared_memory {
            BucketMemory::Automatic => "automatic",
            BucketMemory::Shared => "shared",
            BucketMemory::Own => "own",
        };
        let lines = [
            ("reduction", Value::Operation(reduction)),
            ("ordered_sums", words(self.ordered_sums)),
            ("first_bucket_bytes", Value::Number(self.first_bucket_bytes)),
            ("bucket_bytes", Value::Number(self.bucket_bytes)),
            ("wire_dtype", self.wire_dtype.map_or(Value::Words("that of the gradients"), Value::DType)),
            ("absent", Value::Words(absent)),
            ("non_finite", Value::Words(non_finite)),
            ("uneven", Value::Words(uneven)),
            ("static_graph", words(self.static_graph)),
            ("overlap", words(self.overlap)),
            ("shared_memory", Value::Words(shared_memory)),
        ];
        lines.map(|(label, value)| (label.to_owned(), value)).into()
    }

    /// Refuses options whose results would depend on buckets, a wire of integers, and an algorithm that does not support the number of ranks.
    pub(super) fn check(&self, world_size: usize) -> Result<()> {
        self.wire_dtype.map_or(Ok(()), |dtype| check_float(OPERATION, dtype))?;
        let Reduction::Adasum(options) = self.reduction else { return Ok(()) };
        if options.granularity != Granularity::Tensor {
            let reason =
                "Adasum of all tensors as one would depend on the buckets; its granularity must be `Tensor`".into();
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        options.algorithm.check_ranks(OPERATION, world_size)
    }

    /// The reduction, with the algorithm for gradients of `bytes` bytes.
    pub(super) fn decided(&self, world_size: usize, bytes: usize, shares_memory: bool) -> Reduction {
        match self.reduction {
            // Ranks that share memory send only products.
            Reduction::Adasum(options) if options.algorithm == Algorithm::Auto && shares_memory => {
                Reduction::Adasum(options.with_algorithm(Algorithm::Gram))
            }
            Reduction::Adasum(options) => {
                Reduction::Adasum(options.with_algorithm(options.algorithm.chosen(world_size, bytes)))
            }
            reduction => reduction,
        }
    }

    /// The dtype in which gradients of this dtype are sent; with one rank nothing is sent.
    pub(super) fn dtype_of(&self, gradient: DType, world_size: usize) -> DType {
        let wire = self.wire_dtype.filter(|_| world_size > 1);
        wire.filter(|wire| wire.size_bytes() < gradient.size_bytes()).unwrap_or(gradient)
    }
}
