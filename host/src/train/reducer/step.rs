//! [`Step`]: one step of a reducer, from the first gradient to the last reduction.

use super::bucket::GradientPlace;
use super::memory::{Lane, ReducerMemory};
use super::options::NonFinite;
use super::report::{GradientState, Reduced};
use super::{OPERATION, Order, Reducer};
use crate::call::scope;
use crate::error::{Error, Result};
use crate::memory::{Host, TensorView, TensorViewMut};
use crate::slice::Floats;

/// A step under way. [`finish`](Self::finish) ends it.
///
/// Dropping it instead is an error of the step on every rank: this rank then takes part in the collectives that the others wait for, with
/// zeros. A step that a caught panic or [`std::mem::forget`] has left ends in the same way when the next one begins: that call returns the
/// error. Until then the other ranks wait.
#[must_use = "the other ranks wait for the gradients of this step"]
#[derive(Debug)]
pub struct Step<'r, 'c, M: ReducerMemory = Host> {
    pub(super) reducer: &'r mut Reducer<'c, M>,
}

/// The progress of a step. It belongs to the reducer, which therefore knows of a step that was left.
#[derive(Debug)]
pub(super) struct Progress {
    /// For each owner, whether its gradient is in.
    pub(super) present: Vec<bool>,
    /// For each owner, whether the caller has had the memory of its gradient in the bucket.
    pub(super) lent: Vec<bool>,
    /// For each owner of a present gradient, whether the result is in the bucket or in the caller's memory.
    pub(super) states: Vec<GradientState>,
    /// The number of missing gradients of each bucket.
    pub(super) missing: Vec<usize>,
    /// The first bucket that is not reduced.
    pub(super) next: usize,
    /// Owners in the order in which their gradients were passed.
    pub(super) arrived: Vec<usize>,
    /// The weights of the ranks in a mean; empty if they are equal.
    pub(super) weights: Vec<f64>,
    pub(super) has_data: bool,
    /// The number of examples of all ranks.
    pub(super) examples: Option<usize>,
    /// The first owner of this rank whose gradient is not finite, with the number of its step.
    pub(super) non_finite: Option<(u64, usize)>,
    /// The reason why this rank has no part in the result.
    pub(super) refusal: Option<Error>,
    /// The reason why the ranks cannot end the step together.
    pub(super) failure: Option<Error>,
}

/// A copy of the error for another caller.
fn again(error: &Error) -> Error {
    match error {
        Error::Comm(error) => error.clone().into(),
        Error::InvalidArgument { operation, reason } => Error::InvalidArgument { operation, reason: reason.clone() },
        error => Error::InvalidArgument { operation: OPERATION, reason: error.to_string() },
    }
}

impl<'c, M: ReducerMemory> Step<'_, 'c, M> {
    pub(super) fn under_way(&self) -> &Progress {
        self.reducer.under_way.as_ref().expect("a step is under way until it is over")
    }

    pub(super) fn progress(&mut self) -> &mut Progress {
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
    pub fn ready<'g>(&mut self, parameter: usize, gradient: impl Into<TensorView<'g, M>> + Floats) -> Result<()> {
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
        let checked = self.look_for_non_finite(place.bucket, &[place.tensor]);
        self.refuse_unless(checked)?;
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
    fn place_to_write(&self, parameter: usize) -> Result<GradientPlace> {
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
        let is_left = options.non_finite == NonFinite::Leave;
        let is_checked = M::HOST_WAITS && !is_left || options.non_finite.waits();
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
                let GradientPlace { bucket, tensor } = places[owner].expect("checked");
                of_buckets[bucket].push((tensor, gradient.data()));
            }
        }
        for (bucket, of_bucket) in buckets.iter_mut().zip(&of_buckets) {
            if !of_bucket.is_empty() {
                let found = bucket.pack(lanes, of_bucket)?;
                progress.found(*number, found.filter(|_| !is_left));
            }
        }
        Ok(())
    }

    /// Looks at gradients that were not copied into their bucket, but are there. A GPU looks at the buckets of several ranks before their
    /// reduction.
    fn look_for_non_finite(&mut self, bucket: usize, tensors: &[usize]) -> Result<()> {
        let Reducer { buckets, lanes, under_way, number, comm, options, .. } = &mut *self.reducer;
        let is_left = options.non_finite == NonFinite::Leave;
        if M::HOST_WAITS && !is_left || (comm.world_size() == 1 && options.non_finite.waits()) {
            let found = buckets[bucket].find_non_finite(lanes, tensors)?;
            under_way.as_mut().expect("under way").found(*number, found);
        }
        Ok(())
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
                self.look_for_non_finite(index, &tensors)?;
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
                M::fork(lanes)?;
                let begin = moments.is_some().then(|| M::moment(lanes, Lane::Reductions)).transpose()?;
                bucket.reduce(lanes, *number, &progress.weights)?;
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
        if reduced.is_ok() {
            let waits = self.reducer.options.non_finite.waits();
            let checked = self.reducer.end_checks(waits);
            let found = self.refuse_unless(checked).unwrap_or_default();
            let updated = self.reducer.updated.filter(|_| !waits);
            let progress = self.progress();
            let is_new = |(step, _): &(u64, usize)| updated.is_none_or(|updated| *step > updated);
            progress.non_finite = progress.non_finite.or(found).filter(is_new);
        }
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
}

impl<M: ReducerMemory> Reducer<'_, M> {
    /// Collects the checks of buckets; returns the step and the parameter of the first gradient that they have found. With `waits`, all
    /// checks are over then.
    pub(super) fn end_checks(&mut self, waits: bool) -> Result<Option<(u64, usize)>> {
        let mut first = None;
        for bucket in &mut self.buckets {
            let found = bucket.end_check(&self.lanes, waits)?;
            first = first.or(found);
        }
        Ok(first)
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
        let reason = format!("step {} was dropped without `finish`", self.reducer.number);
        self.progress().refusal.get_or_insert(Error::InvalidArgument { operation: OPERATION, reason });
        if let Err(error) = self.complete() {
            tracing::warn!(%error, "a step ended without a result");
        }
    }
}
