//! [`Queue`]: one device, one stream, in order; and events on it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use cust::context::{Context, CurrentContext};
use cust::device::{Device, DeviceAttribute};
use cust::event::EventFlags;
use cust::stream::{Stream, StreamFlags};

use super::module::{Argument, Kernel, Library};
use super::{CudaError, Named};
use crate::error::Error;

/// A device's primary context, a non-blocking stream in it, and the kernels loaded so far. Clones share all of it.
///
/// Work is asynchronous: a call returns when its work is in the queue. [`synchronize`](Self::synchronize) and copies to the host
/// wait for it. The primary context is the one that the CUDA runtime, NCCL and other crates use.
#[derive(Clone, Debug)]
pub struct Queue {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    // Dropped in this order: kernels and stream before the context.
    kernels: Mutex<HashMap<&'static str, Kernel>>,
    stream: Stream,
    context: Context,
    ordinal: u32,
    library: Library,
}

// SAFETY: the driver's handles may be used from any thread; each use makes the context current first.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver locks its own state, and the table of kernels has a lock here.
unsafe impl Sync for Inner {}

impl Queue {
    /// Opens a queue on a device.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver (code 100), no device of that ordinal (101), or its compute capability is below 7.5.
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        cust::init(cust::CudaFlags::empty()).named("cuInit")?;
        let count = Device::num_devices().named("cuDeviceGetCount")?;
        if ordinal >= count {
            let (call, code) = (format!("device {ordinal}"), cust::error::CudaError::InvalidDevice as u32);
            return Err(CudaError { call, code, text: format!("there are {count} devices, numbered from 0") });
        }
        let device = Device::get_device(ordinal).named("cuDeviceGet")?;
        let capability = |attribute| device.get_attribute(attribute).named("cuDeviceGetAttribute");
        let major = capability(DeviceAttribute::ComputeCapabilityMajor)?;
        let minor = capability(DeviceAttribute::ComputeCapabilityMinor)?;
        let library = Library::for_capability(major, minor).ok_or_else(|| CudaError {
            call: format!("device {ordinal}"),
            code: cust::error::CudaError::NoBinaryForGpu as u32,
            text: format!("compute capability {major}.{minor}, and the kernels need 7.5"),
        })?;
        let context = Context::new(device).named("cuDevicePrimaryCtxRetain")?;
        CurrentContext::set_current(&context).named("cuCtxSetCurrent")?;
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).named("cuStreamCreate")?;
        let inner = Inner { kernels: Mutex::default(), stream, context, ordinal, library };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The ordinal of the device.
    pub fn ordinal(&self) -> u32 {
        self.inner.ordinal
    }

    /// The CUDA stream, for other libraries to order their work on.
    pub fn stream(&self) -> &Stream {
        &self.inner.stream
    }

    /// Waits for everything in the queue.
    ///
    /// # Errors
    /// [`CudaError`], also of work that failed while it ran.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.make_current()?;
        self.inner.stream.synchronize().named("cuStreamSynchronize")
    }

    /// Puts an event at the end of the queue.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn record(&self) -> Result<Event, CudaError> {
        self.make_current()?;
        let event = cust::event::Event::new(EventFlags::DEFAULT).named("cuEventCreate")?;
        event.record(&self.inner.stream).named("cuEventRecord")?;
        Ok(Event { event, queue: self.clone() })
    }

    /// Loads a kernel before its first launch, which would otherwise pay for its compilation by the driver.
    ///
    /// # Errors
    /// [`CudaError`] if the driver refuses the kernel's PTX, or there is no kernel of that name.
    pub fn load(&self, name: &str) -> Result<(), CudaError> {
        self.make_current()?;
        self.with_kernel(name, |_| Ok(()))
    }

    /// Refuses operands whose work is ordered on another queue: nothing would order this one's work after it.
    pub(crate) fn check_same(&self, operation: &'static str, other: &Queue) -> Result<(), Error> {
        if Arc::ptr_eq(&self.inner, &other.inner) {
            return Ok(());
        }
        let (left, right) = (self.ordinal(), other.ordinal());
        let reason = format!("operands belong to different queues, on device {left} and on device {right}");
        Err(Error::InvalidArgument { operation, reason })
    }

    /// Makes the context current on this thread, which every call of the driver needs.
    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        CurrentContext::set_current(&self.inner.context).named("cuCtxSetCurrent")
    }

    /// Puts a launch of `blocks` × `threads` into the queue; nothing happens for no blocks.
    ///
    /// # Safety
    /// `arguments` must be what the contract of the entry point (`gradsync_device::abi`) asks for, and the memory that they
    /// address must be valid, and not used otherwise, until this queue has got past the launch.
    pub(crate) unsafe fn launch(
        &self,
        name: &str,
        blocks: u64,
        threads: u32,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        if blocks == 0 {
            return Ok(());
        }
        self.make_current()?;
        self.with_kernel(name, |kernel| {
            // SAFETY: the caller's promise.
            unsafe { kernel.launch(&self.inner.stream, blocks, threads, arguments) }
        })
    }

    fn with_kernel<T>(&self, name: &str, action: impl FnOnce(&Kernel) -> Result<T, CudaError>) -> Result<T, CudaError> {
        let mut kernels = self.inner.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(name) {
            return action(kernel);
        }
        let kernel = self.inner.library.load(name)?;
        action(kernels.entry(kernel.entry.name).or_insert(kernel))
    }
}

/// A point in a queue, to measure time by.
#[derive(Debug)]
pub struct Event {
    event: cust::event::Event,
    queue: Queue,
}

impl Event {
    /// Waits until the queue has passed both events; seconds between them, to about half a microsecond.
    ///
    /// # Errors
    /// [`CudaError`], also of work that failed while it ran.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64, CudaError> {
        self.queue.make_current()?;
        self.event.synchronize().named("cuEventSynchronize")?;
        let milliseconds = self.event.elapsed_time_f32(&earlier.event).named("cuEventElapsedTime")?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}
