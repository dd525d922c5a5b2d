//! One launch of a kernel: its arguments are checked against the contract, and, where the device supports it, its blocks become resident
//! while the preceding launch ends.
//!
//! This module does not know what kernels compute, and holds no kernels.

use std::ffi::c_void;
use std::ptr;

use gradsync_device::abi::{EntryPoint, Param};

use super::{CudaError, Table, check, check_named};
use crate::sys::cuda::{self, Status};

/// A kernel parameter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    Pointer(u64),
    U64(u64),
    F64(f64),
}

impl From<u64> for Argument {
    fn from(value: u64) -> Self {
        Argument::U64(value)
    }
}

impl From<f64> for Argument {
    fn from(value: f64) -> Self {
        Argument::F64(value)
    }
}

impl From<usize> for Argument {
    fn from(value: usize) -> Self {
        Argument::U64(value as u64)
    }
}

impl From<&Table> for Argument {
    fn from(table: &Table) -> Self {
        Argument::Pointer(table.address())
    }
}

/// The blocks of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    pub(crate) blocks: u64,
    /// Threads of a block, at most the entry point's launch bound.
    pub(crate) threads: u32,
}

/// Enqueues a launch of an entry point into a stream.
///
/// # Safety
/// See `Queue::launch`; the function is the entry point's, and its context current. With `early`, every thread of the kernel begins with
/// `griddepcontrol.wait`.
pub(super) unsafe fn launch(
    (entry, function): (&EntryPoint, cuda::CUfunction),
    stream: cuda::CUstream,
    Grid { blocks, threads }: Grid,
    arguments: &[Argument],
    early: Option<EarlyLaunch>,
) -> Result<(), CudaError> {
    let call = || format!("launch of {}", entry.name);
    let invalid = |text| CudaError { call: call(), code: Status::INVALID_VALUE.0, text };
    let kinds = arguments.iter().map(|argument| match argument {
        Argument::Pointer(_) => Param::Pointer,
        Argument::U64(_) => Param::U64,
        Argument::F64(_) => Param::F64,
    });
    if !kinds.eq(entry.params.iter().copied()) {
        let text = format!("arguments {arguments:?} do not match the parameters {:?}", entry.params);
        return Err(invalid(text));
    }
    let blocks = u32::try_from(blocks)
        .ok()
        .filter(|&blocks| blocks <= i32::MAX as u32)
        .ok_or_else(|| invalid(format!("{blocks} blocks exceed the largest grid, 2^31 - 1")))?;
    let mut pointers: Vec<*mut c_void> = arguments
        .iter()
        .map(|argument| match argument {
            Argument::Pointer(value) | Argument::U64(value) => ptr::from_ref(value).cast_mut().cast(),
            Argument::F64(value) => ptr::from_ref(value).cast_mut().cast(),
        })
        .collect();
    let (pointers, none) = (pointers.as_mut_ptr(), ptr::null_mut());
    // SAFETY: the argument list has the entry point's types in its order; the rest is the caller's promise.
    let status = unsafe {
        match early {
            Some(EarlyLaunch(launch)) => {
                let id = PROGRAMMATIC_STREAM_SERIALIZATION;
                let attribute = Attribute { id, _padding: 0, allowed: 1, _rest: [0; 15] };
                let [grid, block] = [[blocks, 1, 1], [threads, 1, 1]];
                let config =
                    Config { grid, block, shared_bytes: 0, stream, attributes: &attribute, attribute_count: 1 };
                launch(&config, function, pointers, none)
            }
            None => cuda::cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, pointers, none),
        }
    };
    check_named(call, status)
}

/// The driver's `cuLaunchKernelEx`, which `cust` does not declare, for programmatic dependent launch: the blocks of a launch become
/// resident as the blocks of the preceding launch exit, and wait there for its end. That hides most of the gap between two launches.
#[derive(Clone, Copy, Debug)]
pub(super) struct EarlyLaunch(
    unsafe extern "C" fn(*const Config, cuda::CUfunction, *mut *mut c_void, *mut *mut c_void) -> Status,
);

impl EarlyLaunch {
    /// The first CUDA version whose graphs record such launches.
    const CUDA_VERSION: i32 = 12030;

    /// Looks the function up in the driver. Without it, each launch starts only after the preceding one has ended.
    pub(super) fn of_driver() -> Option<Self> {
        let (mut version, mut address) = (0, ptr::null_mut());
        // SAFETY: writes one number.
        let known = check("cuDriverGetVersion", unsafe { cuda::cuDriverGetVersion(&mut version) });
        let found = known.and_then(|()| {
            if version < Self::CUDA_VERSION {
                return Ok(());
            }
            let name = c"cuLaunchKernelEx".as_ptr();
            // SAFETY: the name is terminated; writes one address.
            let status = unsafe { cuda::cuGetProcAddress(name, &mut address, Self::CUDA_VERSION, 0) };
            check("cuGetProcAddress of cuLaunchKernelEx", status)
        });
        if let Err(error) = found {
            tracing::debug!(%error, "no early launches");
            return None;
        }
        // SAFETY: null, or a function of this type, as `cuda.h` declares it.
        unsafe { std::mem::transmute::<*mut c_void, Option<_>>(address) }.map(Self)
    }

    /// A value for tests of the selection, without a driver.
    #[cfg(test)]
    pub(super) fn never_called() -> Self {
        unsafe extern "C" fn launch(
            _: *const Config,
            _: cuda::CUfunction,
            _: *mut *mut c_void,
            _: *mut *mut c_void,
        ) -> Status {
            unreachable!("a test launches nothing")
        }
        Self(launch)
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: cuda::CUstream,
    attributes: *const Attribute,
    attribute_count: u32,
}

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`.
const PROGRAMMATIC_STREAM_SERIALIZATION: u32 = 6;

/// `CUlaunchAttribute` with this attribute's value, an `int` in a union of 64 bytes.
#[repr(C, align(8))]
struct Attribute {
    id: u32,
    _padding: u32,
    allowed: i32,
    _rest: [i32; 15],
}

const _: () = assert!(size_of::<Config>() == 56 && size_of::<Attribute>() == 72);
