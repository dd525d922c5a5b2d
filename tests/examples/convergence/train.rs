//! One run: every rank is a thread with its own copy of the weights, and gradsync does everything between the gradient and the weights.
//!
//! A step of each rank: the gradient of its own batch; then either the reduction over the ranks and the optimizer, or the optimizer and
//! then the reduction of its steps. No weights are sent: the copies stay equal because the reduction's result is bit-identical on every
//! rank, and the run checks that they do.

use anyhow::{Result, ensure};
use gradsync::comm::local::{self, LocalCommunicator};
use gradsync::comm::{Collectives, Ranks, ReduceOp, Split};
use gradsync::kernels::KernelMemory;
use gradsync::memory::Host;
use gradsync::ops::{self, AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes};
use gradsync::train::{self, AdamW, AdamWOptions, DeltaOptimizer, Sgd, SgdOptions, StepOutcome, Stepper};
use gradsync::{DType, GradientBuffer, Slice, SliceMut};
use serde::{Deserialize, Serialize};

use crate::images::{CLASSES, Images, Part};
use crate::lanes::BATCH;
use crate::lenet::{Answers, LeNet};
use crate::random::SplitMix64;
use crate::study::{Method, Purpose, Reduction, Spec};

/// The number of moments at which a run compares the ranks' weights.
pub(crate) const MARKS: usize = 16;
/// Ranks per node, for reductions with nodes.
const RANKS_OF_A_NODE: usize = 8;
const MOMENTUM: f64 = 0.9;
/// The part of the steps in which the rate rises; in the others it falls to 0.
const WARM_UP: f64 = 0.1;

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) steps: usize,
    /// The mean cross-entropy at the end; `None` if numbers were no longer finite.
    pub(crate) loss: Option<f64>,
    /// The proportion of correct answers at the end.
    pub(crate) accuracy: Option<f64>,
    /// Whether the run ended with numbers that are not finite, or no better than a constant answer.
    pub(crate) diverged: bool,
    /// Only of Adasum's figures: the mean of the sum of its weights, for each of [`MARKS`] parts of the steps and each tensor; 1 corresponds
    /// to a mean, the number of ranks to a sum.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) mass: Vec<Vec<f64>>,
}

/// Trains, and returns the outcome from rank 0. Divergence is no error but an outcome.
pub(crate) fn run(spec: &Spec, images: &Images) -> Result<Outcome> {
    let order = order(spec, images);
    let mut outcomes = local::try_run(spec.arm.ranks, |comm| Rank::new(&comm, spec, images)?.train(&order))?;
    Ok(outcomes.swap_remove(0))
}

pub(crate) fn steps(samples: usize, ranks: usize) -> usize {
    (samples / (ranks * BATCH)).max(1)
}

/// The factor of the learning rate in a step; steps are counted from 0.
fn schedule(step: usize, steps: usize) -> f64 {
    let warm = ((WARM_UP * steps as f64) as usize).max(1);
    let rising = (step + 1) as f64 / warm as f64;
    let falling = (steps - step) as f64 / (steps - warm).max(1) as f64;
    rising.min(falling).min(1.0)
}

/// The training images in their order: pass by pass, each pass in another order. The order is identical for all arms and numbers of ranks.
fn order(spec: &Spec, images: &Images) -> Vec<u32> {
    let needed = steps(spec.samples, spec.arm.ranks) * spec.arm.ranks * BATCH;
    let mut order = Vec::new();
    for pass in 0.. {
        if order.len() >= needed {
            break;
        }
        let mut rows = images.rows(Part::Train).to_vec();
        SplitMix64::new(spec.seed, 2 + pass).shuffle(&mut rows);
        order.extend(rows);
    }
    order
}

enum Optimizer {
    Sgd(Sgd),
    Adam(AdamW),
}

impl Optimizer {
    fn new(method: Method) -> gradsync::Result<Self> {
        Ok(match method {
            Method::Sgd => Self::Sgd(Sgd::new(SgdOptions::default())?),
            Method::Momentum => Self::Sgd(Sgd::new(SgdOptions::default().with_momentum(MOMENTUM))?),
            Method::Adam => Self::Adam(AdamW::new(AdamWOptions::default().with_weight_decay(0.0))?),
        })
    }

    fn with_rate(&mut self, rate: f64) -> gradsync::Result<&mut Self> {
        match self {
            Self::Sgd(sgd) => sgd.set_options(sgd.options().with_rate(rate))?,
            Self::Adam(adam) => adam.set_options(adam.options().with_rate(rate))?,
        }
        Ok(self)
    }

    fn of_deltas(&mut self) -> &mut dyn DeltaOptimizer {
        match self {
            Self::Sgd(sgd) => sgd,
            Self::Adam(adam) => adam,
        }
    }

    fn step(&mut self, weights: &mut GradientBuffer, gradients: &GradientBuffer) -> gradsync::Result<()> {
        match self {
            Self::Sgd(sgd) => sgd.step(weights, gradients),
            Self::Adam(adam) => adam.step(weights, gradients),
        }
    }
}

/// One rank of a run.
struct Rank<'a> {
    comm: &'a LocalCommunicator,
    /// For reductions with nodes: this rank's node, and the ranks at its position on all nodes.
    nodes: Option<[LocalCommunicator; 2]>,
    spec: &'a Spec,
    images: &'a Images,
    network: LeNet,
    weights: GradientBuffer,
    gradients: GradientBuffer,
    optimizer: Optimizer,
    /// Reduces the optimizers' steps.
    stepper: Stepper<'a>,
}

impl<'a> Rank<'a> {
    fn new(comm: &'a LocalCommunicator, spec: &'a Spec, images: &'a Images) -> gradsync::Result<Self> {
        let buffer = || GradientBuffer::new(DType::F32, spec.arm.ranks, LeNet::tensors());
        let (mut weights, gradients) = (buffer()?, buffer()?);
        LeNet::start(&mut weights, spec.seed);
        let split = |color: usize| comm.split(Some(color as u64), 0).map(|group| group.expect("it has a colour"));
        let nodes = match spec.arm.reduction {
            Reduction::AdasumOfMeans => {
                Some([split(comm.rank() / RANKS_OF_A_NODE)?, split(comm.rank() % RANKS_OF_A_NODE)?])
            }
            _ => None,
        };
        let optimizer = Optimizer::new(spec.arm.method)?;
        let stepper = Stepper::new(comm, train::Reduction::Adasum(adasum()));
        Ok(Self { comm, nodes, spec, images, network: LeNet::new(), weights, gradients, optimizer, stepper })
    }

    fn train(mut self, order: &[u32]) -> Result<Outcome> {
        let ranks = self.spec.arm.ranks;
        let steps = steps(self.spec.samples, ranks);
        let mut outcome = Outcome { steps, loss: None, accuracy: None, diverged: true, mass: Vec::new() };
        let mut mass = Mass::default();
        for step in 0..steps {
            let first = (step * ranks + self.comm.rank()) * BATCH;
            let labels = self.images.load(&order[first..first + BATCH], self.network.images());
            self.network.run(&self.weights, &labels, Some(&mut self.gradients));
            let Some(report) = self.step(self.spec.rate * schedule(step, steps))? else { return Ok(outcome) };
            mass.add(report, ranks);
            if (step + 1) * MARKS / steps > step * MARKS / steps {
                self.check_weights(step)?;
                outcome.mass.extend(mass.take());
            }
        }
        let is_search = self.spec.purpose == Purpose::Search;
        if is_search || self.spec.arm.reduction != Reduction::Adasum {
            outcome.mass.clear();
        }
        let [loss, accuracy] = self.score(if is_search { Part::Validation } else { Part::Test })?;
        // JSON has only finite numbers.
        outcome.loss = Some(loss).filter(|loss| loss.is_finite());
        outcome.accuracy = outcome.loss.map(|_| accuracy);
        outcome.diverged = outcome.loss.is_none_or(|loss| loss >= (CLASSES as f64).ln());
        Ok(outcome)
    }

    /// Updates the weights. `None` if the gradients or the optimizers' steps were not finite.
    fn step(&mut self, rate: f64) -> Result<Option<Option<AdasumReport>>> {
        let optimizer = self.optimizer.with_rate(rate)?;
        let gradients = &mut self.gradients;
        let mut report = None;
        match self.spec.arm.reduction {
            Reduction::Mean => ops::all_reduce(self.comm, gradients, ReduceOp::Mean)?,
            Reduction::Sum => ops::all_reduce(self.comm, gradients, ReduceOp::Sum)?,
            Reduction::Adasum => report = Some(ops::adasum_all_reduce(self.comm, gradients, adasum())?),
            Reduction::AdasumWhole => {
                let options = adasum().with_granularity(Granularity::Whole);
                ops::adasum_all_reduce(self.comm, gradients, options)?;
            }
            Reduction::AdasumOfMeans => {
                let [node, across] = self.nodes.as_ref().expect("made at the start");
                let nodes: Nodes<'_> = Nodes { all: self.comm, node, across };
                ops::hierarchical_adasum_all_reduce(nodes, gradients, ReduceOp::Mean, adasum())?;
            }
            Reduction::AdasumOfSteps => {
                return match self.stepper.step(gradients, &mut self.weights, optimizer.of_deltas()) {
                    Err(error) if is_overflow(&error) => Ok(None),
                    report => Ok((report?.outcome == StepOutcome::Applied).then_some(None)),
                };
            }
        }
        // The gradients are bit-identical on every rank, so that either all ranks return here or none does.
        if !Host::all_finite(gradients.as_slice())? {
            return Ok(None);
        }
        match optimizer.step(&mut self.weights, gradients) {
            Err(error) if is_overflow(&error) => Ok(None),
            result => Ok(result.map(|()| Some(report))?),
        }
    }

    /// The mean loss and the accuracy on a part of the images, which are divided among the ranks.
    fn score(&mut self, part: Part) -> Result<[f64; 2]> {
        let rows = self.images.rows(part);
        let mut sums = [0.0; 2];
        for batch in rows.chunks(BATCH).skip(self.comm.rank()).step_by(self.spec.arm.ranks) {
            let labels = self.images.load(batch, self.network.images());
            let Answers { loss, correct } = self.network.run(&self.weights, &labels, None);
            sums = [sums[0] + loss, sums[1] + correct as f64];
        }
        self.comm.all_reduce(SliceMut::from(sums.as_mut_slice()), ReduceOp::Sum)?;
        // Further digits are noise, and results are stored as text.
        Ok(sums.map(|sum| (sum / rows.len() as f64 * 1e5).round() / 1e5))
    }

    /// Checks that the weights are bit-identical on all ranks.
    fn check_weights(&self, step: usize) -> Result<()> {
        // The two halves of the hash are exact in f64.
        let own = fingerprint(&self.weights);
        let own = [(own >> 32) as u32, own as u32].map(f64::from);
        let mut all = vec![0.0; 2 * self.comm.world_size()];
        self.comm.all_gather(Slice::from(own.as_slice()), SliceMut::from(all.as_mut_slice()))?;
        let differs = all.chunks(2).position(|hash| *hash != all[..2]);
        ensure!(
            differs.is_none(),
            "step {step}: the weights of rank {} differ from those of rank 0",
            differs.unwrap_or(0)
        );
        Ok(())
    }
}

/// By one Gram matrix with any number of ranks, so that reports have weights.
fn adasum() -> AdasumOptions {
    AdasumOptions::default().with_algorithm(Algorithm::Gram)
}

/// Whether an optimizer refuses the gradients, on every rank: they are finite, but its state would overflow.
fn is_overflow(error: &gradsync::Error) -> bool {
    matches!(error, gradsync::Error::InvalidArgument { .. })
}

/// The FNV-1a hash of the buffer's bytes, which detects a change of a single bit of a weight.
fn fingerprint(weights: &GradientBuffer) -> u64 {
    let bytes = weights.as_slice().as_bytes().iter();
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The sum of Adasum's weights per tensor, accumulated over steps.
#[derive(Default)]
struct Mass {
    of_tensors: Vec<f64>,
    steps: usize,
}

impl Mass {
    fn add(&mut self, report: Option<AdasumReport>, ranks: usize) {
        let Some(weights) = report.and_then(|report| report.weights) else { return };
        self.of_tensors.resize(weights.len() / ranks, 0.0);
        self.of_tensors.iter_mut().zip(weights.chunks(ranks)).for_each(|(sum, own)| *sum += own.iter().sum::<f64>());
        self.steps += 1;
    }

    /// The mean over the steps since the last call.
    fn take(&mut self) -> Option<Vec<f64>> {
        let Self { of_tensors, steps } = std::mem::take(self);
        (steps > 0).then(|| of_tensors.into_iter().map(|sum| (sum / steps as f64 * 1e3).round() / 1e3).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::Arm;

    fn spec(method: Method, reduction: Reduction, ranks: usize, rate: f64) -> Spec {
        let arm = Arm { method, reduction, ranks };
        Spec { purpose: Purpose::Figure, arm, rate, seed: 1, samples: 3 * 32 * ranks }
    }

    #[test]
    fn run_by_sum_is_mean_with_the_rate_times_the_ranks() {
        let images = Images::random(160);
        let run = |reduction, rate| run(&spec(Method::Momentum, reduction, 4, rate), &images).unwrap();
        let (mean, sum) = (run(Reduction::Mean, 0.125), run(Reduction::Sum, 0.125 / 4.0));
        assert_eq!(mean, sum);
        assert_eq!(mean.steps, 3);
        assert_ne!(mean, run(Reduction::Sum, 0.125));
    }

    #[test]
    fn run_repeats_each_way_and_no_two_ways_are_the_same() {
        let images = Images::random(160);
        let ways = [
            (Method::Momentum, Reduction::Adasum),
            (Method::Momentum, Reduction::AdasumWhole),
            (Method::Momentum, Reduction::AdasumOfMeans),
            (Method::Momentum, Reduction::AdasumOfSteps),
            (Method::Adam, Reduction::Adasum),
        ];
        let outcomes = ways.map(|(method, reduction)| {
            let spec = spec(method, reduction, 16, 0.05);
            let outcome = run(&spec, &images).unwrap();
            assert_eq!(outcome, run(&spec, &images).unwrap(), "{spec:?}");
            outcome
        });
        for (index, outcome) in outcomes.iter().enumerate() {
            assert!(outcomes[..index].iter().all(|other| other.loss != outcome.loss), "{:?}", ways[index]);
        }
        let masses = outcomes[0].mass.concat();
        assert_eq!(masses.len(), 3 * 10);
        assert!(masses.iter().all(|mass| *mass > 0.5), "{masses:?}");
    }

    #[test]
    fn check_weights_finds_one_different_bit_on_all_ranks() {
        let (images, spec) = (Images::random(160), spec(Method::Sgd, Reduction::Mean, 4, 0.1));
        let outcomes = gradsync::internal::run_each(4, |comm| {
            let mut rank = Rank::new(&comm, &spec, &images).unwrap();
            rank.check_weights(7).unwrap();
            if comm.rank() == 2 {
                let value = &mut crate::lenet::tensor_mut(&mut rank.weights, 0)[0];
                *value = f32::from_bits(value.to_bits() ^ 1);
            }
            rank.check_weights(8)
        });
        for outcome in outcomes.unwrap() {
            let error = outcome.unwrap().unwrap_err().to_string();
            assert_eq!(error, "step 8: the weights of rank 2 differ from those of rank 0");
        }
    }

    #[test]
    fn run_takes_a_rate_far_too_high_as_an_outcome() {
        let images = Images::random(160);
        for (method, reduction) in [(Method::Sgd, Reduction::Adasum), (Method::Momentum, Reduction::AdasumOfSteps)] {
            let spec = Spec { samples: 20 * 4 * 32, ..spec(method, reduction, 4, 1e30) };
            let outcome = run(&spec, &images).unwrap();
            assert!(outcome.diverged && outcome.loss.is_none() && outcome.accuracy.is_none(), "{outcome:?}");
        }
    }

    #[test]
    fn order_has_all_images_before_one_comes_again() {
        let images = Images::random(160);
        let mut spec = Spec { samples: 4 * 32 * 5, ..spec(Method::Sgd, Reduction::Mean, 4, 0.1) };
        let order = order(&spec, &images);
        assert_eq!(order.len(), 640);
        for pass in order.chunks(160) {
            let mut rows = pass.to_vec();
            rows.sort_unstable();
            assert_eq!(rows, (0..160).collect::<Vec<u32>>());
        }
        assert_ne!(order[..160], order[160..320]);
        spec.arm.ranks = 1;
        assert_eq!(order, super::order(&spec, &images), "the same for every number of ranks");
    }

    #[test]
    fn schedule_rises_for_a_tenth_and_falls_to_nothing() {
        let rates: Vec<f64> = (0..100).map(|step| schedule(step, 100)).collect();
        assert_eq!((rates[0], rates[9], rates[10]), (0.1, 1.0, 1.0));
        assert!(rates[10..].windows(2).all(|pair| pair[1] < pair[0]), "{rates:?}");
        for steps in 1..30 {
            assert!((0..steps).all(|step| schedule(step, steps) > 0.0 && schedule(step, steps) <= 1.0));
        }
    }
}
