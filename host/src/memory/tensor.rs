//! [`TensorView`]: elements of any type in either memory, with a shape.
//!
//! Views borrow; nothing here owns data, or knows an operation.

use std::borrow::Cow;

#[cfg(feature = "cuda")]
use super::Cuda;
use super::{Host, Memory};
#[cfg(feature = "cuda")]
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use crate::dtype::{DType, Element, Float};
use crate::error::{Error, Result, same_len};
use crate::slice::{Floats, Slice, SliceMut, check_aligned, check_dtype, shape_len};

/// A borrowed tensor, in either memory: a slice of elements in row-major order with a shape, for operations that compare shapes. `[]` is a
/// scalar, with one element. The elements have any type; operations that compute refuse other types than floating-point ones.
#[derive(Clone, Debug)]
pub struct TensorView<'a, M: Memory = Host> {
    data: M::Slice<'a>,
    shape: Cow<'a, [usize]>,
}

/// A mutably borrowed tensor, to write or receive into. The rules of [`TensorView`] apply.
#[derive(Debug)]
pub struct TensorViewMut<'a, M: Memory = Host> {
    data: M::SliceMut<'a>,
    shape: Cow<'a, [usize]>,
}

impl<'a, M: Memory> TensorView<'a, M> {
    /// Combines elements in either memory with a shape; [`new`](Self::new) accepts more types of host memory.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the slice.
    pub fn of(data: M::Slice<'a>, shape: Cow<'a, [usize]>) -> Result<Self> {
        check_shape(M::len(data), &shape)?;
        Ok(Self { data, shape })
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        M::dtype(self.data)
    }

    /// The elements.
    pub fn data(&self) -> M::Slice<'a> {
        self.data
    }

    /// The same tensor for a shorter borrow.
    pub(crate) fn reborrow(&self) -> TensorView<'_, M> {
        TensorView { data: M::shortened(self.data), shape: Cow::Borrowed(&self.shape) }
    }

    /// A copy of the elements in host memory. In GPU memory the call waits for the queue.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) unless `T` is the type of the elements; `Error::Cuda` for any work in the
    /// queue that failed.
    pub fn to_vec<T: Element + bytemuck::Pod>(&self) -> Result<Vec<T>> {
        M::to_vec(self.data)
    }
}

impl<'a, M: Memory> TensorViewMut<'a, M> {
    /// Combines elements in either memory with a shape; [`new`](Self::new) accepts more types of host memory.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the slice.
    pub fn of(data: M::SliceMut<'a>, shape: Cow<'a, [usize]>) -> Result<Self> {
        check_shape(M::len(M::as_slice(&data)), &shape)?;
        Ok(Self { data, shape })
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        M::dtype(M::as_slice(&self.data))
    }

    /// The elements, to read for as long as this tensor is borrowed, in either memory:
    ///
    /// ```compile_fail,E0505
    /// use gradsync::memory::{Memory, TensorViewMut};
    ///
    /// fn keep<M: Memory>(tensor: TensorViewMut<'_, M>) -> usize {
    ///     let data = tensor.data();
    ///     drop(tensor);
    ///     M::len(data)
    /// }
    /// ```
    pub fn data(&self) -> M::Slice<'_> {
        M::as_slice(&self.data)
    }

    /// The elements, to write.
    pub(crate) fn elements_mut(&mut self) -> M::SliceMut<'_> {
        M::reborrow(&mut self.data)
    }

    /// The same tensor for a shorter borrow.
    pub(crate) fn reborrow(&mut self) -> TensorViewMut<'_, M> {
        TensorViewMut { data: M::reborrow(&mut self.data), shape: Cow::Borrowed(&self.shape) }
    }

    /// The elements, to write for as long as the memory is borrowed, in either memory.
    pub fn into_data(self) -> M::SliceMut<'a> {
        self.data
    }

    /// Copies elements of the same dtype and number from host memory: `&[1.0f32; 4]` into four elements of `f32`, since Rust takes `1.0` alone
    /// for `f64`. In GPU memory the copy is enqueued, and the call waits for it.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) and [`Error::DTypeMismatch`](crate::Error::DTypeMismatch), where nothing is
    /// written; `Error::Cuda`.
    pub fn copy_from_slice<'b>(&mut self, source: impl Into<Slice<'b>>) -> Result<()> {
        M::copy_from_slice(self.elements_mut(), source.into())
    }
}

impl<'a> TensorView<'a> {
    /// Combines a slice with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the slice.
    pub fn new(data: impl Into<Slice<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of(data.into(), shape.into())
    }

    /// Combines bytes in the machine's order with a type and a shape. The bytes may have any address.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many bytes.
    pub fn of_bytes(dtype: DType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a [u8]) -> Result<Self> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes.len())?;
        Ok(Self { data: Slice::of_bytes(dtype, bytes), shape })
    }

    /// The elements as a slice of their Rust type.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`] unless `T` is the type of the elements; [`Error::InvalidArgument`] for elements that are not aligned, and
    /// for bytes that are no `bool`.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        typed("as_slice", self.data)
    }
}

impl<'a> TensorViewMut<'a> {
    /// Combines a slice with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the slice.
    pub fn new(data: impl Into<SliceMut<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of(data.into(), shape.into())
    }

    /// Combines bytes in the machine's order with a type and a shape. The bytes may have any address.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless the shape has as many bytes.
    pub fn of_bytes(dtype: DType, shape: impl Into<Cow<'a, [usize]>>, bytes: &'a mut [u8]) -> Result<Self> {
        let shape = shape.into();
        check_bytes(dtype, &shape, bytes.len())?;
        Ok(Self { data: SliceMut::of_bytes(dtype, bytes), shape })
    }

    /// The elements as a slice of their Rust type, to write for as long as the memory is borrowed; [`as_mut_slice`](Self::as_mut_slice)
    /// returns the error instead of panicking, and leaves the tensor to the caller.
    ///
    /// ```
    /// use gradsync::prelude::*;
    ///
    /// let mut gradients = GradientBuffer::new(DType::F32, 1, [("weight", [2, 3])])?;
    /// let weight = gradients.tensor_mut(0).data_mut::<f32>();
    /// weight[4] = 0.5;
    /// assert_eq!(gradients.tensor(0).to_vec::<f32>()?, [0.0, 0.0, 0.0, 0.0, 0.5, 0.0]);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Panics
    /// Unless `T` is the type of the elements, which the message names, or if they are not aligned.
    #[track_caller]
    pub fn data_mut<T: Float>(self) -> &'a mut [T] {
        typed_mut("data_mut", self.data).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The elements as a slice of their Rust type.
    ///
    /// # Errors
    /// The errors of [`TensorView::as_slice`].
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        typed("as_slice", self.data.as_slice())
    }

    /// The elements as a slice of their Rust type, to write.
    ///
    /// # Errors
    /// The errors of [`TensorView::as_slice`].
    pub fn as_mut_slice<T: Float>(&mut self) -> Result<&mut [T]> {
        typed_mut("as_mut_slice", self.data.reborrow())
    }
}

fn typed<'a, T: Element>(operation: &'static str, data: Slice<'a>) -> Result<&'a [T]> {
    check_dtype::<T>(operation, data.dtype())?;
    check_aligned(operation, data)?;
    data.typed().ok_or_else(|| Error::InvalidArgument { operation, reason: format!("bytes that are no {}", T::DTYPE) })
}

fn typed_mut<'a, T: Float>(operation: &'static str, data: SliceMut<'a>) -> Result<&'a mut [T]> {
    check_dtype::<T>(operation, data.dtype())?;
    check_aligned(operation, data.as_slice())?;
    Ok(data.typed().expect("aligned elements of the checked type"))
}

#[cfg(feature = "cuda")]
impl<'a> TensorView<'a, Cuda> {
    /// Combines device memory with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the memory.
    pub fn on_device(data: impl Into<DeviceSlice<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of(data.into(), shape.into())
    }
}

#[cfg(feature = "cuda")]
impl<'a> TensorViewMut<'a, Cuda> {
    /// Combines device memory with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the memory.
    pub fn on_device(data: impl Into<DeviceSliceMut<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of(data.into(), shape.into())
    }
}

fn check_shape(len: usize, shape: &[usize]) -> Result<()> {
    let expected = shape_len("tensor view", shape)?;
    same_len("tensor view", (&format!("shape {shape:?}"), expected), ("the data", len))
}

/// Refuses a shape whose elements do not have `bytes` bytes.
fn check_bytes(dtype: DType, shape: &[usize], bytes: usize) -> Result<()> {
    let needed = shape_len("tensor view", shape)?.checked_mul(dtype.size_bytes());
    if needed == Some(bytes) {
        return Ok(());
    }
    let needed = needed.map_or("more than memory has addresses for".into(), |needed| needed.to_string());
    let reason = format!("{dtype} {shape:?} has {needed} bytes, and the data have {bytes}");
    Err(Error::InvalidArgument { operation: "tensor view", reason })
}

impl<M: Memory> Floats for TensorView<'_, M> {}
impl<M: Memory> Floats for TensorViewMut<'_, M> {}

/// Converts a slice, an array or a vector of elements to a tensor of one dimension.
macro_rules! from_elements {
    ($([$($generics:tt)*] $type:ty),*) => {$(
        impl<'a, T: Element, $($generics)*> From<&'a $type> for TensorView<'a> {
            fn from(data: &'a $type) -> Self {
                Self { shape: Cow::Owned(vec![data.len()]), data: data.into() }
            }
        }

        // Not for `bool`: a peer can send bytes that are no `bool`. They are received as bytes.
        impl<'a, T: Element + bytemuck::Pod, $($generics)*> From<&'a mut $type> for TensorViewMut<'a> {
            fn from(data: &'a mut $type) -> Self {
                Self { shape: Cow::Owned(vec![data.len()]), data: data.into() }
            }
        }
    )*};
}
from_elements!([] [T], [const N: usize] [T; N], [] Vec<T>);

/// Converts elements in either memory to a tensor of one dimension.
macro_rules! from_slices {
    ($memory:ty: $slice:ident, $slice_mut:ident) => {
        impl<'a> From<$slice<'a>> for TensorView<'a, $memory> {
            fn from(data: $slice<'a>) -> Self {
                Self { shape: Cow::Owned(vec![data.len()]), data }
            }
        }

        impl<'a> From<$slice_mut<'a>> for TensorViewMut<'a, $memory> {
            fn from(data: $slice_mut<'a>) -> Self {
                Self { shape: Cow::Owned(vec![data.as_slice().len()]), data }
            }
        }
    };
}
from_slices!(Host: Slice, SliceMut);
#[cfg(feature = "cuda")]
from_slices!(Cuda: DeviceSlice, DeviceSliceMut);

#[cfg(feature = "cuda")]
impl<'a> From<&'a DeviceBuffer> for TensorView<'a, Cuda> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        buffer.as_slice().into()
    }
}

#[cfg(feature = "cuda")]
impl<'a> From<&'a mut DeviceBuffer> for TensorViewMut<'a, Cuda> {
    fn from(buffer: &'a mut DeviceBuffer) -> Self {
        buffer.as_mut_slice().into()
    }
}
