//! [`HostTensor`]: an owned tensor in host memory that is passed from operation to operation.
//!
//! It is created from a `Vec` and returns it, without a copy. It does no arithmetic and decides nothing.

use std::any::Any;

use bytemuck::allocation::try_zeroed_vec;

use super::Tensor;
use super::tensor::sealed::Sealed;
use crate::dtype::{DType, Float, with_float};
use crate::error::{Error, Result};
use crate::memory::{Host, TensorView, TensorViewMut};
use crate::slice::{Slice, SliceMut, check_dtype, shape_len};

const OWN_TYPE: &str = "the vector has the tensor's dtype";

/// A tensor that owns its elements, in host memory and row-major order. `[]` is the shape of a scalar, with one element.
///
/// ```
/// use gradsync::ops::tensor_parallel::HostTensor;
///
/// let tensor = HostTensor::new(vec![1.0f32; 6], [2, 3])?;
/// assert_eq!(tensor.shape(), [2, 3]);
/// assert_eq!(tensor.into_vec::<f32>()?, [1.0; 6]);
/// # Ok::<(), gradsync::Error>(())
/// ```
pub struct HostTensor {
    dtype: DType,
    /// The `Vec` of the dtype's Rust type.
    elements: Box<dyn Any + Send + Sync>,
    shape: Vec<usize>,
}

impl HostTensor {
    /// Combines elements with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as `data`.
    pub fn new<T: Float>(data: Vec<T>, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        TensorView::new(&data, &shape)?;
        Ok(Self { dtype: T::DTYPE, elements: Box::new(data), shape })
    }

    /// Allocates zeros for a shape; returns an error if memory does not suffice.
    pub(super) fn zeroed(operation: &'static str, dtype: DType, shape: Vec<usize>) -> Result<Self> {
        let len = shape_len(operation, &shape)?;
        let bytes = len.saturating_mul(dtype.size_bytes());
        let elements: Box<dyn Any + Send + Sync> = with_float!(dtype, T => {
            Box::new(try_zeroed_vec::<T>(len).map_err(|()| Error::OutOfMemory { operation, bytes })?)
        });
        Ok(Self { dtype, elements, shape })
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The elements.
    pub fn as_slice(&self) -> Slice<'_> {
        with_float!(self.dtype, T => self.elements.downcast_ref::<Vec<T>>().expect(OWN_TYPE).into())
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> SliceMut<'_> {
        with_float!(self.dtype, T => self.elements.downcast_mut::<Vec<T>>().expect(OWN_TYPE).into())
    }

    /// The tensor, to read.
    pub fn view(&self) -> TensorView<'_> {
        TensorView::new(self.as_slice(), &self.shape).expect("a tensor has its shape's length")
    }

    /// The tensor, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let shape = self.shape.clone();
        TensorViewMut::new(self.as_mut_slice(), shape).expect("a tensor has its shape's length")
    }

    /// The elements, in the same memory.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`] unless `T` is the type of the elements.
    pub fn into_vec<T: Float>(self) -> Result<Vec<T>> {
        check_dtype::<T>(self.dtype())?;
        Ok(*self.elements.downcast().expect(OWN_TYPE))
    }
}

impl Clone for HostTensor {
    fn clone(&self) -> Self {
        with_float!(self.dtype, T => {
            let elements = self.elements.downcast_ref::<Vec<T>>().expect(OWN_TYPE).clone();
            Self { dtype: self.dtype, elements: Box::new(elements), shape: self.shape.clone() }
        })
    }
}

impl Sealed for HostTensor {}

impl Tensor for HostTensor {
    type Memory = Host;

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.shape()
    }

    fn as_slice(&self) -> Slice<'_> {
        self.as_slice()
    }

    fn as_mut_slice(&mut self) -> SliceMut<'_> {
        self.as_mut_slice()
    }

    fn unwritten(&self, operation: &'static str, shape: Vec<usize>) -> Result<Self> {
        Self::zeroed(operation, self.dtype(), shape)
    }
}

/// Shows dtype and shape; never the elements.
impl std::fmt::Debug for HostTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostTensor").field("dtype", &self.dtype()).field("shape", &self.shape).finish_non_exhaustive()
    }
}
