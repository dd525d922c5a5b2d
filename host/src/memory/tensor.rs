//! [`TensorView`]: elements in some memory, with a shape.
//!
//! They borrow; nothing here owns data, or knows an operation.

use std::borrow::Cow;

use super::{Host, Memory};
use crate::dtype::DType;
use crate::error::{Error, Result, same_len};
use crate::slice::Element;
use crate::slice::{Slice, SliceMut, shape_len};

/// A tensor to read: elements in row-major order and their shape. `[]` is a scalar, with one element.
#[derive(Clone, Debug)]
pub struct TensorView<'a, M: Memory = Host> {
    data: M::Slice<'a>,
    shape: Cow<'a, [usize]>,
}

/// A tensor to write, as [`TensorView`].
#[derive(Debug)]
pub struct TensorViewMut<'a, M: Memory = Host> {
    data: M::SliceMut<'a>,
    shape: Cow<'a, [usize]>,
}

impl<'a, M: Memory> TensorView<'a, M> {
    /// Gives elements in either memory a shape; for host memory, [`new`](Self::new) takes more.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as the slice.
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
}

impl<'a, M: Memory> TensorViewMut<'a, M> {
    /// Gives elements in either memory a shape; for host memory, [`new`](Self::new) takes more.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as the slice.
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

    /// The elements.
    pub fn data(&self) -> M::Slice<'_> {
        M::as_slice(&self.data)
    }

    /// The elements, to write.
    pub fn data_mut(&mut self) -> M::SliceMut<'_> {
        M::reborrow(&mut self.data)
    }

    /// The elements, to write for as long as the tensor is borrowed.
    pub fn into_data(self) -> M::SliceMut<'a> {
        self.data
    }
}

impl<'a> TensorView<'a> {
    /// Gives a slice a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as the slice.
    pub fn new(data: impl Into<Slice<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of(data.into(), shape.into())
    }

    /// A copy of the elements, if `T` is their type.
    pub fn to_vec<T: Element>(&self) -> Option<Vec<T>> {
        self.data.to_vec()
    }
}

impl<'a> TensorViewMut<'a> {
    /// Gives a slice a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] unless the shape has as many elements as the slice.
    pub fn new(data: impl Into<SliceMut<'a>>, shape: impl Into<Cow<'a, [usize]>>) -> Result<Self> {
        Self::of(data.into(), shape.into())
    }

    /// Copies elements of the same dtype and number.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`] and [`Error::DTypeMismatch`]; nothing is written then.
    pub fn copy_from_slice<'b>(&mut self, source: impl Into<Slice<'b>>) -> Result<()> {
        const OPERATION: &str = "copy_from_slice";
        let source = source.into();
        same_len(OPERATION, ("the tensor", self.data.len()), ("the source", source.len()))?;
        if self.dtype() != source.dtype() {
            let (left, right) = (self.dtype(), source.dtype());
            return Err(Error::DTypeMismatch { operation: OPERATION, what: "tensor and source".into(), left, right });
        }
        self.data.reborrow().as_bytes_mut().copy_from_slice(source.as_bytes());
        Ok(())
    }
}

fn check_shape(len: usize, shape: &[usize]) -> Result<()> {
    let expected = shape_len("tensor view", shape)?;
    same_len("tensor view", (&format!("shape {shape:?}"), expected), ("the data", len))
}

/// A slice, an array or a vector of elements is a tensor of one dimension.
macro_rules! from_elements {
    ($([$($generics:tt)*] $type:ty),*) => {$(
        impl<'a, T: Element, $($generics)*> From<&'a $type> for TensorView<'a> {
            fn from(data: &'a $type) -> Self {
                Self { shape: Cow::Owned(vec![data.len()]), data: T::slice(data) }
            }
        }

        impl<'a, T: Element, $($generics)*> From<&'a mut $type> for TensorViewMut<'a> {
            fn from(data: &'a mut $type) -> Self {
                Self { shape: Cow::Owned(vec![data.len()]), data: T::slice_mut(data) }
            }
        }
    )*};
}
from_elements!([] [T], [const N: usize] [T; N], [] Vec<T>);
