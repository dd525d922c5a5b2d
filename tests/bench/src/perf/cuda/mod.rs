//! Measurements on GPUs: kernels, and collectives of ranks with a GPU each.
//!
//! Times are measured between events on the queue, around each call or around each launch of a graph of many calls.

mod adasum;
mod baseline;
mod collectives;
pub(crate) mod kernels;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[allow(unsafe_code, reason = "NCCL's own calls, the baseline")]
mod plain;
pub(crate) mod ranks;
pub(crate) mod tensors;
mod timing;
mod vectors;

use gradsync::driver::Queue;
use gradsync::internal::driver::KernelSource;

use super::record::Load;

/// The kernels that a queue has loaded.
fn loads(queue: &Queue) -> impl Iterator<Item = Load> {
    gradsync::internal::driver::loaded_kernels(queue).into_iter().map(|kernel| Load {
        kernel: kernel.name.into(),
        source: match kernel.source {
            KernelSource::Cubin => "cubin".into(),
            KernelSource::Ptx => "ptx".into(),
            other => unreachable!("{other:?} is not known"),
        },
        load_ms: kernel.load_time.as_secs_f64() * 1e3,
    })
}
