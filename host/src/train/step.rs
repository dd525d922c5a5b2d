//! [`Stepper`]: a whole training step on every rank. Ranks either reduce their gradients before the optimizer, as in usual data
//! parallelism, or combine the steps of their optimizers after it, by Adasum.
//!
//! ONNX Runtime builds the latter as a graph (its Adasum optimizer graph builder), Horovod as its delta optimizers. This module only orders
//! the parts of a step: arithmetic is in `kernels`, the parts are in `ops`, and the optimizer is the caller's choice.

use super::Start;
use super::optimizer::{DeltaOptimizer, OptimizerMemory};
use super::same_bits::check_same_bits;
use super::{same_tensors, zeros_like};
use crate::buffer::GradientBuffer;
use crate::call::{Value, scope, setters};
use crate::call_comparison::{ComparedCall, agree, all_prepared};
use crate::comm::{Collectives, Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Operation, Result, check_float};
use crate::memory::Host;
use crate::ops::{AdasumMemory, AdasumOptions, AdasumReport, Nodes, accumulate, adasum_all_reduce, check_nodes};

const OPERATION: &str = "training step";

/// The names of compared numbers in errors, each with advice for the case that they differ.
const WEIGHTS: (&str, &str) = (
    "the weights",
    "Load the same weights on every rank, or set `start` to `Start::Broadcast` to take those of rank 0",
);
const DELTAS: (&str, &str) = (
    "the optimizers' steps",
    "After a mean or a sum of gradients, optimizers need equal options and states on all ranks: load the same checkpoint of the \
     optimizer on every rank",
);

/// The reduction over ranks in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reduction {
    /// The mean of all ranks' gradients; every optimizer receives the same gradients.
    Mean,
    /// The sum of all ranks' gradients; every optimizer receives the same gradients.
    Sum,
    /// Adasum. In a [`Stepper`], each rank's optimizer receives its own gradients (in nodes: the mean of its node's), and the steps of the
    /// optimizers are combined. In a [`Reducer`](super::Reducer), the tensors that are passed are combined, gradients or steps.
    Adasum(AdasumOptions),
}

/// Options of a [`Stepper`]; equal on all ranks. They are created from a [`Reduction`], with defaults for the other fields.
///
/// ```
/// use gradsync::train::{Reduction, StepOptions};
///
/// let options = StepOptions::from(Reduction::Mean).with_accumulation_steps(4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StepOptions {
    /// The reduction over ranks.
    pub reduction: Reduction,
    /// The number of micro-batches whose gradients have been added, at least 1: gradients are divided by it. 1 by default.
    pub accumulation_steps: usize,
    /// The dtype of the optimizers' steps, also in their exchange by Adasum; `None`, the default, for the dtype of the weights.
    pub delta_dtype: Option<DType>,
    /// How the weights of all ranks become equal in the first step, or by [`Stepper::start`]: [`Start::Broadcast`], which makes them
    /// rank 0's, by default.
    pub start: Start,
    /// Whether ranks verify in every step with a mean or a sum that their optimizers' deltas are the same, bit for bit, so that weights
    /// stay equal. True by default.
    pub compare_deltas: bool,
}

impl From<Reduction> for StepOptions {
    fn from(reduction: Reduction) -> Self {
        Self { reduction, accumulation_steps: 1, delta_dtype: None, start: Start::Broadcast, compare_deltas: true }
    }
}

impl StepOptions {
    setters! {
        with_reduction(reduction: Reduction),
        with_accumulation_steps(accumulation_steps: usize),
        with_delta_dtype(delta_dtype: Option<DType>),
        with_start(start: Start),
        with_compare_deltas(compare_deltas: bool),
    }
}

/// The outcome of a step. The same on every rank.
#[must_use = "a skipped step moves no weight, and says so only here"]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepOutcome {
    /// The weights have changed.
    Applied,
    /// There were NaN or infinities in gradients. No optimizer ran, and no weight changed since the ranks' weights became equal.
    GradientsNotFinite {
        /// The ranks with such gradients; or, where all gradients were finite and only their sum or mean was not, the ranks
        /// that share this sum or mean.
        ranks: Vec<usize>,
    },
    /// There were NaN or infinities in the step of the optimizers. No weight changed, but the optimizers have updated their states with the
    /// gradients.
    DeltasNotFinite,
}

/// The report of a step.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use gradsync::{GradientBuffer, Result, train::{Sgd, Stepper}};
/// fn train(step: &mut Stepper<'_>, gradients: &GradientBuffer<M>, weights: &mut GradientBuffer<M>, sgd: &mut Sgd) -> Result<()> {
///     step.step(gradients, weights, sgd)?; // whether it was skipped is never seen
///     Ok(())
/// }
/// ```
#[must_use = "a skipped step moves no weight, and says so only here"]
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct StepReport {
    /// The outcome.
    pub outcome: StepOutcome,
    /// The report of Adasum, if it ran.
    pub adasum: Option<AdasumReport>,
}

/// Runs training steps: the ranks' gradients become one step of all ranks' weights.
///
/// In the first step, before weights are used, or by [`start`](Self::start), the ranks' weights become equal: every rank takes rank 0's, in
/// place, or, with [`Start::Compare`], weights that differ are refused. In each step, in this order:
///
/// 1. the gradients, divided by `accumulation_steps`, in a copy unless that changes nothing;
/// 2. their mean or sum over all ranks; for Adasum, with [nodes](Self::on_nodes), their mean over the ranks of a node;
/// 3. whether they are finite, on all ranks; if not, the step ends here, with every optimizer as it was;
/// 4. the optimizer turns them into deltas;
/// 5. with [`Reduction::Adasum`], the deltas' Adasum over the ranks, or over one rank of every node;
/// 6. whether the deltas are finite, on all ranks; if not, the step ends here;
/// 7. with a mean or a sum, whether all ranks' deltas are the same;
/// 8. the deltas are added to the weights, each tensor with one rounding.
///
/// Weights with the same bits on all ranks stay so. With Adasum the optimizers' states may differ: they diverge, and a checkpoint must
/// contain each of them. With a mean or a sum the optimizers' options and states have to be equal, and deltas that differ are refused.
/// States are not broadcast: [`broadcast_parameters`](super::broadcast_parameters) does that where one rank has read a checkpoint.
/// Comparing weights or deltas reads them once, about 0.1 s for 1 GB on two cores, and sends 8 bytes per rank. Buffers may have any world
/// size and different dtypes. Unlike ONNX Runtime, this does not clip gradients; the optimizer can.
///
/// ```
/// use gradsync::prelude::*;
/// use gradsync::train::{Reduction, StepOutcome, Stepper};
///
/// let train = |reduction| {
///     local::run(2, |comm| {
///         let mut weights = GradientBuffer::new(DType::F32, 2, [("w", [2])])?;
///         let mut gradients = GradientBuffer::new(DType::F32, 2, [("w", [2])])?;
///         // Orthogonal gradients: Adasum adds the steps that they make.
///         gradients.tensor_mut(0).data_mut::<f32>()[comm.rank()] = 1.0;
///         let mut sgd = Sgd::new(0.5)?;
///         let report = Stepper::new(&comm, reduction).step(&gradients, &mut weights, &mut sgd)?;
///         assert_eq!(report.outcome, StepOutcome::Applied);
///         weights.tensor(0).to_vec::<f32>()
///     })
/// };
/// assert_eq!(train(Reduction::Mean)?, [[-0.25, -0.25]; 2]);
/// assert_eq!(train(Reduction::Adasum(AdasumOptions::default()))?, [[-0.5, -0.5]; 2]);
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct Stepper<'c, M: OptimizerMemory = Host> {
    /// The options may be changed between steps, equally on all ranks.
    pub options: StepOptions,
    all: &'c dyn Communicator<M>,
    nodes: Option<Nodes<'c, M>>,
    /// Whether the ranks' weights have become equal.
    has_started: bool,
}

impl<'c, M: OptimizerMemory + AdasumMemory> Stepper<'c, M> {
    /// Creates a stepper for the ranks of `comm`, before their first step.
    pub fn new(comm: &'c dyn Communicator<M>, options: impl Into<StepOptions>) -> Self {
        Self { options: options.into(), all: comm, nodes: None, has_started: false }
    }

    /// Creates a stepper for ranks in nodes: the gradients of a node are averaged before [`Reduction::Adasum`] combines the nodes' steps. A
    /// mean or a sum runs over all ranks, as without nodes. With one node Adasum has nothing to combine.
    pub fn on_nodes(nodes: Nodes<'c, M>, options: impl Into<StepOptions>) -> Self {
        Self { nodes: Some(nodes), ..Self::new(nodes.all, options) }
    }

    /// Makes the ranks' weights equal now, as [`StepOptions::start`] says, instead of in the first step. All ranks must call it.
    ///
    /// A program whose ranks begin with different weights calls it before it computes the first gradients, which belong to each rank's own
    /// weights otherwise. It may be called again later, when one rank has read other weights.
    ///
    /// # Errors
    /// On every rank, before anything is changed: [`Error::Disagreement`] if ranks have different tensors, dtypes or options;
    /// [`Error::InvalidArgument`] if the nodes' groups do not form a grid of `all`'s ranks, and with [`Start::Compare`] if weights differ,
    /// or are equal and not finite. Errors of the communicators, after which weights of ranks other than 0 are unspecified.
    pub fn start(&mut self, weights: &mut GradientBuffer<M>) -> Result<()> {
        let _scope = scope::within(Operation::TrainingStep).with_tensors(weights.table().tensor_count());
        let lines =
            [("call", Value::Words("start")), ("start", self.start_words()), ("ranks per node", self.node_size())];
        let plan = ComparedCall {
            lines: &lines,
            tables: &[("weights", weights.table())],
            ..ComparedCall::of(Operation::TrainingStep)
        };
        agree(self.all, &plan, Result::<()>::Ok(()))?;
        self.make_equal(weights)
    }

    /// Runs one step. All ranks must call it.
    ///
    /// # Errors
    /// The following errors are returned on every rank, before anything is changed:
    /// * [`Error::Disagreement`] if ranks have different tensors, dtypes or options;
    /// * [`Error::InvalidArgument`] for 0 accumulation steps, and in the first step if the nodes' groups do not form a grid of `all`'s
    ///   ranks; with [`Start::Compare`] also if weights differ (naming all ranks that do), or are equal and not finite;
    /// * [`Error::LengthMismatch`] or [`Error::InvalidArgument`] if gradients and weights have different tensors, and
    ///   [`Error::OutOfMemory`], each on the rank that fails; on the others [`Error::InvalidArgument`] that quotes it;
    /// * [`Error::UnsupportedWorldSize`] in the cases of [`adasum_all_reduce`].
    ///
    /// Later: the optimizer's own error on the rank where it failed, and [`Error::InvalidArgument`] that quotes it on all other ranks;
    /// [`Error::InvalidArgument`] on every rank, naming all ranks whose deltas differ, where they must be equal; errors of the
    /// communicators. No error changes the weights, but in the first step they have become rank 0's by then; and if that broadcast fails,
    /// weights of ranks other than 0 are unspecified. The state of an optimizer changes once it has run.
    pub fn step(
        &mut self,
        gradients: &GradientBuffer<M>,
        weights: &mut GradientBuffer<M>,
        optimizer: &mut dyn DeltaOptimizer<M>,
    ) -> Result<StepReport> {
        let _scope = scope::within(Operation::TrainingStep).with_tensors(weights.table().tensor_count());
        let mut copy = self.begin(gradients, weights)?;
        let _span =
            tracing::debug_span!(OPERATION, rank = self.all.rank(), options = ?self.options, len = weights.len())
                .entered();

        let are_finite = is_finite(gradients)?;
        if let (Some(copy), Some((group, op))) = (&mut copy, self.gradients_group()) {
            group.all_reduce(copy.as_mut_slice(), op)?;
        }
        let are_joined_finite = are_finite && copy.as_ref().map_or(Ok(true), is_finite)?;
        let [causes, affected] = self.ranks_without([are_finite, are_joined_finite])?;
        let ranks = if causes.is_empty() { affected } else { causes };
        if !ranks.is_empty() {
            tracing::debug!(?ranks, "gradients are not finite: no step");
            return Ok(StepReport { outcome: StepOutcome::GradientsNotFinite { ranks }, adasum: None });
        }

        let deltas = self.deltas(copy.as_ref().unwrap_or(gradients), weights, optimizer);
        let mut deltas = all_prepared(Operation::TrainingStep, self.all, deltas)?;
        let adasum = match self.options.reduction {
            Reduction::Adasum(options) => Some(adasum_all_reduce(self.across(), &mut deltas, options)?),
            Reduction::Mean | Reduction::Sum => None,
        };
        let [ranks] = self.ranks_without([is_finite(&deltas)?])?;
        if !ranks.is_empty() {
            tracing::debug!(?ranks, "the step is not finite: no weight moves");
            return Ok(StepReport { outcome: StepOutcome::DeltasNotFinite, adasum });
        }
        if self.options.compare_deltas && adasum.is_none() {
            check_same_bits(OPERATION, self.all, DELTAS, &deltas)?;
        }
        for index in 0..weights.tensor_count() {
            accumulate(weights.tensor_mut(index), deltas.tensor(index))?;
        }
        Ok(StepReport { outcome: StepOutcome::Applied, adasum })
    }

    /// Compares the arguments of all ranks, and makes their weights equal in the first step; returns a copy of the gradients, divided, if
    /// they change before the optimizer.
    fn begin(
        &mut self,
        gradients: &GradientBuffer<M>,
        weights: &mut GradientBuffer<M>,
    ) -> Result<Option<GradientBuffer<M>>> {
        let options = self.options;
        let reduction = match options.reduction {
            Reduction::Mean => Operation::AllReduce(ReduceOp::Mean),
            Reduction::Sum => Operation::AllReduce(ReduceOp::Sum),
            Reduction::Adasum(options) => Operation::AdasumAllReduce(options),
        };
        let lines = [
            ("call", Value::Words("step")),
            ("reduction", Value::Operation(reduction)),
            ("accumulation_steps", Value::Number(options.accumulation_steps)),
            ("delta_dtype", options.delta_dtype.map_or(Value::Words("that of the weights"), Value::DType)),
            ("start", self.start_words()),
            ("compare_deltas", Value::Words(if options.compare_deltas { "true" } else { "false" })),
            ("ranks per node", self.node_size()),
            ("steps or a start before", Value::Words(if self.has_started { "some" } else { "none" })),
        ];
        let tables = [("gradients", gradients.table()), ("weights", weights.table())];
        let plan = ComparedCall { lines: &lines, tables: &tables, ..ComparedCall::of(Operation::TrainingStep) };
        let prepared = self.check(gradients, weights).and_then(|()| self.divided(gradients));
        let copy = agree(self.all, &plan, prepared)?;
        if !self.has_started {
            self.make_equal(weights)?;
        }
        Ok(copy)
    }

    /// Makes the ranks' weights equal, or refuses different ones; the ranks have compared their arguments.
    fn make_equal(&mut self, weights: &mut GradientBuffer<M>) -> Result<()> {
        if let Some(nodes) = self.nodes {
            check_nodes(OPERATION, nodes)?;
        }
        match self.options.start {
            Start::Broadcast => self.all.broadcast(weights.as_mut_slice(), 0)?,
            Start::Compare => check_same_bits(OPERATION, self.all, WEIGHTS, weights)?,
        }
        self.has_started = true;
        Ok(())
    }

    fn start_words(&self) -> Value<'static> {
        Value::Words(if self.options.start == Start::Broadcast { "broadcast" } else { "compare" })
    }

    fn node_size(&self) -> Value<'static> {
        self.nodes.map_or(Value::Words("no nodes"), |nodes| Value::Number(nodes.node.world_size()))
    }

    fn check(&self, gradients: &GradientBuffer<M>, weights: &GradientBuffer<M>) -> Result<()> {
        if self.options.accumulation_steps == 0 {
            let reason = "`accumulation_steps` is 0, and must be at least 1: the number of micro-batches whose gradients were added".into();
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        self.options.delta_dtype.map_or(Ok(()), |dtype| check_float(OPERATION, dtype))?;
        if let Reduction::Adasum(options) = self.options.reduction {
            // The check is made here, so that no optimizer has run by the time that Adasum would fail.
            options.algorithm.check_ranks(OPERATION, self.across().world_size())?;
        }
        same_tensors(OPERATION, ("gradients", gradients.table()), ("weights", weights.table()))
    }

    /// The gradients divided by the accumulation steps; `None` where the optimizer receives them unchanged.
    fn divided(&self, gradients: &GradientBuffer<M>) -> Result<Option<GradientBuffer<M>>> {
        let accumulation_steps = self.options.accumulation_steps;
        if accumulation_steps == 1 && self.gradients_group().is_none() {
            return Ok(None);
        }
        let mut copy = zeros_like(gradients, gradients.dtype(), gradients.world_size())?;
        M::scale(copy.as_mut_slice(), gradients.as_slice(), 1.0 / accumulation_steps as f64)?;
        Ok(Some(copy))
    }

    /// The ranks over which gradients are reduced, and the reduction.
    fn gradients_group(&self) -> Option<(&'c dyn Communicator<M>, ReduceOp)> {
        match self.options.reduction {
            Reduction::Mean => Some((self.all, ReduceOp::Mean)),
            Reduction::Sum => Some((self.all, ReduceOp::Sum)),
            Reduction::Adasum(_) => self.nodes.map(|nodes| (nodes.node, ReduceOp::Mean)),
        }
    }

    /// The ranks whose steps Adasum combines.
    fn across(&self) -> &'c dyn Communicator<M> {
        self.nodes.map_or(self.all, |nodes| nodes.across)
    }

    fn deltas(
        &self,
        gradients: &GradientBuffer<M>,
        weights: &GradientBuffer<M>,
        optimizer: &mut dyn DeltaOptimizer<M>,
    ) -> Result<GradientBuffer<M>> {
        let dtype = self.options.delta_dtype.unwrap_or(weights.dtype());
        let mut deltas = zeros_like(weights, dtype, self.across().world_size())?;
        {
            // The optimizer is the caller's, and may call communicators of its own.
            let _outside = scope::outside();
            optimizer.deltas(gradients, weights, &mut deltas)?;
        }
        // An optimizer can replace the buffer that it was given by another one.
        same_tensors(OPERATION, ("weights", weights.table()), ("deltas", deltas.table()))?;
        Ok(deltas)
    }

    /// For each of `N` conditions, the ranks on which it does not hold. The same on every rank.
    fn ranks_without<const N: usize>(&self, holds: [bool; N]) -> Result<[Vec<usize>; N]> {
        let all = self.all.gather_words(&holds.map(u64::from))?;
        let without = |place: usize| (0..all.len() / N).filter(|rank| all[rank * N + place] == 0).collect();
        Ok(std::array::from_fn(without))
    }
}

/// Whether no tensor has a NaN or an infinity; the gaps between tensors are ignored.
fn is_finite<M: OptimizerMemory>(buffer: &GradientBuffer<M>) -> Result<bool> {
    for (_, tensor) in buffer.tensors() {
        if !M::all_finite(tensor.data())? {
            return Ok(false);
        }
    }
    Ok(true)
}
