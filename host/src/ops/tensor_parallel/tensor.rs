//! [`Tensor`]: an owned tensor that operations take and return, in either memory.

use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Memory;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// A tensor that operations take and return: [`HostTensor`](super::HostTensor), and with the feature `cuda` `DeviceTensor`.
///
/// The kind of its memory determines the type of an operation's communicator.
pub trait Tensor: sealed::Sealed + Sized + Send + 'static {
    /// The kind of memory of the elements.
    type Memory: Memory;

    /// The type of every element.
    fn dtype(&self) -> DType;

    /// The dimensions, outermost first.
    fn shape(&self) -> &[usize];

    /// The elements.
    fn as_slice(&self) -> <Self::Memory as Memory>::Slice<'_>;

    /// The elements, to write.
    fn as_mut_slice(&mut self) -> <Self::Memory as Memory>::SliceMut<'_>;

    /// Allocates a tensor of another shape with the same dtype, on the same queue. The caller writes all elements before they are read.
    #[doc(hidden)]
    fn unwritten(&self, operation: &'static str, shape: Vec<usize>) -> Result<Self>;
}
