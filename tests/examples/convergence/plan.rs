//! The specification of a run, as data: everything that its result depends on.

use serde::{Deserialize, Serialize};

/// The learning task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// LeNet-5 classifies images.
    Images,
    /// A transformer continues plays by Shakespeare.
    Text,
}

/// The optimizer, and the vectors that are reduced. With deltas, every rank's optimizer computes a step from the rank's own gradient, and
/// these steps are reduced; otherwise the optimizer gets the reduced gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    Sgd,
    Momentum,
    MomentumDeltas,
    Adam,
    AdamDeltas,
}

/// The reduction of the ranks' vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reduction {
    Mean,
    Sum,
    /// By one Gram matrix, tensor by tensor.
    Adasum,
    /// Pair by pair along the tree, as in Horovod and ONNX Runtime.
    AdasumTree,
    /// All tensors as one vector.
    AdasumWhole,
    /// The sum inside nodes of 8 ranks, then Adasum across nodes.
    AdasumOfSums,
    /// The mean inside nodes of 8 ranks, then Adasum across nodes.
    AdasumOfMeans,
}

/// The purpose of a run: the choice of a learning rate, or a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    /// Scored on the validation part.
    Search,
    /// Scored on the test part.
    Figure,
}

/// The unit of comparison, for which a learning rate is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Arm {
    pub(crate) task: Task,
    pub(crate) method: Method,
    pub(crate) reduction: Reduction,
    pub(crate) ranks: usize,
}

/// One run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Spec {
    pub(crate) purpose: Purpose,
    #[serde(flatten)]
    pub(crate) arm: Arm,
    /// The highest learning rate, after the warm-up.
    pub(crate) rate: f64,
    /// Determines initial weights and the order of samples, identically for all arms.
    pub(crate) seed: u64,
    /// The number of images or windows of text for all ranks together, which does not depend on the number of ranks.
    pub(crate) samples: usize,
}

/// Ranks per node, for reductions with nodes.
pub(crate) const RANKS_OF_A_NODE: usize = 8;
/// The momentum of methods that have one.
pub(crate) const MOMENTUM: f64 = 0.9;
/// The part of the steps in which the rate rises; in the others it falls to 0.
const WARM_UP: f64 = 0.1;

impl Spec {
    pub(crate) fn steps(&self, batch: usize) -> usize {
        (self.samples / (self.arm.ranks * batch)).max(1)
    }
}

/// The factor of the learning rate in a step; steps are counted from 0.
pub(crate) fn schedule(step: usize, steps: usize) -> f64 {
    let warm = ((WARM_UP * steps as f64) as usize).max(1);
    let rising = (step + 1) as f64 / warm as f64;
    let falling = (steps - step) as f64 / (steps - warm).max(1) as f64;
    rising.min(falling).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_for_a_tenth_and_falls_to_nothing() {
        let rates: Vec<f64> = (0..100).map(|step| schedule(step, 100)).collect();
        assert_eq!((rates[0], rates[9], rates[10]), (0.1, 1.0, 1.0));
        assert!(rates[10..].windows(2).all(|pair| pair[1] < pair[0]), "{rates:?}");
        assert!((rates[99] - 1.0 / 90.0).abs() < 1e-12);
        for steps in 1..30 {
            assert!((0..steps).all(|step| (0.0..=1.0).contains(&schedule(step, steps)) && schedule(step, steps) > 0.0));
        }
    }
}
