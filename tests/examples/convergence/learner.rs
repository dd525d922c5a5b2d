//! The interface between training and a model with its data.
//!
//! All ranks of all runs share the data; a [`Learner`] holds one rank's working memory.

use candle_core::Result;
use gradsync::GradientBuffer;

use crate::images::{Images, Part};
use crate::lanes::BATCH;
use crate::lenet::LeNet;

/// Sums over samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    /// The sum of cross-entropies.
    pub(crate) loss: f64,
    /// The number of correct answers.
    pub(crate) correct: f64,
    pub(crate) count: f64,
}

/// A task with its data.
pub(crate) trait Data: Sync {
    /// Names and shapes of the trained tensors.
    fn tensors(&self) -> Vec<(String, Vec<usize>)>;
    /// Writes the initial weights.
    fn start(&self, weights: &mut GradientBuffer, seed: u64);
    /// Samples per rank and step.
    fn batch(&self) -> usize;
    /// The number of samples in a part; they are numbered from 0.
    fn samples(&self, part: Part) -> usize;
    /// The loss of a constant answer; a run with this loss or a higher one has learned nothing.
    fn chance(&self) -> f64;
    /// One rank's model.
    ///
    /// # Errors
    /// Errors of candle.
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
