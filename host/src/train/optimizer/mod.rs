//! Optimizers: [`Sgd`] and [`AdamW`], fused over all tensors, in host memory and on GPUs with the same bits.
//!
//! | file | contents |
//! |---|---|
//! | `options` | the options of each optimizer, groups of parameters, the scale of the loss |
//! | `report` | the outcome of a step |
//! | `schedule` | the learning rate as a formula of the step |
//! | `state` | the vectors of the state, and the master copies of 16-bit weights |
//! | `memory` | the reports that a host reads without waiting for a GPU |
//!
//! The formulas are in `gradsync_device::math::{optimizer, step}`, the order of the norm's sums in `sums`.

mod memory;
mod options;
mod report;
mod schedule;
mod state;

use std::fmt::Debug;

use gradsync_device::math::step::{
    self, SCALE_PLACE, STEP_MEMORY_LEN, STEP_STATE_LEN, StepMemory, StepRules, StepState,
};
use gradsync_device::math::sums;

pub use self::memory::OptimizerMemory;
use self::memory::state_of;
pub use self::options::{AdamWOptions, LossScaler, OptimizerOptions, ParameterGroup, SgdOptions};
use self::options::{Range, check_options};
pub use self::report::{UpdateOutcome, UpdateReport};
pub use self::schedule::Schedule;
use self::state::{Operand, States, first_negative, updates};
use super::same_tensors;
use crate::buffer::GradientBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernels::optimizer::Target;
use crate::memory::{Host, Memory, TensorView, TensorViewMut};

/// An optimizer that computes steps without applying them: [`Sgd`], [`AdamW`], or the caller's own.
pub trait DeltaOptimizer<M: Memory = Host> {
    /// Writes the step that this optimizer would add to the weights to `deltas`, and updates its own state with the gradients.
    ///
    /// The three buffers have the same tensors, each in a dtype of its own; `deltas` is zero at the call. Not called in steps whose
    /// gradients are not finite.
    ///
    /// # Errors
    /// Any error of the optimizer, with its state unchanged: the step fails on the other ranks too.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer<M>,
        weights: &GradientBuffer<M>,
        deltas: &mut GradientBuffer<M>,
    ) -> Result<()>;
}

/// Stochastic gradient descent; [`SgdOptions`] has the formula.
pub type Sgd<M = Host> = Optimizer<SgdOptions, M>;

/// Adam with decoupled weight decay; [`AdamWOptions`] has the formula.
pub type AdamW<M = Host> = Optimizer<AdamWOptions, M>;

/// A tensor in a step of an optimizer.
#[derive(Debug)]
pub struct TensorStep<'a, M: Memory = Host> {
    /// The name of the parameter.
    pub name: &'a str,
    /// The weights, which the step changes.
    pub weights: TensorViewMut<'a, M>,
    /// The gradient; without one neither weights nor state change, not even by weight decay.
    pub gradient: Option<TensorView<'a, M>>,
}

/// An optimizer: [`Sgd`] or [`AdamW`] by its options, of weights in host memory or on a GPU.
///
/// ```
/// use gradsync::prelude::*;
/// use gradsync::train::{AdamW, ParameterGroup, Schedule};
///
/// let mut weights = GradientBuffer::new(DType::BF16, 1, [("linear.weight", vec![2, 2]), ("linear.bias", vec![2])])?;
/// let mut gradients = GradientBuffer::new(DType::BF16, 1, [("linear.weight", vec![2, 2]), ("linear.bias", vec![2])])?;
/// gradients.tensor_mut(0).copy_from_slice(&[gradsync::bf16::ONE; 4])?;
/// let mut optimizer = AdamW::new(1e-3)?
///     .with_max_norm(1.0)?
///     .with_schedule(Schedule::cosine(1000).with_warm_up(10))?
///     .with_groups([ParameterGroup::matching("*.bias").with_weight_decay(Some(0.0))])?;
/// optimizer.step(&mut weights, &gradients)?;
/// assert_eq!(optimizer.report()?.norm, 2.0);
/// # Ok::<(), Error>(())
/// ```
///
/// # A step
///
/// In this order, and on a GPU without a wait of the host: the norm of all gradients; the factor by which gradients are multiplied, for the
/// scale of the loss and for clipping; the rate by the schedule; the update of all tensors. A step with NaN, infinities, or gradients whose
/// squares leave the range of the state (beyond a norm of 1.3e19 for moments in `f32`, or 1.3e154 for gradients of `f64`) changes no weight
/// and no state. Without a [`LossScaler`] such a step is an error: in host memory of the call, on a GPU of a later one.
///
/// Ranks that reduce their gradients before a step have the same gradients, and so the same steps and skips, without an exchange.
///
/// # Dtypes
///
/// The state is of `f32`, or of `f64` for tensors with operands of `f64`. Weights of `f16` and `bf16` have master copies of `f32` in the
/// optimizer, made of the weights at the first step: each step changes the copy, and rounds it to the weights. A GPU takes weights of `f32`,
/// `f16` or `bf16` with gradients of any of them, and `f64` with gradients of `f64`.
///
/// # Numerics
///
/// The bits are the same on CPUs and GPUs, whatever buckets, threads or devices computed them, but for the payloads of NaN, and for hosts that
/// flush subnormals. Each operation is rounded once; a weight changes by a step that is rounded to the precision of its state.
#[derive(Debug)]
pub struct Optimizer<O: OptimizerOptions, M: OptimizerMemory = Host> {
    options: O,
    max_norm: Option<f64>,
    schedule: Schedule,
    scaler: Option<LossScaler>,
    groups: Vec<ParameterGroup>,
    /// The state of steps before the first one, of a restored optimizer.
    start: StepState,
    started: Option<Started<M>>,
}

/// The memory of an optimizer from its first step on.
#[derive(Debug)]
struct Started<M: OptimizerMemory> {
    states: States<M>,
    /// The numbers of a [`StepMemory`].
    step: M::Buffer,
    /// The sums of squares of all chunks.
    sums: M::Buffer,
    reports: M::Reports,
    latest: Option<StepState>,
    /// The number of skipped steps that the host knows of.
    skipped: f64,
}

/// Rules of no optimizer, whose rate is constant and not limited.
fn no_rules() -> StepRules {
    StepRules {
        rate: 0.0,
        max_norm: f64::INFINITY,
        limit: f64::MAX,
        beta1: 0.0,
        beta2: 0.0,
        epsilon: 0.0,
        corrects: 0.0,
        growth: 1.0,
        backoff: 1.0,
        growth_interval: 0.0,
        most_scale: f64::from(f32::MAX),
        schedule: step::CONSTANT,
        warm_up: 0.0,
        decay_begin: 0.0,
        decay_end: 0.0,
        last: 0.0,
    }
}

impl<O: OptimizerOptions, M: OptimizerMemory> Optimizer<O, M> {
    /// Creates an optimizer before its first step, from a learning rate, as in `AdamW::new(0.001)`, or from its options.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming an option out of its range.
    pub fn new(options: impl Into<O>) -> Result<Self> {
        let options = options.into();
        options.check()?;
        Ok(Self {
            options,
            max_norm: None,
            schedule: Schedule::constant(),
            scaler: None,
            groups: Vec::new(),
            start: StepState::new(1.0),
            started: None,
        })
    }

    /// Clips gradients by their global norm: gradients with a larger norm are multiplied by the quotient of both.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a norm that is not above 0 and finite.
    pub fn with_max_norm(mut self, max_norm: f64) -> Result<Self> {
        check_options(O::NAME, &[("max_norm", max_norm, Range::Positive)])?;
        self.max_norm = Some(max_norm);
        Ok(self)
    }

    /// Multiplies the rate by a schedule.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a schedule whose steps do not ascend.
    pub fn with_schedule(mut self, schedule: Schedule) -> Result<Self> {
        schedule.check(O::NAME)?;
        self.schedule = schedule;
        Ok(self)
    }

    /// Divides gradients by a scale that the program multiplies its loss by: [`loss_scale`](Self::loss_scale). Call it before the first step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming a number out of its range, and after the first step.
    pub fn with_scaler(mut self, scaler: LossScaler) -> Result<Self> {
        self.check_new()?;
        scaler.check(O::NAME)?;
        self.start.scale = scaler.initial;
        self.scaler = Some(scaler);
        Ok(self)
    }

    /// Gives groups of parameters options of their own; the first group that matches a name applies. Call it before the first step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming a number out of its range, and after the first step. That step refuses a group that no parameter
    /// matches.
    pub fn with_groups(mut self, groups: impl IntoIterator<Item = ParameterGroup>) -> Result<Self> {
        self.check_new()?;
        self.groups = groups.into_iter().collect();
        self.groups.iter().try_for_each(|group| group.check(O::NAME))?;
        Ok(self)
    }

    /// Refuses a change that would not reach the state.
    fn check_new(&self) -> Result<()> {
        if self.started.is_none() {
            return Ok(());
        }
        let reason =
            "groups and scalers are chosen before the first step, and this optimizer has made one or was restored"
                .into();
        Err(Error::InvalidArgument { operation: O::NAME, reason })
    }

    /// The options.
    pub fn options(&self) -> O {
        self.options
    }

    /// Changes the options from the next step on. A [recorded](crate::driver) step keeps its options: there a schedule changes the rate.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), after which the options are unchanged.
    pub fn set_options(&mut self, options: O) -> Result<()> {
        options.check()?;
        self.options = options;
        Ok(())
    }

    /// Makes one step of weights in one buffer by gradients in another with the same tensors.
    ///
    /// # Errors
    /// The errors of [`step_tensors`](Self::step_tensors), and [`Error::LengthMismatch`] or [`Error::InvalidArgument`] for buffers whose
    /// tensors differ.
    pub fn step(&mut self, weights: &mut GradientBuffer<M>, gradients: &GradientBuffer<M>) -> Result<()> {
        same_tensors(O::NAME, ("gradients", gradients.table()), ("weights", weights.table()))?;
        let gradients = gradients.tensors().map(|(_, gradient)| gradient);
        let tensors = weights.tensors_mut().zip(gradients);
        let tensors = tensors.map(|((name, weights), gradient)| TensorStep { name, weights, gradient: Some(gradient) });
        self.step_tensors(tensors)
    }

    /// Makes one step of tensors anywhere in memory, in the same order in each step. Tied parameters are one tensor. On a GPU nothing waits;
    /// addresses that stay are uploaded once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor: for a gradient of another length, other tensors than in the first step, two tensors of
    /// one name, dtypes that the optimizer does not take, or memory of another queue; nothing is written then. Without a [`LossScaler`],
    /// [`Error::InvalidArgument`] for gradients that are not finite or too large, of this step or on GPUs of an earlier one, which changed no
    /// weight. [`Error::OutOfMemory`] and `Error::Cuda`.
    pub fn step_tensors<'a>(&mut self, tensors: impl IntoIterator<Item = TensorStep<'a, M>>) -> Result<()> {
        let operands = tensors.into_iter().map(|TensorStep { name, weights, gradient }| Operand {
            name,
            gradient: gradient.map(|gradient| gradient.data()),
            target: Target::Weights { weights: weights.into_data(), copy: None },
        });
        self.run(operands.collect())
    }

    /// The report of the last step; on a GPU the call waits for the step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] before the first step; `Error::Cuda`.
    pub fn report(&self) -> Result<UpdateReport> {
        self.step_state().map(UpdateReport::from)
    }

    /// The report of the last step that is over, or `None` before the first; never waits. Steps of a recorded graph have no such reports.
    ///
    /// # Errors
    /// `Error::Cuda`.
    pub fn latest_report(&mut self) -> Result<Option<UpdateReport>> {
        let Some(started) = &mut self.started else { return Ok(None) };
        started.read_reports()?;
        Ok(started.latest.map(UpdateReport::from))
    }

    /// The scale by which the program multiplies its loss in the next step, 1 without a [`LossScaler`]; on a GPU the call waits for the last
    /// step, and [`loss_scale_view`](Self::loss_scale_view) does not.
    ///
    /// # Errors
    /// `Error::Cuda`.
    pub fn loss_scale(&self) -> Result<f64> {
        match (&self.scaler, &self.started) {
            (Some(_), Some(_)) => self.step_state().map(|state| state.scale),
            _ => Ok(self.start.scale),
        }
    }

    /// The scale of the loss as one number of `f64` in the memory of the weights, which each step updates; `None` before the first step.
    pub fn loss_scale_view(&self) -> Option<M::Slice<'_>> {
        let started = self.started.as_ref()?;
        Some(M::range(M::buffer(&started.step), SCALE_PLACE..SCALE_PLACE + 1))
    }

    /// The number of applied steps; on a GPU the call waits for the last step.
    ///
    /// # Errors
    /// `Error::Cuda`.
    pub fn applied_steps(&self) -> Result<u64> {
        match &self.started {
            Some(_) => self.report().map(|report| report.applied),
            None => Ok(self.start.applied as u64),
        }
    }

    /// Takes the values of the weights at the next step for their master copies, after the program has changed weights of `f16` or `bf16`.
    pub fn reload_weights(&mut self) {
        if let Some(started) = &mut self.started {
            started.states.has_masters = false;
        }
    }

    /// The state of each parameter, for saving: its name, the name of the vector (`velocity`; `first`, `second`; `master`), and its elements
    /// of `f32` or `f64`. Nothing before the first step.
    pub fn vectors(&self) -> impl Iterator<Item = (&str, &'static str, M::Slice<'_>)> {
        self.started.iter().flat_map(|started| {
            let States { tensors, arenas, .. } = &started.states;
            tensors.iter().filter(|tensor| !tensor.is_frozen).flat_map(move |tensor| {
                let arena = &arenas[tensor.arena];
                let vectors = O::VECTORS.iter().zip(&arena.vectors);
                let vectors = vectors
                    .map(|(&vector, data)| (&tensor.name[..], vector, M::range(M::buffer(data), tensor.range.clone())));
                let master = tensor.master.clone().zip(arena.masters.as_ref());
                vectors
                    .chain(master.map(|(range, data)| (&tensor.name[..], "master", M::range(M::buffer(data), range))))
            })
        })
    }

    /// The numbers of the steps, for saving with [`vectors`](Self::vectors): products of β, counts and scales, as [`restore`](Self::restore)
    /// takes them. On a GPU the call waits for the last step.
    ///
    /// # Errors
    /// `Error::Cuda`.
    pub fn numbers(&self) -> Result<Vec<f64>> {
        let state = if self.started.is_some() { self.step_state()? } else { self.start };
        Ok(state.to_numbers().to_vec())
    }

    /// Restores a saved state for these weights: `load` is called for each vector that [`vectors`](Self::vectors) names, in its order, and
    /// writes all its elements. The next step continues from there.
    ///
    /// # Errors
    /// The errors of `load`; [`Error::InvalidArgument`] naming a vector or a number that no optimizer has saved, such as NaN; the errors of
    /// [`step_tensors`](Self::step_tensors). The optimizer is as it was before then.
    pub fn restore<'a>(
        &mut self,
        numbers: &[f64],
        weights: impl IntoIterator<Item = (&'a str, TensorViewMut<'a, M>)>,
        mut load: impl FnMut(&str, &'static str, M::SliceMut<'_>) -> Result<()>,
    ) -> Result<()> {
        let refuse = |reason: String| Err(Error::InvalidArgument { operation: O::NAME, reason });
        let Ok(mut state) = <[f64; STEP_STATE_LEN]>::try_from(numbers).map(StepState::from_numbers) else {
            return refuse(format!("{} numbers of steps, and there are {STEP_STATE_LEN}", numbers.len()));
        };
        let is_count = |value: f64| value >= 0.0 && value < (1_u64 << 53) as f64 && value.fract() == 0.0;
        let is_part = |value: f64| (0.0..=1.0).contains(&value);
        let counts = [("applied", state.applied), ("skipped", state.skipped), ("steps_of_scale", state.steps_of_scale)];
        let powers = [("power1", state.power1), ("power2", state.power2)];
        let bad_count = counts.iter().find(|(_, value)| !is_count(*value));
        let bad_power = powers.iter().find(|(_, value)| !is_part(*value));
        let bad_scale = (!(state.scale > 0.0 && state.scale.is_finite())).then_some(("scale", state.scale));
        if let Some((name, value)) = bad_count.or(bad_power).copied().or(bad_scale) {
            return refuse(format!("the saved {name} is {value}, which no step leaves"));
        }
        if self.scaler.is_none() {
            // The program multiplies its loss by no scale, whatever it did when the state was saved.
            state.scale = self.start.scale;
        }
        let operands: Vec<Operand<'_, M>> = weights
            .into_iter()
            .map(|(name, weights)| Operand {
                name,
                gradient: None,
                target: Target::Weights { weights: weights.into_data(), copy: None },
            })
            .collect();
        let mut started = self.start_with(&operands, &state)?;
        let States { tensors, arenas, has_masters } = &mut started.states;
        *has_masters = true;
        for tensor in tensors.iter().filter(|tensor| !tensor.is_frozen) {
            let arena = &mut arenas[tensor.arena];
            let vectors =
                O::VECTORS.iter().copied().zip(&mut arena.vectors).map(|(name, data)| (name, data, &tensor.range));
            let master =
                tensor.master.as_ref().zip(arena.masters.as_mut()).map(|(range, data)| ("master", data, range));
            for (vector, data, range) in vectors.chain(master) {
                load(&tensor.name, vector, M::range_mut(M::buffer_mut(data), range.clone()))?;
                if !M::all_finite(M::range(M::buffer(data), range.clone()))? {
                    return refuse(format!("the saved vector {vector:?} of {:?} has NaN or infinities", tensor.name));
                }
                let data = M::range(M::buffer(data), range.clone());
                let negative = if vector == "second" { first_negative::<M>(data)? } else { None };
                if let Some(value) = negative {
                    let name = &tensor.name;
                    return refuse(format!(
                        "the saved vector {vector:?} of {name:?} has {value:e}: no mean of squares"
                    ));
                }
            }
        }
        self.started = Some(started);
        Ok(())
    }

    fn step_state(&self) -> Result<StepState> {
        let Some(started) = &self.started else {
            let reason = "no step was made, so there is no report".into();
            return Err(Error::InvalidArgument { operation: O::NAME, reason });
        };
        Ok(state_of(&M::to_vec::<f64>(M::buffer(&started.step))?))
    }

    /// The rules of a step; a state of `f32` limits gradients more than one of `f64`.
    fn rules(&self, states: &States<M>) -> StepRules {
        let is_narrow = states.tensors.iter().any(|tensor| tensor.arena == 0 && !tensor.is_frozen);
        let mut rules = no_rules();
        self.options.write_rules(&mut rules, if is_narrow { f64::from(f32::MAX) } else { f64::MAX });
        self.schedule.write_rules(&mut rules);
        rules.max_norm = self.max_norm.unwrap_or(f64::INFINITY);
        if let Some(scaler) = &self.scaler {
            (rules.growth, rules.backoff) = (scaler.growth, scaler.backoff);
            rules.growth_interval = f64::from(scaler.growth_interval);
        }
        rules
    }

    /// Plans and allocates the memory for these tensors.
    fn start_with(&self, operands: &[Operand<'_, M>], start: &StepState) -> Result<Started<M>> {
        let Some(first) = operands.first() else {
            let reason = "there are no tensors".into();
            return Err(Error::InvalidArgument { operation: O::NAME, reason });
        };
        let near = first.weights();
        let mut states = States::new(O::NAME, operands, &self.groups)?;
        states.check(O::NAME, operands)?;
        states.resize(O::NAME, M::shortened(near), self.options.vectors())?;
        let chunks = states.tensors.iter().map(|tensor| sums::chunks(tensor.len)).sum();
        let mut step = M::zeros_near(O::NAME, M::shortened(near), DType::F64, STEP_MEMORY_LEN)?;
        M::copy_from_slice(M::buffer_mut(&mut step), (&StepMemory::new(*start).to_numbers()[..]).into())?;
        let sums = M::zeros_near(O::NAME, M::shortened(near), DType::F64, chunks)?;
        Ok(Started { states, step, sums, reports: M::reports(near)?, latest: None, skipped: start.skipped })
    }

    /// Makes one step of these operands.
    fn run(&mut self, operands: Vec<Operand<'_, M>>) -> Result<()> {
        if operands.is_empty() && self.started.is_none() {
            return Ok(());
        }
        let mut started = match self.started.take() {
            Some(started) => started,
            None => self.start_with(&operands, &self.start)?,
        };
        let outcome = self.run_with(&mut started, operands);
        self.started = Some(started);
        outcome
    }

    fn run_with(&self, started: &mut Started<M>, mut operands: Vec<Operand<'_, M>>) -> Result<()> {
        started.states.check(O::NAME, &operands)?;
        started.states.resize(O::NAME, operands[0].weights(), self.options.vectors())?;
        self.check_reports(started, &[])?;
        let rules = self.rules(&started.states);
        let Started { states, step, sums, .. } = started;
        {
            let gradients: Vec<M::Slice<'_>> = states.gradients(&operands).map(|(_, gradient)| gradient).collect();
            let mut chunks = 0;
            let first_chunks: Vec<usize> = gradients
                .iter()
                .map(|gradient| {
                    let first = chunks;
                    chunks += sums::chunks(M::len(*gradient));
                    first
                })
                .collect();
            M::square_sums(M::range_mut(M::buffer_mut(sums), 0..chunks), &first_chunks, &gradients)?;
            M::advance_step(M::buffer_mut(step), &rules, M::range(M::buffer(sums), 0..chunks))?;
        }
        let decay = self.options.weight_decay();
        let updates = updates(states, &mut operands, decay)?;
        M::update(self.options.rule(), M::buffer(step), updates)?;
        M::take_report(&mut started.reports, M::buffer(&started.step))?;
        if M::REPORTS_AT_ONCE { self.check_reports(started, &operands) } else { Ok(()) }
    }

    /// Reads the reports of steps that are over; without a scaler, a skipped one is an error, which names a tensor of the step's `operands`,
    /// where these are known.
    fn check_reports(&self, started: &mut Started<M>, operands: &[Operand<'_, M>]) -> Result<()> {
        let Some(refused) = started.read_reports()?.filter(|_| self.scaler.is_none()) else { return Ok(()) };
        let mut not_finite = None;
        for (name, gradient) in started.states.gradients(operands) {
            if not_finite.is_none() && !M::all_finite(gradient)? {
                not_finite = Some(name);
            }
        }
        let reason = match (UpdateReport::from(refused).outcome, not_finite) {
            (UpdateOutcome::NotFinite, Some(name)) => format!("gradients of {name:?} have NaN or infinities"),
            (UpdateOutcome::NotFinite, None) => {
                "gradients have NaN or infinities, or squares whose sum leaves the range of f64,".to_owned()
            }
            // The host was so far behind that it knows the counts alone.
            (UpdateOutcome::Applied, _) => "gradients were not finite or too large".to_owned(),
            _ => format!(
                "gradients have a norm of {:e}, with which the optimizer's state could leave the range of its dtype",
                refused.norm
            ),
        };
        let reason = format!(
            "{reason} in the step behind {} applied and {} skipped ones, which changed no weight and no state",
            refused.applied,
            refused.skipped - 1.0
        );
        Err(Error::InvalidArgument { operation: O::NAME, reason })
    }
}

impl<M: OptimizerMemory> Started<M> {
    /// Reads all reports that are there; returns the first one with a skipped step that the host did not know of.
    fn read_reports(&mut self) -> Result<Option<StepState>> {
        let mut refused = None;
        while let Some(state) = M::next_report(&mut self.reports)? {
            self.latest = Some(state);
            if state.skipped > self.skipped {
                self.skipped = state.skipped;
                refused = refused.or(Some(state));
            }
        }
        Ok(refused)
    }
}

impl<O: OptimizerOptions, M: OptimizerMemory> DeltaOptimizer<M> for Optimizer<O, M> {
    /// Computes the step; see the trait.
    ///
    /// # Errors
    /// The errors of [`Optimizer::step`]. Nothing is written then.
    fn deltas(
        &mut self,
        gradients: &GradientBuffer<M>,
        weights: &GradientBuffer<M>,
        deltas: &mut GradientBuffer<M>,
    ) -> Result<()> {
        same_tensors(O::NAME, ("gradients", gradients.table()), ("weights", weights.table()))?;
        same_tensors(O::NAME, ("gradients", gradients.table()), ("deltas", deltas.table()))?;
        let operands = gradients.tensors().zip(weights.tensors()).zip(deltas.tensors_mut()).map(
            |(((name, gradient), (_, weights)), (_, deltas))| Operand {
                name,
                gradient: Some(gradient.data()),
                target: Target::Deltas { weights: weights.data(), deltas: deltas.into_data() },
            },
        );
        self.run(operands.collect())
    }
}
