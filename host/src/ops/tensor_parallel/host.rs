//! Owned tensors in host memory: the vectors that hold their elements, which tensors are created from and return without a copy.

use std::any::Any;

use bytemuck::allocation::try_zeroed_vec;

use super::tensor::{OwnedTensor, OwnedTensorMemory};
use crate::dtype::{DType, Float, with_float};
use crate::error::{Error, Result};
use crate::memory::{Host, TensorView};
use crate::slice::{Slice, SliceMut, check_dtype};

const OWN_TYPE: &str = "the vector has the tensor's dtype";

/// The `Vec` of a dtype's Rust type.
pub struct Elements {
    dtype: DType,
    vector: Box<dyn Any + Send + Sync>,
}

impl Elements {
    /// Allocates zeros; returns an error if memory does not suffice.
    pub(super) fn zeroed(operation: &'static str, dtype: DType, len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(dtype.size_bytes());
        let vector: Box<dyn Any + Send + Sync> = with_float!(dtype, T => {
            Box::new(try_zeroed_vec::<T>(len).map_err(|()| Error::OutOfMemory { operation, bytes })?)
        });
        Ok(Self { dtype, vector })
    }
}

impl OwnedTensorMemory for Host {
    type Storage = Elements;

    fn elements(storage: &Elements) -> Slice<'_> {
        with_float!(storage.dtype, T => storage.vector.downcast_ref::<Vec<T>>().expect(OWN_TYPE).into())
    }

    fn elements_mut(storage: &mut Elements) -> SliceMut<'_> {
        with_float!(storage.dtype, T => storage.vector.downcast_mut::<Vec<T>>().expect(OWN_TYPE).into())
    }

    fn unwritten(operation: &'static str, like: &Elements, len: usize) -> Result<Elements> {
        Elements::zeroed(operation, like.dtype, len)
    }
}

impl OwnedTensor {
    /// Combines elements with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as `data`.
    pub fn new<T: Float>(data: Vec<T>, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        TensorView::new(&data, &shape)?;
        Ok(Self { storage: Elements { dtype: T::DTYPE, vector: Box::new(data) }, shape })
    }

    /// The elements, in the same memory.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`] unless `T` is the type of the elements.
    pub fn into_vec<T: Float>(self) -> Result<Vec<T>> {
        check_dtype::<T>("into_vec", self.dtype())?;
        Ok(*self.storage.vector.downcast().expect(OWN_TYPE))
    }
}

impl Clone for OwnedTensor {
    fn clone(&self) -> Self {
        let dtype = self.dtype();
        with_float!(dtype, T => {
            let vector = self.storage.vector.downcast_ref::<Vec<T>>().expect(OWN_TYPE).clone();
            Self { storage: Elements { dtype, vector: Box::new(vector) }, shape: self.shape.clone() }
        })
    }
}
