//! Factors that NCCL does not apply, or not exactly: they are applied by a kernel of this crate, in the operation's queue.

use crate::driver::{DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda;
use crate::memory::RawSlice;

/// Whether the dtype can represent the factor exactly.
pub(super) fn is_exact(factor: f64, dtype: DType) -> bool {
    match dtype {
        DType::F64 => true,
        DType::F32 => f64::from(factor as f32) == factor,
        DType::F16 => half::f16::from_f64(factor).to_f64() == factor,
        DType::BF16 => half::bf16::from_f64(factor).to_f64() == factor,
    }
}

/// Multiplies memory by a factor, rounding once.
///
/// # Safety
/// As [`NcclCommunicator::all_reduce_raw`](super::NcclCommunicator::all_reduce_raw).
pub(super) unsafe fn scale_in_place(queue: &Queue, data: RawSlice, factor: f64) -> Result<()> {
    let Some(dtype) = data.dtype.float().filter(|_| factor != 1.0) else { return Ok(()) };
    // SAFETY: the caller's promise; each element is read before it is written.
    let (to, from) = unsafe {
        let to = DeviceSliceMut::from_raw_parts(queue, data.address, dtype, data.len);
        (to, DeviceSlice::from_raw_parts(queue, data.address, dtype, data.len))
    };
    cuda::scale(to, from, factor)
}
