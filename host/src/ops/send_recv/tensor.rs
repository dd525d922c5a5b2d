//! [`WireTensor`]: elements of any type that transports carry, with a shape; bundles consist of them.
//!
//! Tensors borrow; nothing here owns or copies elements.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use crate::driver::{DeviceSlice, DeviceSliceMut};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::memory::Cuda;
use crate::memory::{Host, Memory, TensorView, TensorViewMut};
use crate::plan::bundle::TensorSpec;
use crate::slice::{Slice, SliceMut};

/// A tensor to send, in row-major order. `[]` is the shape of a scalar.
#[derive(Clone, Debug)]
pub struct WireTensor<'a, M: Memory = Host> {
    data: M::Slice<'a>,
    shape: Cow<'a, [usize]>,
}

/// A tensor to receive into, in row-major order. `[]` is the shape of a scalar.
#[derive(Debug)]
pub struct WireTensorMut<'a, M: Memory = Host> {
    data: M::SliceMut<'a>,
    shape: Cow<'a, [usize]>,
}

impl<'a, M: Memory> WireTensor<'a, M> {
    /// Combines elements with a shape.
    pub(crate) fn of_wire(data: M::Slice<'a>, shape: Cow<'a, [usize]>) -> Result<Self> {
        check::<M>(data, &shape)?;
        Ok(Self { data, shape })
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        M::dtype(self.data)
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn data(&self) -> M::Slice<'a> {
        self.data
    }

    pub(super) fn spec(&self) -> TensorSpec {
        TensorSpec { dtype: self.dtype(), dims: self.shape.to_vec() }
    }
}

impl<'a, M: Memory> WireTensorMut<'a, M> {
    /// Combines elements with a shape.
    pub(crate) fn of_wire(data: M::SliceMut<'a>, shape: Cow<'a, [usize]>) -> Result<Self> {
        check::<M>(M::as_slice(&data), &shape)?;
        Ok(Self { data, shape })
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        M::dtype(M::as_slice(&self.data))
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, to read for as long as this tensor is borrowed.
    ///
    /// The result borrows the tensor, so that it cannot be used to read elements that are written through the tensor later:
    ///
    /// ```compile_fail,E0505
    /// use gradsync::ops::send_recv::WireTensorMut;
    ///
    /// fn keep(tensor: WireTensorMut<'_>) {
    ///     let data = tensor.data();
    ///     drop(tensor);
    ///     println!("{data:?}");
    /// }
    /// ```
    pub fn data(&self) -> M::Slice<'_> {
        M::as_slice(&self.data)
    }

    /// The elements, to write.
    pub fn data_mut(&mut self) -> &mut M::SliceMut<'a> {
        &mut self.data
    }

    pub(super) fn spec(&self) -> TensorSpec {
        TensorSpec { dtype: self.dtype(), dims: self.shape.to_vec() }
    }
}

impl<'a> WireTensor<'a> {
    /// Combines bytes with a type and a shape. The bytes may have any address.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many bytes.
    pub fn new(dtype: DType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a [u8]) -> Result<Self> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes.len())?;
        Ok(Self { data: Slice::of_bytes(dtype, bytes), shape })
    }

    /// Combines elements with a shape.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn of<T: Element>(data: &'a [T], shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }

    /// The memory of the elements, in the machine's byte order.
    pub fn bytes(&self) -> &'a [u8] {
        self.data.as_bytes()
    }

    /// The elements, if `T` is their type, the bytes are aligned for `T`, and all of them are valid values; for `bool`, 0 and 1 are.
    pub fn typed<T: Element>(&self) -> Option<&'a [T]> {
        self.data.typed()
    }
}

impl<'a> WireTensorMut<'a> {
    /// Combines bytes with a type and a shape. The bytes may have any address.
    ///
    /// # Errors
    /// The errors of [`WireTensor::new`].
    pub fn new(dtype: DType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a mut [u8]) -> Result<Self> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes.len())?;
        Ok(Self { data: SliceMut::of_bytes(dtype, bytes), shape })
    }

    /// Combines elements with a shape. Not for `bool`, since a peer can send bytes that are no `bool`: they are received as bytes.
    ///
    /// # Errors
    /// The errors of [`WireTensor::new`].
    pub fn of<T: Element + bytemuck::Pod>(data: &'a mut [T], shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }

    /// The memory of the elements.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.data.reborrow().as_bytes_mut()
    }
}

#[cfg(feature = "cuda")]
impl<'a> WireTensor<'a, Cuda> {
    /// Combines device memory with a shape.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many elements.
    pub fn on_device(data: impl Into<DeviceSlice<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }

    /// The elements, if their type is a floating-point one.
    pub fn slice(&self) -> Option<DeviceSlice<'a>> {
        self.dtype().is_float().then_some(self.data)
    }
}

#[cfg(feature = "cuda")]
impl<'a> WireTensorMut<'a, Cuda> {
    /// Combines device memory with a shape.
    ///
    /// # Errors
    /// The errors of [`WireTensor::on_device`].
    pub fn on_device(data: impl Into<DeviceSliceMut<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }
}

impl<'a, M: Memory> From<TensorView<'a, M>> for WireTensor<'a, M> {
    fn from(view: TensorView<'a, M>) -> Self {
        Self { data: view.data(), shape: view.shape().to_vec().into() }
    }
}

impl<'a, M: Memory> From<TensorViewMut<'a, M>> for WireTensorMut<'a, M> {
    fn from(view: TensorViewMut<'a, M>) -> Self {
        let shape = view.shape().to_vec().into();
        Self { data: view.into_data(), shape }
    }
}

impl<'a, T: Element> From<&'a [T]> for WireTensor<'a> {
    /// A tensor of one dimension.
    fn from(data: &'a [T]) -> Self {
        Self { data: data.into(), shape: vec![data.len()].into() }
    }
}

impl<'a, T: Element + bytemuck::Pod> From<&'a mut [T]> for WireTensorMut<'a> {
    /// A tensor of one dimension.
    fn from(data: &'a mut [T]) -> Self {
        let shape = vec![data.len()].into();
        Self { data: data.into(), shape }
    }
}

#[cfg(feature = "cuda")]
impl<'a> From<DeviceSlice<'a>> for WireTensor<'a, Cuda> {
    /// A tensor of one dimension.
    fn from(data: DeviceSlice<'a>) -> Self {
        Self { data, shape: vec![data.len()].into() }
    }
}

#[cfg(feature = "cuda")]
impl<'a> From<DeviceSliceMut<'a>> for WireTensorMut<'a, Cuda> {
    /// A tensor of one dimension.
    fn from(data: DeviceSliceMut<'a>) -> Self {
        let shape = vec![data.as_slice().len()].into();
        Self { data, shape }
    }
}

fn check<M: Memory>(data: M::Slice<'_>, shape: &[usize]) -> Result<()> {
    let (len, dtype) = (M::len(data), M::dtype(data));
    // A product beyond the address space becomes an odd number, which is the size of no shape of these elements.
    check_bytes(dtype, shape, len.saturating_mul(dtype.size_bytes()))
}

/// Refuses a shape whose elements do not have `bytes` bytes.
fn check_bytes(dtype: DType, shape: &[usize], bytes: usize) -> Result<()> {
    let needed = TensorSpec { dtype, dims: shape.to_vec() }.bytes();
    if needed == Some(bytes as u64) {
        return Ok(());
    }
    let needed = needed.map_or("more than 2^64".into(), |needed| needed.to_string());
    let reason = format!("{dtype} {shape:?} has {needed} bytes, and the data have {bytes}");
    Err(Error::InvalidArgument { operation: "tensor", reason })
}
