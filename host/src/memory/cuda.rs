//! [`Cuda`]: the memory of a GPU, and [`DeviceWireSlice`]: elements in it of any type that transports carry.

use std::marker::PhantomData;
use std::ops::Range;

use super::{Memory, PeerMemory};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue, is_aligned};
use crate::dtype::{DType, Float};
use crate::error::{Error, Result};
use crate::slice::{Slice, SliceMut, check_dtype};

/// The memory of a GPU. Work on it runs in the order of a queue, and may be pending when a call returns.
#[derive(Clone, Copy, Debug)]
pub enum Cuda {}

impl Memory for Cuda {
    type Slice<'a> = DeviceSlice<'a>;
    type SliceMut<'a> = DeviceSliceMut<'a>;
    type Wire<'a> = DeviceWireSlice<'a>;
    type WireMut<'a> = DeviceWireSliceMut<'a>;
    type Buffer = DeviceBuffer;
    type Queue = Queue;
    type Sharing = dyn PeerMemory;

    fn buffer(buffer: &DeviceBuffer) -> DeviceSlice<'_> {
        buffer.as_slice()
    }

    fn buffer_mut(buffer: &mut DeviceBuffer) -> DeviceSliceMut<'_> {
        buffer.as_mut_slice()
    }

    fn clear(mut data: DeviceSliceMut<'_>) -> Result<()> {
        Ok(data.clear()?)
    }

    fn len(data: DeviceSlice<'_>) -> usize {
        data.len()
    }

    fn dtype(data: DeviceSlice<'_>) -> DType {
        data.dtype()
    }

    fn range(data: Self::Slice<'_>, range: Range<usize>) -> Self::Slice<'_> {
        data.range(range)
    }

    fn shortened<'short, 'long: 'short>(data: Self::Slice<'long>) -> Self::Slice<'short> {
        data
    }

    fn as_slice<'a>(data: &'a DeviceSliceMut<'_>) -> DeviceSlice<'a> {
        data.as_slice()
    }

    fn reborrow<'a>(data: &'a mut DeviceSliceMut<'_>) -> DeviceSliceMut<'a> {
        data.reborrow()
    }

    fn range_mut(data: Self::SliceMut<'_>, range: Range<usize>) -> Self::SliceMut<'_> {
        data.range_mut(range)
    }

    fn ranges_mut<'a>(data: Self::SliceMut<'a>, ranges: &[Range<usize>]) -> Vec<Self::SliceMut<'a>> {
        let (mut rest, mut at, mut found) = (data, 0, Vec::new());
        for range in ranges {
            let (elements, behind) = rest.split_at_mut(range.end - at);
            found.push(elements.range_mut(range.start - at..range.end - at));
            (rest, at) = (behind, range.end);
        }
        found
    }

    fn wire_shape(data: DeviceWireSlice<'_>) -> (usize, DType) {
        (data.data.len, data.data.dtype)
    }

    fn as_wire<'a>(data: &'a DeviceWireSliceMut<'_>) -> DeviceWireSlice<'a> {
        data.view
    }

    fn to_vec<T: Float>(data: DeviceSlice<'_>) -> Result<Vec<T>> {
        check_dtype::<T>(data.dtype())?;
        let bytes = data.len() * size_of::<T>();
        let no_memory = |()| Error::OutOfMemory { operation: "to_vec", bytes };
        let mut copy = bytemuck::allocation::try_zeroed_vec(data.len()).map_err(no_memory)?;
        data.copy_to_host(SliceMut::from(&mut copy))?;
        Ok(copy)
    }

    fn copy_from_slice(mut data: DeviceSliceMut<'_>, source: Slice<'_>) -> Result<()> {
        data.copy_from_host(source)
    }

    fn check_same_queue(operation: &'static str, one: DeviceWireSlice<'_>, other: DeviceWireSlice<'_>) -> Result<()> {
        one.queue.check_same(operation, other.queue)
    }
}

/// A range of device memory with elements of a type that transports carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawSlice {
    /// The device address of the first element.
    pub address: u64,
    /// The number of elements.
    pub len: usize,
    /// The type of the elements.
    pub dtype: DType,
}

impl RawSlice {
    /// The `len` elements from `begin` on.
    pub(crate) fn range(self, begin: usize, len: usize) -> Self {
        Self { address: self.address + (begin * self.dtype.size_bytes()) as u64, len, ..self }
    }
}

impl From<DeviceSlice<'_>> for RawSlice {
    fn from(data: DeviceSlice<'_>) -> Self {
        Self { address: data.address(), len: data.len(), dtype: data.dtype() }
    }
}

/// Elements in device memory to send: a [`DeviceSlice`], or memory that another object owns.
#[derive(Clone, Copy, Debug)]
pub struct DeviceWireSlice<'a> {
    queue: &'a Queue,
    data: RawSlice,
}

/// Elements in device memory to receive into.
#[derive(Debug)]
pub struct DeviceWireSliceMut<'a> {
    view: DeviceWireSlice<'a>,
    unique: PhantomData<&'a mut ()>,
}

impl<'a> DeviceWireSlice<'a> {
    /// A view of memory that another object owns, of any type: integers, for example, or a tensor of another crate.
    ///
    /// # Safety
    /// There are `data.len` elements at `data.address` on `queue`'s device, and the address is a multiple of the size of one. They are
    /// valid for `'a`, and until `queue` has passed all work that was enqueued with them. In that time only work ordered on `queue` writes
    /// to them.
    pub unsafe fn from_raw_parts(queue: &'a Queue, data: RawSlice) -> Self {
        debug_assert!(is_aligned(data.address, data.dtype.size_bytes(), data.len), "{data:?} is not aligned");
        Self { queue, data }
    }

    /// The queue on which work on the elements is ordered.
    pub fn queue(&self) -> &'a Queue {
        self.queue
    }

    /// The address, number and type of the elements.
    pub fn raw(&self) -> RawSlice {
        self.data
    }
}

impl<'a> DeviceWireSliceMut<'a> {
    /// Like [`DeviceWireSlice::from_raw_parts`], to write.
    ///
    /// # Safety
    /// The conditions of that method; besides, in that time only work ordered on `queue` reads or writes the memory.
    pub unsafe fn from_raw_parts(queue: &'a Queue, data: RawSlice) -> Self {
        // SAFETY: the caller's promise.
        Self { view: unsafe { DeviceWireSlice::from_raw_parts(queue, data) }, unique: PhantomData }
    }

    /// The queue on which work on the elements is ordered.
    pub fn queue(&self) -> &'a Queue {
        self.view.queue
    }

    /// The address, number and type of the elements.
    pub fn raw(&self) -> RawSlice {
        self.view.data
    }
}

impl<'a> From<DeviceSlice<'a>> for DeviceWireSlice<'a> {
    fn from(data: DeviceSlice<'a>) -> Self {
        Self { queue: data.queue(), data: data.into() }
    }
}

impl<'a> From<DeviceSliceMut<'a>> for DeviceWireSliceMut<'a> {
    fn from(data: DeviceSliceMut<'a>) -> Self {
        Self { view: DeviceWireSlice { queue: data.queue(), data: data.as_slice().into() }, unique: PhantomData }
    }
}
