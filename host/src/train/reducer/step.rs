//! [`Step`]: one step of a reducer, from the first gradient to the last reduction.

use super::bucket::Place;
use super::memory::{Lane, ReducerMemory};
use super::options::{AbsentGradients, NonFinite, UnevenEnds};
use super::report::{GradientState, NonFiniteGradient, Reduced};
use super::times::Moments;
use super::vote::Vote;
use super::{OPERATION, Order, Reducer};
use crate::agreement::{Plan, agree, gather};
use crate::call::scope;
use crate::error::{Error, Operation, Result};
use crate::memory::{Host, TensorView, TensorViewMut};
use crate::train::Reduction;

/// A step under way. [`finish`](Self::finish) ends it.
///
/// Dropping it instead is an error of the step on every rank: this rank then takes part in the collectives that the others wait for, with
/// zeros. A step that a caught panic or [`std::mem::forget`] has left ends in the same way when the next one begins: that call returns the
/// error. Until then the other ranks wait.
#[must_use = "the other ranks wait for the gradients of this step"]
#[derive(Debug)]
pub struct Step<'r, 'c, M: ReducerMemory = Host> {
    reducer: &'r mut Reducer<'c, M>,
}

/// The progress of a step. It belongs to the reducer, which therefore knows of a step that was left.
#[derive(Debug)]
pub(super) struct Progress {
    /// For each owner, whether its gradient is in.
    pub(super) present: Vec<bool>,
    /// For each owner, whether the caller has had the memory of its gradient in the bucket.
    lent: Vec<bool>,
    /// For each owner of a present gradient, whether the result is in the bucket or in the caller's memory.
    states: Vec<GradientState>,
    /// The number of missing gradients of each bucket.
    missing: Vec<usize>,
    /// The first bucket that is not reduced.
    next: usize,
    /// Owners in the order in which their gradients were passed.
    pub(super) arrived: Vec<usize>,
    /// The factor of this rank's gradients in a mean.
    weight: f64,
    pub(super) has_data: bool,
    /// The number of examples of all ranks.
    examples: Option<usize>,
    /// The first owner of this rank whose gradient is not finite, with the number of its step.
    pub(super) non_finite: Option<(u64, usize)>,
    /// The reason why this rank has no part in the result.
    pub(super) refusal: Option<Error>,
    /// The reason why the ranks cannot end the step together.
    failure: Option<Error>,
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
    /// Sets the number of the next step, which ranks compare: the number of the program's step, or of the example that it begins with. A
    /// rank that has left out a step is then an error on every rank. Without it, steps are numbered from 1 as they begin, and a rank that
    /// has left one out is not found before its next call that is not a step: its gradients are reduced with the other ranks' gradients of
    /// the step before.
    pub fn at(&mut self, number: u64) -> &mut Self {
        self.next_number = number;
        self
    }

    /// Begins a step on every rank: all must call it.
    ///
    /// # Errors
    /// * [`Error::NotFinite`] for an earlier step, with [`NonFinite::Report`], the default; the next call begins a step;
    /// * [`Error::InvalidArgument`] if the last step was left without an end, by a caught panic for example: it ends now, as
    ///   [`Step::refuse`] would end it;
    /// * in the second step, which may reassign the buckets: [`Error::OutOfMemory`] or `Error::Cuda`, and on the other ranks
    ///   [`Error::InvalidArgument`] that quotes it;
    /// * errors of the communicator.
    pub fn step(&mut self) -> Result<Step<'_, 'c, M>> {
        self.begin()?;
        self.with_number()
    }

    /// Ends a step that was left, reports an earlier one, and numbers the next one.
    fn begin(&mut self) -> Result<()> {
        if self.under_way.is_some() {
            let reason = format!("step {} was left without `finish`: it has ended without a result", self.number);
            return Err(Step { reducer: self }.refuse(Error::InvalidArgument { operation: OPERATION, reason }));
        }
        if let Some(found) = self.reported.take() {
            return Err(self.not_finite(found));
        }
        self.number = self.next_number;
        self.next_number = self.number.wrapping_add(1);
        Ok(())
    }

    /// The operation of the present step.
    pub(super) fn operation(&self) -> Operation {
        Operation::ReducerStep { number: self.number }
    }

    pub(super) fn not_finite(&self, found: NonFiniteGradient) -> Error {
        let NonFiniteGradient { step, rank, parameter } = found;
        Error::NotFinite { operation: OPERATION, step, rank, parameter: self.parameters[parameter].name.clone() }
    }

    fn with_number(&mut self) -> Result<Step<'_, 'c, M>> {
        let _scope = scope::within(self.operation());
        self.divide_anew();
        self.prepare()?;
        self.forget_results();
        // A failure is one of the step, so that every rank gets an error.
        let (moments, refusal) = match self.records_times.then(|| Moments::begin(&self.lanes)).transpose() {
            Ok(moments) => (moments, None),
            Err(error) => (None, Some(error)),
        };
        self.moments = moments;
        let count = self.parameters.len();
        self.under_way = Some(Progress {
            present: vec![false; count],
            lent: vec![false; count],
            states: vec![GradientState::Skipped; count],
            missing: self.buckets.iter().map(|bucket| bucket.members.len()).collect(),
            next: 0,
            arrived: Vec::new(),
            weight: 1.0,
            has_data: true,
            examples: None,
            non_finite: None,
            refusal,
            failure: None,
        });
        Ok(Step { reducer: self })
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
    /// [`step`](Self::step); otherwise each rank's gradients are multiplied by `examples × ranks / examples of all ranks` before the mean,
    /// and rounded once more. All ranks must call the same one of the two functions.
    ///
    /// # Errors
    /// The errors of [`step`](Self::step). A rank with sums over micro-batches that passes 0 examples is refused at the end of the step.
    pub fn step_of(&mut self, examples: usize) -> Result<Option<Step<'_, 'c, M>>> {
        self.begin()?;
        let scope = scope::within(self.operation());
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
        let weighs = matches!(self.options.reduction, Reduction::Mean) && examples > 0;
        let weight = (examples as u128 * ranks as u128) as f64 / total as f64;
        drop(scope);
        let has_sums = self.accumulated.contains(&true);
        let mut step = self.with_number()?;
        let progress = step.progress();
        progress.has_data = examples > 0;
        progress.examples = Some(sum);
        progress.weight = if weighs { weight } else { 1.0 };
        if !progress.has_data && has_sums {
            let reason = "this rank passes 0 examples to `step_of`, and has sums over micro-batches: pass their number of examples, or discard the sums".into();
            progress.refusal = Some(Error::InvalidArgument { operation: OPERATION, reason });
        }
        Ok(Some(step))
    }
}

impl<'c, M: ReducerMemory> Step<'_, 'c, M> {
    fn under_way(&self) -> &Progress {
        self.reducer.under_way.as_ref().expect("a step is under way until it is over")
    }

    fn progress(&mut self) -> &mut Progress {
        self.reducer.under_way.as_mut().expect("a step is under way until it is over")
    }

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
        let owner = self.reducer.owners[parameter];
        self.progress().lent[owner] = true;
        let Reducer { buckets, lanes, parameters, comm, .. } = &mut *self.reducer;
        let buffer = buckets[place.bucket].allocated((lanes, comm.world_size()), parameters)?;
        let (range, shape) = (buffer.segments()[place.tensor].clone(), buffer.shape(place.tensor).to_vec());
        TensorViewMut::of(M::range_mut(M::arena_mut(lanes, buffer), range), shape.into())
    }

    /// Passes a gradient that was computed in its bucket, in the memory that [`gradient_mut`](Self::gradient_mut) has returned in this step.
    ///
    /// # Errors
    /// The errors of [`ready`](Self::ready), and [`Error::InvalidArgument`] if `gradient_mut` was not called for the parameter in this
    /// step: the bucket still has the last step's result.
    pub fn ready_in_place(&mut self, parameter: usize) -> Result<()> {
        let place = self.place_to_write(parameter).and_then(|place| {
            if self.under_way().lent[self.reducer.owners[parameter]] {
                return Ok(place);
            }
            let text = "was not computed in its bucket in this step: write it to `gradient_mut`, or pass it to `ready`";
            Err(self.reducer.refused(parameter, text))
        });
        let place = self.refuse_unless(place)?;
        self.look_for_non_finite(place.bucket, &[place.tensor]);
        let owner = self.reducer.owners[parameter];
        self.progress().states[owner] = GradientState::Reduced;
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
    /// * [`Error::InvalidArgument`] naming a rank that has examples and no gradient at all, while another rank has one, or with
    ///   [`AbsentGradients::Error`](super::AbsentGradients::Error) a rank and a parameter whose gradient it lacks;
    /// * [`Error::NotFinite`] for this step, with [`NonFinite::Error`];
    /// * errors of the communicator, including a mismatch if steps have to be alike and differ on a rank.
    pub fn finish(mut self) -> Result<Reduced> {
        self.complete()
    }

    /// Ends the step with an error of this rank's own: for gradients that it could not compute, for example. It takes part in the
    /// collectives that the other ranks wait for. Every rank's step ends without a result, as [`finish`](Self::finish) describes, and the
    /// other ranks' error names this rank and quotes the reason. Returns the error, or the error of a failed communicator.
    pub fn refuse(mut self, error: Error) -> Error {
        self.progress().refusal.get_or_insert(error);
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
        if self.under_way().present[owner] {
            return Err(self.reducer.refused(parameter, "has two gradients in one step"));
        }
        if !self.under_way().has_data {
            return Err(self.reducer.refused(parameter, "has a gradient on a rank without examples"));
        }
        Ok(())
    }

    /// Records an error of this rank for the end of the step.
    fn refuse_unless<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome {
            self.progress().refusal.get_or_insert_with(|| again(error));
        }
        outcome
    }

    /// Checks gradients, and copies them into the buckets.
    fn take(&mut self, gradients: &[(usize, TensorView<'_, M>)]) -> Result<()> {
        let mut seen = vec![false; self.reducer.parameters.len()];
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
        let Reducer { buckets, lanes, owners, places, under_way, number, options, .. } = &mut *self.reducer;
        let is_checked = M::HOST_WAITS || options.non_finite != NonFinite::Report;
        let progress = under_way.as_mut().expect("under way");
        let mut of_buckets: Vec<Vec<(usize, M::Slice<'_>)>> = vec![Vec::new(); buckets.len()];
        for (parameter, gradient) in plain {
            let owner = owners[*parameter];
            if is_alone {
                progress.states[owner] = GradientState::Unchanged;
                let is_finite = !is_checked || M::all_finite(gradient.data())?;
                progress.found(*number, (!is_finite).then_some(owner));
            } else {
                progress.states[owner] = GradientState::Reduced;
                let Place { bucket, tensor } = places[owner].expect("checked");
                of_buckets[bucket].push((tensor, gradient.data()));
            }
        }
        for (bucket, of_bucket) in buckets.iter_mut().zip(&of_buckets) {
            if !of_bucket.is_empty() {
                let found = bucket.pack(lanes, of_bucket)?;
                progress.found(*number, found);
            }
        }
        Ok(())
    }

    /// Looks at gradients that were not copied into their bucket, but are there.
    fn look_for_non_finite(&mut self, bucket: usize, tensors: &[usize]) {
        let Reducer { buckets, lanes, under_way, number, .. } = &mut *self.reducer;
        let found = buckets[bucket].find_non_finite(lanes, tensors);
        under_way.as_mut().expect("under way").found(*number, found);
    }

    /// Moves the sums over micro-batches of these owners into the buckets.
    fn take_sums(&mut self, owners: &[usize]) -> Result<()> {
        for index in 0..self.reducer.buckets.len() {
            let reducer = &mut *self.reducer;
            let place = |owner: &usize| reducer.places[*owner].filter(|place| place.bucket == index);
            let mut tensors: Vec<usize> = owners.iter().filter_map(place).map(|place| place.tensor).collect();
            tensors.sort_unstable();
            if !tensors.is_empty() {
                let with = (&reducer.lanes, reducer.comm.world_size());
                reducer.buckets[index].take_sums(with, &reducer.parameters, &tensors)?;
                self.look_for_non_finite(index, &tensors);
            }
        }
        owners.iter().for_each(|&owner| self.progress().states[owner] = GradientState::Reduced);
        Ok(())
    }

    /// Records that gradients are in the buckets, and reduces the buckets that they complete.
    fn arrive(&mut self, parameters: impl IntoIterator<Item = usize>) -> Result<()> {
        for parameter in parameters {
            let owner = self.reducer.owners[parameter];
            let bucket = self.reducer.places[owner].expect("checked").bucket;
            let progress = self.progress();
            progress.present[owner] = true;
            progress.arrived.push(owner);
            progress.missing[bucket] -= 1;
        }
        if self.reducer.order == Order::OfBuckets { self.reduce(false) } else { Ok(()) }
    }

    /// Reduces the buckets whose turn it is, or all remaining ones.
    fn reduce(&mut self, all: bool) -> Result<()> {
        let _scope = scope::within(self.reducer.operation());
        let Reducer { buckets, lanes, comm, moments, under_way, number, .. } = &mut *self.reducer;
        let progress = under_way.as_mut().expect("under way");
        if let Some(error) = &progress.failure {
            return Err(again(error));
        }
        if comm.world_size() == 1 {
            return Ok(());
        }
        while progress.next < buckets.len() && (all || progress.missing[progress.next] == 0) {
            let bucket = &mut buckets[progress.next];
            let mut run = || {
                if progress.weight != 1.0 {
                    let buffer = bucket.buffer.as_mut().expect("allocated where there are several ranks");
                    M::scale_in_place(M::arena_mut(lanes, buffer), progress.weight)?;
                }
                M::fork(lanes)?;
                let begin = moments.is_some().then(|| M::moment(lanes, Lane::Reductions)).transpose()?;
                bucket.reduce(lanes, *number)?;
                if let Some((moments, begin)) = moments.as_mut().zip(begin) {
                    moments.bucket(lanes, bucket.bytes(), begin)?;
                }
                Ok(())
            };
            if let Err(error) = run() {
                progress.failure = Some(again(&error));
                return Err(error);
            }
            progress.next += 1;
        }
        Ok(())
    }

    /// Fills the buckets with sums over micro-batches without a gradient in this step, and with zeros for absent gradients.
    fn fill(&mut self) -> Result<()> {
        let progress = self.under_way();
        let owned = |owner: &usize| self.reducer.places[*owner].is_some() && !progress.present[*owner];
        let absent: Vec<usize> = (0..progress.present.len()).filter(owned).collect();
        let (summed, unused): (Vec<usize>, Vec<usize>) =
            absent.into_iter().partition(|&owner| self.reducer.accumulated[owner] && progress.has_data);
        self.take_sums(&summed)?;
        summed.into_iter().for_each(|owner| self.progress().present[owner] = true);
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
        let _scope = scope::within(self.reducer.operation());
        let filled = self.fill();
        let _ = self.refuse_unless(filled);
        let Reducer { lanes, moments, .. } = &mut *self.reducer;
        let recorded = moments.as_mut().map_or(Ok(()), |moments| moments.gradients(lanes));
        let _ = self.refuse_unless(recorded);
        let reduced = self.reduce(true);
        let joined = M::join(&self.reducer.lanes);
        let checked = if reduced.is_ok() { self.end_checks() } else { Ok(()) };
        let _ = self.refuse_unless(checked);
        let outcome = reduced.and_then(|()| self.vote()).and_then(|states| joined.map(|()| states));
        let outcome = outcome.and_then(|states| self.judge(states));
        let examples = self.under_way().examples;
        let reducer = &mut *self.reducer;
        reducer.under_way = None;
        reducer.accumulated.fill(false);
        match outcome {
            Ok((states, non_finite)) => {
                reducer.states.clone_from(&states);
                Ok(Reduced { owners: reducer.owners.clone(), states, examples, non_finite })
            }
            Err(error) => {
                reducer.forget_results();
                Err(error)
            }
        }
    }

    /// Collects the checks of buckets; waits for them, if the options need them in this step.
    fn end_checks(&mut self) -> Result<()> {
        let Reducer { buckets, lanes, under_way, options, .. } = &mut *self.reducer;
        let waits = options.non_finite != NonFinite::Report;
        let progress = under_way.as_mut().expect("under way");
        for bucket in buckets {
            let found = bucket.end_check(lanes, waits)?;
            progress.non_finite = progress.non_finite.or(found);
        }
        Ok(())
    }

    /// Exchanges the lists of the ranks' gradients; returns the states of all gradients, and the first gradient that is not finite.
    fn vote(&mut self) -> Result<(Vec<GradientState>, Option<NonFiniteGradient>)> {
        let comm = self.reducer.comm;
        if let Some((present, _)) = &self.reducer.fixed {
            let progress = self.under_way();
            let differs = |owner: &usize| progress.has_data && present[*owner] != progress.present[*owner];
            if let Some(owner) = (0..present.len()).find(differs) {
                let text = if present[owner] {
                    "has no gradient on this rank, and had one in the first step"
                } else {
                    "has a gradient on this rank, and had none in the first step"
                };
                let text =
                    format!("{text}: with `static_graph` each rank has gradients of the same parameters in every step");
                let error = self.reducer.refused(owner, &text);
                self.progress().refusal.get_or_insert(error);
            }
        }
        let plan = Plan::of(self.reducer.operation());
        match &self.reducer.fixed {
            // No host waits for another one, so that an error of one rank can only end the communicator, through a call that the others
            // do not make.
            Some((_, states)) if !self.reducer.votes_always() => {
                let (progress, states) = (self.under_way(), states.clone());
                let found = progress.non_finite.map(|(step, parameter)| {
                    self.reducer.not_finite(NonFiniteGradient { step, rank: Some(comm.rank()), parameter })
                });
                return match self.progress().refusal.take().or(found) {
                    Some(error) => agree(comm, &plan, Err(error)),
                    None => Ok((states, None)),
                };
            }
            _ => {}
        }
        let is_first = self.reducer.order == Order::Unknown;
        let words = self.words(is_first);
        let all = if comm.world_size() == 1 { words } else { gather(comm, &words)? };
        let votes: Vec<Vote<'_>> = all.chunks_exact(all.len() / comm.world_size()).map(Vote).collect();
        if votes.iter().any(Vote::refuses) {
            let refusal = self.progress().refusal.take();
            return match comm.world_size() {
                1 => Err(refusal.expect("the only rank refuses")),
                _ => agree(comm, &plan, refusal.map_or(Ok(()), Err)).map(|()| (Vec::new(), None)),
            };
        }
        self.check_absent(&votes)?;
        let found = votes.iter().enumerate().find_map(|(rank, vote)| vote.non_finite(rank));
        let states = match comm.world_size() {
            1 => self.states_of(|owner| self.under_way().states[owner]),
            _ => self.states_of(|owner| match votes.iter().any(|vote| vote.has(owner)) {
                true => GradientState::Reduced,
                false => GradientState::Skipped,
            }),
        };
        if is_first && comm.world_size() > 1 {
            self.reducer.order = Order::Agreed(self.reducer.order_of(&votes));
        }
        if self.reducer.options.static_graph && self.reducer.fixed.is_none() {
            self.reducer.fixed = Some((self.under_way().present.clone(), states.clone()));
        }
        Ok((states, found))
    }

    /// Treats gradients that are not finite as the options say. Every rank comes to the same conclusion.
    fn judge(
        &mut self,
        (states, found): (Vec<GradientState>, Option<NonFiniteGradient>),
    ) -> Result<(Vec<GradientState>, Option<NonFiniteGradient>)> {
        let found = match found {
            None => self.reducer.non_finite_result(&states)?,
            found => found,
        };
        let Some(found) = found else { return Ok((states, None)) };
        let reducer = &mut *self.reducer;
        let is_of_this_step = found.step == reducer.number;
        match reducer.options.non_finite {
            NonFinite::Report if is_of_this_step => {
                reducer.reported = Some(found);
                Ok((states, None))
            }
            NonFinite::Report | NonFinite::Error => Err(reducer.not_finite(found)),
            NonFinite::Skip => {
                let error = reducer.not_finite(found);
                tracing::warn!(%error, "the step is skipped on every rank");
                Ok((self.states_of(|_| GradientState::Skipped), Some(found)))
            }
        }
    }

    /// The states of all parameters, given the states of the trained ones.
    fn states_of(&self, trained: impl Fn(usize) -> GradientState) -> Vec<GradientState> {
        let state = |(owner, parameter): (usize, &super::Parameter)| match parameter.is_trained {
            false => GradientState::NotTrained,
            true => trained(owner),
        };
        self.reducer.parameters.iter().enumerate().map(state).collect()
    }

    /// Refuses absent gradients, if the options do. Every rank sees the same votes.
    fn check_absent(&self, votes: &[Vote<'_>]) -> Result<()> {
        let (reducer, count) = (&*self.reducer, self.reducer.parameters.len());
        let has_any = |vote: &Vote<'_>| (0..count).any(|owner| vote.has(owner));
        let absent = reducer.options.absent;
        let with_data = || votes.iter().enumerate().filter(|(_, vote)| vote.has_data());
        if absent != AbsentGradients::ZerosOfWholeRanks && votes.iter().any(has_any) {
            if let Some((rank, _)) = with_data().find(|(_, vote)| !has_any(vote)) {
                let reason = format!(
                    "rank {rank} has no gradient in step {}, and other ranks have: its loss depends on no parameter of the reducer. A rank \
                     without examples calls `step_of(0)`; for ranks that add zeros on purpose there is `AbsentGradients::ZerosOfWholeRanks`",
                    reducer.number
                );
                return Err(Error::InvalidArgument { operation: OPERATION, reason });
            }
        }
        if absent != AbsentGradients::Error {
            return Ok(());
        }
        for (rank, vote) in with_data() {
            let lacks = |owner: &usize| reducer.places[*owner].is_some() && !vote.has(*owner);
            if let Some(owner) = (0..count).find(lacks) {
                return Err(reducer.refused(owner, &format!("has no gradient on rank {rank}")));
            }
        }
        Ok(())
    }

    /// This rank's vote.
    fn words(&self, with_order: bool) -> Vec<u64> {
        Vote::words(self.under_way(), with_order)
    }
}

impl<M: ReducerMemory> Reducer<'_, M> {
    /// Whether the ranks vote in every step, also if each step has the same gradients: hosts that wait for the reduction anyway do, and so
    /// do hosts that look at the gradients.
    fn votes_always(&self) -> bool {
        M::HOST_WAITS || self.options.non_finite != NonFinite::Report
    }

    /// The order of gradients on the lowest rank that had data, with the parameters that it did not use at the end.
    fn order_of(&self, votes: &[Vote<'_>]) -> Vec<usize> {
        let count = self.parameters.len();
        let order = votes.iter().find(|vote| vote.has_data()).map_or(&[][..], |vote| vote.order(count));
        let mut order: Vec<usize> =
            order.iter().map(|&owner| owner as usize).take_while(|&owner| owner < count).collect();
        let rest: Vec<usize> =
            (0..count).filter(|owner| self.places[*owner].is_some() && !order.contains(owner)).collect();
        order.extend(rest);
        order
    }

    /// The first parameter whose reduced gradient is not finite. A mean of finite numbers is finite.
    fn non_finite_result(&self, states: &[GradientState]) -> Result<Option<NonFiniteGradient>> {
        if self.comm.world_size() == 1 || self.options.reduction == Reduction::Mean || !self.votes_always() {
            return Ok(None);
        }
        let reduced = |owner: &usize| self.places[*owner].is_some() && states[*owner] == GradientState::Reduced;
        for owner in (0..states.len()).filter(reduced) {
            let place = self.places[owner].expect("filtered");
            let gradient = self.buckets[place.bucket].gradient(&self.lanes, place.tensor).expect("allocated");
            if !M::all_finite(gradient.data())? {
                return Ok(Some(NonFiniteGradient { step: self.number, rank: None, parameter: owner }));
            }
        }
        Ok(None)
    }
}

impl Progress {
    /// Records an owner whose gradient of this step is not finite.
    fn found(&mut self, step: u64, owner: Option<usize>) {
        self.non_finite = self.non_finite.or(owner.map(|owner| (step, owner)));
    }
}

impl<M: ReducerMemory> Drop for Step<'_, '_, M> {
    fn drop(&mut self) {
        if self.reducer.under_way.is_none() || std::thread::panicking() {
            return;
        }
        let reason = "it has left a step without finishing it".into();
        self.progress().refusal.get_or_insert(Error::InvalidArgument { operation: OPERATION, reason });
        if let Err(error) = self.complete() {
            tracing::warn!(%error, "a step ended without a result");
        }
    }
}
