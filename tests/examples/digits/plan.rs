//! What all runs of one demo have in common, and the three ways of reducing.

/// How the ranks' gradients become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Mean,
    Sum,
    Adasum,
}

impl Mode {
    pub(crate) const ALL: [Self; 3] = [Self::Mean, Self::Sum, Self::Adasum];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Sum => "sum",
            Self::Adasum => "Adasum",
        }
    }
}

/// One demo's numbers; a run adds a mode and a learning rate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) ranks: usize,
    /// Per rank and step.
    pub(crate) micro_batches: usize,
    /// Images in one micro-batch.
    pub(crate) micro_batch: usize,
    pub(crate) steps: usize,
    pub(crate) momentum: f32,
    pub(crate) seed: u64,
}

impl Plan {
    pub(crate) fn images_per_rank(&self) -> usize {
        self.micro_batches * self.micro_batch
    }

    /// Images in one step, over all ranks.
    pub(crate) fn batch(&self) -> usize {
        self.ranks * self.images_per_rank()
    }

    /// Whole batches in the training images; what is left over sits out, another part of them each epoch.
    pub(crate) fn steps_per_epoch(&self, images: usize) -> Result<usize, PlanError> {
        match images / self.batch() {
            0 => Err(PlanError::BatchTooLarge { batch: self.batch(), ranks: self.ranks, images }),
            steps => Ok(steps),
        }
    }
}

/// Why a plan cannot be carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlanError {
    #[error("one step of {ranks} ranks takes {batch} images, and there are {images} to train on: use fewer ranks")]
    BatchTooLarge { batch: usize, ranks: usize, images: usize },
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: Plan = Plan { ranks: 8, micro_batches: 4, micro_batch: 10, steps: 2, momentum: 0.9, seed: 1 };

    #[test]
    fn a_batch_larger_than_the_training_set_is_an_error() {
        assert_eq!(PLAN.steps_per_epoch(1280).unwrap(), 4);
        assert_eq!(PLAN.steps_per_epoch(320).unwrap(), 1);
        let error = PLAN.steps_per_epoch(319).unwrap_err();
        assert!(matches!(error, PlanError::BatchTooLarge { batch: 320, ranks: 8, images: 319 }), "{error}");
    }
}
