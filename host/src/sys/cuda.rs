//! This crate's own declarations of the CUDA driver's C interface, as far as the crate calls it: results, and values that calls write
//! through pointers, are integers.
//!
//! `cust` 0.3.2 declares the same functions with Rust enums of CUDA 11.6. Newer drivers have codes that those enums lack: 46 for a device
//! that another process uses exclusively, 810 for a client that MPS has ended. An enum value outside the enum is undefined behaviour, so
//! such a code must not pass through `cust`. The names and types are from NVIDIA's `cuda.h` ([driver
//! API](https://docs.nvidia.com/cuda/cuda-driver-api/)); `cust` links the library, and supplies the types of the handles.
//!
//! # Calls that still pass through `cust`
//!
//! There are three, all in the creation of a queue. Before the first two, the same calls are made by the declarations here, so that a
//! refusal of the device is first seen as an integer:
//!
//! * `Device::get_device`, which calls `cuDeviceGet`, a lookup in a table;
//! * `Context::new`: `cuDevicePrimaryCtxRetain` of a context that is already retained, and `cuCtxSetCurrent` of the current one;
//! * `Stream::new`: `cuStreamCreateWithPriority`, once, in `Queue::new` alone. It can meet an unknown code where the device fails, or MPS
//!   ends the process, right after the others.
//!
//! The declarations here release the handles that these calls return.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

pub(crate) use cust::sys::{CUcontext, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream};

/// `CUdevice`
pub(crate) type CUdevice = c_int;
/// `CUdeviceptr`
pub(crate) type CUdeviceptr = u64;

/// `CUresult`: the result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Status(pub(crate) c_uint);

impl Status {
    /// `CUDA_SUCCESS`
    pub(crate) const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_INVALID_VALUE`
    pub(crate) const INVALID_VALUE: Self = Self(1);
    /// `CUDA_ERROR_OUT_OF_MEMORY`
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_NO_DEVICE`
    pub(crate) const NO_DEVICE: Self = Self(100);
    /// `CUDA_ERROR_INVALID_DEVICE`
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    /// `CUDA_ERROR_NO_BINARY_FOR_GPU`
    pub(crate) const NO_BINARY_FOR_GPU: Self = Self(209);
    /// `CUDA_ERROR_INVALID_HANDLE`
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    /// `CUDA_ERROR_NOT_FOUND`
    pub(crate) const NOT_FOUND: Self = Self(500);
    /// `CUDA_ERROR_NOT_READY`: not a failure; the work is still pending.
    pub(crate) const NOT_READY: Self = Self(600);
    /// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    /// `CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE`
    pub(crate) const COOPERATIVE_LAUNCH_TOO_LARGE: Self = Self(720);
    /// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    /// `CUDA_ERROR_STREAM_CAPTURE_INVALIDATED`
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Self = Self(901);

    /// The driver's name for the code, and its description.
    pub(crate) fn text(self) -> String {
        let told = |ask: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = ptr::null();
            // SAFETY: writes one address.
            let status = unsafe { ask(self, &mut text) };
            // SAFETY: a terminated static string of the driver.
            (status == Self::SUCCESS && !text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        match (told(cuGetErrorName), told(cuGetErrorString)) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            (Some(name), None) => name.into_owned(),
            _ => "the driver has no name for this code".into(),
        }
    }
}

/// `CUipcMemHandle`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CUipcMemHandle(pub(crate) [u8; 64]);

/// `CU_EVENT_DEFAULT`
pub(crate) const CU_EVENT_DEFAULT: c_uint = 0;
/// `CU_EVENT_DISABLE_TIMING`
pub(crate) const CU_EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
pub(crate) const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
/// `CU_MEMHOSTALLOC_PORTABLE`
pub(crate) const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTALLOC_DEVICEMAP`
pub(crate) const CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 2;
/// `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`
pub(crate) const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: c_uint = 10;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
pub(crate) const CU_STREAM_CAPTURE_MODE_RELAXED: c_uint = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
pub(crate) const CU_STREAM_CAPTURE_STATUS_NONE: c_uint = 0;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`
pub(crate) const CU_STREAM_CAPTURE_STATUS_ACTIVE: c_uint = 1;

// No `#[link]`: the build script links `libcuda.rs`, which forwards every function that `cust` declares. Each of these functions must be
// among them; any other fails to link.
unsafe extern "C" {
    pub(crate) fn cuInit(flags: c_uint) -> Status;
    pub(crate) fn cuDriverGetVersion(version: *mut c_int) -> Status;
    pub(crate) fn cuGetErrorName(status: Status, text: *mut *const c_char) -> Status;
    pub(crate) fn cuGetErrorString(status: Status, text: *mut *const c_char) -> Status;
    pub(crate) fn cuGetProcAddress(
        name: *const c_char,
        function: *mut *mut c_void,
        cuda_version: c_int,
        flags: u64,
    ) -> Status;

    pub(crate) fn cuDeviceGetCount(count: *mut c_int) -> Status;
    pub(crate) fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> Status;
    pub(crate) fn cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice) -> Status;
    pub(crate) fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: CUdevice) -> Status;
    pub(crate) fn cuDeviceCanAccessPeer(answer: *mut c_int, device: CUdevice, peer: CUdevice) -> Status;
    pub(crate) fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice) -> Status;

    pub(crate) fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> Status;
    pub(crate) fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> Status;
    pub(crate) fn cuCtxGetCurrent(context: *mut CUcontext) -> Status;
    pub(crate) fn cuCtxSetCurrent(context: CUcontext) -> Status;
    pub(crate) fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) -> Status;

    pub(crate) fn cuStreamDestroy_v2(stream: CUstream) -> Status;
    pub(crate) fn cuStreamSynchronize(stream: CUstream) -> Status;
    pub(crate) fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> Status;
    pub(crate) fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> Status;
    pub(crate) fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> Status;
    pub(crate) fn cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        status: *mut c_uint,
        id: *mut u64,
        graph: *mut CUgraph,
        dependencies: *mut *const c_void,
        dependency_count: *mut usize,
    ) -> Status;

    pub(crate) fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64) -> Status;
    pub(crate) fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> Status;
    pub(crate) fn cuGraphExecDestroy(executable: CUgraphExec) -> Status;
    pub(crate) fn cuGraphDestroy(graph: CUgraph) -> Status;

    pub(crate) fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> Status;
    pub(crate) fn cuEventRecord(event: CUevent, stream: CUstream) -> Status;
    pub(crate) fn cuEventQuery(event: CUevent) -> Status;
    pub(crate) fn cuEventSynchronize(event: CUevent) -> Status;
    pub(crate) fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> Status;
    pub(crate) fn cuEventDestroy_v2(event: CUevent) -> Status;

    pub(crate) fn cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize) -> Status;
    pub(crate) fn cuMemFree_v2(address: CUdeviceptr) -> Status;
    pub(crate) fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, address: CUdeviceptr) -> Status;
    pub(crate) fn cuPointerGetAttribute(value: *mut c_void, attribute: c_uint, address: CUdeviceptr) -> Status;
    pub(crate) fn cuMemAllocHost_v2(start: *mut *mut c_void, bytes: usize) -> Status;
    pub(crate) fn cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, flags: c_uint) -> Status;
    pub(crate) fn cuMemFreeHost(start: *mut c_void) -> Status;
    pub(crate) fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> Status;
    pub(crate) fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> Status;
    pub(crate) fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> Status;
    pub(crate) fn cuMemsetD8Async(to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream) -> Status;

    pub(crate) fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, address: CUdeviceptr) -> Status;
    pub(crate) fn cuIpcOpenMemHandle_v2(address: *mut CUdeviceptr, handle: CUipcMemHandle, flags: c_uint) -> Status;
    pub(crate) fn cuIpcCloseMemHandle(address: CUdeviceptr) -> Status;

    pub(crate) fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        option_count: c_uint,
        options: *mut c_uint,
        values: *mut *mut c_void,
    ) -> Status;
    pub(crate) fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> Status;
    pub(crate) fn cuModuleUnload(module: CUmodule) -> Status;
    pub(crate) fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Status;
}
