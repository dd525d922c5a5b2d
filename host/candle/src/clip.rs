//! Clipping of reduced gradients by their global norm (PyTorch's `clip_grad_norm_`).

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use gradsync::Slice;
use gradsync::internal::kernels::cpu;
use gradsync::memory::Host;

use crate::data_parallel::DataParallel;
use crate::error::{Error, Result};
use crate::memory::{TensorMemory, check, lend};
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

/// The sum of the squares of all elements times a power of two.
fn squares(data: Slice<'_>, power: f64) -> gradsync::Result<f64> {
    /// The number of elements that are multiplied at a time.
    const PIECE_LEN: usize = 1 << 16;
    if power == 1.0 {
        return Ok(cpu::squared_norms(data, &[0..data.len()])?.iter().sum());
    }
    let mut piece = vec![0.0f64; data.len().min(PIECE_LEN)];
    let mut sum = 0.0;
    for begin in (0..data.len()).step_by(PIECE_LEN) {
        let len = PIECE_LEN.min(data.len() - begin);
        cpu::scale((&mut piece[..len]).into(), data.range(begin..begin + len), power)?;
        sum += cpu::squared_norms((&piece[..len]).into(), &[0..len])?.iter().sum::<f64>();
    }
    Ok(sum)
}

/// Clips gradients in host memory in place, by gradsync's kernels; returns the norm.
pub(crate) fn on_host(tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<Tensor> {
    /// The least factor that is applied at once: `f32`, in which narrow dtypes are multiplied, has it and larger ones with all digits.
    const STEP: f64 = 1.0 / (1u128 << 100) as f64;
    let root_of_squares = |power: f64| -> Result<f64> {
        let mut sum = 0.0;
        lend::<Host>(&(), tensors, |_, data| {
            data.iter().try_for_each(|data| {
                sum += squares(data.as_slice(), power)?;
                Ok(())
            })
        })?;
        Ok(sum.sqrt())
    };
    let multiply = |factor: f64| {
        lend::<Host>(&(), tensors, |_, data| {
            data.into_iter().for_each(|data| cpu::scale_in_place(data, factor));
            Ok(())
        })
    };
    let (mut root, mut power, mut steps) = (root_of_squares(1.0)?, 1.0, 0);
    // The squares of numbers of f64 can leave its range where the norm does not.
    if !(1e-130..=f64::MAX).contains(&root) && tensors.iter().any(|(_, tensor)| tensor.dtype() == DType::F64) {
        (power, steps) = if root < 1.0 { (STEP.powi(-6), 0) } else { (STEP.powi(6), 6) };
        root = root_of_squares(power)?;
    }
    let norm = root / power;
    // A NaN factor is applied too.
    if norm.is_nan() || norm > max_norm {
        let (mut dividend, divisor) = (max_norm, if steps > 0 { root } else { norm });
        while divisor.is_finite() && dividend < divisor * STEP {
            (dividend, steps) = (dividend / STEP, steps + 1);
        }
        (0..steps).try_for_each(|_| multiply(STEP))?;
        multiply(dividend / divisor)?;
    }
    Ok(Tensor::new(norm, &Device::Cpu)?)
}
