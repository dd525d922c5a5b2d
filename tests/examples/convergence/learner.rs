//! What is trained: a model and its data, behind one face.
//!
//! The data are shared by all ranks of all runs; a [`Learner`] is one rank's room to work in.

use candle_core::Result;
use gradsync::GradientBuffer;

use crate::images::{Images, Part};
use crate::lanes::BATCH;
use crate::lenet::LeNet;

/// Sums over samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    /// Cross-entropy.
    pub(crate) loss: f64,
    /// Right answers.
    pub(crate) correct: f64,
    pub(crate) count: f64,
}

/// A task and its data.
pub(crate) trait Data: Sync {
    /// Names and shapes of what is trained.
    fn tensors(&self) -> Vec<(String, Vec<usize>)>;
    /// Writes the weights from which training starts.
    fn start(&self, weights: &mut GradientBuffer, seed: u64);
    /// Samples that a rank sees in a step.
    fn batch(&self) -> usize;
    /// How many samples a part has; they are numbered from 0.
    fn samples(&self, part: Part) -> usize;
    /// The loss of who always gives the same answer; at or above it nothing has been learned.
    fn chance(&self) -> f64;
    /// One rank's model.
    ///
    /// # Errors
    /// candle's.
    fn learner(&self) -> Result<Box<dyn Learner + '_>>;
}

/// One rank's model.
pub(crate) trait Learner {
    /// Writes the gradient of the mean loss over a batch of training samples.
    fn gradient(&mut self, weights: &GradientBuffer, samples: &[u32], into: &mut GradientBuffer) -> Result<()>;
    /// Scores up to a batch of samples of a part.
    fn score(&mut self, weights: &GradientBuffer, part: Part, samples: &[u32]) -> Result<Sums>;
}

impl Data for Images {
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        LeNet::tensors()
    }

    fn start(&self, weights: &mut GradientBuffer, seed: u64) {
        LeNet::start(weights, seed);
    }

    fn batch(&self) -> usize {
        BATCH
    }

    fn samples(&self, part: Part) -> usize {
        self.rows(part).len()
    }

    fn chance(&self) -> f64 {
        (crate::images::CLASSES as f64).ln()
    }

    fn learner(&self) -> Result<Box<dyn Learner + '_>> {
        Ok(Box::new(ImageLearner { images: self, network: LeNet::new(), labels: [0; BATCH] }))
    }
}

struct ImageLearner<'a> {
    images: &'a Images,
    network: LeNet,
    labels: [u8; BATCH],
}

impl ImageLearner<'_> {
    fn load(&mut self, part: Part, samples: &[u32]) {
        let all = self.images.rows(part);
        let mut rows = [0; BATCH];
        rows.iter_mut().zip(samples).for_each(|(row, &sample)| *row = all[sample as usize]);
        self.images.gather(&rows[..samples.len()], self.network.images(), &mut self.labels);
    }
}

impl Learner for ImageLearner<'_> {
    fn gradient(&mut self, weights: &GradientBuffer, samples: &[u32], into: &mut GradientBuffer) -> Result<()> {
        self.load(Part::Train, samples);
        self.network.gradient(weights, &self.labels[..samples.len()], into);
        Ok(())
    }

    fn score(&mut self, weights: &GradientBuffer, part: Part, samples: &[u32]) -> Result<Sums> {
        self.load(part, samples);
        let answers = self.network.answer(weights, &self.labels[..samples.len()]);
        Ok(Sums { loss: answers.loss, correct: answers.correct as f64, count: samples.len() as f64 })
    }
}
