//! The CUDA backend: typed launches of the kernels in `gradsync-device`, with the numerics of [`cpu`](super::cpu).
//!
//! Every call checks lengths, dtypes and queues, then enqueues its launches into the queue of its destination. Only calls that return
//! values wait for the queue. Sums of f32, f16 and bf16 products differ from the CPU's only in the order of their `f64` additions.

pub mod baseline;
mod elementwise;
pub(crate) mod optimizer;
mod packet_adasum;
mod packet_group;
mod segments;

pub(crate) use elementwise::scale_in_place;
pub use elementwise::{accumulate, accumulate_all, all_finite, cast, cast_all, pack, scale, unpack, zero, zero_all};
pub(crate) use packet_adasum::{PacketAdasum, PacketPlan};
pub(crate) use packet_group::{MailboxSize, PacketGroup, PacketLimits, Shots, sum_entries};
pub use segments::SegmentWorkspace;
pub(crate) use segments::{MOST_RANKS, PeerAddresses, PeerGroup, PeerKernel, PeerSums};

use gradsync_device::abi::{TableRow, bytes_of};

use crate::driver::{Argument, DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::Result;

/// The address of a slice as a kernel parameter.
fn pointer(slice: DeviceSlice<'_>) -> Argument {
    Argument::Pointer(slice.address())
}

fn pointer_mut(slice: &DeviceSliceMut<'_>) -> Argument {
    pointer(slice.as_slice())
}

/// Uploads a table for a kernel to device memory.
fn upload_words(queue: &Queue, words: &[u64]) -> Result<DeviceBuffer> {
    let words: &[f64] = bytemuck::cast_slice(words);
    let mut table = DeviceBuffer::allocate(queue, DType::F64, words.len())?;
    table.as_mut_slice().upload(words.into())?;
    Ok(table)
}

/// The rows of a table in the words that [`upload_words`] takes.
fn words_of<T: TableRow>(rows: &[T]) -> Vec<u64> {
    bytemuck::pod_collect_to_vec(bytes_of(rows))
}
