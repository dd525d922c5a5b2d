//! One run: every rank is a thread with its own copy of the weights, and gradsync does everything between the gradient and the weights.
//!
//! A step of each rank: the gradient of its own batch; then either the reduction over the ranks and the optimizer, or the optimizer and
//! then the reduction of its steps. No weights are sent: the copies stay equal because the reduction's result is bit-identical on every
//! rank, and the run checks that they do.

use gradsync::comm::local::{self, LocalCommunicator};
use gradsync::comm::{Collectives, Ranks, ReduceOp, Split};
use gradsync::ops::{self, AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes};
use gradsync::train::{self, Adam, AdamOptions, DeltaOptimizer, Sgd, SgdOptions, StepOutcome, Stepper};
use gradsync::{DType, GradientBuffer, Slice, SliceMut, kernels};
use serde::{Deserialize, Serialize};

use crate::images::Part;
use crate::learner::{Data, Learner, Sums};
use crate::plan::{MOMENTUM, Method, Purpose, RANKS_OF_A_NODE, Reduction, Spec, schedule};
use crate::random::SplitMix64;

/// The number of intermediate evaluations of a run for a figure.
pub(crate) const MARKS: usize = 16;
/// Samples of the validation part for an intermediate evaluation.
const MARK_SAMPLES: usize = 2_048;

/// The error that stopped a run. Divergence is no error but an outcome.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    #[error("step {step}: the weights of rank {rank} differ from those of rank 0 ({found:016x}, not {expected:016x})")]
    WeightsDiffer { step: usize, rank: usize, expected: u64, found: u64 },
    #[error("rank {0} panicked")]
    Panicked(usize),
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    #[error(transparent)]
    Gradsync(#[from] gradsync::Error),
}

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) steps: usize,
    /// The mean cross-entropy at the end; `None` if numbers were no longer finite.
    pub(crate) loss: Option<f64>,
    /// The proportion of correct answers at the end.
    pub(crate) accuracy: Option<f64>,
    /// The step at which the run stopped because its gradient was not finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stopped: Option<usize>,
    /// Whether the run ended with numbers that are not finite, or no better than a constant answer.
    pub(crate) diverged: bool,
    /// The loss, if it is finite, and the accuracy on validation samples after each of [`MARKS`] equal parts of the steps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) curve: Vec<(Option<f64>, f64)>,
    /// The mean of the sum of Adasum's weights, for each part of the steps and each tensor: 1 corresponds to a mean, the number of ranks to
    /// a sum.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) mass: Vec<Vec<f64>>,
}

/// Trains, and returns the outcome from rank 0.
pub(crate) fn run(spec: &Spec, data: &dyn Data) -> Result<Outcome, TrainError> {
    let order = order(spec, data);
    let outcomes = local::run_each(spec.arm.ranks, |comm| Rank::new(&comm, spec, data)?.train(&order))?;
    let mut account = None;
    let mut consequence = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(Ok(outcome)) if rank == 0 => account = Some(outcome),
            Ok(Ok(_)) => {}
            // If one rank fails, the others' next collective fails too. The error that is not about communication is the cause, and is
            // returned.
            Ok(Err(error @ TrainError::Gradsync(gradsync::Error::Comm(_)))) => {
                consequence.get_or_insert(error);
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => return Err(TrainError::Panicked(rank)),
        }
    }
    match consequence {
        Some(error) => Err(error),
        None => account.ok_or(TrainError::Panicked(0)),
    }
}

/// The training samples in their order: pass by pass, each pass in another order. The order is identical for all arms and numbers of ranks.
fn order(spec: &Spec, data: &dyn Data) -> Vec<u32> {
    let (all, needed) = (data.samples(Part::Train) as u32, spec.steps(data.batch()) * spec.arm.ranks * data.batch());
    let mut order = Vec::new();
    for pass in 0.. {
        if order.len() >= needed {
            break;
        }
        let mut samples: Vec<u32> = (0..all).collect();
        SplitMix64::new(spec.seed, 2 + pass).shuffle(&mut samples);
        order.extend(samples);
    }
    order
}

enum Optimizer {
    Sgd(Box<Sgd>),
    Adam(Box<Adam>),
}

impl Optimizer {
    fn new(method: Method) -> gradsync::Result<Self> {
        Ok(match method {
            Method::Sgd => Self::Sgd(Box::new(Sgd::new(SgdOptions::default())?)),
            Method::Momentum | Method::MomentumDeltas => {
                Self::Sgd(Box::new(Sgd::new(SgdOptions::default().with_momentum(MOMENTUM))?))
            }
            Method::Adam | Method::AdamDeltas => Self::Adam(Box::new(Adam::new(AdamOptions::default())?)),
        })
    }

    fn with_rate(&mut self, rate: f64) -> gradsync::Result<&mut dyn DeltaOptimizer> {
        match self {
            Self::Sgd(sgd) => sgd.set_options(sgd.options().with_rate(rate)).map(|()| sgd.as_mut() as _),
            Self::Adam(adam) => adam.set_options(adam.options().with_rate(rate)).map(|()| adam.as_mut() as _),
        }
    }
}

/// One rank of a run.
struct Rank<'a> {
    comm: &'a LocalCommunicator,
    /// For reductions with nodes: this rank's node, and the ranks at its position on all nodes.
    nodes: Option<[LocalCommunicator; 2]>,
    spec: &'a Spec,
    data: &'a dyn Data,
    learner: Box<dyn Learner + 'a>,
    weights: GradientBuffer,
    gradients: GradientBuffer,
    deltas: GradientBuffer,
    optimizer: Optimizer,
    /// Used by the methods with deltas.
    stepper: Stepper<'a>,
}

impl<'a> Rank<'a> {
    fn new(comm: &'a LocalCommunicator, spec: &'a Spec, data: &'a dyn Data) -> Result<Self, TrainError> {
        let buffer = || GradientBuffer::new(DType::F32, spec.arm.ranks, data.tensors());
        let (mut weights, gradients, deltas) = (buffer()?, buffer()?, buffer()?);
        data.start(&mut weights, spec.seed);
        let nodes = match spec.arm.reduction {
            Reduction::AdasumOfSums | Reduction::AdasumOfMeans => {
                let split =
                    |color: usize| comm.split(Some(color as u64), 0).map(|group| group.expect("it has a colour"));
                Some([split(comm.rank() / RANKS_OF_A_NODE)?, split(comm.rank() % RANKS_OF_A_NODE)?])
            }
            _ => None,
        };
        let optimizer = Optimizer::new(spec.arm.method)?;
        let stepper = Stepper::new(comm, train::Reduction::Adasum(options(spec.arm.reduction)));
        Ok(Self { comm, nodes, spec, data, learner: data.learner()?, weights, gradients, deltas, optimizer, stepper })
    }

    fn train(mut self, order: &[u32]) -> Result<Outcome, TrainError> {
        let (batch, ranks) = (self.data.batch(), self.spec.arm.ranks);
        let steps = self.spec.steps(batch);
        let mut outcome = Outcome {
            steps,
            loss: None,
            accuracy: None,
            stopped: None,
            diverged: true,
            curve: Vec::new(),
            mass: Vec::new(),
        };
        let mut mass = Mass::default();
        for step in 0..steps {
            let first = (step * ranks + self.comm.rank()) * batch;
            self.learner.gradient(&self.weights, &order[first..first + batch], &mut self.gradients)?;
            let Some(report) = self.step(self.spec.rate * schedule(step, steps))? else {
                outcome.stopped = Some(step);
                return Ok(outcome);
            };
            mass.add(report, ranks);
            let is_mark = (step + 1) * MARKS / steps > step * MARKS / steps;
            if is_mark && self.spec.purpose == Purpose::Figure {
                self.check_weights(step)?;
                let scores = self.score(Part::Validation, MARK_SAMPLES)?;
                outcome.curve.push((scores.loss(), scores.accuracy()));
                outcome.mass.extend(mass.take());
            }
        }
        self.check_weights(steps)?;
        let part = if self.spec.purpose == Purpose::Search { Part::Validation } else { Part::Test };
        let scores = self.score(part, usize::MAX)?;
        outcome.loss = scores.loss();
        outcome.accuracy = outcome.loss.map(|_| scores.accuracy());
        outcome.diverged = outcome.loss.is_none_or(|loss| loss >= self.data.chance());
        Ok(outcome)
    }

    /// Updates the weights. `None` if the gradients or the steps were not finite.
    fn step(&mut self, rate: f64) -> Result<Option<Option<AdasumReport>>, TrainError> {
        let optimizer = self.optimizer.with_rate(rate)?;
        if matches!(self.spec.arm.method, Method::MomentumDeltas | Method::AdamDeltas) {
            let report = match self.stepper.step(&self.gradients, &mut self.weights, optimizer) {
                Err(error) if is_overflow(&error) => return Ok(None),
                report => report?,
            };
            return Ok((report.outcome == StepOutcome::Applied).then_some(report.adasum));
        }
        let report = match (self.spec.arm.reduction, &self.nodes) {
            (Reduction::Mean, _) => ops::all_reduce(self.comm, &mut self.gradients, ReduceOp::Mean).map(|()| None)?,
            (Reduction::Sum, _) => ops::all_reduce(self.comm, &mut self.gradients, ReduceOp::Sum).map(|()| None)?,
            (reduction, Some([node, across])) => {
                let within = if reduction == Reduction::AdasumOfSums { ReduceOp::Sum } else { ReduceOp::Mean };
                let nodes: Nodes<'_> = Nodes { all: self.comm, node, across };
                ops::hierarchical_adasum_all_reduce(nodes, &mut self.gradients, within, options(reduction))?;
                None
            }
            (reduction, None) => Some(ops::adasum_all_reduce(self.comm, &mut self.gradients, options(reduction))?),
        };
        // The gradients are bit-identical on every rank, so that either all ranks return here or none does.
        if !kernels::cpu::all_finite(self.gradients.as_slice()) {
            return Ok(None);
        }
        match optimizer.deltas(&self.gradients, &self.weights, &mut self.deltas) {
            Err(error) if is_overflow(&error) => return Ok(None),
            result => result?,
        }
        for index in 0..self.weights.tensor_count() {
            ops::in_place_accumulate(self.weights.tensor_mut(index), self.deltas.tensor(index), None)?;
        }
        Ok(Some(report))
    }

    /// The score on the first samples of a part, which are divided among the ranks.
    fn score(&mut self, part: Part, most: usize) -> Result<Sums, TrainError> {
        let samples: Vec<u32> = (0..self.data.samples(part).min(most) as u32).collect();
        let mut own = [0.0; 3];
        for batch in samples.chunks(self.data.batch()).skip(self.comm.rank()).step_by(self.spec.arm.ranks) {
            let Sums { loss, correct, count } = self.learner.score(&self.weights, part, batch)?;
            own.iter_mut().zip([loss, correct, count]).for_each(|(sum, value)| *sum += value);
        }
        self.comm.all_reduce(SliceMut::from(own.as_mut_slice()), ReduceOp::Sum)?;
        Ok(Sums { loss: own[0], correct: own[1], count: own[2] })
    }

    /// Checks that the weights are bit-identical on all ranks.
    fn check_weights(&self, step: usize) -> Result<(), TrainError> {
        // The two halves of the hash are exact in f64.
        let own = fingerprint(&self.weights);
        let own = [(own >> 32) as u32, own as u32].map(f64::from);
        let mut all = vec![0.0; 2 * self.comm.world_size()];
        self.comm.all_gather(Slice::from(own.as_slice()), SliceMut::from(all.as_mut_slice()))?;
        let all: Vec<u64> = all.chunks(2).map(|halves| ((halves[0] as u64) << 32) | halves[1] as u64).collect();
        match all.iter().position(|hash| *hash != all[0]) {
            Some(rank) => Err(TrainError::WeightsDiffer { step, rank, expected: all[0], found: all[rank] }),
            None => Ok(()),
        }
    }
}

/// Whether an optimizer refuses the gradients, on every rank: they are finite, but its state would overflow.
fn is_overflow(error: &gradsync::Error) -> bool {
    matches!(error, gradsync::Error::InvalidArgument { .. })
}

fn options(reduction: Reduction) -> AdasumOptions {
    let algorithm = if reduction == Reduction::AdasumTree { Algorithm::Tree } else { Algorithm::Gram };
    let granularity = if reduction == Reduction::AdasumWhole { Granularity::Whole } else { Granularity::Tensor };
    AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity)
}

/// The FNV-1a hash of the buffer's bytes, which detects a change of a single bit of a weight.
fn fingerprint(weights: &GradientBuffer) -> u64 {
    let bytes = weights.as_slice().as_bytes().iter();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Sums {
    /// The mean loss; `None` if it is not finite, because JSON has only finite numbers.
    fn loss(&self) -> Option<f64> {
        Some(rounded(self.loss / self.count)).filter(|loss| loss.is_finite())
    }

    fn accuracy(&self) -> f64 {
        rounded(self.correct / self.count)
    }
}

/// Further digits are noise, and results are stored as text.
fn rounded(value: f64) -> f64 {
    (value * 1e5).round() / 1e5
}

/// The sum of Adasum's weights per layer, accumulated over steps.
#[derive(Default)]
struct Mass {
    of_layers: Vec<f64>,
    steps: usize,
}

impl Mass {
    fn add(&mut self, report: Option<AdasumReport>, ranks: usize) {
        let Some(weights) = report.and_then(|report| report.weights) else { return };
        self.of_layers.resize(weights.len() / ranks, 0.0);
        self.of_layers.iter_mut().zip(weights.chunks(ranks)).for_each(|(sum, own)| *sum += own.iter().sum::<f64>());
        self.steps += 1;
    }

    /// The mean over the steps since the last call.
    fn take(&mut self) -> Option<Vec<f64>> {
        let Self { of_layers, steps } = std::mem::take(self);
        (steps > 0).then(|| of_layers.into_iter().map(|sum| (sum / steps as f64 * 1e3).round() / 1e3).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::Images;
    use crate::plan::{Arm, Task};

    fn spec(reduction: Reduction, ranks: usize, rate: f64) -> Spec {
        let arm = Arm { task: Task::Images, method: Method::Momentum, reduction, ranks };
        Spec { purpose: Purpose::Figure, arm, rate, seed: 1, samples: 3 * 32 * ranks }
    }

    #[test]
    fn sum_is_mean_with_the_rate_times_the_ranks() {
        let images = Images::random(160);
        let run = |reduction, rate| run(&spec(reduction, 4, rate), &images).unwrap();
        let (mean, sum) = (run(Reduction::Mean, 0.125), run(Reduction::Sum, 0.125 / 4.0));
        assert_eq!(mean, sum);
        assert_eq!((mean.steps, mean.curve.len()), (3, 3));
        assert_ne!(mean, run(Reduction::Sum, 0.125));
    }

    #[test]
    fn every_way_is_the_same_in_every_run_and_no_two_ways_are() {
        let images = Images::random(160);
        let ways = [
            (Reduction::Adasum, Method::Momentum),
            (Reduction::AdasumWhole, Method::Momentum),
            (Reduction::AdasumOfSums, Method::Momentum),
            (Reduction::AdasumOfMeans, Method::Momentum),
            (Reduction::Adasum, Method::MomentumDeltas),
            (Reduction::Adasum, Method::Adam),
        ];
        let outcomes = ways.map(|(reduction, method)| {
            let mut spec = spec(reduction, 16, 0.05);
            spec.arm.method = method;
            let outcome = run(&spec, &images).unwrap();
            assert_eq!(outcome, run(&spec, &images).unwrap(), "{spec:?}");
            outcome
        });
        for (index, outcome) in outcomes.iter().enumerate() {
            assert!(outcomes[..index].iter().all(|other| other.curve != outcome.curve), "{:?}", ways[index]);
        }
        let masses = outcomes[0].mass.concat();
        assert_eq!(masses.len(), 3 * 10);
        assert!(masses.iter().all(|mass| *mass > 0.5), "{masses:?}");
    }

    #[test]
    fn one_different_bit_on_one_rank_is_found_by_all() {
        let (images, spec) = (Images::random(160), spec(Reduction::Mean, 4, 0.1));
        let outcomes = local::run_each(4, |comm| {
            let mut rank = Rank::new(&comm, &spec, &images).unwrap();
            rank.check_weights(7).unwrap();
            if comm.rank() == 2 {
                let value = &mut crate::lenet::tensor_mut(&mut rank.weights, 0)[0];
                *value = f32::from_bits(value.to_bits() ^ 1);
            }
            rank.check_weights(8)
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.unwrap().unwrap_err();
            assert!(matches!(error, TrainError::WeightsDiffer { step: 8, rank: 2, .. }), "{error}");
        }
    }

    #[test]
    fn a_rate_far_too_high_is_an_outcome() {
        let images = Images::random(160);
        for method in [Method::Sgd, Method::MomentumDeltas] {
            let mut spec = spec(Reduction::Adasum, 4, 1e30);
            (spec.arm.method, spec.samples) = (method, 20 * 4 * 32);
            let outcome = run(&spec, &images).unwrap();
            assert!(outcome.diverged && outcome.loss.is_none() && outcome.accuracy.is_none(), "{outcome:?}");
            assert!(outcome.stopped.is_some_and(|step| step > 0), "{outcome:?}");
        }
    }

    #[test]
    fn all_samples_are_seen_before_one_is_seen_again() {
        let images = Images::random(160);
        let mut spec = spec(Reduction::Mean, 4, 0.1);
        spec.samples = 4 * 32 * 5;
        let order = order(&spec, &images);
        assert_eq!(order.len(), 640);
        for pass in order.chunks(160) {
            let mut samples = pass.to_vec();
            samples.sort_unstable();
            assert_eq!(samples, (0..160).collect::<Vec<u32>>());
        }
        assert_ne!(order[..160], order[160..320]);
        spec.arm.ranks = 1;
        assert_eq!(order, super::order(&spec, &images), "the same for every number of ranks");
    }
}
