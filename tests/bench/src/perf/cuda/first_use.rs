//! The cost of a process's first kernel, and of loading each kernel.

use std::time::Instant;

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, KernelSource, Queue};
use gradsync::kernels::cuda;

use crate::perf::PerfError;
use crate::perf::machine::FirstUse;
use crate::perf::record::Load;

/// Opens a device and runs a kernel on it, which the driver compiles for the device. Nothing may have run on the device before; `driver` is
/// the time of the driver's initialisation, in seconds. The caller must keep the queue: a context without users is destroyed, and created
/// anew by the next user.
pub(crate) fn measure(ordinal: u32, driver: f64) -> Result<(FirstUse, Queue), PerfError> {
    let start = Instant::now();
    let queue = Queue::new(ordinal)?;
    let mut data = DeviceBuffer::zeroed(&queue, DType::F32, 1024)?;
    queue.synchronize()?;
    let opened = Instant::now();
    cuda::zero(data.as_mut_slice())?;
    queue.synchronize()?;
    let (context, kernel) = (opened - start, opened.elapsed());
    // The driver caches compiled kernels on disk, unless this variable disables it.
    let is_cached = std::env::var("CUDA_CACHE_DISABLE").map_or(true, |value| value.trim() == "0" || value.is_empty());
    let first_use = FirstUse {
        open_ms: (driver + context.as_secs_f64()) * 1e3,
        kernel_ms: kernel.as_secs_f64() * 1e3,
        may_be_cached: is_cached,
    };
    drop(data);
    Ok((first_use, queue))
}

/// The kernels that a queue has loaded.
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
