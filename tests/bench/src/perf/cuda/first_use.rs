//! What a process pays before its first kernel has run, and for each kernel that it loads.

use std::time::Instant;

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, KernelSource, Queue};
use gradsync::kernels::cuda;

use crate::perf::PerfError;
use crate::perf::machine::FirstUse;
use crate::perf::record::Load;

/// Opens a device, and runs a kernel on it, which the driver compiles for that. Nothing may have been run on the device before; `driver`
/// is what its initialisation took, in seconds. The queue is to be kept: a context that nobody holds is destroyed, and made anew.
pub(crate) fn measure(ordinal: u32, driver: f64) -> Result<(FirstUse, Queue), PerfError> {
    let start = Instant::now();
    let queue = Queue::new(ordinal)?;
    let mut data = DeviceBuffer::zeroed(&queue, DType::F32, 1024)?;
    queue.synchronize()?;
    let opened = Instant::now();
    cuda::zero(data.as_mut_slice())?;
    queue.synchronize()?;
    let (context, kernel) = (opened - start, opened.elapsed());
    // The driver keeps what it has compiled on disk, unless it is told not to.
    let is_cached = std::env::var("CUDA_CACHE_DISABLE").map_or(true, |value| value.trim() == "0" || value.is_empty());
    let first_use = FirstUse {
        open_ms: (driver + context.as_secs_f64()) * 1e3,
        kernel_ms: kernel.as_secs_f64() * 1e3,
        may_be_cached: is_cached,
    };
    drop(data);
    Ok((first_use, queue))
}

/// What a queue has loaded.
pub(super) fn loads(queue: &Queue) -> impl Iterator<Item = Load> {
    queue.loaded_kernels().into_iter().map(|kernel| Load {
        kernel: kernel.name.into(),
        source: match kernel.source {
            KernelSource::Cubin => "cubin".into(),
            KernelSource::Ptx => "ptx".into(),
            other => unreachable!("{other:?} is not known"),
        },
        load_ms: kernel.load_time.as_secs_f64() * 1e3,
    })
}
