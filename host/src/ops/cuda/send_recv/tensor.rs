//! Tensors of any type that transports carry, in device memory: what bundles are made of.
//!
//! They borrow; nothing here owns or copies elements.

use std::borrow::Cow;
use std::marker::PhantomData;

use crate::comm::RawSlice;
use crate::driver::{DeviceSlice, DeviceSliceMut, Queue, is_aligned};
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::ops::send_recv::{check, spec};
use crate::plan::bundle::TensorSpec;

/// A tensor in device memory to read, in row-major order. `[]` is the shape of a scalar.
#[derive(Clone, Debug)]
pub struct DeviceTensorView<'a> {
    queue: &'a Queue,
    data: RawSlice,
    shape: Cow<'a, [usize]>,
}

/// A tensor in device memory to write.
#[derive(Debug)]
pub struct DeviceTensorViewMut<'a> {
    view: DeviceTensorView<'a>,
    unique: PhantomData<&'a mut ()>,
}

impl<'a> DeviceTensorView<'a> {
    /// Gives device memory a shape.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many elements.
    pub fn new(data: DeviceSlice<'a>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        // SAFETY: a borrow of that memory, whose work is ordered on its queue.
        unsafe { Self::from_raw_parts(data.queue(), data.into(), shape) }
    }

    /// Memory that something else owns, of any type: integers, for example, or a tensor of another crate.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Safety
    /// `data.len` elements at `data.address` on `queue`'s device, at a multiple of the size of one, valid for `'a`, and not written by anything
    /// but work ordered on `queue` for as long.
    pub unsafe fn from_raw_parts(queue: &'a Queue, data: RawSlice, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        let shape = shape.into();
        let bytes = data.len.checked_mul(data.dtype.size_bytes()).ok_or_else(|| Error::InvalidArgument {
            operation: "tensor",
            reason: format!("{} elements of {} exceed the address space", data.len, data.dtype),
        })?;
        check(data.dtype, &shape, bytes)?;
        debug_assert!(is_aligned(data.address, data.dtype.size_bytes(), data.len), "{data:?} is not aligned");
        Ok(Self { queue, data, shape })
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DataType {
        self.data.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The queue that work on it is ordered on.
    pub fn queue(&self) -> &'a Queue {
        self.queue
    }

    /// Where its elements are.
    pub fn raw(&self) -> RawSlice {
        self.data
    }

    /// Its elements, if they are of a type of gradients.
    pub fn slice(&self) -> Option<DeviceSlice<'a>> {
        let RawSlice { address, len, dtype } = self.data;
        // SAFETY: this tensor's memory.
        dtype.float().map(|dtype| unsafe { DeviceSlice::from_raw_parts(self.queue, address, dtype, len) })
    }

    pub(super) fn spec(&self) -> TensorSpec {
        spec(self.data.dtype, &self.shape)
    }

    /// As bytes. Their number fits the address space: that has been checked.
    pub(super) fn bytes(&self) -> RawSlice {
        let RawSlice { address, len, dtype } = self.data;
        RawSlice { address, len: len * dtype.size_bytes(), dtype: DataType::U8 }
    }
}

impl<'a> DeviceTensorViewMut<'a> {
    /// Gives device memory a shape.
    ///
    /// # Errors
    /// As [`DeviceTensorView::new`].
    pub fn new(data: DeviceSliceMut<'a>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        // SAFETY: the mutable borrow becomes this tensor's.
        unsafe { Self::from_raw_parts(data.queue(), data.as_slice().into(), shape) }
    }

    /// As [`DeviceTensorView::from_raw_parts`], to write.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, and nothing else may read or write the memory for `'a` but work ordered on `queue`.
    pub unsafe fn from_raw_parts(queue: &'a Queue, data: RawSlice, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        // SAFETY: the caller's promise.
        Ok(Self { view: unsafe { DeviceTensorView::from_raw_parts(queue, data, shape) }?, unique: PhantomData })
    }

    /// The same tensor, to read for as long as this one is borrowed.
    ///
    /// A copy of the view lives no longer, so that nobody reads what is written through this tensor later:
    ///
    /// ```compile_fail,E0505
    /// use gradsync::ops::cuda::send_recv::{DeviceTensorView, DeviceTensorViewMut};
    ///
    /// fn keep(tensor: DeviceTensorViewMut<'_>) {
    ///     let copy: DeviceTensorView<'_> = tensor.as_tensor().clone();
    ///     drop(tensor);
    ///     println!("{copy:?}");
    /// }
    /// ```
    pub fn as_tensor(&self) -> &DeviceTensorView<'_> {
        &self.view
    }
}

impl<'a> From<DeviceSlice<'a>> for DeviceTensorView<'a> {
    /// A vector.
    fn from(data: DeviceSlice<'a>) -> Self {
        Self { queue: data.queue(), data: data.into(), shape: vec![data.len()].into() }
    }
}

impl<'a> From<DeviceSliceMut<'a>> for DeviceTensorViewMut<'a> {
    /// A vector.
    fn from(data: DeviceSliceMut<'a>) -> Self {
        let shape = vec![data.as_slice().len()].into();
        let view = DeviceTensorView { queue: data.queue(), data: data.as_slice().into(), shape };
        Self { view, unique: PhantomData }
    }
}
