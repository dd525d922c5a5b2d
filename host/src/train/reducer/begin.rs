//! The begin of a reducer's step: its number, the numbers of examples, and the end of a step that was left.

use super::options::UnevenEnds;
use super::report::{GradientState, NonFiniteGradient};
use super::step::{Progress, Step};
use super::times::Moments;
use super::{OPERATION, Reducer, ReducerMemory};
use crate::call::scope;
use crate::call_comparison::gather;
use crate::error::{Error, Operation, Result};
use crate::train::Reduction;

fn greatest_common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
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
    /// * [`Error::NotFinite`] for an earlier step, with [`NonFinite::Report`](super::NonFinite::Report), the default; the next call begins a step;
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
        self.updated = self.updated.filter(|updated| *updated < self.number);
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
            weights: Vec::new(),
            has_data: true,
            examples: None,
            non_finite: self.found.take(),
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
    ///     Ok(means)
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
        let weighs = self.options.reduction == Reduction::Mean && all.iter().any(|&other| other != all[0]);
        // The smallest weights of the same mean, so that their products need the fewest roundings.
        let divisor = all.iter().copied().reduce(greatest_common_divisor).unwrap_or(1);
        let weights = all.iter().filter(|_| weighs).map(|&examples| (examples / divisor) as f64).collect();
        drop(scope);
        let has_sums = self.accumulated.contains(&true);
        let mut step = self.with_number()?;
        let progress = step.progress();
        progress.has_data = examples > 0;
        progress.examples = Some(sum);
        progress.weights = weights;
        if !progress.has_data && has_sums {
            let reason = "this rank passes 0 examples to `step_of`, and has sums over micro-batches: pass their number of examples, or discard the sums".into();
            progress.refusal = Some(Error::InvalidArgument { operation: OPERATION, reason });
        }
        Ok(Some(step))
    }
}
