//! Forwarders of the CUDA driver's functions: the `libcuda` that programs with the feature `cuda` link.
//!
//! `cust` links the driver by name. With NVIDIA's own library that takes a CUDA toolkit to build, and a driver to start the program. `build.rs`
//! compiles this file instead, as a crate of its own, to a `libcuda.a` that has every function which `cust_raw` declares. On its first call a
//! forwarder opens the driver's library, `libcuda.so.1` or the one that `GRADSYNC_LIBCUDA` names, finds the function of the same name there, and
//! calls it. Without a driver the answer is `CUDA_ERROR_NO_DEVICE`, and where the driver is too old for the function, `CUDA_ERROR_NOT_FOUND`.
//! Nothing here is code of NVIDIA's.
//!
//! # Arguments
//!
//! Forwarders know no signatures. Nearly every argument of the driver's functions is of integer class (integers, enumerations, pointers). The two
//! IPC handles are structures of 64 bytes by value: on x86-64 such a structure travels on the stack, on aarch64 by reference. Sixteen words, which
//! are all argument registers and the first words of the stack, cover the longest list (11 arguments) and the handles (two registers, eight words
//! of stack). Passing more words than the callee takes is harmless where the caller removes them, as it does in the ELF ABIs of both; at worst
//! words of the caller's frame are read and handed on. Functions that take floats by value are spelled out, as those travel in other registers.
//!
//! Because of that, calls and definitions must never meet in one compilation: the optimiser may take a call with other arguments than the
//! definition has for unreachable. `build.rs` keeps them apart, as machine code of two crates of which neither sees the other.

#![no_std]
#![allow(non_snake_case)]

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use core::{mem, ptr};

unsafe extern "C" {
    fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    fn getenv(name: *const c_char) -> *const c_char;
}

/// `RTLD_NOW | RTLD_GLOBAL` of Linux.
const NOW_AND_GLOBAL: c_int = 0x102;
/// `CUDA_ERROR_NO_DEVICE`
const NO_DEVICE: c_int = 100;
/// `CUDA_ERROR_NOT_FOUND`
const NOT_FOUND: c_int = 500;

/// An address that is looked up at its first use. Threads may race: `dlopen` and `dlsym` give all of them the same. A failure is not kept.
struct Found(AtomicPtr<c_void>);

impl Found {
    const fn not_yet() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    fn or(&self, look_up: impl FnOnce() -> *mut c_void) -> Option<*mut c_void> {
        let mut address = self.0.load(Ordering::Acquire);
        if address.is_null() {
            address = look_up();
            self.0.store(address, Ordering::Release);
        }
        (!address.is_null()).then_some(address)
    }
}

/// The driver's library.
fn driver() -> Option<*mut c_void> {
    static DRIVER: Found = Found::not_yet();
    DRIVER.or(|| {
        // SAFETY: a terminated name; the environment is not changed while the driver is first called, as for every reader of it.
        let named = unsafe { getenv(c"GRADSYNC_LIBCUDA".as_ptr()) };
        // SAFETY: a text of the environment, unless it is null.
        let is_named = !named.is_null() && unsafe { *named } != 0;
        let file = if is_named { named } else { c"libcuda.so.1".as_ptr() };
        // SAFETY: a terminated name. Whoever names another library answers for what its initialisers do.
        unsafe { dlopen(file, NOW_AND_GLOBAL) }
    })
}

/// The driver's function of this name, or the code that its callers get.
fn find(kept: &Found, name: &CStr) -> Result<*mut c_void, c_int> {
    let library = driver().ok_or(NO_DEVICE)?;
    // SAFETY: a library that is open and stays open, and a terminated name.
    kept.or(|| unsafe { dlsym(library, name.as_ptr()) }).ok_or(NOT_FOUND)
}

/// The texts of error codes are there without a driver too: the `Display` of `cust` asks for them, and would panic on a refusal.
///
/// # Safety
/// `to` must be a place for an address.
unsafe fn text(to: *mut *const c_char, text: &'static CStr) -> c_int {
    // SAFETY: this function's contract.
    unsafe { to.write(text.as_ptr()) };
    0
}

/// A register, or as much of the stack.
type Word = usize;

macro_rules! forward {
    ($name:ident($($argument:ident: $type:ty),*) else |$code:ident| $missing:expr) => {
        /// # Safety
        /// As the driver's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            static FUNCTION: Found = Found::not_yet();
            const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            };
            match find(&FUNCTION, NAME) {
                Ok(function) => {
                    // SAFETY: the driver's function of this name, which takes these arguments, or the first words of them: see above.
                    unsafe {
                        let function = mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> c_int>(function);
                        function($($argument),*)
                    }
                }
                Err($code) => $missing,
            }
        }
    };
    ($name:ident($($argument:ident: $type:ty),*)) => {
        forward! { $name($($argument: $type),*) else |code| code }
    };
    ($($name:ident)*) => {
        $(forward! {
            $name(
                a: Word, b: Word, c: Word, d: Word, e: Word, f: Word, g: Word, h: Word,
                i: Word, j: Word, k: Word, l: Word, m: Word, n: Word, o: Word, p: Word
            )
        })*
    };
}

forward! {
    cuGetErrorName(error: c_int, to: *mut *const c_char) else |_code| unsafe { text(to, c"CUDA_ERROR_NO_DEVICE") }
}
forward! {
    cuGetErrorString(error: c_int, to: *mut *const c_char) else |_code| unsafe {
        text(to, c"no CUDA driver here: libcuda.so.1 cannot be opened")
    }
}

forward! { cuParamSetf(function: Word, offset: Word, value: f32) }
forward! { cuTexRefSetMipmapLevelBias(texture: Word, bias: f32) }
forward! { cuTexRefSetMipmapLevelClamp(texture: Word, least: f32, most: f32) }

// The others that `cust_raw` 0.11 declares; a test of `cargo xtask` compares the list.
forward! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2 cuArrayGetPlane
    cuArrayGetSparseProperties cuCtxAttach cuCtxCreate_v2 cuCtxCreate_v3 cuCtxDestroy_v2 cuCtxDetach
    cuCtxDisablePeerAccess cuCtxEnablePeerAccess cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevice
    cuCtxGetExecAffinity cuCtxGetFlags cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange
    cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxResetPersistingL2Cache cuCtxSetCacheConfig cuCtxSetCurrent cuCtxSetLimit
    cuCtxSetSharedMemConfig cuCtxSynchronize cuDestroyExternalMemory cuDestroyExternalSemaphore cuDeviceCanAccessPeer
    cuDeviceComputeCapability cuDeviceGet cuDeviceGetAttribute cuDeviceGetByPCIBusId cuDeviceGetCount
    cuDeviceGetDefaultMemPool cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute cuDeviceGetLuid
    cuDeviceGetMemPool cuDeviceGetName cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAttribute cuDeviceGetPCIBusId
    cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceGraphMemTrim
    cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRetain
    cuDevicePrimaryCtxSetFlags_v2 cuDeviceSetGraphMemAttribute cuDeviceSetMemPool cuDeviceTotalMem_v2 cuDriverGetVersion
    cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuEventRecordWithFlags
    cuEventSynchronize cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray
    cuFlushGPUDirectRDMAWrites cuFuncGetAttribute cuFuncGetModule cuFuncSetAttribute cuFuncSetBlockShape
    cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGetExportTable cuGetProcAddress
    cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddEmptyNode cuGraphAddEventRecordNode
    cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode
    cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode
    cuGraphAddMemsetNode cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy
    cuGraphDestroyNode cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent
    cuGraphEventWaitNodeSetEvent cuGraphExecChildGraphNodeSetParams cuGraphExecDestroy
    cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent cuGraphExecExternalSemaphoresSignalNodeSetParams
    cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams
    cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecUpdate
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges
    cuGraphGetNodes cuGraphGetRootNodes cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphInstantiateWithFlags
    cuGraphInstantiate_v2 cuGraphKernelNodeCopyAttributes cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams
    cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams cuGraphLaunch cuGraphMemAllocNodeGetParams
    cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams
    cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetDependencies cuGraphNodeGetDependentNodes
    cuGraphNodeGetType cuGraphReleaseUserObject cuGraphRemoveDependencies cuGraphRetainUserObject cuGraphUpload
    cuGraphicsMapResources cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
    cuGraphicsUnregisterResource cuImportExternalMemory cuImportExternalSemaphore cuInit cuIpcCloseMemHandle
    cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle cuIpcOpenMemHandle_v2 cuLaunch cuLaunchCooperativeKernel
    cuLaunchCooperativeKernelMultiDevice cuLaunchGrid cuLaunchGridAsync cuLaunchHostFunc cuLaunchKernel cuLinkAddData_v2
    cuLinkAddFile_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy cuMemAddressFree cuMemAddressReserve cuMemAdvise
    cuMemAllocAsync cuMemAllocFromPoolAsync cuMemAllocHost_v2 cuMemAllocManaged cuMemAllocPitch_v2 cuMemAlloc_v2
    cuMemCreate cuMemExportToShareableHandle cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetAccess
    cuMemGetAddressRange_v2 cuMemGetAllocationGranularity cuMemGetAllocationPropertiesFromHandle cuMemGetInfo_v2
    cuMemHostAlloc cuMemHostGetDevicePointer_v2 cuMemHostGetFlags cuMemHostRegister_v2 cuMemHostUnregister
    cuMemImportFromShareableHandle cuMemMap cuMemMapArrayAsync cuMemPoolCreate cuMemPoolDestroy cuMemPoolExportPointer
    cuMemPoolExportToShareableHandle cuMemPoolGetAccess cuMemPoolGetAttribute cuMemPoolImportFromShareableHandle
    cuMemPoolImportPointer cuMemPoolSetAccess cuMemPoolSetAttribute cuMemPoolTrimTo cuMemPrefetchAsync
    cuMemRangeGetAttribute cuMemRangeGetAttributes cuMemRelease cuMemRetainAllocationHandle cuMemSetAccess cuMemUnmap
    cuMemcpy cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DPeer
    cuMemcpy3DPeerAsync cuMemcpy3D_v2 cuMemcpyAsync cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2 cuMemcpyAtoH_v2
    cuMemcpyDtoA_v2 cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoAAsync_v2
    cuMemcpyHtoA_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2 cuMemcpyPeer cuMemcpyPeerAsync cuMemsetD16Async cuMemsetD16_v2
    cuMemsetD2D16Async cuMemsetD2D16_v2 cuMemsetD2D32Async cuMemsetD2D32_v2 cuMemsetD2D8Async cuMemsetD2D8_v2
    cuMemsetD32Async cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2 cuMipmappedArrayCreate cuMipmappedArrayDestroy
    cuMipmappedArrayGetLevel cuMipmappedArrayGetSparseProperties cuModuleGetFunction cuModuleGetGlobal_v2
    cuModuleGetSurfRef cuModuleGetTexRef cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary
    cuModuleUnload cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxPotentialBlockSize
    cuOccupancyMaxPotentialBlockSizeWithFlags cuParamSetSize cuParamSetTexRef cuParamSeti cuParamSetv
    cuPointerGetAttribute cuPointerGetAttributes cuPointerSetAttribute cuProfilerInitialize cuProfilerStart
    cuProfilerStop cuSignalExternalSemaphoresAsync cuStreamAddCallback cuStreamAttachMemAsync cuStreamBatchMemOp
    cuStreamBeginCapture_v2 cuStreamCopyAttributes cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2
    cuStreamEndCapture cuStreamGetAttribute cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2 cuStreamGetCtx
    cuStreamGetFlags cuStreamGetPriority cuStreamIsCapturing cuStreamQuery cuStreamSetAttribute cuStreamSynchronize
    cuStreamUpdateCaptureDependencies cuStreamWaitEvent cuStreamWaitValue32 cuStreamWaitValue64 cuStreamWriteValue32
    cuStreamWriteValue64 cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray
    cuSurfRefSetArray cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc
    cuTexObjectGetTextureDesc cuTexRefCreate cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2
    cuTexRefGetArray cuTexRefGetBorderColor cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat
    cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp
    cuTexRefGetMipmappedArray cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2 cuTexRefSetArray
    cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat cuTexRefSetMaxAnisotropy
    cuTexRefSetMipmapFilterMode cuTexRefSetMipmappedArray cuThreadExchangeStreamCaptureMode cuUserObjectCreate
    cuUserObjectRelease cuUserObjectRetain cuWaitExternalSemaphoresAsync
}
