//! Clipping of reduced gradients by their global norm (PyTorch's `clip_grad_norm_`).

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};

use crate::data_parallel::DataParallel;
use crate::error::{Error, Result};
use crate::memory::{GROUP, TensorMemory, check, lend};
use crate::variables::Variable;

impl<M: TensorMemory> DataParallel<'_, M> {
    /// Multiplies all gradients by `max_norm / norm` if `norm`, the root of the sum of the squares of all elements, is larger than
    /// `max_norm`. Returns the norm before clipping as a scalar tensor on the gradients' device: `f64` on CPUs and `f32` on GPUs, where the
    /// host does not wait.
    ///
    /// The gradients must be the result of [`backward`](Self::backward); they are the same on all ranks, and so are the clipped ones.
    /// Gradients of [local](crate::Variables::with_local) variables are neither counted nor multiplied. Nothing is communicated. On CPUs
    /// squares are added in `f64` in a fixed order. If a gradient is not finite, the norm is not, and gradients are NaN or zero afterwards:
    /// check the norm before the optimizer's step where that may happen.
    ///
    /// # Errors
    /// [`Error::Number`] for a `max_norm` that is not positive and finite; [`Error::Storage`] for gradients that are not contiguous or
    /// share a storage; nothing is written then. Errors of candle.
    pub fn clip_gradients(&self, gradients: &mut GradStore, max_norm: f64) -> Result<Tensor> {
        if !(max_norm > 0.0 && max_norm.is_finite()) {
            return Err(Error::Number { name: "max_norm", value: max_norm, needs: "positive and finite" });
        }
        let (context, variables) = self.parts();
        let mut tensors: Vec<(&str, &Tensor)> = Vec::new();
        let mut vars = Vec::new();
        for (_, Variable { name, var, .. }) in variables {
            if let Some(gradient) = gradients.get(var) {
                tensors.push((name, gradient));
                vars.push(var.clone());
            }
        }
        check(&tensors)?;
        let (norm, clipped) = M::clip(context, &tensors, max_norm)?;
        for (var, gradient) in vars.into_iter().zip(clipped) {
            gradients.insert(&var, gradient);
        }
        Ok(norm)
    }
}

/// Clips by gradsync's kernels, with the norm on the host.
pub(crate) fn by_kernels<M: TensorMemory>(
    context: &M::Context,
    tensors: &[(&str, &Tensor)],
    max_norm: f64,
    squares: impl Fn(M::Slice<'_>) -> gradsync::Result<f64>,
) -> Result<Tensor> {
    let mut sum = 0.0;
    for group in tensors.chunks(GROUP) {
        let add =
            |data: Vec<M::SliceMut<'_>>| data.iter().try_fold(sum, |sum, data| Ok(sum + squares(M::as_slice(data))?));
        sum = lend::<M, _>(context, group, add)?;
    }
    let norm: f64 = f64::sqrt(sum);
    let factor = max_norm / norm;
    // A NaN factor is applied too.
    if factor.is_nan() || factor < 1.0 {
        for group in tensors.chunks(GROUP) {
            lend::<M, _>(context, group, |data| data.into_iter().try_for_each(|data| M::scale_in_place(data, factor)))?;
        }
    }
    Ok(Tensor::new(norm, &Device::Cpu)?)
}
