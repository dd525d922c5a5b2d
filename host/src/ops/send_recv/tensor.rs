//! Tensors of any type that transports carry, as their bytes: what bundles are made of.
//!
//! They borrow; nothing here owns or copies elements.

use std::borrow::Cow;

use half::{bf16, f16};

use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::plan::bundle::TensorSpec;
use crate::slice::{TensorView, TensorViewMut, with_typed};

mod sealed {
    pub trait Sealed {}
}

/// A type of elements that transports carry: that of gradients, integers of 8 to 64 bits, and `bool`.
pub trait Carried: sealed::Sealed + bytemuck::NoUninit + bytemuck::CheckedBitPattern {
    /// Its name at run time.
    const DATA_TYPE: DataType;
}

macro_rules! carried {
    ($($type:ty => $name:ident),*) => {$(
        impl sealed::Sealed for $type {}
        impl Carried for $type {
            const DATA_TYPE: DataType = DataType::$name;
        }
    )*};
}
carried!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, u64 => U64, i32 => I32, u32 => U32, i8 => I8, u8 => U8);
carried!(i16 => I16, u16 => U16, bool => Bool);

/// A tensor to read: the bytes of its elements in row-major order and the machine's byte order, and its shape. `[]` is a scalar.
#[derive(Clone, Debug)]
pub struct TensorBytes<'a> {
    dtype: DataType,
    shape: Cow<'a, [usize]>,
    bytes: &'a [u8],
}

/// A tensor to write, as [`TensorBytes`].
#[derive(Debug)]
pub struct TensorBytesMut<'a> {
    dtype: DataType,
    shape: Cow<'a, [usize]>,
    bytes: &'a mut [u8],
}

impl<'a> TensorBytes<'a> {
    /// Gives bytes a type and a shape.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless they have as many bytes as there are.
    pub fn new(dtype: DataType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a [u8]) -> Result<Self> {
        let shape = shape.into();
        check(dtype, &shape, bytes.len())?;
        Ok(Self { dtype, shape, bytes })
    }

    /// Gives elements a shape.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of<T: Carried>(data: &'a [T], shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::new(T::DATA_TYPE, shape, bytemuck::cast_slice(data))
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The memory of the elements.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements, if `T` is their type, the bytes lie where a `T` can, and they are values of it: of `bool`, 0 and 1 are.
    pub fn typed<T: Carried>(&self) -> Option<&'a [T]> {
        if self.dtype != T::DATA_TYPE {
            return None;
        }
        bytemuck::checked::try_cast_slice(self.bytes).ok()
    }

    pub(crate) fn spec(&self) -> TensorSpec {
        spec(self.dtype, &self.shape)
    }
}

impl<'a> TensorBytesMut<'a> {
    /// Gives bytes a type and a shape.
    ///
    /// # Errors
    /// As [`TensorBytes::new`].
    pub fn new(dtype: DataType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a mut [u8]) -> Result<Self> {
        let shape = shape.into();
        check(dtype, &shape, bytes.len())?;
        Ok(Self { dtype, shape, bytes })
    }

    /// Gives elements a shape. Not those of `bool`, as a peer can send bytes that are none: they are received as bytes.
    ///
    /// # Errors
    /// As [`TensorBytes::new`].
    pub fn of<T: Carried + bytemuck::Pod>(data: &'a mut [T], shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::new(T::DATA_TYPE, shape, bytemuck::cast_slice_mut(data))
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The memory of the elements.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    pub(crate) fn spec(&self) -> TensorSpec {
        spec(self.dtype, &self.shape)
    }
}

impl<'a> From<TensorView<'a>> for TensorBytes<'a> {
    fn from(view: TensorView<'a>) -> Self {
        let data = view.data();
        Self { dtype: data.dtype().into(), shape: view.shape().to_vec().into(), bytes: data.as_bytes() }
    }
}

impl<'a> From<TensorViewMut<'a>> for TensorBytesMut<'a> {
    fn from(view: TensorViewMut<'a>) -> Self {
        let (dtype, shape) = (view.data().dtype().into(), view.shape().to_vec().into());
        let bytes = with_typed!(SliceMut, view.into_data(), data => bytemuck::cast_slice_mut(data));
        Self { dtype, shape, bytes }
    }
}

impl<'a, T: Carried> From<&'a [T]> for TensorBytes<'a> {
    fn from(data: &'a [T]) -> Self {
        Self { dtype: T::DATA_TYPE, shape: vec![data.len()].into(), bytes: bytemuck::cast_slice(data) }
    }
}

impl<'a, T: Carried + bytemuck::Pod> From<&'a mut [T]> for TensorBytesMut<'a> {
    fn from(data: &'a mut [T]) -> Self {
        Self { dtype: T::DATA_TYPE, shape: vec![data.len()].into(), bytes: bytemuck::cast_slice_mut(data) }
    }
}

/// What a header says about a tensor.
pub(crate) fn spec(dtype: DataType, shape: &[usize]) -> TensorSpec {
    TensorSpec { dtype, dims: shape.iter().map(|&dim| dim as u64).collect() }
}

/// Refuses a shape that does not have so many bytes.
pub(crate) fn check(dtype: DataType, shape: &[usize], bytes: usize) -> Result<()> {
    let needed = spec(dtype, shape).bytes();
    if needed == Some(bytes as u64) {
        return Ok(());
    }
    let needed = needed.map_or("more than 2^64".into(), |needed| needed.to_string());
    let reason = format!("{dtype} {shape:?} has {needed} bytes, and the data have {bytes}");
    Err(Error::InvalidArgument { operation: "tensor", reason })
}
