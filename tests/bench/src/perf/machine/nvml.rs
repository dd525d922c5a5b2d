//! Clocks and links of GPUs, from NVIDIA's management library, which is part of the driver: `libnvidia-ml.so.1`.
//!
//! The library is loaded if it is present; otherwise every value is `None`. Names and numbers are taken from `nvml.h`.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use libloading::Library;

const SUCCESS: c_int = 0;
/// `NVML_CLOCK_SM`
const SM: c_uint = 1;
/// `NVML_CLOCK_MEM`
const MEMORY: c_uint = 2;
/// `NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON`, `NVML_FI_DEV_NVLINK_LINK_COUNT`
const LINK_FIELDS: [c_uint; 2] = [90, 91];

type Device = *mut c_void;

/// `nvmlFieldValue_t`; the value is a union of eight bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct FieldValue {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency: i64,
    kind: c_uint,
    code: c_uint,
    value: u64,
}

/// The current clocks and links of a GPU.
pub(super) struct Clocks {
    pub(super) sm: Option<u32>,
    pub(super) sm_max: Option<u32>,
    pub(super) memory: Option<u32>,
    /// The bandwidth of all links together, in one direction.
    pub(super) links_gbs: Option<f64>,
}

pub(super) struct Nvml(Library);

impl Nvml {
    pub(super) fn open() -> Option<Self> {
        // SAFETY: the library is the driver's own, and its initialisers affect only the library itself.
        let library = unsafe { Library::new("libnvidia-ml.so.1") }.ok()?;
        // SAFETY: the function has no arguments, and may be called repeatedly.
        let code = unsafe { library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2\0").ok()?() };
        (code == SUCCESS).then_some(Self(library))
    }

    /// The driver's version.
    pub(super) fn driver(&self) -> Option<String> {
        let mut text = [0 as c_char; 128];
        // SAFETY: the function writes at most this many characters, with a zero at the end.
        let code = unsafe {
            let function = self
                .0
                .get::<unsafe extern "C" fn(*mut c_char, c_uint) -> c_int>(b"nvmlSystemGetDriverVersion\0")
                .ok()?;
            function(text.as_mut_ptr(), text.len() as c_uint)
        };
        let bytes: Vec<u8> = text.iter().take_while(|&&byte| byte != 0).map(|&byte| byte as u8).collect();
        (code == SUCCESS).then(|| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The clocks of the GPU with that UUID.
    pub(super) fn clocks(&self, uuid: [u8; 16]) -> Option<Clocks> {
        let device = self.device(uuid)?;
        Some(Clocks {
            sm: self.clock(b"nvmlDeviceGetClockInfo\0", device, SM),
            sm_max: self.clock(b"nvmlDeviceGetMaxClockInfo\0", device, SM),
            memory: self.clock(b"nvmlDeviceGetClockInfo\0", device, MEMORY),
            links_gbs: self.links(device),
        })
    }

    /// Finds a GPU by UUID, because ordinals are CUDA's own if `CUDA_VISIBLE_DEVICES` is set.
    fn device(&self, uuid: [u8; 16]) -> Option<Device> {
        let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        let name = CString::new(format!("GPU-{}", parts.join("-"))).ok()?;
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: the function reads a string and writes one handle.
        let code = unsafe {
            let function = self
                .0
                .get::<unsafe extern "C" fn(*const c_char, *mut Device) -> c_int>(b"nvmlDeviceGetHandleByUUID\0")
                .ok()?;
            function(name.as_ptr(), &mut device)
        };
        (code == SUCCESS).then_some(device)
    }

    fn clock(&self, function: &[u8], device: Device, kind: c_uint) -> Option<u32> {
        let mut clock = 0;
        // SAFETY: both functions that are called here take a handle and a kind of clock, and write one number.
        let code = unsafe {
            let function = self.0.get::<unsafe extern "C" fn(Device, c_uint, *mut c_uint) -> c_int>(function).ok()?;
            function(device, kind, &mut clock)
        };
        (code == SUCCESS).then_some(clock)
    }

    fn links(&self, device: Device) -> Option<f64> {
        let mut fields = LINK_FIELDS.map(|field| FieldValue { field, ..FieldValue::default() });
        // SAFETY: the function reads and writes exactly these fields.
        let code = unsafe {
            let function = self
                .0
                .get::<unsafe extern "C" fn(Device, c_int, *mut FieldValue) -> c_int>(b"nvmlDeviceGetFieldValues\0")
                .ok()?;
            function(device, fields.len() as c_int, fields.as_mut_ptr())
        };
        let is_told = code == SUCCESS && fields.iter().all(|field| field.code == SUCCESS as c_uint);
        // Both values are 32-bit numbers, in the first half of the union on every machine that has this library.
        let [megabytes, count] = fields.map(|field| f64::from(field.value as u32));
        let rate = megabytes * count / 1e3;
        (is_told && rate > 0.0).then_some(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_field_has_nvmls_layout() {
        assert_eq!((size_of::<FieldValue>(), std::mem::offset_of!(FieldValue, value)), (40, 32));
    }
}
