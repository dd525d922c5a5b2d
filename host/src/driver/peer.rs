//! Device memory that the kernels of other ranks access: by CUDA IPC between processes, and directly within one; and a flag in host memory
//! that makes kernels abort.
//!
//! The transport decides which ranks are peers, and how the memory is used.

use std::ffi::c_void;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};

use super::{CudaError, Queue, check};
use crate::sys::cuda;

/// A description of a rank's memory, which it sends to the others.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// The number of the process, unique in the world.
    process: [u8; 16],
    device: u32,
    address: u64,
    /// The IPC handle by which other processes of this machine open the allocation; `offset` is the start of the memory in it.
    handle: Vec<u8>,
    offset: u64,
}

/// A random number that identifies this process in the world.
pub(crate) fn process_number() -> [u8; 16] {
    static NUMBER: OnceLock<[u8; 16]> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut number = [0; 16];
        // Without randomness, two processes look like one; the driver then refuses to open the other's memory by address.
        if getrandom::fill(&mut number).is_err() {
            number[..4].copy_from_slice(&std::process::id().to_le_bytes());
        }
        number
    })
}

impl Queue {
    /// The address and the bytes of the allocation that an address of this queue's device belongs to.
    ///
    /// # Errors
    /// [`CudaError`] for an address of no allocation.
    pub(crate) fn allocation_of(&self, address: u64) -> Result<(u64, usize), CudaError> {
        self.make_current()?;
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: writes an address and a number; the driver checks the address.
        check("cuMemGetAddressRange", unsafe { cuda::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) })?;
        Ok((base, bytes))
    }

    /// Whether an address belongs to memory of `cuMemAlloc`, which has an IPC handle, in contrast to memory of pools and of `cuMemCreate`.
    ///
    /// # Errors
    /// [`CudaError`] for an address of no allocation.
    pub(crate) fn is_of_mem_alloc(&self, address: u64) -> Result<bool, CudaError> {
        self.make_current()?;
        let mut answer = 0u32;
        let attribute = cuda::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        // SAFETY: the attribute is a number of four bytes; the driver checks the address.
        check("cuPointerGetAttribute", unsafe {
            cuda::cuPointerGetAttribute((&raw mut answer).cast(), attribute, address)
        })?;
        Ok(answer != 0)
    }
}

/// Memory of another rank, mapped into this one's address space for as long as this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    queue: Queue,
    /// The base address of the IPC mapping; none within one process.
    base: Option<u64>,
    address: u64,
}

impl Offer {
    /// Describes memory of `queue`'s device.
    pub(crate) fn new(queue: &Queue, address: u64) -> Result<Self, CudaError> {
        let (base, _) = queue.allocation_of(address)?;
        let mut handle = cuda::CUipcMemHandle([0; 64]);
        // SAFETY: writes a handle; the base is that of an allocation.
        check("cuIpcGetMemHandle", unsafe { cuda::cuIpcGetMemHandle(&mut handle, base) })?;
        Ok(Self {
            process: process_number(),
            device: queue.ordinal(),
            address,
            handle: handle.0.to_vec(),
            offset: address - base,
        })
    }

    /// Maps the memory for `queue`'s device.
    pub(crate) fn open(&self, queue: &Queue) -> Result<Mapping, CudaError> {
        queue.make_current()?;
        if self.process == process_number() {
            if self.device != queue.ordinal() {
                queue.reach(self.device)?;
            }
            return Ok(Mapping { queue: queue.clone(), base: None, address: self.address });
        }
        let mut handle = cuda::CUipcMemHandle([0; 64]);
        handle.0.iter_mut().zip(&self.handle).for_each(|(to, &from)| *to = from);
        let mut base = 0;
        let lazily = cuda::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: writes one address; the handle belongs to another process, which keeps the memory while the group lasts.
        check("cuIpcOpenMemHandle", unsafe { cuda::cuIpcOpenMemHandle_v2(&mut base, handle, lazily) })?;
        Ok(Mapping { queue: queue.clone(), base: Some(base), address: base + self.offset })
    }
}

impl Mapping {
    /// The address of the memory in this rank's address space.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Some(base) = self.base else { return };
        let closed = self.queue.make_current().and_then(|()| {
            // SAFETY: opened in `open`, closed once; the driver waits for work that uses it.
            check("cuIpcCloseMemHandle", unsafe { cuda::cuIpcCloseMemHandle(base) })
        });
        if let Err(error) = closed {
            tracing::error!(%error, "a peer's memory was not unmapped");
        }
    }
}

/// A flag that the host sets and kernels read.
#[derive(Debug)]
pub(crate) struct HostFlag {
    flag: *mut AtomicU32,
    queue: Queue,
}

// SAFETY: the pointer addresses an atomic and is valid until the drop.
unsafe impl Send for HostFlag {}
// SAFETY: as above.
unsafe impl Sync for HostFlag {}

impl HostFlag {
    /// Creates a cleared flag for kernels of `queue`'s device.
    pub(crate) fn new(queue: &Queue) -> Result<Self, CudaError> {
        queue.make_current()?;
        let mut flag: *mut c_void = ptr::null_mut();
        let flags = cuda::CU_MEMHOSTALLOC_DEVICEMAP | cuda::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: writes one address.
        check("cuMemHostAlloc", unsafe { cuda::cuMemHostAlloc(&mut flag, size_of::<AtomicU32>(), flags) })?;
        let flag = flag.cast::<AtomicU32>();
        // SAFETY: memory for the flag was just allocated, aligned to a page.
        unsafe { flag.write(AtomicU32::new(0)) };
        Ok(Self { flag, queue: queue.clone() })
    }

    /// The address by which kernels read the flag: host and devices share one address space.
    pub(crate) fn address(&self) -> u64 {
        self.flag as u64
    }

    /// Sets the flag.
    pub(crate) fn set(&self) {
        // SAFETY: live until the drop.
        unsafe { &*self.flag }.store(1, Ordering::Release);
    }
}

impl Drop for HostFlag {
    fn drop(&mut self) {
        let freed = self.queue.make_current().and_then(|()| {
            // SAFETY: allocated in `new`, freed once; the driver waits for the device.
            check("cuMemFreeHost", unsafe { cuda::cuMemFreeHost(self.flag.cast()) })
        });
        if let Err(error) = freed {
            tracing::error!(%error, "a flag was not freed");
        }
    }
}
