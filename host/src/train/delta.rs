//! [`adasum_step`]: one training step in which ranks combine the steps of their optimizers instead of their gradients.
//!
//! ONNX Runtime builds the same as a graph (its Adasum optimizer graph builder), Horovod as its delta optimizers. The
//! order of what happens is all there is here: arithmetic is in `kernels`, the parts are in `ops`, and the optimizer is
//! the caller's choice.

use std::hash::{DefaultHasher, Hash, Hasher};

use super::ranks::Ranks;
use super::{same_tensors, zeros_like};
use crate::buffer::GradientBuffer;
use crate::comm::{Communicator, ReduceOp};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::cpu;
use crate::ops::{AdasumOptions, AdasumReport, adasum_all_reduce, in_place_accumulate};

const OPERATION: &str = "adasum_step";

/// An optimizer that says where it would go, and lets others decide: [`Sgd`](super::Sgd), [`Adam`](super::Adam), or the
/// caller's own.
pub trait DeltaOptimizer {
    /// Writes the step that this optimizer would add to the weights, and takes the gradients into its own state.
    ///
    /// The three buffers hold the same tensors, each in a dtype of its own; `deltas` comes as zeros. Not called in
    /// steps whose gradients are not finite.
    ///
    /// # Errors
    /// Whatever the optimizer refuses, with its state as it was: the other ranks' step fails too.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer,
        weights: &GradientBuffer,
        deltas: &mut GradientBuffer,
    ) -> Result<()>;
}

/// Choices of an [`adasum_step`]; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepOptions {
    /// How many micro-batches have been added up in the gradients, at least 1: they are divided by it.
    pub accumulation_steps: usize,
    /// In which dtype steps are made and exchanged; `None` for that of the weights.
    pub delta_dtype: Option<DType>,
    /// How the steps are combined.
    pub adasum: AdasumOptions,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self { accumulation_steps: 1, delta_dtype: None, adasum: AdasumOptions::default() }
    }
}

/// How an [`adasum_step`] ended. The same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepOutcome {
    /// The weights have moved.
    Applied,
    /// There were NaN or infinities in gradients. No optimizer ran and no weight moved.
    GradientsNotFinite {
        /// Where: ranks of the group across nodes, each for its node.
        ranks: Vec<usize>,
    },
    /// There were NaN or infinities in the combined step. No weight moved, but the optimizers have taken the gradients
    /// in.
    DeltasNotFinite,
}

/// What an [`adasum_step`] did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// How it ended.
    pub outcome: StepOutcome,
    /// What Adasum did, if it came to that.
    pub adasum: Option<AdasumReport>,
}

/// Makes one step: every rank's optimizer turns its gradients into a step, and the Adasum of those steps moves the
/// weights.
///
/// In this order:
///
/// 1. the gradients, times 1 / (`accumulation_steps` × ranks of the node), in a copy unless that changes nothing;
/// 2. with a `node`, their sum over its ranks;
/// 3. whether they are finite, on all ranks; if not, the step ends here;
/// 4. `optimizer` turns them into deltas;
/// 5. the deltas' Adasum over `comm`;
/// 6. whether that is finite, on all ranks; if not, the step ends here;
/// 7. the deltas are added to the weights, each tensor with one rounding.
///
/// `comm` joins one rank of every node, those in the same place on their nodes, and `node` the ranks of this one;
/// without `node`, `comm` joins all ranks. Weights that were the same bits on all ranks stay so, whatever the
/// optimizers' states; those of different nodes go different ways, and each belongs into a checkpoint. A `node` that is
/// all there is leaves Adasum with nothing to combine. Buffers may have been made for any number of ranks and be of
/// different dtypes. Unlike upstream, nothing is clipped: an optimizer that should, does.
///
/// ```
/// use gradsync::comm::{Communicator, local};
/// use gradsync::train::{Sgd, SgdOptions, StepOptions, StepOutcome, adasum_step};
/// use gradsync::{DType, GradientBuffer};
///
/// let outcomes = local::run(2, |comm| {
///     let mut weights = GradientBuffer::new(DType::F32, 2, [("w", [2])])?;
///     let mut gradients = GradientBuffer::new(DType::F32, 2, [("w", [2])])?;
///     // Orthogonal steps: Adasum adds them.
///     gradients.tensor_mut(0).into_data().typed::<f32>().unwrap()[comm.rank()] = 1.0;
///     let mut sgd = Sgd::new(SgdOptions { rate: 0.5, ..SgdOptions::default() });
///     let report = adasum_step(&comm, None, &gradients, &mut weights, &mut sgd, StepOptions::default())?;
///     assert_eq!(report.outcome, StepOutcome::Applied);
///     Ok::<_, gradsync::Error>(weights.tensor(0).data().to_f64_vec())
/// })?;
/// for weights in outcomes {
///     assert_eq!(weights.expect("no rank panicked")?, [-0.5, -0.5]);
/// }
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// # Errors
/// [`Error::InvalidArgument`] if ranks have other tensors, dtypes, options or nodes of other sizes (on every rank,
/// naming two that differ), or for 0 accumulation steps; [`Error::LengthMismatch`], [`Error::InvalidArgument`] or
/// [`Error::ShapeMismatch`] if gradients and weights hold other tensors; [`Error::UnsupportedWorldSize`] as
/// [`adasum_all_reduce`] has it: all on every rank, before anything happens. The optimizer's own error where it failed,
/// and [`Error::InvalidArgument`] naming that rank on all others. Those of the communicators. The weights are left
/// alone by every error; the state of an optimizer is not, once it has run.
pub fn adasum_step(
    comm: &dyn Communicator,
    node: Option<&dyn Communicator>,
    gradients: &GradientBuffer,
    weights: &mut GradientBuffer,
    optimizer: &mut dyn DeltaOptimizer,
    options: StepOptions,
) -> Result<StepReport> {
    let ranks = Ranks { across: comm, node };
    // All that the checks after this look at is in the comparison, so that they end the same way on every rank.
    ranks.same(OPERATION, fingerprint(ranks, gradients, weights, options))?;
    check(comm, gradients, weights, options)?;
    let _span = tracing::debug_span!("adasum_step", rank = comm.rank(), ?options, len = weights.len()).entered();

    let own;
    let factor = 1.0 / (options.accumulation_steps as f64 * ranks.on_node() as f64);
    let gradients = if factor == 1.0 && node.is_none() {
        gradients
    } else {
        own = scaled(gradients, factor, node)?;
        &own
    };
    let not_finite = ranks.not_well(is_finite(gradients))?;
    if !not_finite.is_empty() {
        tracing::debug!(?not_finite, "gradients are not finite: no step");
        return Ok(StepReport { outcome: StepOutcome::GradientsNotFinite { ranks: not_finite }, adasum: None });
    }

    let dtype = options.delta_dtype.unwrap_or(weights.dtype());
    let outcome = zeros_like(weights.table(), dtype, comm.world_size()).and_then(|mut deltas| {
        optimizer.deltas(gradients, weights, &mut deltas)?;
        // An optimizer can put another buffer in the place of the one that it was given.
        same_tensors(OPERATION, ("weights", weights.table()), ("deltas", deltas.table()))?;
        Ok(deltas)
    });
    let failed = ranks.not_well(outcome.is_ok())?;
    let mut deltas = outcome?;
    if !failed.is_empty() {
        let reason = format!("the optimizer failed, or had no memory, on the node of {}", numbers(&failed));
        return Err(Error::InvalidArgument { operation: OPERATION, reason });
    }

    let adasum = Some(adasum_all_reduce(comm, &mut deltas, options.adasum)?);
    if !ranks.not_well(is_finite(&deltas))?.is_empty() {
        tracing::debug!("the combined step is not finite: no weight moves");
        return Ok(StepReport { outcome: StepOutcome::DeltasNotFinite, adasum });
    }
    for index in 0..weights.tensor_count() {
        in_place_accumulate(weights.tensor_mut(index), deltas.tensor(index), None)?;
    }
    Ok(StepReport { outcome: StepOutcome::Applied, adasum })
}

/// Whether no tensor has a NaN or an infinity; what lies in the gaps between tensors does not count.
fn is_finite(buffer: &GradientBuffer) -> bool {
    (0..buffer.tensor_count()).all(|index| cpu::all_finite(buffer.tensor(index).data()))
}

fn fingerprint(ranks: Ranks<'_>, gradients: &GradientBuffer, weights: &GradientBuffer, options: StepOptions) -> u64 {
    let mut hasher = DefaultHasher::new();
    let tables = [gradients.table().fingerprint(), weights.table().fingerprint()];
    (tables, options, ranks.node.map(|node| node.world_size())).hash(&mut hasher);
    hasher.finish()
}

fn check(
    comm: &dyn Communicator,
    gradients: &GradientBuffer,
    weights: &GradientBuffer,
    options: StepOptions,
) -> Result<()> {
    if options.accumulation_steps == 0 {
        let reason = "there are 0 accumulation steps, and must be at least 1".into();
        return Err(Error::InvalidArgument { operation: OPERATION, reason });
    }
    // Known beforehand, and no optimizer should have run by the time that Adasum says it.
    options.adasum.algorithm.check_ranks(OPERATION, comm.world_size())?;
    same_tensors(OPERATION, ("gradients", gradients.table()), ("weights", weights.table()))
}

/// The gradients times `factor`, summed over the node.
fn scaled(gradients: &GradientBuffer, factor: f64, node: Option<&dyn Communicator>) -> Result<GradientBuffer> {
    let mut scaled = zeros_like(gradients.table(), gradients.dtype(), gradients.world_size())?;
    cpu::scale(scaled.as_mut_slice(), gradients.as_slice(), factor)?;
    if let Some(node) = node {
        node.all_reduce(scaled.as_mut_slice(), ReduceOp::Sum)?;
    }
    Ok(scaled)
}

fn numbers(ranks: &[usize]) -> String {
    match ranks {
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {ranks:?}"),
    }
}
