//! [`Optimizer`]: gradsync's fused optimizers, of candle's variables in place.

use std::collections::HashSet;
use std::ops::{Deref, DerefMut};

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use gradsync::memory::Host;
use gradsync::train::{self, AdamWOptions, OptimizerOptions, SgdOptions, TensorStep};
use gradsync::{TensorView, TensorViewMut};

use crate::error::{Error, Result};
use crate::memory::{self, TensorMemory, check, lend_all};
use crate::variables::{Variable, Variables};

/// Stochastic gradient descent; [`SgdOptions`] has the formula.
pub type Sgd<M = Host> = Optimizer<SgdOptions, M>;

/// Adam with decoupled weight decay, as candle's; [`AdamWOptions`] has the formula.
pub type AdamW<M = Host> = Optimizer<AdamWOptions, M>;

/// An optimizer of variables in place, fused over all of them: [`Sgd`] or [`AdamW`] by its options.
///
/// It is an [`Optimizer`](train::Optimizer) of gradsync, whose methods it has: reports, the scale of a loss, other options from the next
/// step on. [`DataParallel::step`](crate::DataParallel::step) makes a step with gradients of all ranks, and [`step`](Self::step) one with
/// gradients of candle.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
/// use gradsync::memory::Host;
/// use gradsync_candle::{AdamW, Error};
///
/// let variables = VarMap::new();
/// let model = linear(3, 1, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
/// let mut optimizer = AdamW::<Host>::new(&variables, 0.1)?;
/// let input = Tensor::ones((4, 3), DType::F32, &Device::Cpu)?;
/// for _ in 0..3 {
///     let loss = mse(&model.forward(&input)?, &Tensor::ones((4, 1), DType::F32, &Device::Cpu)?)?;
///     optimizer.step(&loss.backward()?)?;
/// }
/// assert_eq!(optimizer.report()?.applied, 3);
/// # Ok::<(), Error>(())
/// ```
///
/// # Variables
///
/// The variables are those of the [`Variables`] that are neither frozen nor local, each once: the norm of all gradients, which clips them
/// and tells whether they are finite, has to be the same on all ranks, and local ones have gradients of their own on each rank. Local
/// variables need an optimizer of their own, of [names](Variables) that include no others. A variable without a gradient in a step keeps
/// its value and its state.
///
/// Variables of `f16` and `bf16` have master copies of `f32` in the optimizer, which are made at the first step: call
/// [`reload_weights`](train::Optimizer::reload_weights) after setting such variables.
///
/// # Threads
///
/// Other threads that use the variables wait for a step on CPUs, and until it is enqueued on GPUs. A step begins when no other thread uses
/// them.
#[derive(Debug)]
pub struct Optimizer<O: OptimizerOptions, M: TensorMemory = Host> {
    // The state is in memory of the context's queue, and is dropped first.
    optimizer: train::Optimizer<O, M>,
    context: Option<M::Context>,
    variables: Variables,
}

impl<O: OptimizerOptions, M: TensorMemory> Optimizer<O, M> {
    /// Creates an optimizer of a [`VarMap`](candle_nn::VarMap)'s variables, or of others by [name](Variables), from a learning rate or from
    /// options.
    ///
    /// # Errors
    /// The errors of [`train::Optimizer::new`], which name an option out of its range, and of [`of`](Self::of).
    pub fn new(variables: impl Into<Variables>, options: impl Into<O>) -> Result<Self> {
        Self::of(variables, train::Optimizer::new(options)?)
    }

    /// Creates an optimizer of variables from an optimizer of gradsync, with its clipping, schedule, scaler and groups:
    ///
    /// ```
    /// use candle_nn::VarMap;
    /// use gradsync::memory::Host;
    /// use gradsync::train::{self, ParameterGroup, Schedule};
    /// use gradsync_candle::{AdamW, Variables};
    /// # use candle_core::{DType, Device};
    /// # let variables = VarMap::new();
    /// # candle_nn::linear(3, 1, candle_nn::VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    ///
    /// let optimizer = train::AdamW::new(1e-3)?
    ///     .with_max_norm(1.0)?
    ///     .with_schedule(Schedule::cosine(1000).with_warm_up(100))?
    ///     .with_groups([ParameterGroup::matching("*bias").with_weight_decay(Some(0.0))])?;
    /// let mut optimizer = AdamW::<Host>::of(&variables, optimizer)?;
    /// # Ok::<(), gradsync_candle::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Device`], [`Error::DType`] and [`Error::Storage`], which name the variable.
    pub fn of(variables: impl Into<Variables>, optimizer: train::Optimizer<O, M>) -> Result<Self> {
        let variables = variables.into();
        let updated = updated(&variables);
        updated.iter().try_for_each(|variable| check_variable::<M>(variable, updated[0].var.device()).map(drop))?;
        check(&updated.iter().map(|Variable { name, var, .. }| (&name[..], var.as_tensor())).collect::<Vec<_>>())?;
        Ok(Self { optimizer, context: None, variables })
    }

    /// The variables, by name.
    pub fn variables(&self) -> &Variables {
        &self.variables
    }

    /// Makes one step with gradients of [`Tensor::backward`] or of [`DataParallel::backward`](crate::DataParallel::backward). On a GPU it is
    /// enqueued behind candle's work, and later work on the variables behind it; the host does not wait.
    ///
    /// # Errors
    /// An error that names a variable whose gradient has another shape; the errors of [`train::Optimizer::step_tensors`], among them
    /// gradients that are not finite, unless the optimizer has a scaler; [`Error::Storage`] for gradients that are not contiguous or share
    /// a storage. Nothing is written then.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        let Self { optimizer, context, variables } = self;
        let updated = updated(variables);
        let Some(first) = updated.first() else { return Ok(()) };
        let context = match context {
            Some(context) => context,
            None => context.insert(M::context(first.var.device(), false)?),
        };
        let tensors: Vec<_> = updated.iter().map(|variable| (*variable, gradients.get(&variable.var))).collect();
        lend_step(context, &tensors, |tensors| optimizer.step_tensors(tensors))
    }

    /// The optimizer, for a step of tensors in the order of this context, which the state of the optimizer keeps.
    pub(crate) fn within(&mut self, context: &M::Context) -> &mut train::Optimizer<O, M> {
        self.context.get_or_insert_with(|| context.clone());
        &mut self.optimizer
    }

    /// Refuses the variables of a `DataParallel` unless this optimizer has the same ones.
    pub(crate) fn check_variables(&self, operation: &'static str, of_ranks: &Variables) -> Result<()> {
        let (own, of_ranks) = (updated(&self.variables), updated(of_ranks));
        let lacks = |others: &[&Variable], one: &Variable| {
            !others.iter().any(|other| (other.var.id(), &other.name) == (one.var.id(), &one.name))
        };
        if own.len() == of_ranks.len()
            && own.iter().zip(&of_ranks).all(|(own, other)| (own.var.id(), &own.name) == (other.var.id(), &other.name))
        {
            return Ok(());
        }
        let missing = of_ranks.iter().find(|variable| lacks(&own, variable));
        let reason = match (missing, own.iter().find(|variable| lacks(&of_ranks, variable))) {
            (Some(missing), _) => format!("the optimizer lacks the variable {:?}, which all ranks train", missing.name),
            (None, Some(more)) => {
                format!("the optimizer has the variable {:?}, which is not trained by all ranks", more.name)
            }
            (None, None) => "the optimizer has a variable twice".into(),
        };
        let reason = format!("{reason}: create it of `DataParallel::variables`");
        Err(gradsync::Error::InvalidArgument { operation, reason }.into())
    }
}

/// The methods of gradsync's optimizer; its `step` takes buffers, and is reached by `Deref` alone.
impl<O: OptimizerOptions, M: TensorMemory> Deref for Optimizer<O, M> {
    type Target = train::Optimizer<O, M>;

    fn deref(&self) -> &Self::Target {
        &self.optimizer
    }
}

impl<O: OptimizerOptions, M: TensorMemory> DerefMut for Optimizer<O, M> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.optimizer
    }
}

/// The variables that an optimizer updates: the trained ones of all ranks, each by its first name.
pub(crate) fn updated(variables: &Variables) -> Vec<&Variable> {
    let mut ids = HashSet::new();
    variables.reduced().iter().filter(|variable| variable.is_trained() && ids.insert(variable.var.id())).collect()
}

/// Refuses a variable that cannot be lent, or is on another device than `like`.
pub(crate) fn check_variable<M: TensorMemory>(
    variable: &Variable,
    like: &candle_core::Device,
) -> Result<gradsync::DType> {
    let Variable { name, var, .. } = variable;
    if let Some(wanted) = M::refuses(var.device(), like) {
        return Err(Error::Device { name: name.clone(), found: var.device().location(), wanted });
    }
    let Some(dtype) = memory::dtype(var.dtype()) else {
        return Err(Error::DType { name: name.clone(), dtype: var.dtype() });
    };
    if !var.is_contiguous() {
        let shape = var.dims().to_vec();
        return Err(Error::Storage { name: name.clone(), shape, reason: "is not contiguous" });
    }
    Ok(dtype)
}

/// Lends variables, and gradients of candle, to one step of an optimizer.
pub(crate) fn lend_step<M: TensorMemory>(
    context: &M::Context,
    variables: &[(&Variable, Option<&Tensor>)],
    step: impl FnOnce(Vec<TensorStep<'_, M>>) -> gradsync::Result<()>,
) -> Result<()> {
    let weights = variables.iter().map(|(variable, _)| (&variable.name[..], variable.var.as_tensor()));
    let gradients = variables.iter().filter_map(|(variable, gradient)| Some((&variable.name[..], (*gradient)?)));
    let tensors: Vec<_> = weights.chain(gradients).collect();
    lend_all::<M>(context, &tensors, |mut lent| {
        let (weights, gradients) = lent.split_at_mut(variables.len());
        let mut gradients = gradients.iter();
        let mut tensors = Vec::with_capacity(variables.len());
        for ((Variable { name, var, .. }, gradient), weights) in variables.iter().zip(weights) {
            let view = |gradient: &Tensor| {
                if gradient.shape() != var.shape() {
                    let (shape, other) = (var.dims(), gradient.dims());
                    let reason =
                        format!("the gradient of {name:?} has the shape {other:?}, and the variable {shape:?}");
                    return Err(gradsync::Error::InvalidArgument { operation: "step", reason });
                }
                let data = gradients.next().expect("lent behind the variables");
                TensorView::of(M::as_slice(data), var.dims().into())
            };
            let gradient = gradient.map(view).transpose()?;
            let weights = TensorViewMut::of(M::reborrow(weights), var.dims().into())?;
            tensors.push(TensorStep { name, weights, gradient });
        }
        step(tensors)
    })
}
