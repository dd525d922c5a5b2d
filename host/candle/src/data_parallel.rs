//! [`DataParallel`]: `backward` with gradients that are reduced over ranks (PyTorch's DistributedDataParallel).

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{Storage, Tensor, TensorId, Var};
use gradsync::TensorView;
use gradsync::comm::{Communicator, Operation};
use gradsync::internal::all_prepared;
use gradsync::memory::Host;
use gradsync::train::{
    AbsentGradients, GradientState, NonFinite, NonFiniteGradient, OptimizerOptions, Parameter, Reduced, Reducer, Start,
    StepTimes,
};

use crate::declared::{Declared, shared_by_threads};
use crate::error::{Error, Result};
use crate::memory::{TensorMemory, lend, storage_key};
use crate::optimizer::{Optimizer, check_variable, lend_step, updated};
use crate::options::DataParallelOptions;
use crate::variables::{Variable, Variables};

const BACKWARD: &str = "backward";

/// The variables of a model whose gradients are reduced over ranks; each rank has a copy of the model and its own data.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap, linear, loss::mse};
/// use gradsync::comm::{Ranks, local};
/// use gradsync::train::Reduction;
/// use gradsync_candle::{DataParallel, Error};
///
/// let weights = local::try_run(2, |comm| {
///     let variables = VarMap::new();
///     let model = linear(3, 1, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
///     // Every rank has made other random weights; all continue with rank 0's.
///     let mut parallel = DataParallel::new(&variables, &comm, Reduction::Mean)?;
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
/// nothing. [`step`](Self::step) copies none back: its optimizer reads them in the buckets. Gradients are passed in the order in which
/// candle computes them. On a GPU a second stream takes each gradient as soon as it is computed, and reduces it while candle computes the
/// others. On CPUs the reduction begins after candle has computed all gradients.
///
/// The gradient of a variable is absent from the store if no rank has one or if it is [declared as frozen](Variables::with_frozen):
/// candle's optimizers do not change such variables, not even by weight decay. A rank without a gradient where others have one counts as
/// zeros; a rank without any, while others have some, is an error ([`AbsentGradients`](gradsync::train::AbsentGradients)). A variable with
/// two names is one variable. [`NonFinite`](gradsync::train::NonFinite) says what becomes of gradients with NaN or infinities.
///
/// # Memory
///
/// Besides candle's gradients, the buckets and sums of a reducer: see [`Reducer`], "Memory".
///
/// # Variables of the graph
///
/// A loss may depend on variables that were [declared](Variables), and on variables of other `DataParallel`s of this process, whose
/// gradients are removed from the store: a generator's loss passes through the critic's variables, and its optimizer changes none of them.
/// Any other variable is an error that describes it, since each rank would train it alone: the weight of a layer that was made after `new`,
/// for example. A variable that a rank shall train alone is [declared as local](Variables::with_local), and its gradient stays in the store
/// as candle has computed it.
///
/// # Errors on all ranks
///
/// If a rank cannot take part, because candle has refused an operation, its loss depends on a variable that was not declared, or a gradient
/// has another shape or dtype than its variable, every rank's call returns an error: that rank its own, the others one that names the rank
/// and quotes it. No gradient was reduced then, and the next step can run. After errors of the communicator no step can run.
#[derive(Debug)]
pub struct DataParallel<'c, M: TensorMemory = Host> {
    // The reducer uses the streams of the context, and is dropped first.
    reducer: Reducer<'c, M>,
    context: M::Context,
    comm: &'c dyn Communicator<M>,
    variables: Variables,
    /// The number of each variable by its tensor; the number of its first name, if it has several.
    numbers: HashMap<TensorId, usize>,
    declared: Declared,
    /// For each variable, whether threads that are ranks share it.
    is_shared: Vec<bool>,
    /// For each variable, whether a step had a gradient of it, on any rank.
    had_gradient: Vec<bool>,
    non_finite: Option<NonFiniteGradient>,
    has_sums: bool,
}

impl<'c, M: TensorMemory> DataParallel<'c, M> {
    /// Creates it for the variables of a model, from a [`VarMap`](candle_nn::VarMap) or by [name](Variables), on the CPU or on the GPU of a
    /// communicator in device memory. All ranks must call it, with the same variables. Every rank then takes rank 0's values, of frozen
    /// variables too, in place and without a copy of the model: candle's generator for CPUs cannot be seeded, so initial weights differ.
    /// [`Start::Compare`] refuses other values instead.
    ///
    /// # Errors
    /// All errors are returned on every rank: [`Error::Device`], [`Error::DType`], [`Error::Storage`] and [`Error::PerThreadStream`] on the
    /// rank where they occur, and on the others an error that quotes it; errors of [`Reducer::new`], which name the variable and the ranks
    /// that differ in name, shape or dtype; an error for ranks that are threads and share a variable, unless it is frozen and all share it;
    /// the errors of [`broadcast`](Self::broadcast) or, for all variables, of [`compare`](Self::compare).
    pub fn new(
        variables: impl Into<Variables>,
        comm: &'c dyn Communicator<M>,
        options: impl Into<DataParallelOptions>,
    ) -> Result<Self> {
        let (variables, DataParallelOptions { reducer: options, start }) = (variables.into(), options.into());
        let device = variables.reduced().first().map_or(candle_core::Device::Cpu, |first| first.var.device().clone());
        let prepared = declare::<M>(&variables, &device)
            .and_then(|declared| Ok((declared, M::context(&device, options.overlap && comm.world_size() > 1)?)));
        let ((parameters, numbers), context) = all_prepared(Operation::Reducer, comm, prepared)?;
        let reducer = M::reducer(&context, comm, parameters, options)?;
        let is_shared = shared_by_threads("DataParallel::new", comm, &variables)?;
        let parallel = Self {
            reducer,
            context,
            comm,
            declared: Declared::new(&variables),
            variables,
            numbers,
            had_gradient: vec![false; is_shared.len()],
            is_shared,
            non_finite: None,
            has_sums: false,
        };
        match start {
            Start::Compare => parallel.compare_all()?,
            _ => parallel.broadcast()?,
        }
        Ok(parallel)
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
        let name = |index: &usize| &self.variables.reduced()[*index].name[..];
        self.reducer.buckets().map(|bucket| bucket.iter().map(name).collect()).collect()
    }

    /// Sets the number of the next step, which ranks compare, so that a rank that has left out a step is an error on every rank: see
    /// [`Reducer::at`]. The number of the program's step is one: `parallel.at(step).backward(&loss)`.
    pub fn at(&mut self, number: u64) -> &mut Self {
        self.reducer.at(number);
        self
    }

    /// Computes the gradients of a loss, reduced over ranks, for `optimizer.step`. Gradients of earlier [`accumulate`](Self::accumulate)
    /// calls are added. All ranks must call it.
    ///
    /// # Errors
    /// See [above](Self#errors-on-all-ranks), among them a variable that [was not declared](Self#variables-of-the-graph); the errors of
    /// [`Step::finish`](gradsync::train::Step::finish), which depend on the options.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        let computed = self.compute(loss);
        let reduced = self.reduce(computed, None)?.expect("a step without numbers of examples has gradients");
        self.take_back(reduced)
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
        let reduced = self.reduce(computed, Some(batch.map_or(0, |(_, examples)| examples)))?;
        reduced.map(|reduced| self.take_back(reduced)).transpose()
    }

    /// Computes the gradients of a loss, reduces them over ranks, and makes a step of an optimizer, which reads them where they were reduced:
    /// nothing is copied back. The norm, clipping and skipped steps are the same on all ranks. Gradients of earlier
    /// [`accumulate`](Self::accumulate) calls are added. All ranks must call it.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{Module, VarBuilder, VarMap, linear, loss::mse};
    /// # use gradsync::comm::local;
    /// # use gradsync::train::Reduction;
    /// # use gradsync_candle::{AdamW, DataParallel, Error};
    /// # local::try_run(2, |comm| {
    /// # let variables = VarMap::new();
    /// # let model = linear(3, 1, VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu))?;
    /// # let examples = Tensor::ones((4, 3), DType::F32, &Device::Cpu)?;
    /// let mut parallel = DataParallel::new(&variables, &comm, Reduction::Mean)?;
    /// let mut optimizer = AdamW::new(&variables, 0.1)?;
    /// for step in 0..3 {
    ///     let loss = mse(&model.forward(&examples)?, &Tensor::ones((4, 1), DType::F32, &Device::Cpu)?)?;
    ///     parallel.at(step).step(&loss, &mut optimizer)?;
    /// }
    /// # Ok::<_, Error>(())
    /// # })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// Gradients that are not finite are an error of the optimizer on every rank, or with a [`LossScaler`](gradsync::train::LossScaler) a
    /// skipped step; with [`NonFinite::Error`](gradsync::train::NonFinite::Error) and [`NonFinite::Skip`](gradsync::train::NonFinite::Skip)
    /// the optimizer makes no step then, and its scaler is not told. With a scaler multiply each loss by
    /// [`loss_scale`](gradsync::train::Optimizer::loss_scale).
    ///
    /// # Errors
    /// The errors of [`backward`](Self::backward); on all ranks, an optimizer of other variables than those that all ranks train, which the
    /// error names; the errors of [`Optimizer::step`](crate::Optimizer::step).
    pub fn step<O: OptimizerOptions>(&mut self, loss: &Tensor, optimizer: &mut Optimizer<O, M>) -> Result<()> {
        let computed = self.compute(loss).and_then(|gradients| {
            optimizer.check_variables("step", &self.variables)?;
            Ok(gradients)
        });
        let (Gradients { store, .. }, reduced) =
            self.reduce(computed, None)?.expect("a step without numbers of examples has gradients");
        if let Some(reduced) = &reduced {
            self.note(reduced);
            if reduced.non_finite().is_some() {
                return Ok(());
            }
        }
        let Self { reducer, context, variables, comm, .. } = self;
        // Only one rank can have a result that is in candle's memory.
        let own = |variable: &Variable| (comm.world_size() == 1).then(|| store.get(&variable.var)).flatten();
        let tensors: Vec<_> = updated(variables).into_iter().map(|variable| (variable, own(variable))).collect();
        let optimizer = optimizer.within(context);
        lend_step(context, &tensors, |tensors| match &reduced {
            Some(_) => reducer.update(optimizer, tensors),
            None => optimizer.step_tensors(tensors),
        })
    }

    /// Reduces the gradients of this rank, in a step that all ranks begin and end alike; `None` if no rank has more examples. Without an
    /// outcome of the reducer the gradients are the result.
    fn reduce(
        &mut self,
        computed: Result<Gradients>,
        examples: Option<usize>,
    ) -> Result<Option<(Gradients, Option<Reduced>)>> {
        if self.reduces_nothing() && examples != Some(0) {
            return Ok(Some((computed?, None)));
        }
        let mut step = match examples {
            None => self.reducer.step()?,
            Some(examples) => match self.reducer.step_of(examples)? {
                Some(step) => step,
                None => return Ok(None),
            },
        };
        self.has_sums = false;
        let handed_in = computed.and_then(|gradients| {
            gradients.hand_in(&self.context, &self.variables, |views| step.ready_all(views))?;
            Ok(gradients)
        });
        match handed_in {
            Ok(gradients) => {
                let reduced = step.finish()?;
                Ok(Some((gradients, Some(reduced))))
            }
            Err(error) => Err(step.refuse(error.into_gradsync(BACKWARD)).into()),
        }
    }

    /// Adds the gradients of a micro-batch to the sums, in `f32` or wider and without communication (PyTorch's `no_sync`). The next
    /// [`backward`](Self::backward) reduces the sums. Nothing is divided by the number of micro-batches: divide the loss.
    ///
    /// # Errors
    /// On this rank alone: candle's errors, a variable that [was not declared](Self#variables-of-the-graph), and the errors of
    /// [`Reducer::accumulate`]. The sums are unchanged then.
    pub fn accumulate(&mut self, loss: &Tensor) -> Result<()> {
        let gradients = self.compute(loss)?;
        self.has_sums = true;
        let Self { reducer, context, variables, .. } = self;
        gradients.hand_in(context, variables, |views| reducer.accumulate(views))
    }

    /// Discards the gradients of the micro-batches since the last step.
    pub fn discard_accumulated(&mut self) {
        self.reducer.discard_accumulated();
        self.has_sums = false;
    }

    /// The reason why the last step has no gradients on any rank, with
    /// [`NonFinite::Skip`](gradsync::train::NonFinite::Skip): a gradient with NaN or infinities. The number of its parameter counts in the
    /// order of [`Variables::iter`].
    pub fn non_finite(&self) -> Option<NonFiniteGradient> {
        self.non_finite
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

    /// The context, and each reduced variable once with its number and its first name, for operations on variables and gradients.
    pub(crate) fn parts(&self) -> (&M::Context, impl Iterator<Item = (usize, &Variable)>) {
        let is_first = |(number, variable): &(usize, &Variable)| self.numbers[&variable.var.id()] == *number;
        (&self.context, self.variables.reduced().iter().enumerate().filter(is_first))
    }

    /// Whether candle's gradients are the result as they are: on a single GPU, unless the options need a look at them.
    fn reduces_nothing(&self) -> bool {
        let options = self.reducer.options();
        let looks = M::HOST_WAITS
            || options.absent == AbsentGradients::Error
            || matches!(options.non_finite, NonFinite::Error | NonFinite::Skip);
        self.comm.world_size() == 1 && !self.has_sums && !looks
    }

    /// Whether threads that are ranks share a variable, by its number.
    pub(crate) fn is_shared(&self, number: usize) -> bool {
        self.is_shared[number]
    }

    /// Whether gradients change a variable, by its number: it is declared as trained, and has had a gradient, once any variable has.
    pub(crate) fn is_trained(&self, number: usize) -> bool {
        let had_gradient = self.had_gradient[number] || !self.had_gradient.contains(&true);
        self.variables.reduced()[number].is_trained() && had_gradient
    }

    /// Computes candle's gradients, for trained variables alone, in the order in which they were computed, each with its own storage.
    fn compute(&self, loss: &Tensor) -> Result<Gradients> {
        let nodes = loss.sorted_nodes();
        let others = self.declared.others(BACKWARD, &self.variables, &nodes)?;
        let mut store = loss.backward()?;
        let variables = self.variables.reduced();
        let frozen =
            variables.iter().filter(|variable| !variable.is_trained()).map(|variable| variable.var.as_tensor());
        for variable in frozen.chain(others) {
            store.remove(variable);
        }
        let mut order = Vec::new();
        let mut keys = HashSet::new();
        for number in nodes.into_iter().filter_map(|node| self.numbers.get(&node.id()).copied()) {
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

    /// Notes the outcome of a step.
    fn note(&mut self, reduced: &Reduced) {
        self.non_finite = reduced.non_finite();
        for (number, had_gradient) in self.had_gradient.iter_mut().enumerate() {
            *had_gradient |= reduced.state(number).has_gradient();
        }
    }

    /// Copies reduced gradients to the memory of candle's gradients, and removes gradients of variables without a result.
    fn take_back(&mut self, (gradients, reduced): (Gradients, Option<Reduced>)) -> Result<GradStore> {
        let Gradients { mut store, .. } = gradients;
        let Some(reduced) = reduced else { return Ok(store) };
        self.note(&reduced);
        let variables = self.variables.reduced();
        let mut with_result = Vec::new();
        for (number, Variable { var, .. }) in variables.iter().enumerate() {
            match reduced.state(number) {
                state if !state.has_gradient() => drop(store.remove(var)),
                state => {
                    let is_first = self.reducer.owner(number) == number;
                    with_result.extend((is_first && state == GradientState::Reduced).then_some(number));
                }
            }
        }
        for &number in &with_result {
            let Variable { var, .. } = &variables[number];
            if store.get(var).is_none() {
                store.insert(var, var.zeros_like()?);
            }
        }
        lend::<M>(&self.context, &tensors(variables, &store, &with_result), |begin, data| {
            let mut destinations: Vec<_> = with_result[begin..].iter().copied().zip(data).collect();
            self.reducer.copy_gradients(&mut destinations)
        })?;
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
        let tensors = tensors(variables.reduced(), &self.store, &self.order);
        lend::<M>(context, &tensors, |begin, data| {
            let mut views = Vec::with_capacity(data.len());
            for (number, data) in (begin..).zip(&data) {
                let shape = tensors[number].1.dims().into();
                views.push((self.order[number], TensorView::of(M::as_slice(data), shape)?));
            }
            take(&views)
        })
    }
}

/// The gradients of the variables with these numbers, which have one, by name.
fn tensors<'g>(variables: &'g [Variable], store: &'g GradStore, numbers: &[usize]) -> Vec<(&'g str, &'g Tensor)> {
    let gradient = |&number: &usize| {
        let Variable { name, var, .. } = &variables[number];
        (&name[..], store.get(var).expect("it has a gradient"))
    };
    numbers.iter().map(gradient).collect()
}

type Numbers = HashMap<TensorId, usize>;

/// The parameters of the reducer, in the order of the variables, and the number of each variable's first name.
fn declare<M: TensorMemory>(variables: &Variables, device: &candle_core::Device) -> Result<(Vec<Parameter>, Numbers)> {
    let mut numbers = HashMap::new();
    let mut parameters = Vec::new();
    for (number, variable) in variables.reduced().iter().enumerate() {
        let Variable { name, var, .. } = variable;
        let dtype = check_variable::<M>(variable, device)?;
        numbers.entry(var.id()).or_insert(number);
        let parameter = Parameter::new(name.clone(), var.dims(), dtype).with_trained(variable.is_trained());
        parameters.push(parameter.with_storage(Some(bytes(var))));
    }
    if let Some(Variable { name, var, .. }) =
        variables.local().iter().find(|local| numbers.contains_key(&local.var.id()))
    {
        let shape = var.dims().to_vec();
        return Err(Error::Storage { name: name.clone(), shape, reason: "is local, and has another name that is not" });
    }
    Ok((parameters, numbers))
}

/// An address range that two names share if they are one variable. A storage of candle belongs to one variable as a whole, so the address
/// of its description serves as well as the address of its elements.
fn bytes(var: &Var) -> std::ops::Range<u64> {
    let key = storage_key(var) as u64;
    key..key + size_of::<Storage>() as u64
}
