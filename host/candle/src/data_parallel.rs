//! [`DataParallel`]: `backward` with gradients that are reduced over ranks (PyTorch's DistributedDataParallel).

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{Storage, Tensor, TensorId, Var};
use gradsync::TensorView;
use gradsync::comm::Communicator;
use gradsync::memory::Host;
use gradsync::train::{
    AbsentGradients, GradientState, Parameter, Reduced, Reducer, ReducerOptions, Step, StepTimes, broadcast_parameters,
    compare_parameters,
};

use crate::error::{Error, Result, on_every_rank};
use crate::memory::{self, GROUP, TensorMemory, lend, storage_key};
use crate::variables::{Variable, Variables};

const BACKWARD: &str = "backward";

/// The variables of a model whose gradients are reduced over ranks; each rank has a copy of the model and its own data.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap, linear, loss::mse};
/// use gradsync::comm::{Ranks, local};
/// use gradsync::train::{ReducerOptions, Reduction};
/// use gradsync_candle::{DataParallel, Error};
///
/// let weights = local::run(2, |comm| {
///     let variables = VarMap::new();
///     let model = linear(3, 1, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
///     let mut parallel = DataParallel::new(&variables, &comm, ReducerOptions::from(Reduction::Mean))?;
///     parallel.broadcast()?; // every rank has made other random weights
///     let mut optimizer = AdamW::new_lr(variables.all_vars(), 0.1)?;
///     for step in 0..3 {
///         let examples = Tensor::full((step + comm.rank()) as f32, (4, 3), &Device::Cpu)?;
///         let loss = mse(&model.forward(&examples)?, &Tensor::ones((4, 1), DType::F32, &Device::Cpu)?)?;
///         let mut gradients = parallel.backward(&loss)?;
///         parallel.clip_gradients(&mut gradients, 1.0)?;
///         optimizer.step(&gradients)?;
///     }
///     parallel.compare()?; // all ranks have the same weights, bit for bit
///     Ok::<_, Error>(model.weight().flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Gradients
///
/// [`backward`](Self::backward) passes all gradients to a [`Reducer`], which copies them into buckets, and copies the reduced ones back to
/// the memory of candle's gradients: a step allocates only zeros for gradients that other ranks have and this one has not. One rank copies
/// nothing. Gradients are passed in the order in which candle computes them. On a GPU a second stream takes each gradient as soon as it is
/// computed, and reduces it while candle computes the others. On CPUs the reduction begins after candle has computed all gradients.
///
/// The gradient of a variable is absent from the store if no rank has one or if it is [declared as frozen](Variables::with_frozen):
/// candle's optimizers do not change such variables, not even by weight decay. A rank without a gradient where others have one counts as
/// zeros ([`AbsentGradients`]). A variable with two names is one variable.
///
/// # Errors on all ranks
///
/// If a rank cannot take part, because candle has refused an operation, or a gradient has another shape or dtype than its variable, every
/// rank's call returns an error: that rank its own, the others one that names the rank and quotes it. No gradient was reduced then, and the
/// next step can run. After errors of the communicator no step can run.
#[derive(Debug)]
pub struct DataParallel<'c, M: TensorMemory = Host> {
    // The reducer uses the streams of the context, and is dropped first.
    reducer: Reducer<'c, M>,
    context: M::Context,
    comm: &'c dyn Communicator<M>,
    variables: Variables,
    /// The number of each variable by its tensor; the number of its first name, if it has several.
    numbers: HashMap<TensorId, usize>,
    has_sums: bool,
}

impl<'c, M: TensorMemory> DataParallel<'c, M> {
    /// Creates it for the variables of a model, from a [`VarMap`](candle_nn::VarMap) or by [name](Variables), on the CPU or on the GPU of a
    /// communicator in device memory. All ranks must call it, with the same variables. They keep their values: see
    /// [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    /// All errors are returned on every rank: [`Error::Device`], [`Error::DType`], [`Error::Storage`] and [`Error::PerThreadStream`] on the
    /// rank where they occur, and [`Error::OtherRank`] on the others; errors of [`Reducer::new`], which name the variable and the ranks
    /// that differ in name, shape or dtype.
    pub fn new(
        variables: impl Into<Variables>,
        comm: &'c dyn Communicator<M>,
        options: impl Into<ReducerOptions>,
    ) -> Result<Self> {
        let (variables, options) = (variables.into(), options.into());
        let device = variables.as_slice().first().map_or(candle_core::Device::Cpu, |first| first.var.device().clone());
        let prepared = declare::<M>(&variables, &device)
            .and_then(|declared| Ok((declared, M::context(&device, options.overlap && comm.world_size() > 1)?)));
        let ((parameters, numbers), context) = on_every_rank(comm, prepared)?;
        let reducer = M::reducer(&context, comm, parameters, options)?;
        Ok(Self { reducer, context, comm, variables, numbers, has_sums: false })
    }

    /// The variables, by name.
    pub fn variables(&self) -> &Variables {
        &self.variables
    }

    /// The communicator.
    pub fn communicator(&self) -> &'c dyn Communicator<M> {
        self.comm
    }

    /// The names of the variables in each bucket, in the order in which buckets are reduced. The assignment is final after the second step.
    pub fn buckets(&self) -> Vec<Vec<&str>> {
        let name = |index: &usize| &self.variables.as_slice()[*index].name[..];
        self.reducer.buckets().map(|bucket| bucket.iter().map(name).collect()).collect()
    }

    /// Replaces all variables on every rank by the variables of rank 0, frozen ones included. It must be called once at the start: candle's
    /// generator for CPUs cannot be seeded, so the ranks' initial weights differ. The moments of candle's optimizers are zeros on all ranks
    /// at that time.
    ///
    /// # Errors
    /// The errors of [`broadcast_parameters`].
    pub fn broadcast(&self) -> Result<()> {
        self.in_groups(|names, data| {
            let mut tensors: Vec<_> = names.iter().copied().zip(data).collect();
            broadcast_parameters(self.comm, &mut tensors, 0)
        })
    }

    /// Refuses variables whose bits differ between ranks; for use at checkpoints, for example.
    ///
    /// # Errors
    /// The errors of [`compare_parameters`], on every rank, which name the ranks and the variable that differ.
    pub fn compare(&self) -> Result<()> {
        self.in_groups(|names, data| {
            let tensors: Vec<_> = names.iter().copied().zip(data.iter().map(M::as_slice)).collect();
            compare_parameters(self.comm, &tensors)
        })
    }

    /// Computes the gradients of a loss, reduced over ranks, for `optimizer.step`. Gradients of earlier [`accumulate`](Self::accumulate)
    /// calls are added. All ranks must call it.
    ///
    /// # Errors
    /// See [above](Self#errors-on-all-ranks); with [`AbsentGradients::Error`], an error that names a rank and a variable without gradient.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        let computed = self.compute(loss);
        if self.reduces_nothing() {
            return self.alone(computed?);
        }
        let step = self.reducer.step()?;
        self.has_sums = false;
        let (reduced, gradients) = end(&self.context, &self.variables, step, computed)?;
        self.take_back(&reduced, gradients)
    }

    /// Like [`backward`](Self::backward), for a loss that is a mean over a number of examples that may differ between ranks: with
    /// [`Reduction::Mean`](gradsync::train::Reduction::Mean) the result is the gradient of the mean over all ranks' examples
    /// ([`Reducer::step_of`]). `None` means that this rank has no more data; it continues to call this until the result is `None` on every
    /// rank, because all data are used up ([`UnevenEnds`](gradsync::train::UnevenEnds)).
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward).
    pub fn backward_of(&mut self, batch: Option<(&Tensor, usize)>) -> Result<Option<GradStore>> {
        let computed = match batch {
            Some((loss, _)) => self.compute(loss),
            None => Ok(Gradients { store: GradStore::default(), order: Vec::new() }),
        };
        let examples = batch.map_or(0, |(_, examples)| examples);
        if self.reduces_nothing() && examples > 0 {
            return self.alone(computed?).map(Some);
        }
        let Some(step) = self.reducer.step_of(examples)? else { return Ok(None) };
        self.has_sums = false;
        let (reduced, gradients) = end(&self.context, &self.variables, step, computed)?;
        self.take_back(&reduced, gradients).map(Some)
    }

    /// Adds the gradients of a micro-batch to the sums, in `f32` or wider and without communication (PyTorch's `no_sync`). The next
    /// [`backward`](Self::backward) reduces the sums. Nothing is divided by the number of micro-batches: divide the loss.
    ///
    /// # Errors
    /// On this rank alone: candle's errors, and the errors of [`Reducer::accumulate`].
    pub fn accumulate(&mut self, loss: &Tensor) -> Result<()> {
        let gradients = self.compute(loss)?;
        let Self { reducer, context, variables, .. } = self;
        let hand_in = gradients.hand_in(context, variables, |views| reducer.accumulate(views));
        self.has_sums = true;
        hand_in
    }

    /// Discards the gradients of the micro-batches since the last step.
    pub fn discard_accumulated(&mut self) {
        self.reducer.discard_accumulated();
        self.has_sums = false;
    }

    /// Chooses whether later steps record [when](Self::times) their buckets are reduced ([`Reducer::record_times`]).
    pub fn record_times(&mut self, records: bool) {
        self.reducer.record_times(records);
    }

    /// The course of the last step, since candle had enqueued its backward pass, if it was [recorded](Self::record_times).
    ///
    /// # Errors
    /// The errors of [`Reducer::times`].
    pub fn times(&self) -> Result<Option<StepTimes>> {
        Ok(self.reducer.times()?)
    }

    /// The context, and each variable once with its first name, for operations on reduced gradients.
    pub(crate) fn parts(&self) -> (&M::Context, impl Iterator<Item = (&str, &Var)>) {
        let first = |(number, variable): (usize, &'_ Variable)| self.numbers[&variable.var.id()] == number;
        let owned =
            self.variables.as_slice().iter().enumerate().filter(move |(number, variable)| first((*number, variable)));
        (&self.context, owned.map(|(_, variable)| (&variable.name[..], &variable.var)))
    }

    /// Passes all variables, each once, to `body`, a group at a time.
    fn in_groups(&self, mut body: impl FnMut(&[&str], Vec<M::SliceMut<'_>>) -> gradsync::Result<()>) -> Result<()> {
        let (context, owned) = self.parts();
        let tensors: Vec<(&str, &Tensor)> = owned.map(|(name, var)| (name, var.as_tensor())).collect();
        for group in tensors.chunks(GROUP) {
            let names: Vec<&str> = group.iter().map(|(name, _)| *name).collect();
            lend::<M, _>(context, group, |data| body(&names, data))?;
        }
        Ok(())
    }

    /// Whether candle's gradients are the result without a reduction.
    fn reduces_nothing(&self) -> bool {
        self.comm.world_size() == 1 && !self.has_sums
    }

    /// The gradients of a single rank.
    fn alone(&self, gradients: Gradients) -> Result<GradStore> {
        if self.reducer.options().absent == AbsentGradients::Error {
            let wanted = |(number, variable): &(usize, &Variable)| {
                variable.is_trained
                    && self.numbers[&variable.var.id()] == *number
                    && gradients.store.get(&variable.var).is_none()
            };
            if let Some((number, Variable { name, .. })) = self.variables.as_slice().iter().enumerate().find(wanted) {
                let reason = format!("parameter {number}, {name:?}, has no gradient on rank 0");
                return Err(gradsync::Error::InvalidArgument { operation: BACKWARD, reason }.into());
            }
        }
        Ok(gradients.store)
    }

    /// Computes candle's gradients, for trained variables alone, in the order in which they were computed, each with its own storage.
    fn compute(&self, loss: &Tensor) -> Result<Gradients> {
        let mut store = loss.backward()?;
        let variables = self.variables.as_slice();
        for variable in variables.iter().filter(|variable| !variable.is_trained) {
            store.remove(&variable.var);
        }
        let mut order = Vec::new();
        let mut keys = HashSet::new();
        for number in loss.sorted_nodes().into_iter().filter_map(|node| self.numbers.get(&node.id()).copied()) {
            let Variable { name, var, .. } = &variables[number];
            let Some(gradient) = store.get(var) else { continue };
            if gradient.dtype() != var.dtype() || gradient.shape() != var.shape() {
                let reason = format!(
                    "the gradient of {name:?} has the shape {:?} and the dtype {:?}, and the variable {:?} and {:?}",
                    gradient.dims(),
                    gradient.dtype(),
                    var.dims(),
                    var.dtype(),
                );
                return Err(gradsync::Error::InvalidArgument { operation: BACKWARD, reason }.into());
            }
            // Gradients of candle 0.11 are results of operations with their own storages; others are copied.
            if !keys.insert(storage_key(gradient)) || !gradient.is_contiguous() {
                let own = gradient.force_contiguous()?;
                keys.insert(storage_key(&own));
                store.insert(var, own);
            }
            order.push(number);
        }
        Ok(Gradients { store, order })
    }

    /// Copies reduced gradients to the memory of candle's gradients.
    fn take_back(&self, reduced: &Reduced, gradients: Gradients) -> Result<GradStore> {
        let Gradients { mut store, .. } = gradients;
        let variables = self.variables.as_slice();
        let has_result =
            |number: &usize| self.reducer.owner(*number) == *number && reduced.state(*number) == GradientState::Reduced;
        let numbers: Vec<usize> = (0..variables.len()).filter(has_result).collect();
        for group in numbers.chunks(GROUP) {
            for &number in group {
                let Variable { var, .. } = &variables[number];
                if store.get(var).is_none() {
                    store.insert(var, var.zeros_like()?);
                }
            }
            let tensors: Vec<(&str, &Tensor)> = group
                .iter()
                .map(|&number| (&variables[number].name[..], store.get(&variables[number].var).expect("inserted")))
                .collect();
            lend::<M, _>(&self.context, &tensors, |data| {
                let mut destinations: Vec<_> = group.iter().copied().zip(data).collect();
                self.reducer.copy_gradients(&mut destinations)
            })?;
        }
        Ok(store)
    }
}

/// The gradients of this rank.
struct Gradients {
    store: GradStore,
    /// The numbers of the variables with a gradient.
    order: Vec<usize>,
}

impl Gradients {
    fn hand_in<M: TensorMemory>(
        &self,
        context: &M::Context,
        variables: &Variables,
        mut take: impl FnMut(&[(usize, TensorView<'_, M>)]) -> gradsync::Result<()>,
    ) -> Result<()> {
        let variables = variables.as_slice();
        for group in self.order.chunks(GROUP) {
            let tensors: Vec<(&str, &Tensor)> = group
                .iter()
                .map(|&number| (&variables[number].name[..], self.store.get(&variables[number].var).expect("computed")))
                .collect();
            lend::<M, _>(context, &tensors, |data| {
                let mut views = Vec::with_capacity(data.len());
                for ((&number, (_, tensor)), data) in group.iter().zip(&tensors).zip(&data) {
                    views.push((number, TensorView::of(M::as_slice(data), tensor.dims().into())?));
                }
                take(&views)
            })?;
        }
        Ok(())
    }
}

/// Passes the gradients of this rank and ends the step, on every rank alike.
fn end<M: TensorMemory>(
    context: &M::Context,
    variables: &Variables,
    mut step: Step<'_, '_, M>,
    computed: Result<Gradients>,
) -> Result<(Reduced, Gradients)> {
    let handed_in = computed.and_then(|gradients| {
        gradients.hand_in(context, variables, |views| step.ready_all(views))?;
        Ok(gradients)
    });
    match handed_in {
        Ok(gradients) => Ok((step.finish()?, gradients)),
        Err(error) => Err(step.refuse(error.into_gradsync(BACKWARD)).into()),
    }
}

type Numbers = HashMap<TensorId, usize>;

/// The parameters of the reducer, in the order of the variables, and the number of each variable's first name.
fn declare<M: TensorMemory>(variables: &Variables, device: &candle_core::Device) -> Result<(Vec<Parameter>, Numbers)> {
    let mut numbers = HashMap::new();
    let mut parameters = Vec::new();
    for (number, Variable { name, var, is_trained }) in variables.as_slice().iter().enumerate() {
        if !M::has(var.device(), device) {
            let wanted = M::name(device);
            return Err(Error::Device { name: name.clone(), found: var.device().location(), wanted });
        }
        let Some(dtype) = memory::dtype(var.dtype()) else {
            return Err(Error::DType { name: name.clone(), dtype: var.dtype() });
        };
        if !var.is_contiguous() {
            let shape = var.dims().to_vec();
            return Err(Error::Storage { name: name.clone(), shape, reason: "is not contiguous" });
        }
        numbers.entry(var.id()).or_insert(number);
        let parameter = Parameter::new(name.clone(), var.dims(), dtype).with_trained(*is_trained);
        parameters.push(parameter.with_storage(Some(bytes(var))));
    }
    Ok((parameters, numbers))
}

/// An address range that two names share if they are one variable. A storage of candle belongs to one variable as a whole, so the address
/// of its description serves as well as the address of its elements.
fn bytes(var: &Var) -> std::ops::Range<u64> {
    let key = storage_key(var) as u64;
    key..key + size_of::<Storage>() as u64
}
