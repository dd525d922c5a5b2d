//! [`OwnedTensor`]: an owned tensor that operations take and return, in either memory.

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Host, Memory, TensorView, TensorViewMut};
use crate::slice::shape_len;

/// A tensor that owns its elements, in row-major order: the argument and the result of operations that pass memory on. `[]` is the shape of
/// a scalar, with one element.
///
/// In host memory it is created from a `Vec` and returns it without a copy:
///
/// ```
/// use gradsync::ops::tensor_parallel::OwnedTensor;
///
/// let tensor = OwnedTensor::new(vec![1.0f32; 6], [2, 3])?;
/// assert_eq!(tensor.shape(), [2, 3]);
/// assert_eq!(tensor.into_vec::<f32>()?, [1.0; 6]);
/// # Ok::<(), gradsync::Error>(())
/// ```
///
/// In GPU memory it is created from a `DeviceBuffer`, or from another crate's memory, and all work on it is ordered on its queue. An
/// operation that creates a new tensor drops its argument while work in the queue still reads it; the next owner of the memory uses it
/// behind that work.
pub struct OwnedTensor<M: OwnedTensorMemory = Host> {
    pub(super) storage: M::Storage,
    pub(super) shape: Vec<usize>,
}

/// The storage of owned tensors in one kind of memory.
pub trait OwnedTensorMemory: Memory {
    /// Owned elements of one dtype.
    type Storage: Send + 'static;

    /// The elements.
    fn elements(storage: &Self::Storage) -> Self::Slice<'_>;

    /// The elements, to write.
    fn elements_mut(storage: &mut Self::Storage) -> Self::SliceMut<'_>;

    /// Allocates `len` elements with the dtype, and on the queue, of another tensor. The caller writes all of them before they are read.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), on a GPU `Error::Cuda`.
    fn unwritten(operation: &'static str, like: &Self::Storage, len: usize) -> Result<Self::Storage>;
}

impl<M: OwnedTensorMemory> OwnedTensor<M> {
    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        M::dtype(self.as_slice())
    }

    /// The elements.
    pub fn as_slice(&self) -> M::Slice<'_> {
        M::elements(&self.storage)
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> M::SliceMut<'_> {
        M::elements_mut(&mut self.storage)
    }

    /// The tensor, to read.
    pub fn view(&self) -> TensorView<'_, M> {
        TensorView::of(self.as_slice(), self.shape[..].into()).expect("a tensor has its shape's length")
    }

    /// The tensor, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_, M> {
        let data = M::elements_mut(&mut self.storage);
        TensorViewMut::of(data, self.shape[..].into()).expect("a tensor has its shape's length")
    }

    /// Allocates a tensor of another shape with the same dtype, on the same queue. The caller writes all elements before they are read.
    pub(super) fn unwritten(&self, operation: &'static str, shape: Vec<usize>) -> Result<Self> {
        let storage = M::unwritten(operation, &self.storage, shape_len(operation, &shape)?)?;
        Ok(Self { storage, shape })
    }
}

/// Shows dtype and shape; never the elements.
impl<M: OwnedTensorMemory> std::fmt::Debug for OwnedTensor<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnedTensor").field("dtype", &self.dtype()).field("shape", &self.shape).finish_non_exhaustive()
    }
}
