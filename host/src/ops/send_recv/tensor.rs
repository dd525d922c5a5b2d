//! [`WireTensor`]: elements of any type that transports carry, with a shape; bundles are made of them.
//!
//! They borrow; nothing here owns or copies elements.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use crate::driver::{DeviceSlice, DeviceSliceMut};
use crate::dtype::DataType;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::memory::{Cuda, DeviceWireSlice, DeviceWireSliceMut};
use crate::memory::{Host, Memory, TensorView, TensorViewMut, WireElement, WireSlice, WireSliceMut};
use crate::plan::bundle::TensorSpec;

/// A tensor to send, in row-major order. `[]` is the shape of a scalar.
#[derive(Clone, Debug)]
pub struct WireTensor<'a, M: Memory = Host> {
    data: M::Wire<'a>,
    shape: Cow<'a, [usize]>,
}

/// A tensor to receive into, as [`WireTensor`].
#[derive(Debug)]
pub struct WireTensorMut<'a, M: Memory = Host> {
    data: M::WireMut<'a>,
    shape: Cow<'a, [usize]>,
}

impl<'a, M: Memory> WireTensor<'a, M> {
    /// Gives elements a shape.
    pub(crate) fn of_wire(data: M::Wire<'a>, shape: Cow<'a, [usize]>) -> Result<Self> {
        check(M::wire_shape(data), &shape)?;
        Ok(Self { data, shape })
    }

    /// The type of every element.
    pub fn dtype(&self) -> DataType {
        M::wire_shape(self.data).1
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements.
    pub fn data(&self) -> M::Wire<'a> {
        self.data
    }

    pub(super) fn spec(&self) -> TensorSpec {
        spec(self.dtype(), &self.shape)
    }
}

impl<'a, M: Memory> WireTensorMut<'a, M> {
    /// Gives elements a shape.
    pub(crate) fn of_wire(data: M::WireMut<'a>, shape: Cow<'a, [usize]>) -> Result<Self> {
        check(M::wire_shape(M::as_wire(&data)), &shape)?;
        Ok(Self { data, shape })
    }

    /// The type of every element.
    pub fn dtype(&self) -> DataType {
        M::wire_shape(M::as_wire(&self.data)).1
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The elements, to read for as long as this tensor is borrowed.
    ///
    /// Nobody keeps them, to read what is written through this tensor later:
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
    pub fn data(&self) -> M::Wire<'_> {
        M::as_wire(&self.data)
    }

    /// The elements, to write.
    pub fn data_mut(&mut self) -> &mut M::WireMut<'a> {
        &mut self.data
    }

    pub(super) fn spec(&self) -> TensorSpec {
        spec(self.dtype(), &self.shape)
    }
}

impl<'a> WireTensor<'a> {
    /// Gives bytes a type and a shape. They may lie at any address.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many bytes.
    pub fn new(dtype: DataType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a [u8]) -> Result<Self> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes.len())?;
        Ok(Self { data: WireSlice::of_bytes(dtype, bytes), shape })
    }

    /// Gives elements a shape.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of<T: WireElement>(data: &'a [T], shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }

    /// The memory of the elements, in the machine's byte order.
    pub fn bytes(&self) -> &'a [u8] {
        self.data.bytes()
    }

    /// The elements, if `T` is their type, the bytes lie where a `T` can, and they are values of it: of `bool`, 0 and 1 are.
    pub fn typed<T: WireElement>(&self) -> Option<&'a [T]> {
        if self.dtype() != T::DATA_TYPE {
            return None;
        }
        bytemuck::checked::try_cast_slice(self.bytes()).ok()
    }
}

impl<'a> WireTensorMut<'a> {
    /// Gives bytes a type and a shape. They may lie at any address.
    ///
    /// # Errors
    /// As [`WireTensor::new`].
    pub fn new(dtype: DataType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a mut [u8]) -> Result<Self> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes.len())?;
        Ok(Self { data: WireSliceMut::of_bytes(dtype, bytes), shape })
    }

    /// Gives elements a shape. Not those of `bool`, as a peer can send bytes that are none: they are received as bytes.
    ///
    /// # Errors
    /// As [`WireTensor::new`].
    pub fn of<T: WireElement + bytemuck::Pod>(data: &'a mut [T], shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }

    /// The memory of the elements.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.data.bytes_mut()
    }
}

#[cfg(feature = "cuda")]
impl<'a> WireTensor<'a, Cuda> {
    /// Gives device memory a shape.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many elements.
    pub fn on_device(data: impl Into<DeviceWireSlice<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }

    /// The elements, if they are of a type of gradients.
    pub fn slice(&self) -> Option<DeviceSlice<'a>> {
        let raw = self.data.raw();
        // SAFETY: this tensor's memory.
        raw.dtype
            .float()
            .map(|dtype| unsafe { DeviceSlice::from_raw_parts(self.data.queue(), raw.address, dtype, raw.len) })
    }
}

#[cfg(feature = "cuda")]
impl<'a> WireTensorMut<'a, Cuda> {
    /// Gives device memory a shape.
    ///
    /// # Errors
    /// As [`WireTensor::on_device`].
    pub fn on_device(data: impl Into<DeviceWireSliceMut<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of_wire(data.into(), shape.into())
    }
}

impl<'a, M: Memory> From<TensorView<'a, M>> for WireTensor<'a, M> {
    fn from(view: TensorView<'a, M>) -> Self {
        Self { data: view.data().into(), shape: view.shape().to_vec().into() }
    }
}

impl<'a, M: Memory> From<TensorViewMut<'a, M>> for WireTensorMut<'a, M> {
    fn from(view: TensorViewMut<'a, M>) -> Self {
        let shape = view.shape().to_vec().into();
        Self { data: view.into_data().into(), shape }
    }
}

impl<'a, T: WireElement> From<&'a [T]> for WireTensor<'a> {
    /// A vector.
    fn from(data: &'a [T]) -> Self {
        Self { data: data.into(), shape: vec![data.len()].into() }
    }
}

impl<'a, T: WireElement + bytemuck::Pod> From<&'a mut [T]> for WireTensorMut<'a> {
    /// A vector.
    fn from(data: &'a mut [T]) -> Self {
        let shape = vec![data.len()].into();
        Self { data: data.into(), shape }
    }
}

#[cfg(feature = "cuda")]
impl<'a> From<DeviceSlice<'a>> for WireTensor<'a, Cuda> {
    /// A vector.
    fn from(data: DeviceSlice<'a>) -> Self {
        Self { data: data.into(), shape: vec![data.len()].into() }
    }
}

#[cfg(feature = "cuda")]
impl<'a> From<DeviceSliceMut<'a>> for WireTensorMut<'a, Cuda> {
    /// A vector.
    fn from(data: DeviceSliceMut<'a>) -> Self {
        let shape = vec![data.as_slice().len()].into();
        Self { data: data.into(), shape }
    }
}

/// The description of a tensor in a header.
pub(super) fn spec(dtype: DataType, shape: &[usize]) -> TensorSpec {
    TensorSpec { dtype, dims: shape.iter().map(|&dim| dim as u64).collect() }
}

fn check((len, dtype): (usize, DataType), shape: &[usize]) -> Result<()> {
    let bytes = len.checked_mul(dtype.size_bytes()).ok_or_else(|| Error::InvalidArgument {
        operation: "tensor",
        reason: format!("{len} elements of {dtype} exceed the address space"),
    })?;
    check_bytes(dtype, shape, bytes)
}

/// Refuses a shape that does not have so many bytes.
fn check_bytes(dtype: DataType, shape: &[usize], bytes: usize) -> Result<()> {
    let needed = spec(dtype, shape).bytes();
    if needed == Some(bytes as u64) {
        return Ok(());
    }
    let needed = needed.map_or("more than 2^64".into(), |needed| needed.to_string());
    let reason = format!("{dtype} {shape:?} has {needed} bytes, and the data have {bytes}");
    Err(Error::InvalidArgument { operation: "tensor", reason })
}
