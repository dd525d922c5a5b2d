//! The operands of an optimizer's update, on either memory.

pub(crate) use gradsync_device::math::optimizer::SgdScalars;

use crate::dtype::DType;
use crate::memory::Memory;

/// An optimizer, with the scalars that are not in the memory of a step.
#[derive(Clone, Copy, Debug)]
pub enum UpdateRule {
    /// SGD.
    Sgd(SgdScalars),
    /// AdamW.
    AdamW,
}

/// One tensor of an update. All operands have one length.
#[derive(Debug)]
pub struct TensorUpdate<'a, M: Memory> {
    pub(crate) gradients: M::Slice<'a>,
    /// The optimizer's state, `f32` or `f64`; SGD has one vector with momentum, and none without.
    pub(crate) states: [Option<M::SliceMut<'a>>; 2],
    pub(crate) target: Target<'a, M>,
    /// The factor of the step's rate.
    pub(crate) rate: f64,
    pub(crate) decay: f64,
}

/// The result of an update of a tensor. Weights have the dtype of the state.
#[derive(Debug)]
pub(crate) enum Target<'a, M: Memory> {
    /// The weights themselves, and a copy of them in another dtype.
    Weights { weights: M::SliceMut<'a>, copy: Option<M::SliceMut<'a>> },
    /// The step as a tensor of its own.
    Deltas { weights: M::Slice<'a>, deltas: M::SliceMut<'a> },
}

impl<M: Memory> TensorUpdate<'_, M> {
    pub(crate) fn weights(&self) -> M::Slice<'_> {
        match &self.target {
            Target::Weights { weights, .. } => M::as_slice(weights),
            Target::Deltas { weights, .. } => M::shortened(*weights),
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) fn output(&self) -> Option<M::Slice<'_>> {
        match &self.target {
            Target::Weights { copy, .. } => copy.as_ref().map(|copy| M::as_slice(copy)),
            Target::Deltas { deltas, .. } => Some(M::as_slice(deltas)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        M::len(M::shortened(self.gradients))
    }

    /// The dtype of the state and of the weights, in which AdamW computes.
    pub(crate) fn dtype(&self) -> DType {
        M::dtype(self.weights())
    }
}
