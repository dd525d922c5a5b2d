//! What a run is, as data: everything that its result depends on.

use serde::{Deserialize, Serialize};

/// What is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Task {
    /// LeNet-5 tells clothes apart.
    Images,
    /// A transformer continues plays by Shakespeare.
    Text,
}

/// What becomes of gradients before weights move. Deltas: every rank's optimizer makes a step of its own gradient, and these are reduced;
/// otherwise the reduced gradient goes to the optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Method {
    Sgd,
    Momentum,
    MomentumDeltas,
    Adam,
    AdamDeltas,
}

/// How the ranks' vectors become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Reduction {
    Mean,
    Sum,
    /// By one Gram matrix, tensor by tensor.
    Adasum,
    /// Pair by pair along the tree, as Horovod and ONNX Runtime have it.
    AdasumTree,
    /// All tensors as one vector.
    AdasumWhole,
    /// The sum inside nodes of 8 ranks, Adasum of the nodes.
    AdasumOfSums,
    /// The mean inside nodes of 8 ranks, Adasum of the nodes.
    AdasumOfMeans,
}

/// Why a run is made: to choose a rate by, or for a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Purpose {
    /// Scored on the validation part.
    Search,
    /// Scored on the test part.
    Figure,
}

/// What is compared: all that a learning rate is chosen for.
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
    /// At its highest, after the warm-up.
    pub(crate) rate: f64,
    /// Decides initial weights and the order of samples: the same for all arms.
    pub(crate) seed: u64,
    /// Images or windows of text that are seen, by all ranks together: the same however many ranks there are.
    pub(crate) samples: usize,
}

/// Ranks of a node, where nodes reduce first.
pub(crate) const RANKS_OF_A_NODE: usize = 8;
/// Momentum, where there is one.
pub(crate) const MOMENTUM: f64 = 0.9;
/// The part of the steps in which the rate rises; it falls to 0 in the others.
const WARM_UP: f64 = 0.1;

impl Spec {
    pub(crate) fn steps(&self, batch: usize) -> usize {
        (self.samples / (self.arm.ranks * batch)).max(1)
    }
}

/// The part of the rate that counts in a step, counted from 0.
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
