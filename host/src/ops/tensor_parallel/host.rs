//! [`HostTensor`]: an owned tensor in host memory that is passed from operation to operation.
//!
//! It is created from a `Vec` and returns it, without a copy. It does no arithmetic and decides nothing.

use bytemuck::allocation::{cast_vec, try_zeroed_vec};
use half::{bf16, f16};

use super::Tensor;
use super::tensor::sealed::Sealed;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Host, TensorView, TensorViewMut};
use crate::slice::Element;
use crate::slice::{Slice, SliceMut, check_dtype, shape_len};

/// Elements of one of the four dtypes.
#[derive(Clone)]
enum Elements {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Elements {
    fn of<T: Element>(data: Vec<T>) -> Self {
        match T::DTYPE {
            DType::F64 => Elements::F64(cast_vec(data)),
            DType::F32 => Elements::F32(cast_vec(data)),
            DType::F16 => Elements::F16(cast_vec(data)),
            DType::BF16 => Elements::BF16(cast_vec(data)),
        }
    }

    fn zeroed<T: Element>(operation: &'static str, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(T::DTYPE.size_bytes());
        try_zeroed_vec::<T>(len).map(Self::of).map_err(|()| Error::OutOfMemory { operation, bytes })
    }
}

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
#[derive(Clone)]
pub struct HostTensor {
    elements: Elements,
    shape: Vec<usize>,
}

impl HostTensor {
    /// Combines elements with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as `data`.
    pub fn new<T: Element>(data: Vec<T>, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        TensorView::new(&data, &shape)?;
        Ok(Self { elements: Elements::of(data), shape })
    }

    /// Allocates zeros for a shape; returns an error if memory does not suffice.
    pub(super) fn zeroed(operation: &'static str, dtype: DType, shape: Vec<usize>) -> Result<Self> {
        let len = shape_len(operation, &shape)?;
        let elements = match dtype {
            DType::F64 => Elements::zeroed::<f64>(operation, len),
            DType::F32 => Elements::zeroed::<f32>(operation, len),
            DType::F16 => Elements::zeroed::<f16>(operation, len),
            DType::BF16 => Elements::zeroed::<bf16>(operation, len),
        };
        Ok(Self { elements: elements?, shape })
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        self.as_slice().dtype()
    }

    /// The elements.
    pub fn as_slice(&self) -> Slice<'_> {
        match &self.elements {
            Elements::F64(data) => data.into(),
            Elements::F32(data) => data.into(),
            Elements::F16(data) => data.into(),
            Elements::BF16(data) => data.into(),
        }
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> SliceMut<'_> {
        match &mut self.elements {
            Elements::F64(data) => data.into(),
            Elements::F32(data) => data.into(),
            Elements::F16(data) => data.into(),
            Elements::BF16(data) => data.into(),
        }
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
    pub fn into_vec<T: Element>(self) -> Result<Vec<T>> {
        check_dtype::<T>(self.dtype())?;
        Ok(match self.elements {
            Elements::F64(data) => cast_vec(data),
            Elements::F32(data) => cast_vec(data),
            Elements::F16(data) => cast_vec(data),
            Elements::BF16(data) => cast_vec(data),
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
