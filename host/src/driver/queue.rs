//! [`Queue`]: one device and one in-order stream, with the memory and the kernels that it uses.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::context::{OwnedStream, Primary};
use super::device::{Device, DeviceAttribute};
use super::event::{Event, Timing};
use super::gate::{Changing, Gate, Held};
use super::launch::{Argument, EarlyLaunch, Grid};
use super::module::{Kernel, LOWEST_CAPABILITY, Library, LoadedKernel};
use super::pool::{self, Pool, Staging, Table, Tables};
use super::recording::Recording;
use super::{CudaError, check, peer_shared, retired};
use crate::error::Error;
use crate::sys::cuda::{self, Status};
use crate::trace::waiting_for_device;

/// A CUDA stream: non-blocking, in the primary context of one device, with the kernels loaded so far. Clones are the same stream.
///
/// Work is asynchronous: a call returns when its work is in the queue. [`synchronize`](Self::synchronize) and copies to the host
/// wait for it. The primary context is the one that the CUDA runtime, NCCL and other crates use.
#[derive(Clone, Debug)]
pub struct Queue {
    inner: Arc<Inner>,
}

/// `CU_STREAM_LEGACY`: the default stream that all threads share.
const LEGACY_STREAM: cuda::CUstream = ptr::without_provenance_mut(1);

fn per_thread_stream() -> CudaError {
    CudaError {
        call: "a queue on stream 0x2".into(),
        code: Status::INVALID_HANDLE.0,
        text: "this is the per-thread default stream (CU_STREAM_PER_THREAD), another one on every thread, and a queue is used by several; use \
               one that was made with cuStreamCreate (candle: Device::new_cuda_with_stream instead of Device::new_cuda)"
            .into(),
    }
}

#[derive(Debug)]
struct Inner {
    // Dropped in this order: everything else before the context.
    kernels: Mutex<HashMap<&'static str, Kernel>>,
    pool: Mutex<Pool>,
    staging: Mutex<Staging>,
    tables: Mutex<Tables>,
    stream: cuda::CUstream,
    /// Destroys `stream`, unless it has another owner.
    _owned: Option<OwnedStream>,
    context: Primary,
    device: Device,
    library: Library,
    gate: Gate,
}

// SAFETY: the driver's handles may be used from any thread; each use makes the context current first.
unsafe impl Send for Inner {}
// SAFETY: as above; the driver locks its own state, and the table of kernels has a lock here.
unsafe impl Sync for Inner {}

impl Queue {
    /// Opens a queue on a device.
    ///
    /// # Errors
    /// [`CudaError`] if there is no driver (code 100), no device with that ordinal (101), or its compute capability is below 7.5.
    pub fn new(ordinal: u32) -> Result<Self, CudaError> {
        Self::open(ordinal, || {
            let stream = OwnedStream::new()?;
            Ok((stream.raw(), Some(stream)))
        })
    }

    /// Opens a queue on a stream of another library, in the device's primary context (which the CUDA runtime uses too). Work of both is
    /// then ordered as on any one stream.
    ///
    /// Null and 0x1 (`CU_STREAM_LEGACY`) are the legacy default stream, one for all threads; [`stream`](Self::stream) is 0x1 for both. CUDA
    /// synchronizes it with all streams of the context that were not created as non-blocking, in both directions. It cannot be recorded:
    /// [`capture`](Self::capture) returns an error.
    ///
    /// 0x2 (`CU_STREAM_PER_THREAD`) is refused, since it is a different stream on every thread that uses it and so orders nothing between
    /// threads. candle's `Device::new_cuda` works on it; `Device::new_cuda_with_stream` has a stream of its own.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new), and [`CudaError`], code 400, for the per-thread default stream.
    ///
    /// # Safety
    /// `stream` is a live stream of that device's primary context, and outlives this queue, its clones and everything made with it. Only
    /// [`wait_for`](Self::wait_for) makes it part of the recording of another queue, never a call of another library. A library that
    /// records its work keeps all memory that the recorded work uses.
    pub unsafe fn from_raw_stream(ordinal: u32, stream: *mut c_void) -> Result<Self, CudaError> {
        let stream = match stream.addr() {
            // Depending on their build, some libraries mean the per-thread default stream by null.
            0 => LEGACY_STREAM,
            2 => return Err(per_thread_stream()),
            _ => stream.cast(),
        };
        Self::open(ordinal, || Ok((stream, None)))
    }

    fn open(
        ordinal: u32,
        stream: impl FnOnce() -> Result<(cuda::CUstream, Option<OwnedStream>), CudaError>,
    ) -> Result<Self, CudaError> {
        let device = Device::new(ordinal)?;
        let major = device.attribute(DeviceAttribute::ComputeCapabilityMajor)?;
        let minor = device.attribute(DeviceAttribute::ComputeCapabilityMinor)?;
        let library = Library::for_capability(major, minor, EarlyLaunch::of_driver).ok_or_else(|| CudaError {
            call: format!("device {ordinal}"),
            code: Status::NO_BINARY_FOR_GPU.0,
            text: format!("compute capability {major}.{minor}, and the kernels need {LOWEST_CAPABILITY}"),
        })?;
        let library = library.as_told();
        let context = Primary::retain(device)?;
        let (stream, owned) = stream()?;
        let (kernels, pool) = (Mutex::default(), Mutex::default());
        let (staging, tables, gate) = (Mutex::default(), Mutex::default(), Gate::default());
        let inner = Inner { kernels, pool, staging, tables, stream, _owned: owned, context, device, library, gate };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The ordinal of the device.
    pub fn ordinal(&self) -> u32 {
        self.inner.device.ordinal()
    }

    /// The CUDA stream (`cudaStream_t`, `CUstream`), for other libraries to order their work on.
    pub fn stream(&self) -> *mut c_void {
        self.inner.stream.cast()
    }

    pub(super) fn raw_stream(&self) -> cuda::CUstream {
        self.inner.stream
    }

    /// The device's UUID, which is unique in the world.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn device_uuid(&self) -> Result<[u8; 16], CudaError> {
        self.inner.device.uuid()
    }

    /// Waits for everything in the queue.
    ///
    /// # Errors
    /// [`CudaError`], also of work that failed while it ran.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.wait()?;
        peer_shared::settle(false);
        Ok(())
    }

    /// Waits for everything in the queue, without advancing pending releases.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.make_current()?;
        let _waiting = waiting_for_device(self.ordinal());
        // SAFETY: the handle is live.
        check("cuStreamSynchronize", unsafe { cuda::cuStreamSynchronize(self.inner.stream) })
    }

    /// Records an event at the end of the queue.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn record(&self) -> Result<Event, CudaError> {
        let event = Event::new(self, Timing::Kept)?;
        event.record()?;
        Ok(event)
    }

    /// Creates an event that records no time, to be recorded later.
    pub(crate) fn event(&self) -> Result<Event, CudaError> {
        Event::new(self, Timing::Left)
    }

    /// Makes all later work of this queue wait until another queue has passed an event. The host does not wait.
    ///
    /// # Errors
    /// [`CudaError`] of the driver.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.make_current()?;
        // An event of a recording takes this queue into the recording.
        let _changing = event.may_be_recorded().then(|| self.change_recordings(&[]));
        event.mark().make_stream_wait(self.inner.stream)?;
        self.join_recording()
    }

    /// Makes all later work of this queue wait for everything that is in another queue now. The host does not wait.
    pub(crate) fn wait_for_all_of(&self, earlier: &Queue) -> Result<(), CudaError> {
        let end = earlier.event()?;
        end.record()?;
        self.wait_for(&end)
    }

    /// Keeps recordings from beginning and ending in this queue, on any thread, until the result is dropped: for a call that checks for a
    /// recording, and enqueues its work accordingly.
    pub(crate) fn hold(&self) -> Held<'_> {
        self.inner.gate.hold()
    }

    /// Waits until no call [holds](Self::hold) this queue or one of these others, which are different, and keeps calls from holding them
    /// until the result is dropped. Queues that this thread holds are left out: they are in the middle of a call of its own.
    pub(super) fn change_recordings<'a>(&'a self, others: &'a [Queue]) -> Vec<Changing<'a>> {
        let gates = others.iter().chain([self]).map(|queue| &queue.inner.gate);
        Gate::change(&gates.filter(|gate| !gate.is_held_here()).collect::<Vec<_>>())
    }

    /// Whether this thread is in a call that holds this queue.
    pub(super) fn is_held_here(&self) -> bool {
        self.inner.gate.is_held_here()
    }

    /// Loads a kernel, so that its first launch need not wait for loading and for the driver's compiler.
    ///
    /// # Errors
    /// [`CudaError`] if the driver refuses the kernel's PTX, or there is no kernel with that name.
    pub fn load(&self, name: &str) -> Result<(), CudaError> {
        self.make_current()?;
        self.with_kernel(name, |_| Ok(()))
    }

    /// The kernels that this queue and its clones have loaded, by name, each with its source and its load time.
    pub(crate) fn loaded_kernels(&self) -> Vec<LoadedKernel> {
        let kernels = self.inner.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let mut loaded: Vec<LoadedKernel> = kernels.values().map(|kernel| kernel.loaded).collect();
        loaded.sort_by_key(|kernel| kernel.name);
        loaded
    }

    /// Whether both are handles of one queue.
    pub(super) fn is_same(&self, other: &Queue) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The queue, if this is its last handle; of handles that are dropped concurrently, exactly one is the last.
    pub(super) fn into_last(self) -> Option<Self> {
        Arc::into_inner(self.inner).map(|inner| Self { inner: Arc::new(inner) })
    }

    /// Enables this device's kernels to access all memory of another device, through their primary contexts.
    pub(super) fn reach(&self, ordinal: u32) -> Result<(), CudaError> {
        let peer = Device::new(ordinal)?;
        // The context stays retained: access lasts as long as the process.
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle; the other context is live.
        let status = unsafe {
            check("cuDevicePrimaryCtxRetain", cuda::cuDevicePrimaryCtxRetain(&mut context, peer.handle()))?;
            self.make_current()?;
            cuda::cuCtxEnablePeerAccess(context, 0)
        };
        match status {
            Status::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            status => check(&format!("cuCtxEnablePeerAccess to device {ordinal}"), status),
        }
    }

    /// Refuses to record the legacy default stream: the driver's own error describes a call made during a recording.
    pub(super) fn refuse_default_stream(&self) -> Result<(), CudaError> {
        if self.inner.stream != LEGACY_STREAM {
            return Ok(());
        }
        Err(CudaError {
            call: "cuStreamBeginCapture of stream 0x1".into(),
            code: Status::STREAM_CAPTURE_UNSUPPORTED.0,
            text:
                "the default stream cannot be recorded; use Queue::new, or a stream that was made with cuStreamCreate"
                    .into(),
        })
    }

    /// Refuses an operand of another queue: nothing would order its work with this queue's work.
    pub(crate) fn check_same(&self, operation: &'static str, other: &Queue) -> Result<(), Error> {
        if self.is_same(other) {
            return Ok(());
        }
        let (left, right) = (self.ordinal(), other.ordinal());
        let reason = format!("operands belong to different queues, on device {left} and on device {right}");
        Err(Error::InvalidArgument { operation, reason })
    }

    /// Makes the context current on this thread; every call of the driver needs it.
    pub(crate) fn make_current(&self) -> Result<(), CudaError> {
        self.inner.context.make_current()
    }

    /// Device memory for `bytes` bytes, ordered on this queue: reused memory of an earlier buffer, or new memory.
    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.make_current()?;
        self.refuse_capture("an allocation")?;
        peer_shared::settle(false);
        let class = pool::size_class(bytes);
        let kept = self.pool().take(class);
        if let Some(address) = kept.map_or_else(|| pool::allocate(class), |address| Ok(Some(address)))? {
            return Ok(address);
        }
        // Memory that this queue or a retired one caches, or that peers have released, may be enough.
        peer_shared::settle(true);
        retired::destroy(self.ordinal());
        self.pool().release();
        pool::allocate(class)?.ok_or_else(|| pool::out_of_memory(bytes))
    }

    /// Takes back memory that [`allocate`](Self::allocate) returned for `bytes` bytes.
    pub(super) fn free(&self, address: u64, bytes: usize) {
        self.pool().give(pool::size_class(bytes), address);
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.inner.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a copy of bytes on the device; does nothing for zero bytes.
    ///
    /// # Safety
    /// There are `bytes` bytes at both addresses, on this device and disjoint, valid and not used otherwise until this queue has passed the
    /// copy.
    pub(crate) unsafe fn copy_bytes(&self, to: u64, from: u64, bytes: usize) -> Result<(), CudaError> {
        if bytes == 0 {
            return Ok(());
        }
        self.make_current()?;
        // SAFETY: the caller's promise.
        check("cuMemcpyDtoDAsync", unsafe { cuda::cuMemcpyDtoDAsync_v2(to, from, bytes, self.inner.stream) })
    }

    /// A table on the device, for a launch that is enqueued while the result lives, by a call that [holds](Self::hold) the queue. A table
    /// that is not cached is uploaded, in the queue's order.
    pub(crate) fn table(&self, words: &[u64]) -> Result<Table, CudaError> {
        let _held = self.hold();
        let mut tables = self.inner.tables.lock().unwrap_or_else(PoisonError::into_inner);
        self.make_current()?;
        if let Some(table) = tables.find(words) {
            self.record_reader(&table)?;
            return Ok(table);
        }
        let address = self.allocate(size_of_val(words))?;
        // SAFETY: just allocated with that size; earlier users of the memory are earlier in the queue.
        let uploaded = unsafe { self.upload(address, bytemuck::cast_slice(words)) };
        if let Err(error) = uploaded {
            self.free(address, size_of_val(words));
            return Err(error);
        }
        let (table, gone) = tables.keep(words.to_vec(), address);
        for (bytes, address) in gone {
            self.free(address, bytes);
        }
        Ok(table)
    }

    /// Registers with the recording under way, if there is one, that its work reads a table of this queue.
    pub(crate) fn record_reader(&self, table: &Table) -> Result<(), CudaError> {
        let Some(id) = self.capture_id()? else { return Ok(()) };
        match Recording::find(id) {
            Some(recording) => recording.keep(Arc::new(table.clone())),
            // Nothing tells when another library destroys its graph, so the table stays as long as the queue.
            None => std::mem::forget(table.clone()),
        }
        Ok(())
    }

    /// # Safety
    /// The conditions of `Staging::upload`.
    pub(super) unsafe fn upload(&self, address: u64, data: &[u8]) -> Result<(), CudaError> {
        let _held = self.hold();
        self.make_current()?;
        self.refuse_capture("the upload of a table")?;
        let mut staging = self.inner.staging.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's promise.
        unsafe { staging.upload(self.inner.stream, address, data) }
    }

    /// Enqueues a launch of `blocks` blocks; does nothing for zero blocks.
    ///
    /// # Safety
    /// `arguments` must satisfy the contract of the entry point (`gradsync_device::abi`), and the memory that they address must be valid,
    /// and not used otherwise, until this queue has passed the launch.
    pub(crate) unsafe fn launch(&self, name: &str, blocks: u64, arguments: &[Argument]) -> Result<(), CudaError> {
        if blocks == 0 {
            return Ok(());
        }
        self.make_current()?;
        self.with_kernel(name, |kernel| {
            let grid = Grid { blocks, threads: kernel.entry.bounds.threads };
            // SAFETY: the caller's promise.
            unsafe { kernel.launch(self.inner.stream, grid, arguments) }
        })
    }

    /// Like [`launch`](Self::launch), into another queue of the same device, with a number of threads: a kernel that is loaded for this
    /// queue need not be loaded for that one.
    ///
    /// # Safety
    /// The conditions of [`launch`](Self::launch), for the other queue, which is on the same device. The entry point accepts this number of
    /// threads.
    pub(crate) unsafe fn launch_into(
        &self,
        queue: &Queue,
        name: &str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        self.make_current()?;
        self.with_kernel(name, |kernel| {
            // SAFETY: the caller's promise.
            unsafe { kernel.launch(queue.inner.stream, grid, arguments) }
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

impl Drop for Inner {
    fn drop(&mut self) {
        // The fields' own drops need the context too.
        if let Err(error) = self.context.make_current() {
            tracing::error!(%error, "a queue's memory was not freed");
            return;
        }
        let pool = self.pool.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (bytes, address) in self.tables.get_mut().unwrap_or_else(PoisonError::into_inner).take_all() {
            pool.give(pool::size_class(bytes), address);
        }
        pool.release();
        // The retired queues have the same context, so it is still current when the fields are dropped.
        retired::destroy(self.device.ordinal());
    }
}
