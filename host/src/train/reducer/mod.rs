//! [`Reducer`]: data parallelism for programs that compute gradients by any means (PyTorch's DistributedDataParallel).
//!
//! | file | contents |
//! |---|---|
//! | `parameter` | the description of parameters, and the detection of tied ones |
//! | `options` | the options of a reducer |
//! | `bucket` | the memory of gradients that are reduced together |
//! | `memory` | the differences of host memory and GPUs |
//! | `begin` | the begin of a step, and its number |
//! | `step` | one step, from the first gradient to the last reduction |
//! | `vote` | the comparison of the ranks' steps at their end |
//! | `report` | the outcome of a step |
//! | `times` | when its buckets were reduced |
//!
//! `plan::buckets` assigns gradients to buckets; the reductions are operations of [`ops`](crate::ops).

mod begin;
mod bucket;
#[cfg(feature = "cuda")]
mod cuda;
mod memory;
mod options;
mod parameter;
mod report;
mod step;
mod times;
mod vote;

use self::bucket::{Bucket, BucketKind, GradientPlace, unpack};
use self::memory::HostLanes;
pub use self::memory::ReducerMemory;
pub use self::options::{AbsentGradients, BucketMemory, NonFinite, ReducerOptions, UnevenEnds};
pub use self::parameter::Parameter;
pub use self::report::{GradientState, NonFiniteGradient, Reduced};
use self::step::Progress;
pub use self::step::Step;
use self::times::Moments;
pub use self::times::{BucketTimes, StepTimes};
use super::{Optimizer, OptimizerMemory, OptimizerOptions, Reduction, TensorStep};
use crate::call::{Value, scope};
use crate::call_comparison::{ComparedCall, agree, all_prepared};
use crate::comm::Communicator;
use crate::error::{Error, Operation, Result, same_len};
use crate::memory::{Host, TensorView};
use crate::plan::buckets;

const OPERATION: &str = "reducer";

/// Reduces the gradients of a model over ranks, step by step, while they are computed.
///
/// Parameters are numbered in the order of their declaration, ideally the order in which their gradients appear, which is about the order
/// of the layers, last first. A step takes each gradient as soon as it is computed, and returns all of them reduced. The reducer sees no
/// weights: they have to be equal on all ranks before the first step.
///
/// ```
/// use gradsync::comm::{Ranks, local};
/// use gradsync::train::{GradientState, Parameter, Reducer, ReducerOptions, Reduction, broadcast_parameters};
/// use gradsync::{DType, TensorView};
///
/// let means = local::run(2, |comm| {
///     // Every rank has made other random weights, and takes the weights of rank 0.
///     let (mut bias, mut weight) = (vec![comm.rank() as f32; 2], vec![comm.rank() as f32; 6]);
///     broadcast_parameters(&comm, &mut [("bias", (&mut bias).into()), ("weight", (&mut weight).into())], 0)?;
///
///     let parameters = [Parameter::new("bias", [2], DType::F32), Parameter::new("weight", [2, 3], DType::F32)];
///     let mut reducer = Reducer::new(&comm, parameters, ReducerOptions::from(Reduction::Mean))?;
///     for _ in 0..3 {
///         let value = comm.rank() as f32;
///         let (bias, weight) = ([value; 2], [2.0 * value; 6]);
///         let mut step = reducer.step()?;
///         step.ready(0, &bias)?;
///         step.ready(1, TensorView::new(&weight, vec![2, 3])?)?;
///         let reduced = step.finish()?;
///         assert_eq!(reduced.state(1), GradientState::Reduced);
///     }
///     reducer.gradient(1).expect("there are two ranks").to_vec::<f32>()
/// })?;
/// assert_eq!(means, [[1.0; 6], [1.0; 6]]);
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// # Buckets
///
/// Gradients are copied into buckets, one copy each; [`Step::gradient_mut`] returns the memory in the bucket instead, for programs that can
/// compute a gradient there. A bucket is reduced as soon as its last gradient is in, in one order on all ranks: the order of the
/// gradients in the first complete step, on the lowest rank that had data in it. Ranks whose gradients appear in another order keep a
/// full bucket until its turn. The first step reduces all buckets at its end, and agrees on the order; the second reassigns the buckets,
/// if the order requires it. On host memory a bucket is reduced by the call that completes it. On GPUs it is reduced in a separate queue,
/// and [`Step::finish`] makes the queue of the gradients wait for it, not the host.
///
/// With one rank nothing is copied and nothing is launched: the gradients that were passed are the result ([`GradientState::Unchanged`]), and
/// [`gradient`](Self::gradient) returns `None`.
///
/// # Absent gradients
///
/// | a parameter that | is | its gradient |
/// |---|---|---|
/// | was declared as not trained | [`NotTrained`](GradientState::NotTrained) | unchanged |
/// | no rank has used in this step | [`Skipped`](GradientState::Skipped) | unchanged: the optimizer must not change parameter and state either |
/// | some ranks have not used in this step | [`Reduced`](GradientState::Reduced) | zeros on these ranks, or an error on all ([`AbsentGradients`]) |
///
/// A rank that has examples and no gradient at all is an error on all ranks, unless the options allow it.
///
/// # Numerics
///
/// Adasum, and sums and means on host memory or [in rank order](ReducerOptions::ordered_sums), have bits that depend on the gradients and
/// the ranks alone, and not on buckets, their order or the order of the gradients. A gradient is rounded to the wire's dtype once, and its
/// reduction once more. NCCL's own sums depend on the length of the bucket.
///
/// # Memory
///
/// Besides the gradients that are handed in, a reducer of several ranks takes, for `n` elements of trained parameters:
///
/// | memory | bytes |
/// |---|---|
/// | buckets, from the first step on | `n` × the size of the dtype on the wire |
/// | sums over micro-batches, from the first [`accumulate`](Self::accumulate) on, where the wire's dtype is narrower than `f32` | `n` × 4; otherwise the buckets hold the sums |
/// | Adasum and [ordered sums](ReducerOptions::ordered_sums) on GPUs | up to the buckets' bytes, for the vectors of other ranks |
///
/// Rounding adds less than a chunk for each tensor and for each rank of a bucket: 512 elements, and 8192 for tensors of a million. So a model
/// of 100 million parameters takes 400 MB with gradients in `f32`; with `bf16` on the wire 200 MB, and with micro-batches 600 MB. One rank
/// takes memory only for sums.
///
/// # Errors on all ranks
///
/// Ranks compare the numbers of their steps, also where steps are [alike](ReducerOptions::static_graph): a step that one rank has left and
/// begun again is an error of all ranks. [`at`](Self::at) makes them the numbers of the program's steps.
///
/// A failure of one rank's step is an error of [`Step::finish`] on every rank, which names the rank, and ends the step without a result: no
/// gradient outside the reducer has changed then, and the next step can run. A rank that drops its step early causes such an error too.
/// Errors of the communicator end the reducer.
#[derive(Debug)]
pub struct Reducer<'c, M: ReducerMemory = Host> {
    comm: &'c dyn Communicator<M>,
    lanes: M::Lanes,
    options: ReducerOptions,
    /// The reduction, with the algorithm of Adasum for all buckets.
    reduction: Reduction,
    parameters: Vec<Parameter>,
    /// For each parameter the first parameter that it is tied to; itself, if it is tied to none.
    owners: Vec<usize>,
    /// The positions of trained parameters in the buckets.
    places: Vec<Option<GradientPlace>>,
    buckets: Vec<Bucket<'c, M>>,
    order: Order,
    /// The outcome of the last assignment to buckets, until the ranks have prepared their reductions.
    unprepared: Option<Result<()>>,
    /// The number of the last step, and of the next one.
    number: u64,
    next_number: u64,
    /// The step that has begun and not ended.
    under_way: Option<Progress>,
    /// A gradient of the last step that was not finite, until it is reported.
    reported: Option<NonFiniteGradient>,
    /// The last step with an [`update`](Self::update), whose optimizer has looked at all gradients.
    updated: Option<u64>,
    /// The step and the parameter of a gradient that was not finite in buckets that are no more, until the next step.
    found: Option<(u64, usize)>,
    /// For each parameter, whether it has a sum over micro-batches.
    accumulated: Vec<bool>,
    states: Vec<GradientState>,
    /// The gradients that this rank had in its first step, and the resulting states, if steps have to be alike.
    fixed: Option<(Vec<bool>, Vec<GradientState>)>,
    records_times: bool,
    /// The moments of the last step, or of the step under way.
    moments: Option<Moments<M>>,
}

/// The ranks' agreement on the order in which gradients appear.
#[derive(Debug, PartialEq, Eq)]
enum Order {
    Unknown,
    /// The agreed order, which the buckets do not have yet.
    Agreed(Vec<usize>),
    OfBuckets,
}

impl<'c> Reducer<'c> {
    /// Creates a reducer of gradients in host memory, for these parameters. All ranks must call it, with the same parameters in the same
    /// order.
    ///
    /// # Errors
    /// All errors are returned on every rank:
    /// * [`Error::Disagreement`] naming the parameter and two ranks that differ in its name, shape, dtype or in whether it is trained or
    ///   tied; or the option in which they differ;
    /// * [`Error::InvalidArgument`] for names that occur twice, storages that overlap and are not equal, tied parameters that differ, and
    ///   Adasum of another granularity than [`Tensor`](crate::ops::Granularity::Tensor); [`Error::UnsupportedWorldSize`] for Adasum by the
    ///   tree; [`Error::OutOfMemory`]; with [`BucketMemory::Shared`] also ranks that share no memory ([`Error::InvalidArgument`]), and
    ///   [`Error::MemoryFile`]; each on the rank that fails, and on the others [`Error::InvalidArgument`] that quotes it;
    /// * errors of the communicator.
    pub fn new(
        comm: &'c dyn Communicator,
        parameters: impl IntoIterator<Item = Parameter>,
        options: impl Into<ReducerOptions>,
    ) -> Result<Self> {
        let options = options.into();
        Self::with_lanes(comm, HostLanes::new(comm, options.shared_memory), parameters, options)
    }

    /// Whether buckets are in memory that all ranks, which are processes, reduce in place ([`ReducerOptions::shared_memory`]); equal on all
    /// ranks.
    pub fn shares_memory(&self) -> bool {
        self.lanes.is_shared()
    }
}

impl<'c, M: ReducerMemory> Reducer<'c, M> {
    fn with_lanes(
        comm: &'c dyn Communicator<M>,
        lanes: Result<M::Lanes>,
        parameters: impl IntoIterator<Item = Parameter>,
        options: ReducerOptions,
    ) -> Result<Self> {
        let _scope = scope::within(Operation::Reducer);
        let parameters: Vec<Parameter> = parameters.into_iter().collect();
        let checked = options.check(comm.world_size()).and_then(|()| parameter::check(&parameters));
        let mut lines = options.lines();
        lines.extend(parameter::lines(&parameters, checked.as_deref().unwrap_or_default()));
        let lines: Vec<(&str, Value<'_>)> = lines.iter().map(|(label, value)| (&label[..], *value)).collect();
        let prepared = checked.and_then(|owners| lanes.map(|lanes| (owners, lanes)));
        let (owners, lanes) = match comm.world_size() {
            1 => prepared?,
            _ => agree(comm, &ComparedCall { lines: &lines, ..ComparedCall::of(Operation::Reducer) }, prepared)?,
        };
        let count = parameters.len();
        let owned = |index: &usize| owners[*index] == *index && parameters[*index].is_trained;
        let order: Vec<usize> = (0..count).filter(owned).collect();
        let bytes = order
            .iter()
            .map(|&index| {
                parameters[index].len() * options.dtype_of(parameters[index].dtype, comm.world_size()).size_bytes()
            })
            .sum();
        let reduction = options.decided(comm.world_size(), bytes, comm.sharing().is_some());
        let mut reducer = Self {
            comm,
            lanes,
            options,
            reduction,
            parameters,
            owners,
            places: vec![None; count],
            buckets: Vec::new(),
            order: Order::Unknown,
            unprepared: None,
            number: 0,
            next_number: 1,
            under_way: None,
            reported: None,
            updated: None,
            found: None,
            accumulated: vec![false; count],
            states: vec![GradientState::Skipped; count],
            fixed: None,
            records_times: false,
            moments: None,
        };
        reducer.divide(&order);
        reducer.prepare()?;
        reducer.forget_results();
        Ok(reducer)
    }

    /// The parameters, as they were declared.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// The options of the reducer.
    pub fn options(&self) -> ReducerOptions {
        self.options
    }

    /// The communicator of the ranks over which gradients are reduced.
    pub fn communicator(&self) -> &'c dyn Communicator<M> {
        self.comm
    }

    /// The number of the parameter that has the gradient of this one: itself, or the first one that it is tied to. Panics beyond the last.
    pub fn owner(&self, parameter: usize) -> usize {
        self.owners[parameter]
    }

    /// The number of the parameter with this name.
    pub fn index_of(&self, name: &str) -> Option<usize> {
        self.parameters.iter().position(|parameter| parameter.name == name)
    }

    /// The numbers of the parameters in each bucket, in the order in which buckets are reduced.
    pub fn buckets(&self) -> impl ExactSizeIterator<Item = &[usize]> {
        self.buckets.iter().map(|bucket| &bucket.members[..])
    }

    /// The state of a parameter's gradient since the last step; for a tied parameter, its owner's. Panics beyond the last.
    pub fn state(&self, parameter: usize) -> GradientState {
        self.states[self.owners[parameter]]
    }

    /// The reduced gradient of a parameter, in the dtype of the wire, until the next step or the next sum over micro-batches. `None` unless
    /// its state is [`GradientState::Reduced`]: a program's own gradient is the result where the state is [`GradientState::Unchanged`], as with
    /// one rank.
    pub fn gradient(&self, parameter: usize) -> Option<TensorView<'_, M>> {
        let owner = *self.owners.get(parameter)?;
        let is_reduced = self.under_way.is_none() && self.states[owner] == GradientState::Reduced;
        let place = self.places[owner].filter(|_| is_reduced)?;
        self.buckets[place.bucket].gradient(&self.lanes, place.tensor)
    }

    /// Copies reduced gradients to destinations, given with the numbers of their parameters, with casts where dtypes differ; on GPUs in one
    /// launch per bucket. Destinations of gradients in another state than [`GradientState::Reduced`] are left unchanged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a number beyond the last parameter, or on GPUs memory of another queue; [`Error::LengthMismatch`]
    /// naming the parameter; nothing is written. `Error::Cuda`.
    pub fn copy_gradients(&self, destinations: &mut [(usize, M::SliceMut<'_>)]) -> Result<()> {
        for (parameter, data) in destinations.iter() {
            let declared = self.parameters.get(*parameter).ok_or_else(|| self.no_parameter(*parameter))?;
            let data = ("the destination", M::len(M::as_slice(data)));
            same_len(OPERATION, (&format!("the gradient of {:?}", declared.name), declared.len()), data)?;
        }
        for (index, bucket) in self.buckets.iter().enumerate() {
            let Some(buffer) = &bucket.buffer else { continue };
            let (mut wanted, mut tensors) = (Vec::new(), Vec::new());
            for (parameter, data) in destinations.iter_mut() {
                let owner = self.owners[*parameter];
                let place = self.places[owner].filter(|place| place.bucket == index);
                let is_reduced = self.under_way.is_none() && self.states[owner] == GradientState::Reduced;
                if let Some(place) = place.filter(|_| is_reduced) {
                    wanted.push(M::reborrow(data));
                    tensors.push(place.tensor);
                }
            }
            unpack(&self.lanes, buffer, &mut wanted, &tensors)?;
        }
        Ok(())
    }

    /// Makes one step of an optimizer with the reduced gradients, which it reads where they are, in the buckets. `tensors` are the trained
    /// parameters, by name, in the same order in each step; others may be left out. The tensor's own gradient is used where it is the
    /// result, as with one rank, and ignored otherwise. A parameter without a gradient keeps its weights and its state, and tied parameters
    /// are updated once, as the first of them.
    ///
    /// The optimizer's report or error tells of gradients that are not finite, and [`NonFinite::Report`] does not tell of them again.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that no parameter has, or for a trained parameter that is missing; the errors of
    /// [`Optimizer::step_tensors`](super::Optimizer::step_tensors).
    pub fn update<'a, O: OptimizerOptions>(
        &mut self,
        optimizer: &mut Optimizer<O, M>,
        tensors: impl IntoIterator<Item = TensorStep<'a, M>>,
    ) -> Result<()>
    where
        M: OptimizerMemory,
    {
        let mut tensors: Vec<TensorStep<'a, M>> = tensors.into_iter().collect();
        let numbers = self.numbers_of(tensors.iter().map(|tensor| tensor.name))?;
        (self.reported, self.updated) = (None, Some(self.number));
        let is_updated = |number: usize| self.owners[number] == number && self.parameters[number].is_trained;
        let owners = tensors.iter_mut().zip(numbers).filter(|(_, number)| is_updated(*number));
        optimizer.step_tensors(owners.map(|(TensorStep { name, weights, gradient }, number)| {
            let gradient = match self.state(number) {
                GradientState::Unchanged => gradient.as_ref().map(TensorView::reborrow),
                _ => self.gradient(number),
            };
            TensorStep { name, weights: weights.reborrow(), gradient }
        }))
    }

    /// The numbers of the parameters with these names, among which are all trained ones.
    fn numbers_of<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<Vec<usize>> {
        let (count, mut next) = (self.parameters.len(), 0);
        let mut is_missing: Vec<bool> = self.places.iter().map(Option::is_some).collect();
        let mut numbers = Vec::with_capacity(count);
        for name in names {
            // Names are usually in the order of the parameters.
            let found = (next..count).chain(0..next).find(|number| self.parameters[*number].name == name);
            let Some(number) = found else {
                let reason = format!("no parameter is named {name:?}");
                return Err(Error::InvalidArgument { operation: OPERATION, reason });
            };
            is_missing[number] = false;
            numbers.push(number);
            next = number + 1;
        }
        match is_missing.iter().position(|is_missing| *is_missing) {
            Some(missing) => {
                Err(self.refused(missing, "is trained, and is not among the tensors of the optimizer's step"))
            }
            None => Ok(numbers),
        }
    }

    /// Adds gradients of a micro-batch to the sums over earlier micro-batches, without communication (PyTorch's `no_sync`). The next step
    /// reduces the sums, with its own gradients added. Sums are `f32`, or `f64` for gradients of `f64`, and rounded once to the dtype of
    /// the wire; nothing is divided by the number of micro-batches. On GPUs one launch serves all gradients of a bucket. The reduced
    /// gradients of the last step are lost.
    ///
    /// # Errors
    /// The errors of [`Step::ready`], on this rank alone and with the sums unchanged, also while a step that was left has not ended;
    /// [`Error::OutOfMemory`] or `Error::Cuda`.
    pub fn accumulate(&mut self, gradients: &[(usize, TensorView<'_, M>)]) -> Result<()> {
        if self.under_way.is_some() {
            let reason =
                format!("step {} was left without `finish`: the next `step` ends it on every rank", self.number);
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        self.divide_anew();
        let mut seen = vec![false; self.parameters.len()];
        for (parameter, gradient) in gradients {
            let owner = self.check(*parameter, gradient)?;
            if std::mem::replace(&mut seen[owner], true) {
                return Err(self.refused(*parameter, "has two gradients in one micro-batch"));
            }
        }
        if let Some(Err(error)) = &self.unprepared {
            // The other ranks are notified in the next step.
            let reason = format!("the buckets were not divided anew: {error}");
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        }
        self.add_up(gradients)?;
        self.forget_results();
        Ok(())
    }

    /// Chooses whether later steps record [when](Self::times) their buckets are reduced. They do not at first. On GPUs a recorded step has
    /// two more events a bucket in its queues.
    pub fn record_times(&mut self, records: bool) {
        self.records_times = records;
    }

    /// The course of the last step, if it was [recorded](Self::record_times). On GPUs the host waits for the end of the step.
    ///
    /// # Errors
    /// `Error::Cuda`, also for a step that was recorded as a graph.
    pub fn times(&self) -> Result<Option<StepTimes>> {
        self.moments.as_ref().map_or(Ok(None), Moments::times)
    }

    /// Discards the sums over micro-batches since the last step.
    pub fn discard_accumulated(&mut self) {
        self.accumulated.fill(false);
    }

    /// Adds checked gradients to the sums, one bucket at a time.
    fn add_up(&mut self, gradients: &[(usize, TensorView<'_, M>)]) -> Result<()> {
        let with = (&self.lanes, self.comm.world_size());
        let mut of_buckets: Vec<Vec<(usize, bool, M::Slice<'_>)>> = vec![Vec::new(); self.buckets.len()];
        for (parameter, gradient) in gradients {
            let owner = self.owners[*parameter];
            let GradientPlace { bucket, tensor } = self.places[owner].expect("checked");
            of_buckets[bucket].push((tensor, !self.accumulated[owner], gradient.data()));
        }
        for (bucket, mut of_bucket) in self.buckets.iter_mut().zip(of_buckets) {
            if !of_bucket.is_empty() {
                of_bucket.sort_by_key(|(tensor, ..)| *tensor);
                bucket.accumulate(with, &self.parameters, &of_bucket)?;
                of_bucket.iter().for_each(|(tensor, ..)| self.accumulated[bucket.members[*tensor]] = true);
            }
        }
        Ok(())
    }

    /// Assigns parameters to buckets, in the order of their gradients. A lack of memory is an error of the next step.
    fn divide(&mut self, order: &[usize]) {
        let described = |&index: &usize| {
            let parameter = &self.parameters[index];
            let dtype = self.options.dtype_of(parameter.dtype, self.comm.world_size());
            (index, BucketKind::new(parameter.dtype, dtype), parameter.len() * dtype.size_bytes())
        };
        let (first, others) = (self.options.first_bucket_bytes, self.options.bucket_bytes);
        let buckets = buckets::assign(order.iter().map(described), first, others);
        if buckets.iter().map(|plan| &plan.members).eq(self.buckets.iter().map(|bucket| &bucket.members)) {
            return;
        }
        // The checks of the last step would end unread with their buckets, so that the host waits for them.
        let checked = self.end_checks(true).map(|found| self.found = self.found.or(found));
        // The new buckets reuse the memory of the old ones, ordered behind all work on their gradients.
        let released = checked.and_then(|()| M::fork(&self.lanes));
        self.buckets.clear();
        self.buckets.extend(buckets.into_iter().map(Bucket::new));
        for (index, bucket) in self.buckets.iter().enumerate() {
            for (tensor, &member) in bucket.members.iter().enumerate() {
                self.places[member] = Some(GradientPlace { bucket: index, tensor });
            }
        }
        let world_size = self.comm.world_size();
        let mut allocated = released;
        if world_size > 1 && allocated.is_ok() {
            let with = (&self.lanes, world_size);
            allocated =
                self.buckets.iter_mut().try_for_each(|bucket| bucket.allocated(with, &self.parameters).map(drop));
        }
        self.unprepared = Some(allocated);
    }

    /// Assigns parameters to buckets in the agreed order, unless they already are.
    fn divide_anew(&mut self) {
        if let Order::Agreed(order) = &mut self.order {
            let order = std::mem::take(order);
            self.order = Order::OfBuckets;
            self.divide(&order);
            self.forget_results();
        }
    }

    /// Prepares the reductions of new buckets, together with all ranks.
    fn prepare(&mut self) -> Result<()> {
        let Some(allocated) = self.unprepared.take() else { return Ok(()) };
        if self.comm.world_size() == 1 {
            return allocated;
        }
        let _scope = scope::within(Operation::Reducer);
        let mut buffers = self.buckets.iter_mut().filter_map(|bucket| bucket.buffer.as_mut());
        let allocated = allocated.and(M::agree_on_memory(self.comm, &mut self.lanes, &mut buffers));
        let outcome = all_prepared(Operation::Reducer, self.comm, allocated).and_then(|()| {
            let reduction = (self.reduction, self.options.ordered_sums);
            let is_checked = self.options.non_finite != NonFinite::Leave;
            let mut buckets = self.buckets.iter_mut();
            buckets.try_for_each(|bucket| bucket.prepare(self.comm, &self.lanes, reduction, is_checked))
        });
        if let Err(error) = &outcome {
            let reason = format!("an earlier step could not prepare it: {error}");
            self.unprepared = Some(Err(Error::InvalidArgument { operation: OPERATION, reason }));
        }
        outcome
    }

    /// Marks all gradients as not reduced.
    fn forget_results(&mut self) {
        for (state, parameter) in self.states.iter_mut().zip(&self.parameters) {
            *state = if parameter.is_trained { GradientState::Skipped } else { GradientState::NotTrained };
        }
    }

    /// Checks a gradient; returns the owner of its parameter.
    fn check(&self, parameter: usize, gradient: &TensorView<'_, M>) -> Result<usize> {
        let owner = self.check_trained(parameter)?;
        let declared = &self.parameters[parameter];
        if gradient.shape() != declared.shape {
            let text =
                format!("has a gradient of shape {:?}, and was declared with {:?}", gradient.shape(), declared.shape);
            return Err(self.refused(parameter, &text));
        }
        if gradient.dtype() != declared.dtype {
            let text = format!("has a gradient of {}, and was declared with {}", gradient.dtype(), declared.dtype);
            return Err(self.refused(parameter, &text));
        }
        M::check_floats(OPERATION, gradient.data())?;
        Ok(owner)
    }

    fn check_trained(&self, parameter: usize) -> Result<usize> {
        let declared = self.parameters.get(parameter).ok_or_else(|| self.no_parameter(parameter))?;
        if !declared.is_trained {
            return Err(self.refused(parameter, "has a gradient, and was declared as not trained"));
        }
        Ok(self.owners[parameter])
    }

    fn no_parameter(&self, parameter: usize) -> Error {
        let reason = format!("there is no parameter {parameter}; there are {}", self.parameters.len());
        Error::InvalidArgument { operation: OPERATION, reason }
    }

    fn refused(&self, parameter: usize, text: &str) -> Error {
        let reason = format!("parameter {parameter}, {:?}, {text}", self.parameters[parameter].name);
        Error::InvalidArgument { operation: OPERATION, reason }
    }
}
