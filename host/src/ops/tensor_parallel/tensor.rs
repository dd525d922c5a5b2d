//! [`Tensor`]: an owned tensor that operations are handed and hand back, wherever its elements are.

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Memory;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// A tensor that operations are handed and hand back: [`HostTensor`](super::HostTensor), and with the feature `cuda`
/// `DeviceTensor`.
///
/// The memory of its elements decides which communicators an operation takes.
pub trait Tensor: sealed::Sealed + Sized + Send + 'static {
    /// The memory of the elements.
    type Memory: Memory;

    /// The type of every element.
    fn dtype(&self) -> DType;

    /// The dimensions, outermost first.
    fn shape(&self) -> &[usize];

    /// The elements.
    fn as_slice(&self) -> <Self::Memory as Memory>::Slice<'_>;

    /// The elements, to write.
    fn as_mut_slice(&mut self) -> <Self::Memory as Memory>::SliceMut<'_>;

    /// A new tensor of another shape with the same dtype, ordered as this one. The caller writes all elements before anything reads them.
    #[doc(hidden)]
    fn unwritten(&self, operation: &'static str, shape: Vec<usize>) -> Result<Self>;
}
