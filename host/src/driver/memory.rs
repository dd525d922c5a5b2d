//! Device memory: owned buffers and views of them, with dtype and length.
//!
//! A buffer belongs to the queue that made it. Its memory returns to that queue when no buffer, recorded work or peer uses it any more.
//! Copies between host and device wait; everything else is in the queue's order.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::recording::DeviceMemory;
use super::{CudaError, Queue, check};
use crate::dtype::DType;
use crate::error::{Error, Result, check_float, same_len};
use crate::slice::{Floats, Slice, SliceMut};
use crate::sys::cuda;

/// Owned memory of a GPU, of one floating-point dtype and aligned to 256 bytes: a program allocates it for one vector or tensor, and passes
/// it on as a [`DeviceSlice`], with a shape as a [`TensorView`](crate::TensorView).
#[derive(Debug)]
pub struct DeviceBuffer {
    memory: Arc<DeviceMemory>,
    dtype: DType,
    len: usize,
}

/// A borrowed slice of elements in a GPU's memory, whose type is known at run time: the argument of collectives and kernels that only read
/// it. It is the counterpart of [`Slice`](crate::Slice), which is host memory; neither converts to the other.
///
/// Elements of any type can be sent; operations that compute refuse other types than floating-point ones.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSlice<'a> {
    queue: &'a Queue,
    address: u64,
    dtype: DType,
    len: usize,
}

/// A mutably borrowed slice of elements in a GPU's memory: the argument of collectives and kernels that write it. The rules of
/// [`DeviceSlice`] apply.
#[derive(Debug)]
pub struct DeviceSliceMut<'a> {
    view: DeviceSlice<'a>,
    unique: PhantomData<&'a mut DeviceBuffer>,
}

impl DeviceBuffer {
    /// Allocates `len` elements and enqueues clearing them.
    ///
    /// # Errors
    /// [`Error::Cuda`], code 2 when memory does not suffice; [`Error::InvalidArgument`] beyond the address space, and for an
    /// integer type.
    pub fn zeroed(queue: &Queue, dtype: DType, len: usize) -> Result<Self> {
        Self::filled(queue, dtype, len, 0)
    }

    /// Like [`zeroed`](Self::zeroed), but sets every byte to `byte`.
    pub(crate) fn filled(queue: &Queue, dtype: DType, len: usize, byte: u8) -> Result<Self> {
        let _held = queue.hold();
        let buffer = Self::allocate(queue, dtype, len)?;
        let bytes = len * dtype.size_bytes();
        // SAFETY: `bytes` bytes were just allocated.
        check("cuMemsetD8Async", unsafe {
            cuda::cuMemsetD8Async(buffer.memory.address(), byte, bytes, queue.raw_stream())
        })?;
        Ok(buffer)
    }

    /// Allocates a copy of host data.
    ///
    /// # Errors
    /// The errors of [`zeroed`](Self::zeroed).
    pub fn from_host(queue: &Queue, data: Slice<'_>) -> Result<Self> {
        let mut buffer = Self::allocate(queue, data.dtype(), data.len())?;
        buffer.as_mut_slice().copy_from_host(data)?;
        Ok(buffer)
    }

    /// Allocates a copy of device data of any type, on their queue.
    pub(crate) fn copy_of(data: DeviceSlice<'_>) -> Result<Self> {
        let mut buffer = Self::of_any_type(data.queue(), data.dtype(), data.len())?;
        buffer.as_mut_slice().copy_from_device(data)?;
        Ok(buffer)
    }

    /// Allocates without writing: the elements are unspecified. The caller writes them before they are read.
    pub(crate) fn allocate(queue: &Queue, dtype: DType, len: usize) -> Result<Self> {
        check_float("device buffer", dtype)?;
        Self::of_any_type(queue, dtype, len)
    }

    /// Like [`allocate`](Self::allocate), for elements of any type.
    pub(crate) fn of_any_type(queue: &Queue, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(dtype.size_bytes()).filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes = bytes.ok_or_else(|| Error::InvalidArgument {
            operation: "device buffer",
            reason: format!("{len} elements of {dtype} exceed the address space"),
        })?;
        Ok(Self { memory: Arc::new(DeviceMemory::new(queue, bytes)?), dtype, len })
    }

    /// The allocation, which lives as long as any reference to it.
    pub(crate) fn memory(&self) -> &Arc<DeviceMemory> {
        &self.memory
    }

    /// The whole buffer.
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        let (queue, address) = (self.memory.queue(), self.memory.address());
        DeviceSlice { queue, address, dtype: self.dtype, len: self.len }
    }

    /// The whole buffer, to write.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut { view: self.as_slice(), unique: PhantomData }
    }
}

impl<'a> DeviceSlice<'a> {
    /// A view of device memory that another object owns: a tensor of another crate, for example.
    ///
    /// # Safety
    /// There are `len` elements at `address` on `queue`'s device, and `address` is a multiple of the size of one. They are valid for `'a`,
    /// and until `queue` has passed all work that was enqueued with them, including launches of graphs that recorded such work. In that
    /// time only work ordered on `queue` writes to them.
    pub unsafe fn from_raw_parts(queue: &'a Queue, address: u64, dtype: DType, len: usize) -> Self {
        debug_assert!(
            is_aligned(address, dtype.size_bytes(), len),
            "{len} elements of {dtype} at {address:#x} are not aligned"
        );
        Self { queue, address, dtype, len }
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The queue on which work on this memory is ordered.
    pub fn queue(&self) -> &'a Queue {
        self.queue
    }

    /// The number of bytes. The product does not overflow, because the elements exist in memory.
    pub(crate) fn size_bytes(&self) -> usize {
        self.len * self.dtype.size_bytes()
    }

    /// The elements of a range; panics as slicing does when it is out of bounds.
    pub fn range(self, range: Range<usize>) -> DeviceSlice<'a> {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of {} elements", self.len);
        let address = self.address + (range.start * self.dtype.size_bytes()) as u64;
        DeviceSlice { address, len: range.len(), ..self }
    }

    /// Waits for the queue and copies the elements to the host.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::DTypeMismatch`], or [`Error::Cuda`] for any work in the queue that failed.
    pub fn copy_to_host(self, data: SliceMut<'_>) -> Result<()> {
        same_host("copy to host", self, data.len(), data.dtype())?;
        // Held until the copy is over: the host's memory would be part of a recording.
        let _held = self.queue.hold();
        self.queue.make_current()?;
        self.queue.refuse_capture("a copy to the host")?;
        let bytes = data.as_bytes_mut();
        // SAFETY: both sides have that many bytes, and the host's memory stays borrowed until the wait below is over.
        check("cuMemcpyDtoHAsync", unsafe {
            let stream = self.queue.raw_stream();
            cuda::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), self.address, bytes.len(), stream)
        })?;
        Ok(self.queue.synchronize()?)
    }
}

impl<'a> DeviceSliceMut<'a> {
    /// A writable view of the memory of `view`.
    ///
    /// # Safety
    /// The caller holds the memory mutably, and no work reads it in a way that the writes disturb.
    pub(crate) unsafe fn from_view(view: DeviceSlice<'a>) -> Self {
        Self { view, unique: PhantomData }
    }

    /// Like [`DeviceSlice::from_raw_parts`], to write.
    ///
    /// # Safety
    /// The conditions of that method; besides, for `'a` only work ordered on `queue` reads or writes the memory.
    pub unsafe fn from_raw_parts(queue: &'a Queue, address: u64, dtype: DType, len: usize) -> Self {
        // SAFETY: the caller's promise.
        Self { view: unsafe { DeviceSlice::from_raw_parts(queue, address, dtype, len) }, unique: PhantomData }
    }

    /// The same elements, shared.
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        self.view
    }

    /// The elements, to read, for the whole borrow.
    pub(crate) fn into_slice(self) -> DeviceSlice<'a> {
        self.view
    }

    /// The queue on which work on this memory is ordered.
    pub fn queue(&self) -> &'a Queue {
        self.view.queue
    }

    /// The same elements for a shorter borrow.
    pub fn reborrow(&mut self) -> DeviceSliceMut<'_> {
        DeviceSliceMut { view: self.view, unique: PhantomData }
    }

    /// The elements of a range; panics as slicing does when it is out of bounds.
    pub fn range_mut(self, range: Range<usize>) -> DeviceSliceMut<'a> {
        DeviceSliceMut { view: self.view.range(range), unique: PhantomData }
    }

    /// Splits the elements at `middle`; panics as slicing does when that is out of bounds.
    pub fn split_at_mut(self, middle: usize) -> (DeviceSliceMut<'a>, DeviceSliceMut<'a>) {
        let (first, second) = (self.view.range(0..middle), self.view.range(middle..self.view.len));
        (DeviceSliceMut { view: first, unique: PhantomData }, DeviceSliceMut { view: second, unique: PhantomData })
    }

    /// Enqueues clearing all bytes.
    pub(crate) fn clear(&mut self) -> Result<(), CudaError> {
        let DeviceSlice { queue, address, dtype, len } = self.view;
        queue.make_current()?;
        // SAFETY: the view has that many bytes and is borrowed mutably.
        check("cuMemsetD8Async", unsafe {
            cuda::cuMemsetD8Async(address, 0, len * dtype.size_bytes(), queue.raw_stream())
        })
    }

    /// Enqueues a copy of host data and waits until the data have been read.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::DTypeMismatch`], or [`Error::Cuda`].
    pub fn copy_from_host(&mut self, data: Slice<'_>) -> Result<()> {
        same_host("copy from host", self.view, data.len(), data.dtype())?;
        let _held = self.view.queue.hold();
        self.view.queue.make_current()?;
        self.view.queue.refuse_capture("a copy from the host")?;
        let bytes = data.as_bytes();
        // SAFETY: both sides have that many bytes, and the host's memory stays borrowed until the wait below is over.
        check("cuMemcpyHtoDAsync", unsafe {
            let stream = self.view.queue.raw_stream();
            cuda::cuMemcpyHtoDAsync_v2(self.view.address, bytes.as_ptr().cast(), bytes.len(), stream)
        })?;
        Ok(self.view.queue.synchronize()?)
    }

    /// Enqueues a copy of a table through pinned memory, without waiting.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::DTypeMismatch`], or [`Error::Cuda`].
    pub(crate) fn upload(&mut self, data: Slice<'_>) -> Result<()> {
        same_host("upload", self.view, data.len(), data.dtype())?;
        // SAFETY: both sides have that many bytes, and the destination is borrowed mutably.
        Ok(unsafe { self.view.queue.upload(self.view.address, data.as_bytes()) }?)
    }

    /// Enqueues a copy of device memory of the same dtype, length and queue.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`], [`Error::DTypeMismatch`], [`Error::InvalidArgument`] for another queue, or [`Error::Cuda`].
    pub fn copy_from_device(&mut self, source: DeviceSlice<'_>) -> Result<()> {
        self.view.queue.check_same("copy on the device", source.queue)?;
        same_host("copy on the device", self.view, source.len, source.dtype)?;
        self.view.queue.make_current()?;
        let bytes = self.view.len * self.view.dtype.size_bytes();
        // SAFETY: both sides have that many bytes.
        check("cuMemcpyDtoDAsync", unsafe {
            cuda::cuMemcpyDtoDAsync_v2(self.view.address, source.address, bytes, self.view.queue.raw_stream())
        })?;
        Ok(())
    }
}

impl Floats for DeviceBuffer {}
impl Floats for DeviceSlice<'_> {}
impl Floats for DeviceSliceMut<'_> {}

impl<'a> From<&'a DeviceBuffer> for DeviceSlice<'a> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        buffer.as_slice()
    }
}

impl<'a> From<&'a mut DeviceBuffer> for DeviceSliceMut<'a> {
    fn from(buffer: &'a mut DeviceBuffer) -> Self {
        buffer.as_mut_slice()
    }
}

impl<'a> From<&'a mut DeviceSliceMut<'_>> for DeviceSliceMut<'a> {
    /// The same elements for a shorter borrow.
    fn from(data: &'a mut DeviceSliceMut<'_>) -> Self {
        data.reborrow()
    }
}

/// Whether elements of `size` bytes may lie at an address; kernels rely on it. An empty range may have any address.
fn is_aligned(address: u64, size: usize, len: usize) -> bool {
    len == 0 || address % size as u64 == 0
}

fn same_host(operation: &'static str, device: DeviceSlice<'_>, len: usize, dtype: DType) -> Result<()> {
    same_len(operation, ("device memory", device.len), ("the other side", len))?;
    if device.dtype != dtype {
        let what = "device memory and the other side".into();
        return Err(Error::DTypeMismatch { operation, what, left: device.dtype, right: dtype });
    }
    Ok(())
}
