//! [`Step`]: one step of a reducer, from the first gradient to the last reduction.

use super::bucket::Place;
use super::memory::{Lane, ReducerMemory};
use super::options::{AbsentGradients, UnevenEnds};
use super::report::{GradientState, Reduced};
use super::times::Moments;
use super::{OPERATION, Order, Reducer};
use crate::agreement::{Plan, agree, gather};
use crate::call::scope;
use crate::error::{Error, Operation, Result};
use crate::memory::{Host, TensorView, TensorViewMut};
use crate::train::Reduction;

/// Bits of a vote's first word.
const REFUSES: u64 = 1;
const HAS_DATA: u64 = 2;
/// The filler at the end of a list of parameters that is shorter than others.
const NOTHING: u64 = u64::MAX;

/// A step under way. [`finish`](Self::finish) ends it.
///
/// Dropping it instead is an error of the step on every rank: this rank then takes part in the collectives that the others wait for, with
/// zeros. In a thread that panics it does not take part.
#[must_use = "the other ranks wait for the gradients of this step"]
#[derive(Debug)]
pub struct Step<'r, 'c, M: ReducerMemory = Host> {
    reducer: &'r mut Reducer<'c, M>,
    /// For each owner, whether its gradient is in.
    present: Vec<bool>,
    /// The number of missing gradients of each bucket.
    missing: Vec<usize>,
    /// The first bucket that is not reduced.
    next: usize,
    /// Owners in the order in which their gradients were passed.
    arrived: Vec<usize>,
    /// The weights of the ranks in a mean; empty if they are equal.
    weights: Vec<f64>,
    has_data: bool,
    /// The number of examples of all ranks.
    examples: Option<usize>,
    /// The reason why this rank has no part in the result.
    refusal: Option<Error>,
    /// The reason why the ranks cannot end the step together.
    failure: Option<Error>,
    is_over: bool,
}

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// A copy of the error for another caller.
fn again(error: &Error) -> Error {
    match error {
        Error::Comm(error) => error.clone().into(),
        Error::InvalidArgument { operation, reason } => Error::InvalidArgument { operation, reason: reason.clone() },
        error => Error::InvalidArgument { operation: OPERATION, reason: error.to_string() },
    }
}

impl<'c, M: ReducerMemory> Reducer<'c, M> {
    /// Begins a step on every rank: all must call it.
    ///
    /// # Errors
    /// In the second step, which may reassign the buckets: [`Error::OutOfMemory`] or `Error::Cuda`, and on the other ranks
    /// [`Error::InvalidArgument`] that quotes it. Errors of the communicator.
    pub fn step(&mut self) -> Result<Step<'_, 'c, M>> {
        let _scope = scope::within(Operation::ReducerStep);
        self.divide_anew();
        self.prepare()?;
        self.forget_results();
        // A failure is one of the step, so that every rank gets an error.
        let (moments, refusal) = match self.records_times.then(|| Moments::begin(&self.lanes)).transpose() {
            Ok(moments) => (moments, None),
            Err(error) => (None, Some(error)),
        };
        self.moments = moments;
        let missing = self.buckets.iter().map(|bucket| bucket.members.len()).collect();
        Ok(Step {
            present: vec![false; self.parameters.len()],
            missing,
            next: 0,
            arrived: Vec::new(),
            weights: Vec::new(),
            has_data: true,
            examples: None,
            refusal,
            failure: None,
            is_over: false,
            reducer: self,
        })
    }

    /// Begins a step in which this rank's gradients are means over `examples` examples, a number that may differ between ranks: with
    /// [`Reduction::Mean`] the reduced gradients are the mean over the examples of all ranks, as if one rank had all of them. 0 means that
    /// this rank has no more data: it passes no gradient, and continues to call this until there is no step. `None` on every rank when all
    /// data are used up, or with [`UnevenEnds::Stop`] when one rank's data are. The hosts wait for each other.
    ///
    /// ```
    /// use gradsync::comm::{Ranks, local};
    /// use gradsync::train::{Parameter, Reducer, ReducerOptions};
    /// use gradsync::DType;
    ///
    /// // Rank 0 has batches of 4 and 4 examples, rank 1 one of 2.
    /// let batches = [vec![4, 4], vec![2]];
    /// let means = local::run(2, |comm| {
    ///     let parameters = [Parameter::new("weight", [1], DType::F32)];
    ///     let mut reducer = Reducer::new(&comm, parameters, ReducerOptions::default())?;
    ///     let (mut means, mut batches) = (Vec::new(), batches[comm.rank()].iter());
    ///     loop {
    ///         let examples = batches.next().copied().unwrap_or(0);
    ///         let Some(mut step) = reducer.step_of(examples)? else { break };
    ///         if examples > 0 {
    ///             step.ready(0, &[comm.rank() as f32])?;
    ///         }
    ///         let reduced = step.finish()?;
    ///         let gradient = reducer.gradient(0).map(|gradient| gradient.to_vec::<f32>()).transpose()?;
    ///         means.push((reduced.examples(), gradient));
    ///     }
    ///     Ok::<_, gradsync::Error>(means)
    /// })?;
    /// assert_eq!(means[0], [(Some(6), Some(vec![2.0 / 6.0])), (Some(4), Some(vec![0.0]))]);
    /// assert_eq!(means[0], means[1]);
    /// # Ok::<(), gradsync::Error>(())
    /// ```
    ///
    /// Sums and Adasum are not weighted; a rank without data adds zeros to them. Where numbers are equal, results have the bits of
    /// [`step`](Self::step); otherwise they are the weights of
    /// [`all_reduce_weighted`](crate::comm::Collectives::all_reduce_weighted): on host memory the mean is rounded once. NCCL, and ordered
    /// sums on GPUs, multiply each rank's gradients by `examples / examples of all ranks` first, with one more rounding. All ranks must
    /// call the same one of the two functions.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step). A rank with sums over micro-batches that passes 0 examples is refused at the end of the step.
    pub fn step_of(&mut self, examples: usize) -> Result<Option<Step<'_, 'c, M>>> {
        let scope = scope::within(Operation::ReducerStep);
        let ranks = self.comm.world_size();
        let all = if ranks == 1 { vec![examples as u64] } else { gather(self.comm, &[examples as u64])? };
        let total: u128 = all.iter().map(|&examples| u128::from(examples)).sum();
        let stops = self.options.uneven == UnevenEnds::Stop && all.contains(&0);
        if total == 0 || stops {
            return Ok(None);
        }
        let Ok(sum) = usize::try_from(total) else {
            let reason = format!("the ranks' batches have {total} examples, more than memory has addresses");
            return Err(Error::InvalidArgument { operation: OPERATION, reason });
        };
        let weighs = self.options.reduction == Reduction::Mean && all.iter().any(|&other| other != all[0]);
        // The smallest weights of the same mean, so that their products need the fewest roundings.
        let divisor = all.iter().copied().reduce(greatest_common_divisor).unwrap_or(1);
        let weights = all.iter().filter(|_| weighs).map(|&examples| (examples / divisor) as f64).collect();
        drop(scope);
        let mut step = self.step()?;
        step.has_data = examples > 0;
        step.examples = Some(sum);
        step.weights = weights;
        if !step.has_data && step.reducer.accumulated.contains(&true) {
            let reason = "it has sums over micro-batches, and says that it has no examples".into();
            step.refusal = Some(Error::InvalidArgument { operation: OPERATION, reason });
        }
        Ok(Some(step))
    }
}

impl<'c, M: ReducerMemory> Step<'_, 'c, M> {
    /// Passes the gradient of a parameter, by its number, in the declared shape and dtype. It is copied; on GPUs in the order of its queue.
    /// On host memory, the buckets that it completes are reduced when this returns.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the parameter: for another shape or dtype, a second gradient (also under the name of a tied
    /// parameter), a gradient of a parameter that is not trained, or any gradient on a rank without data; nothing is copied then.
    /// [`finish`](Self::finish) returns the first of these errors on every rank. Errors of the communicator, after which the reducer has
    /// ended.
    pub fn ready<'g>(&mut self, parameter: usize, gradient: impl Into<TensorView<'g, M>>) -> Result<()> {
        self.ready_all(&[(parameter, gradient.into())])
    }

    /// Like [`ready`](Self::ready) for several gradients; on GPUs, the gradients of one bucket are copied in one launch.
    ///
    /// # Errors
    /// The errors of that method.
    pub fn ready_all(&mut self, gradients: &[(usize, TensorView<'_, M>)]) -> Result<()> {
        let taken = self.take(gradients);
        self.refuse_unless(taken)?;
        self.arrive(gradients.iter().map(|(parameter, _)| *parameter))
    }

    /// The memory of a parameter's gradient in its bucket, to compute the gradient there; [`ready_in_place`](Self::ready_in_place) then
    /// passes it without a copy. It has the shape of the parameter and the dtype of the wire; its elements are unspecified. Its address is
    /// the same in every step after the second.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the parameter, in the cases of [`ready`](Self::ready), and if it has a sum over micro-batches;
    /// [`Error::OutOfMemory`] or `Error::Cuda` with one rank, whose buckets have no memory before.
    pub fn gradient_mut(&mut self, parameter: usize) -> Result<TensorViewMut<'_, M>> {
        let place = self.place_to_write(parameter);
        let place = self.refuse_unless(place)?;
        let Reducer { buckets, lanes, parameters, comm, .. } = &mut *self.reducer;
        let buffer = buckets[place.bucket].allocated((lanes, comm.world_size()), parameters)?;
        let (range, shape) = (buffer.segments()[place.tensor].clone(), buffer.shape(place.tensor).to_vec());
        TensorViewMut::of(M::range_mut(M::arena_mut(lanes, buffer), range), shape.into())
    }

    /// Passes a gradient that was computed in its [bucket](Self::gradient_mut).
    ///
    /// # Errors
    /// The errors of [`ready`](Self::ready).
    pub fn ready_in_place(&mut self, parameter: usize) -> Result<()> {
        let place = self.place_to_write(parameter);
        let place = self.refuse_unless(place)?;
        let reducer = &mut *self.reducer;
        if reducer.buckets[place.bucket].buffer.is_none() {
            let error = reducer.refused(parameter, "is handed in as if in its place, which nobody has asked for");
            return self.refuse_unless(Err(error));
        }
        reducer.states[reducer.owners[parameter]] = GradientState::Reduced;
        self.arrive([parameter])
    }

    /// Ends the step: reduces the remaining buckets, with zeros for absent gradients, and returns the states of all gradients. On GPUs the
    /// queue of the gradients waits for the reductions; the host waits for the other hosts, unless the steps are
    /// [alike](super::ReducerOptions::static_graph), and not for a GPU.
    ///
    /// # Errors
    /// All errors are returned on every rank, without a result:
    /// * the error of a rank that was refused a gradient, or has dropped its step; on the other ranks [`Error::InvalidArgument`] that names
    ///   the rank and quotes it;
    /// * with [`AbsentGradients::Error`], [`Error::InvalidArgument`] naming a rank and a parameter whose gradient it lacks;
    /// * errors of the communicator, including a mismatch if steps have to be alike and differ on a rank.
    pub fn finish(mut self) -> Result<Reduced> {
        self.is_over = true;
        self.complete()
    }

    /// Ends the step with an error of this rank's own: for gradients that it could not compute, for example. It takes part in the
    /// collectives that the other ranks wait for. Every rank's step ends without a result, as [`finish`](Self::finish) describes, and the
    /// other ranks' error names this rank and quotes the reason. Returns the error, or the error of a failed communicator.
    pub fn refuse(mut self, error: Error) -> Error {
        self.refusal.get_or_insert(error);
        self.is_over = true;
        match self.complete() {
            Err(error) => error,
            Ok(_) => unreachable!("a refusal ends every rank's step"),
        }
    }

    /// The place of a gradient that has not been passed yet.
    fn place_to_write(&self, parameter: usize) -> Result<Place> {
        let reducer = &*self.reducer;
        let owner = reducer.check_trained(parameter)?;
        self.check_wanted(parameter, owner)?;
        if reducer.accumulated[owner] {
            return Err(reducer.refused(parameter, "has a sum over micro-batches in its place"));
        }
        Ok(reducer.places[owner].expect("trained"))
    }

    fn check_wanted(&self, parameter: usize, owner: usize) -> Result<()> {
        if self.present[owner] {
            return Err(self.reducer.refused(parameter, "has two gradients in one step"));
        }
        if !self.has_data {
            return Err(self.reducer.refused(parameter, "has a gradient on a rank without examples"));
        }
        Ok(())
    }

    /// Records an error of this rank for the end of the step.
    fn refuse_unless<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome {
            self.refusal.get_or_insert_with(|| again(error));
        }
        outcome
    }

    /// Checks gradients, and copies them into the buckets.
    fn take(&mut self, gradients: &[(usize, TensorView<'_, M>)]) -> Result<()> {
        let mut seen = vec![false; self.present.len()];
        for (parameter, gradient) in gradients {
            let owner = self.reducer.check(*parameter, gradient)?;
            self.check_wanted(*parameter, owner)?;
            if std::mem::replace(&mut seen[owner], true) {
                return Err(self.reducer.refused(*parameter, "has two gradients in one step"));
            }
        }
        let reducer = &mut *self.reducer;
        let is_alone = reducer.comm.world_size() == 1;
        let is_summed = |(parameter, _): &&(usize, TensorView<'_, M>)| reducer.accumulated[reducer.owners[*parameter]];
        let (summed, plain): (Vec<_>, Vec<_>) = gradients.iter().partition(is_summed);
        if !summed.is_empty() {
            let summed: Vec<_> = summed.into_iter().cloned().collect();
            reducer.add_up(&summed)?;
            let owners: Vec<usize> = summed.iter().map(|(parameter, _)| reducer.owners[*parameter]).collect();
            self.take_sums(&owners)?;
        }
        let reducer = &mut *self.reducer;
        let mut of_buckets: Vec<Vec<(usize, M::Slice<'_>)>> = vec![Vec::new(); reducer.buckets.len()];
        for (parameter, gradient) in plain {
            let owner = reducer.owners[*parameter];
            if is_alone {
                reducer.states[owner] = GradientState::Unchanged;
            } else {
                let Place { bucket, tensor } = reducer.places[owner].expect("checked");
                of_buckets[bucket].push((tensor, gradient.data()));
            }
        }
        for (bucket, of_bucket) in reducer.buckets.iter_mut().zip(&of_buckets) {
            if !of_bucket.is_empty() {
                bucket.pack(&reducer.lanes, of_bucket)?;
            }
        }
        Ok(())
    }

    /// Moves the sums over micro-batches of these owners into the buckets.
    fn take_sums(&mut self, owners: &[usize]) -> Result<()> {
        let reducer = &mut *self.reducer;
        let with = (&reducer.lanes, reducer.comm.world_size());
        for (index, bucket) in reducer.buckets.iter_mut().enumerate() {
            let place = |owner: &usize| reducer.places[*owner].filter(|place| place.bucket == index);
            let mut tensors: Vec<usize> = owners.iter().filter_map(place).map(|place| place.tensor).collect();
            tensors.sort_unstable();
            if !tensors.is_empty() {
                bucket.take_sums(with, &reducer.parameters, &tensors)?;
            }
        }
        owners.iter().for_each(|&owner| reducer.states[owner] = GradientState::Reduced);
        Ok(())
    }

    /// Records that gradients are in the buckets, and reduces the buckets that they complete.
    fn arrive(&mut self, parameters: impl IntoIterator<Item = usize>) -> Result<()> {
        for parameter in parameters {
            let owner = self.reducer.owners[parameter];
            self.present[owner] = true;
            self.arrived.push(owner);
            self.missing[self.reducer.places[owner].expect("checked").bucket] -= 1;
        }
        if self.reducer.order == Order::OfBuckets { self.reduce(false) } else { Ok(()) }
    }

    /// Reduces the buckets whose turn it is, or all remaining ones.
    fn reduce(&mut self, all: bool) -> Result<()> {
        if let Some(error) = &self.failure {
            return Err(again(error));
        }
        let _scope = scope::within(Operation::ReducerStep);
        let Reducer { buckets, lanes, comm, moments, .. } = &mut *self.reducer;
        if comm.world_size() == 1 {
            return Ok(());
        }
        while self.next < buckets.len() && (all || self.missing[self.next] == 0) {
            let bucket = &mut buckets[self.next];
            let buffer = bucket.buffer.as_mut().expect("allocated where there are several ranks");
            let mut run = || {
                M::fork(lanes)?;
                let begin = moments.is_some().then(|| M::moment(lanes, Lane::Reductions)).transpose()?;
                bucket.reduction.as_mut().expect("prepared").run(buffer, &self.weights)?;
                if let Some((moments, begin)) = moments.as_mut().zip(begin) {
                    let bytes = buffer.table().arena_len() * buffer.dtype().size_bytes();
                    moments.bucket(lanes, bytes, begin)?;
                }
                Ok(())
            };
            if let Err(error) = run() {
                self.failure = Some(again(&error));
                return Err(error);
            }
            self.next += 1;
        }
        Ok(())
    }

    /// Fills the buckets with sums over micro-batches without a gradient in this step, and with zeros for absent gradients.
    fn fill(&mut self) -> Result<()> {
        let owned = |owner: &usize| self.reducer.places[*owner].is_some() && !self.present[*owner];
        let absent: Vec<usize> = (0..self.present.len()).filter(owned).collect();
        let (summed, unused): (Vec<usize>, Vec<usize>) =
            absent.into_iter().partition(|&owner| self.reducer.accumulated[owner] && self.has_data);
        self.take_sums(&summed)?;
        summed.into_iter().for_each(|owner| self.present[owner] = true);
        if self.reducer.comm.world_size() == 1 {
            return Ok(());
        }
        let Reducer { buckets, lanes, places, .. } = &mut *self.reducer;
        for (index, bucket) in buckets.iter_mut().enumerate() {
            let place = |owner: &usize| places[*owner].filter(|place| place.bucket == index);
            let mut tensors: Vec<usize> = unused.iter().filter_map(place).map(|place| place.tensor).collect();
            tensors.sort_unstable();
            bucket.clear(lanes, &tensors)?;
        }
        Ok(())
    }

    fn complete(&mut self) -> Result<Reduced> {
        let _scope = scope::within(Operation::ReducerStep);
        let filled = self.fill();
        let _ = self.refuse_unless(filled);
        let Reducer { lanes, moments, .. } = &mut *self.reducer;
        let recorded = moments.as_mut().map_or(Ok(()), |moments| moments.gradients(lanes));
        let _ = self.refuse_unless(recorded);
        let reduced = self.reduce(true);
        let joined = M::join(&self.reducer.lanes);
        let voted = reduced.and_then(|()| self.vote());
        self.reducer.accumulated.fill(false);
        let outcome = voted.and_then(|states| joined.map(|()| states));
        match outcome {
            Ok(states) => {
                self.reducer.states.clone_from(&states);
                Ok(Reduced { owners: self.reducer.owners.clone(), states, examples: self.examples })
            }
            Err(error) => {
                self.reducer.forget_results();
                Err(error)
            }
        }
    }

    /// Exchanges the lists of the ranks' gradients; returns the states of all gradients.
    fn vote(&mut self) -> Result<Vec<GradientState>> {
        let comm = self.reducer.comm;
        let plan = Plan::of(Operation::ReducerStep);
        if comm.world_size() == 1 {
            return self.states_alone();
        }
        if let Some((present, states)) = &self.reducer.fixed {
            // No rank waits for this rank's vote, so a step that differs can only end the communicator, through a call that the others do
            // not make.
            let differs = (0..present.len()).find(|&owner| self.has_data && present[owner] != self.present[owner]);
            let differs = differs.map(|owner| {
                self.reducer
                    .refused(owner, "has not a gradient where it had one in the first step, or the other way round")
            });
            return match self.refusal.take().or(differs) {
                Some(error) => agree(comm, &plan, Err(error)),
                None => Ok(states.clone()),
            };
        }
        let is_first = self.reducer.order == Order::Unknown;
        let all = gather(comm, &self.words(is_first))?;
        let votes: Vec<Vote<'_>> = all.chunks_exact(all.len() / comm.world_size()).map(Vote).collect();
        if votes.iter().any(Vote::refuses) {
            return agree(comm, &plan, self.refusal.take().map_or(Ok(()), Err)).map(|()| Vec::new());
        }
        self.check_absent(&votes)?;
        let states = self.states_of(|owner| votes.iter().any(|vote| vote.has(owner)));
        if is_first {
            let count = self.present.len();
            let order = votes.iter().find(|vote| vote.has_data()).map_or(&[][..], |vote| vote.order(count));
            let mut order: Vec<usize> =
                order.iter().map(|&owner| owner as usize).take_while(|&owner| owner < count).collect();
            let rest = (0..count).filter(|owner| self.reducer.places[*owner].is_some() && !order.contains(owner));
            let rest: Vec<usize> = rest.collect();
            order.extend(rest);
            self.reducer.order = Order::Agreed(order);
        }
        if self.reducer.options.static_graph {
            self.reducer.fixed = Some((self.present.clone(), states.clone()));
        }
        Ok(states)
    }

    fn states_alone(&mut self) -> Result<Vec<GradientState>> {
        if let Some(error) = self.refusal.take() {
            return Err(error);
        }
        let present: Vec<bool> = self.present.clone();
        let words = self.words(false);
        self.check_absent(&[Vote(&words)])?;
        let states = std::mem::take(&mut self.reducer.states);
        self.reducer.states = states.clone();
        Ok(states
            .into_iter()
            .zip(present)
            .map(|(state, present)| match state {
                GradientState::NotTrained => state,
                _ if present => state,
                _ => GradientState::Skipped,
            })
            .collect())
    }

    fn states_of(&self, is_used: impl Fn(usize) -> bool) -> Vec<GradientState> {
        let state = |(owner, parameter): (usize, &super::Parameter)| match parameter.is_trained {
            false => GradientState::NotTrained,
            true if is_used(owner) => GradientState::Reduced,
            true => GradientState::Skipped,
        };
        self.reducer.parameters.iter().enumerate().map(state).collect()
    }

    /// Refuses absent gradients, if the options do. Every rank sees the same votes.
    fn check_absent(&self, votes: &[Vote<'_>]) -> Result<()> {
        if self.reducer.options.absent != AbsentGradients::Error {
            return Ok(());
        }
        for (rank, vote) in votes.iter().enumerate().filter(|(_, vote)| vote.has_data()) {
            let lacks = |owner: &usize| self.reducer.places[*owner].is_some() && !vote.has(*owner);
            if let Some(owner) = (0..self.present.len()).find(lacks) {
                return Err(self.reducer.refused(owner, &format!("has no gradient on rank {rank}")));
            }
        }
        Ok(())
    }

    /// This rank's vote.
    fn words(&self, with_order: bool) -> Vec<u64> {
        let flag = |bit: u64, is_set: bool| if is_set { bit } else { 0 };
        let mut words = vec![flag(REFUSES, self.refusal.is_some()) | flag(HAS_DATA, self.has_data)];
        let bits = |owners: &[bool]| owners.iter().rev().fold(0, |word, &bit| word << 1 | u64::from(bit));
        words.extend(self.present.chunks(u64::BITS as usize).map(bits));
        if with_order {
            words.extend(self.arrived.iter().map(|&owner| owner as u64));
            let absent = self.present.len() - self.arrived.len();
            words.extend(std::iter::repeat_n(NOTHING, absent));
        }
        words
    }
}

/// The message of a rank at the end of a step: flags, a bit for each gradient that it had, and in the first step their order.
struct Vote<'a>(&'a [u64]);

impl Vote<'_> {
    fn refuses(&self) -> bool {
        self.0[0] & REFUSES != 0
    }

    fn has_data(&self) -> bool {
        self.0[0] & HAS_DATA != 0
    }

    fn has(&self, owner: usize) -> bool {
        let bits = u64::BITS as usize;
        self.0[1 + owner / bits] >> (owner % bits) & 1 != 0
    }

    fn order(&self, count: usize) -> &[u64] {
        &self.0[self.0.len() - count..]
    }
}

impl<M: ReducerMemory> Drop for Step<'_, '_, M> {
    fn drop(&mut self) {
        if self.is_over || std::thread::panicking() {
            return;
        }
        let reason = "it has left a step without finishing it".into();
        self.refusal.get_or_insert(Error::InvalidArgument { operation: OPERATION, reason });
        if let Err(error) = self.complete() {
            tracing::warn!(%error, "a step ended without a result");
        }
    }
}
