//! A device's primary context, and a stream in it. `cust` creates both; this crate's own declarations, which return integers, release them
//! (`sys::cuda` says why).

use std::mem::ManuallyDrop;
use std::ptr;

use cust::context::Context;
use cust::stream::{Stream, StreamFlags};

use super::device::Device;
use super::{CudaError, Named, check};
use crate::sys::cuda;

/// A device's primary context, retained for as long as this lives.
#[derive(Debug)]
pub(super) struct Primary {
    context: ManuallyDrop<Context>,
    device: Device,
}

impl Primary {
    /// Retains the context, and makes it current on this thread.
    pub(super) fn retain(device: Device) -> Result<Self, CudaError> {
        // The first retain reports every refusal of the device as a `CudaError`, before `cust` is called.
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle.
        let status = unsafe { cuda::cuDevicePrimaryCtxRetain(&mut context, device.handle()) };
        check("cuDevicePrimaryCtxRetain", status)?;
        let made = set_current(context).and_then(|()| {
            let device = cust::device::Device::get_device(device.ordinal()).named("cuDeviceGet")?;
            Context::new(device).named("cuDevicePrimaryCtxRetain")
        });
        release(device);
        Ok(Self { context: ManuallyDrop::new(made?), device })
    }

    /// Makes the context current on this thread.
    pub(super) fn make_current(&self) -> Result<(), CudaError> {
        set_current(self.context.as_raw())
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        release(self.device);
    }
}

/// The context that was current on this thread, or null if there was none.
#[derive(Debug)]
pub(super) struct Current(cuda::CUcontext);

impl Current {
    pub(super) fn get() -> Result<Self, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: writes one handle.
        check("cuCtxGetCurrent", unsafe { cuda::cuCtxGetCurrent(&mut context) }).map(|()| Self(context))
    }

    /// Makes the context current again.
    pub(super) fn restore(self) -> Result<(), CudaError> {
        set_current(self.0)
    }
}

fn set_current(context: cuda::CUcontext) -> Result<(), CudaError> {
    // SAFETY: the handle is a retained context, a context that was current before, or null, which means none.
    check("cuCtxSetCurrent", unsafe { cuda::cuCtxSetCurrent(context) })
}

fn release(device: Device) {
    // SAFETY: each release has one earlier `cuDevicePrimaryCtxRetain`.
    let status = unsafe { cuda::cuDevicePrimaryCtxRelease_v2(device.handle()) };
    if let Err(error) = check("cuDevicePrimaryCtxRelease", status) {
        tracing::error!(%error, "a context was not released");
    }
}

/// A non-blocking stream, which does not wait for the legacy default stream. Its context must be current where it is created and dropped.
#[derive(Debug)]
pub(super) struct OwnedStream(ManuallyDrop<Stream>);

impl OwnedStream {
    pub(super) fn new() -> Result<Self, CudaError> {
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).named("cuStreamCreate")?;
        Ok(Self(ManuallyDrop::new(stream)))
    }

    pub(super) fn raw(&self) -> cuda::CUstream {
        self.0.as_inner()
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once; the driver keeps it until its work is over.
        if let Err(error) = check("cuStreamDestroy", unsafe { cuda::cuStreamDestroy_v2(self.raw()) }) {
            tracing::error!(%error, "a stream was not destroyed");
        }
    }
}
