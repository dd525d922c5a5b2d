//! The CUDA backend: typed launches of the kernels in `gradsync-device`, with the numerics of [`cpu`](super::cpu).
//!
//! Every call checks lengths, dtypes and queues, then puts its launches into the queue of its destination and returns; only calls
//! that return values wait. Sums of f32, f16 and bf16 products differ from the CPU's only in the order of their `f64` additions.

mod elementwise;
mod layers;

pub use elementwise::{accumulate, all_finite, cast, pack, scale, unpack, zero, zero_all};
pub use layers::Layers;

use crate::driver::{Argument, DeviceSlice, DeviceSliceMut, Queue};
use crate::error::{Error, Result};

/// The address of a slice as a kernel parameter.
fn pointer(slice: DeviceSlice<'_>) -> Argument {
    Argument::Pointer(slice.address())
}

fn pointer_mut(slice: &DeviceSliceMut<'_>) -> Argument {
    pointer(slice.as_slice())
}

/// Refuses operands whose work is ordered on different queues: nothing would order this launch after the other queue's.
fn same_queue(operation: &'static str, queue: &Queue, other: &Queue) -> Result<()> {
    if queue.is_same(other) {
        return Ok(());
    }
    let (left, right) = (queue.ordinal(), other.ordinal());
    let reason = format!("operands belong to different queues, on device {left} and on device {right}");
    Err(Error::InvalidArgument { operation, reason })
}

/// A table for a kernel, in device memory.
fn upload_words(queue: &Queue, words: &[u64]) -> Result<crate::driver::DeviceBuffer> {
    crate::driver::DeviceBuffer::from_host(queue, bytemuck::cast_slice::<u64, f64>(words).into())
}
