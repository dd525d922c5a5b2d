//! One training run: every rank a thread, one way of reducing the gradients, one learning rate.
//!
//! A step on each rank: clear the `GradientBuffer`; for every micro-batch run candle forward and backward and
//! accumulate the gradients (the first overwrites, the rest add); reduce the buffer over the ranks; step the optimiser
//! on the rank's own copy of the weights. Each rank's gradient is the mean over its samples of the step, so *mean* gives
//! the gradient of the whole batch, *sum* gives `ranks` times that, and *Adasum* something between the two.
//!
//! Never sends weights after the start: the copies stay equal because the reduction is bitwise identical on all ranks,
//! and once an epoch the run checks that they are.

use std::time::{Duration, Instant};

use candle_core::{D, Device, Tensor};
use gradsync::comm::{Communicator, ReduceOp, local};
use gradsync::ops::{self, AdasumOptions, AdasumReport};
use gradsync::{DType, GradientBuffer, Slice, SliceMut, TensorView, kernels};

use crate::curve::{Point, Scores};
use crate::data::{Digits, PIXELS, Split};
use crate::model::{Network, Sgd};
use crate::plan::{Mode, Plan, PlanError};
use crate::random::SplitMix64;

/// Why a run stopped. A run that diverges is not among them: that is an outcome.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("step {step}: the weights of rank {rank} differ from those of rank 0 ({found:016x}, not {expected:016x})")]
    WeightsDiffer { step: usize, rank: usize, expected: u64, found: u64 },
    #[error("candle gave no gradient for {0}")]
    NoGradient(String),
    #[error("rank {0} panicked")]
    Panicked(usize),
    #[error(transparent)]
    Gradsync(#[from] gradsync::Error),
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// What came out of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) rate: f32,
    /// One point a step, the start included.
    pub(crate) curve: Vec<Point>,
    /// Scores on the training images after the last step.
    pub(crate) train: Scores,
    /// The step whose loss was no longer a number, and at which the run stopped.
    pub(crate) diverged: Option<usize>,
    pub(crate) time: Time,
    /// Layers whose Adasum coefficients needed the exact path, over all steps.
    pub(crate) recomputed: usize,
}

impl Run {
    /// After the last step; None if the run diverged.
    pub(crate) fn validation_loss(&self) -> Option<f64> {
        self.diverged.is_none().then(|| self.last().validation.loss)
    }

    pub(crate) fn last(&self) -> &Point {
        self.curve.last().expect("a curve has its start")
    }
}

/// Wall-clock, scoring left out.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Time {
    /// Gradients, reduction and optimiser.
    pub(crate) steps: Duration,
    /// In the gradient's all-reduce alone, on the slowest rank. The ranks meet at a barrier first, so that waiting for a
    /// rank that is still computing does not count as reducing.
    pub(crate) reduction: Duration,
}

/// Trains on `plan.ranks` threads and gives rank 0's account; `on_step` is called once a step.
pub(crate) fn run(
    plan: &Plan,
    mode: Mode,
    rate: f32,
    digits: &Digits,
    split: &Split,
    on_step: &(dyn Fn() + Sync),
) -> Result<Run, TrainError> {
    let steps_per_epoch = plan.steps_per_epoch(split.train.len())?;
    let outcomes = local::run(plan.ranks, |comm| {
        Rank::new(&comm, plan, mode, rate, digits, split)?.train(steps_per_epoch, on_step)
    })?;
    let mut account = None;
    let mut consequence = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(Ok(run)) if rank == 0 => account = Some(run),
            Ok(Ok(_)) => {}
            // When one rank fails, the others' next collective fails too. The one reason that is not about the ranks'
            // meeting is the one to show.
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

/// One rank's side of a run.
struct Rank<'a> {
    comm: &'a dyn Communicator,
    plan: &'a Plan,
    mode: Mode,
    rate: f32,
    digits: &'a Digits,
    split: &'a Split,
    network: Network,
    buffer: GradientBuffer,
    time: Time,
    recomputed: usize,
}

impl<'a> Rank<'a> {
    fn new(
        comm: &'a dyn Communicator,
        plan: &'a Plan,
        mode: Mode,
        rate: f32,
        digits: &'a Digits,
        split: &'a Split,
    ) -> Result<Self, TrainError> {
        let mut network = Network::new(plan.seed)?;
        // Rank 0 decides where everyone starts, as it would if it had just read a checkpoint.
        for parameter in &mut network.parameters {
            comm.broadcast(SliceMut::from(parameter.values.as_mut_slice()), 0)?;
        }
        network.publish()?;
        let tensors = network.parameters.iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone()));
        let buffer = GradientBuffer::new(DType::F32, plan.ranks, tensors)?;
        let (time, recomputed) = (Time::default(), 0);
        Ok(Self { comm, plan, mode, rate, digits, split, network, buffer, time, recomputed })
    }

    fn train(mut self, steps_per_epoch: usize, on_step: &(dyn Fn() + Sync)) -> Result<Run, TrainError> {
        let mut sgd = Sgd::new(&self.network, self.rate, self.plan.momentum);
        let validation = self.share(&self.split.validation)?;
        let test = self.share(&self.split.test)?;
        let mut curve = vec![Point::start(self.score(&validation)?, self.score(&test)?)];
        let mut order = Vec::new();
        let mut diverged = None;
        for step in 1..=self.plan.steps {
            let place = (step - 1) % steps_per_epoch;
            if place == 0 {
                order = self.epoch_order((step - 1) / steps_per_epoch);
            }
            let first = place * self.plan.batch() + self.comm.rank() * self.plan.images_per_rank();

            self.comm.barrier()?;
            let started = Instant::now();
            let own_loss = self.accumulate(&order[first..first + self.plan.images_per_rank()])?;
            // With the wait for the slowest rank: what all of them together took.
            self.comm.barrier()?;
            self.time.steps += started.elapsed();
            let lengths = self.lengths()?;
            self.comm.barrier()?;
            let started = Instant::now();
            let report = self.reduce()?;
            sgd.step(&mut self.network, &self.buffer)?;
            self.comm.barrier()?;
            self.time.steps += started.elapsed();

            let weights = report.and_then(|report| report.weights);
            let adasum_scale = weights.and_then(|weights| scale(&weights, &lengths, self.plan.ranks));
            let loss = self.total(ReduceOp::Mean, [own_loss])?[0];
            let (validation, test) = (self.score(&validation)?, self.score(&test)?);
            curve.push(Point { step, batch_loss: Some(loss), validation, test, adasum_scale });
            if self.comm.rank() == 0 {
                on_step();
            }
            if place + 1 == steps_per_epoch || step == self.plan.steps {
                self.check_weights(step)?;
            }
            // Every rank has the same sums, so every rank leaves here or none does.
            if !(loss.is_finite() && validation.loss.is_finite()) {
                diverged = Some(step);
                break;
            }
        }
        let train = self.score(&self.share(&self.split.train)?)?;
        let [steps, reduction] =
            self.total(ReduceOp::Max, [self.time.steps.as_secs_f64(), self.time.reduction.as_secs_f64()])?;
        let time = Time { steps: Duration::from_secs_f64(steps), reduction: Duration::from_secs_f64(reduction) };
        Ok(Run { rate: self.rate, curve, train, diverged, time, recomputed: self.recomputed })
    }

    /// The training rows in the order of this epoch: the same on all ranks and in all runs of one seed.
    fn epoch_order(&self, epoch: usize) -> Vec<usize> {
        let mut rows = self.split.train.clone();
        SplitMix64::new(self.plan.seed, 2 + epoch as u64).shuffle(&mut rows);
        rows
    }

    /// This rank's gradient of the mean loss over `rows`, micro-batch by micro-batch. Gives that loss.
    fn accumulate(&mut self, rows: &[usize]) -> Result<f64, TrainError> {
        // The first micro-batch overwrites. Clearing first means that a step which fails half-way leaves no mixture.
        for index in 0..self.buffer.tensor_count() {
            ops::zero_gradient(self.buffer.tensor_mut(index));
        }
        let mut loss_sum = 0.0;
        for (index, rows) in rows.chunks(self.plan.micro_batch).enumerate() {
            let (images, labels) = tensors(self.digits, rows)?;
            let loss = candle_nn::loss::cross_entropy(&self.network.forward(&images)?, &labels)?;
            loss_sum += f64::from(loss.to_scalar::<f32>()?);
            // Each micro-batch counts for its part of the rank's mean.
            let gradients = (loss / self.plan.micro_batches as f64)?.backward()?;
            for (tensor, parameter) in self.network.parameters.iter().enumerate() {
                let gradient = gradients
                    .get(parameter.var.as_tensor())
                    .ok_or_else(|| TrainError::NoGradient(parameter.name.clone()))?;
                let gradient = gradient.flatten_all()?.to_vec1::<f32>()?;
                let gradient = TensorView::new(Slice::from(gradient.as_slice()), &parameter.shape)?;
                ops::in_place_accumulate_v2(self.buffer.tensor_mut(tensor), gradient, index == 0)?;
            }
        }
        Ok(loss_sum / self.plan.micro_batches as f64)
    }

    /// Reduces the buffer over the ranks, and times it: the caller has made them meet.
    fn reduce(&mut self) -> Result<Option<AdasumReport>, TrainError> {
        let started = Instant::now();
        let report = match self.mode {
            Mode::Mean => ops::all_reduce(self.comm, &mut self.buffer, ReduceOp::Mean).map(|()| None)?,
            Mode::Sum => ops::all_reduce(self.comm, &mut self.buffer, ReduceOp::Sum).map(|()| None)?,
            Mode::Adasum => Some(ops::adasum_all_reduce(self.comm, &mut self.buffer, AdasumOptions::default())?),
        };
        self.time.reduction += started.elapsed();
        self.recomputed += report.as_ref().map_or(0, |report| report.recomputed);
        Ok(report)
    }

    /// The length of every rank's gradient, layer by layer (ranks × layers): what Adasum's weights are to be seen
    /// beside. For the report only, and not timed; empty in the other modes.
    fn lengths(&self) -> Result<Vec<f64>, TrainError> {
        if self.mode != Mode::Adasum {
            return Ok(Vec::new());
        }
        let own = kernels::cpu::squared_norms(self.buffer.as_slice(), self.buffer.segments())?;
        let mut all = vec![0.0; own.len() * self.comm.world_size()];
        self.comm.all_gather(Slice::from(own.as_slice()), SliceMut::from(all.as_mut_slice()))?;
        Ok(all.into_iter().map(f64::sqrt).collect())
    }

    /// This rank's share of `rows`, to be scored again and again.
    fn share(&self, rows: &[usize]) -> Result<Share, TrainError> {
        let (rank, world_size) = (self.comm.rank(), self.comm.world_size());
        let own = &rows[rows.len() * rank / world_size..rows.len() * (rank + 1) / world_size];
        let images = if own.is_empty() { None } else { Some(tensors(self.digits, own)?) };
        Ok(Share { images, total: rows.len() })
    }

    /// Scores of the current weights on all ranks' shares together.
    fn score(&self, share: &Share) -> Result<Scores, TrainError> {
        let mut own = [0.0; 2];
        if let Some((images, labels)) = &share.images {
            let scores = self.network.forward(images)?;
            let loss = candle_nn::loss::cross_entropy(&scores, labels)?.to_scalar::<f32>()?;
            let right = scores.argmax(D::Minus1)?.eq(labels)?.to_vec1::<u8>()?;
            own = [f64::from(loss) * right.len() as f64, right.iter().map(|&right| f64::from(right)).sum()];
        }
        let [loss, correct] = self.total(ReduceOp::Sum, own)?;
        Ok(Scores { loss: loss / share.total as f64, correct: correct as usize, total: share.total })
    }

    fn total<const N: usize>(&self, op: ReduceOp, mut values: [f64; N]) -> Result<[f64; N], TrainError> {
        self.comm.all_reduce(SliceMut::from(values.as_mut_slice()), op)?;
        Ok(values)
    }

    /// All ranks must hold the same bits.
    fn check_weights(&self, step: usize) -> Result<(), TrainError> {
        // The two halves of the hash are exact in f64.
        let own = self.network.fingerprint();
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

/// A rank's part of the images that are scored after every step.
struct Share {
    /// None where there are more ranks than images.
    images: Option<(Tensor, Tensor)>,
    /// Images of all ranks together.
    total: usize,
}

/// Where Adasum stands between a mean (1) and a sum (the number of ranks): the mean of the ranks' weights, each counted
/// by the length of the gradient that it scales, times the number of ranks. `weights` is layers × ranks, `lengths` is
/// ranks × layers. None where all gradients are zero or one is not finite.
fn scale(weights: &[f64], lengths: &[f64], ranks: usize) -> Option<f64> {
    let layers = weights.len() / ranks;
    let pairs = (0..layers).flat_map(|layer| (0..ranks).map(move |rank| (layer, rank)));
    let weighted: f64 = pairs.map(|(layer, rank)| weights[layer * ranks + rank] * lengths[rank * layers + layer]).sum();
    let scale = ranks as f64 * weighted / lengths.iter().sum::<f64>();
    scale.is_finite().then_some(scale)
}

fn tensors(digits: &Digits, rows: &[usize]) -> Result<(Tensor, Tensor), TrainError> {
    let (pixels, labels) = digits.gather(rows);
    let images = Tensor::from_vec(pixels, (rows.len(), PIXELS), &Device::Cpu)?;
    let labels = Tensor::from_vec(labels, rows.len(), &Device::Cpu)?;
    Ok((images, labels))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { ranks: 8, micro_batches: 4, micro_batch: 10, steps: 2, momentum: 0.9, seed: 1 };

    #[test]
    fn sum_is_mean_with_the_rate_times_the_ranks() {
        let (digits, split) = Digits::random_problem();
        let run = |mode, rate| run(&PLAN, mode, rate, &digits, &split, &|| ()).unwrap();
        let (mean, sum) = (run(Mode::Mean, 0.125), run(Mode::Sum, 0.125 / 8.0));
        assert_eq!(mean.curve, sum.curve);
        assert_ne!(mean.curve, run(Mode::Sum, 0.125).curve);
        let adasum = run(Mode::Adasum, 0.125);
        assert_ne!(mean.curve, adasum.curve);
        for point in &adasum.curve[1..] {
            let scale = point.adasum_scale.unwrap();
            assert!((0.5..=16.0).contains(&scale), "{scale}");
        }
    }

    #[test]
    fn mean_does_not_depend_on_how_the_batch_is_cut() {
        let (digits, split) = Digits::random_problem();
        let run = |ranks, micro_batches, micro_batch| {
            let plan = Plan { ranks, micro_batches, micro_batch, ..PLAN };
            run(&plan, Mode::Mean, 0.125, &digits, &split, &|| ()).unwrap().train.loss
        };
        let whole = run(1, 1, 320);
        // The same 320 gradients added in another order: about 1e-7 a step, far below what one lost image changes.
        assert!((run(8, 4, 10) - whole).abs() < 1e-5, "{whole}");
        assert!((run(4, 1, 80) - whole).abs() < 1e-5, "{whole}");
    }

    #[test]
    fn one_different_bit_on_one_rank_is_found_by_all() {
        let (digits, split) = Digits::random_problem();
        let plan = Plan { ranks: 4, ..PLAN };
        let outcomes = local::run(4, |comm| {
            let mut rank = Rank::new(&comm, &plan, Mode::Mean, 0.1, &digits, &split).unwrap();
            rank.check_weights(7).unwrap();
            if comm.rank() == 2 {
                let value = &mut rank.network.parameters[0].values[0];
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
    fn the_scale_is_1_for_a_mean_and_the_ranks_for_a_sum() {
        let lengths = [3.0, 5.0, 0.5, 7.0];
        assert_eq!(scale(&[0.5; 4], &lengths, 2), Some(1.0));
        assert_eq!(scale(&[1.0; 4], &lengths, 2), Some(2.0));
        // A huge weight on a gradient of length 0 does nothing: layer 0 is 3 and 0.5, layer 1 is 0 and 7.
        assert_eq!(scale(&[0.5, 0.5, 1e9, 0.5], &[3.0, 0.0, 0.5, 7.0], 2), Some(1.0));
        assert_eq!(scale(&[1.0; 4], &[0.0; 4], 2), None);
    }

    #[test]
    fn a_rate_far_too_high_is_an_outcome() {
        let (digits, split) = Digits::random_problem();
        let plan = Plan { steps: 20, ..PLAN };
        let run = run(&plan, Mode::Sum, 1e30, &digits, &split, &|| ()).unwrap();
        let step = run.diverged.unwrap();
        assert_eq!(run.curve.len(), step + 1);
    }
}
