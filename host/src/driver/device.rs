//! [`Device`]: a GPU of this machine, and its attributes. It owns no resources and makes no context.

use std::ffi::CStr;

use super::{CudaError, check};
use crate::sys::cuda::{self, Status};

/// A CUDA device of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    ordinal: u32,
    handle: cuda::CUdevice,
}

/// The attributes of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)] // the names are the driver's
#[non_exhaustive]
pub enum DeviceAttribute {
    MultiprocessorCount = 16,
    /// In kHz.
    MemoryClockRate = 36,
    /// In bits.
    GlobalMemoryBusWidth = 37,
    /// In bytes.
    L2CacheSize = 38,
    ComputeCapabilityMajor = 75,
    ComputeCapabilityMinor = 76,
}

impl Device {
    /// Returns the number of devices.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver (code 100).
    pub fn count() -> Result<u32, CudaError> {
        // SAFETY: takes a number.
        check("cuInit", unsafe { cuda::cuInit(0) })?;
        let mut count = 0;
        // SAFETY: writes one number.
        check("cuDeviceGetCount", unsafe { cuda::cuDeviceGetCount(&mut count) })?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Looks up the device with this ordinal.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver (code 100), or no device with that ordinal (101).
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        let count = Self::count()?;
        if ordinal >= count {
            let (call, code) = (format!("device {ordinal}"), Status::INVALID_DEVICE.0);
            return Err(CudaError { call, code, text: format!("there are {count} devices, numbered from 0") });
        }
        let mut handle = 0;
        // SAFETY: writes one number.
        check("cuDeviceGet", unsafe { cuda::cuDeviceGet(&mut handle, ordinal as i32) })?;
        Ok(Self { ordinal, handle })
    }

    /// The ordinal of the device among the devices that this process sees.
    pub fn ordinal(self) -> u32 {
        self.ordinal
    }

    pub(super) fn handle(self) -> cuda::CUdevice {
        self.handle
    }

    /// The name of the device's model.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn name(self) -> Result<String, CudaError> {
        let mut name = [0u8; 256];
        // The last byte stays zero, so that the name is always terminated.
        let len = name.len() as i32 - 1;
        // SAFETY: writes at most `len` bytes.
        check("cuDeviceGetName", unsafe { cuda::cuDeviceGetName(name.as_mut_ptr().cast(), len, self.handle) })?;
        Ok(CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned())
    }

    /// The UUID of the device, which is unique in the world.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn uuid(self) -> Result<[u8; 16], CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: writes 16 bytes.
        check("cuDeviceGetUuid", unsafe { cuda::cuDeviceGetUuid(&mut uuid, self.handle) })?;
        Ok(uuid)
    }

    /// Queries an attribute of the device.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub(crate) fn attribute(self, attribute: DeviceAttribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one number.
        let status = unsafe { cuda::cuDeviceGetAttribute(&mut value, attribute as u32, self.handle) };
        check("cuDeviceGetAttribute", status)?;
        Ok(value)
    }
}

/// The names of the CUDA devices of this machine, by ordinal.
///
/// # Errors
/// [`CudaError`] if there is no driver or no device: code 100, `CUDA_ERROR_NO_DEVICE`.
pub fn devices() -> Result<Vec<String>, CudaError> {
    let count = Device::count()?;
    if count == 0 {
        return Err(CudaError::of("cuDeviceGetCount".into(), Status::NO_DEVICE));
    }
    (0..count).map(|ordinal| Device::new(ordinal)?.name()).collect()
}

/// Whether kernels on a device of this machine can reach the memory of another one, both by ordinal.
///
/// # Errors
/// [`CudaError`] for a device that does not exist, and without a driver.
pub fn can_access_peer(device: u32, peer: u32) -> Result<bool, CudaError> {
    let (device, peer, mut answer) = (Device::new(device)?, Device::new(peer)?, 0);
    // SAFETY: writes one integer.
    let status = unsafe { cuda::cuDeviceCanAccessPeer(&mut answer, device.handle(), peer.handle()) };
    check("cuDeviceCanAccessPeer", status)?;
    Ok(answer != 0)
}
