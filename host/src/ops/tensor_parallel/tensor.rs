//! [`Tensor`]: what the operations ask of a tensor, wherever its elements are.
//!
//! It says what can be done with one kind of memory. What is done, and in which order, stands in the modules beside it.

use crate::dtype::DType;
use crate::error::Result;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// A tensor that operations are handed and hand back: [`HostTensor`](super::HostTensor), and with the feature `cuda`
/// `DeviceTensor`.
///
/// Its type decides what carries it between ranks, and with that, which communicators an operation takes.
pub trait Tensor: sealed::Sealed + Sized + Send + 'static {
    /// A communicator that carries such tensors: `&dyn Communicator` or `&dyn DeviceCommunicator`.
    type Comm<'c>: Copy;

    /// The type of every element.
    fn dtype(&self) -> DType;

    /// The dimensions, outermost first.
    fn shape(&self) -> &[usize];

    #[doc(hidden)]
    fn world_size(comm: Self::Comm<'_>) -> usize;

    /// Every rank's words, in rank order; the host waits for the others.
    #[doc(hidden)]
    fn gather_words(words: &[u64], comm: Self::Comm<'_>) -> Result<Vec<u64>>;

    /// Whether all ranks are known to have agreed on this value before; the same answer on all ranks that ask alike.
    #[doc(hidden)]
    fn was_agreed(value: u64, comm: Self::Comm<'_>) -> Result<bool>;

    /// All ranks agree on this value.
    #[doc(hidden)]
    fn remember(value: u64, comm: Self::Comm<'_>);

    /// The sum over the ranks, in this tensor's memory.
    #[doc(hidden)]
    fn sum(self, comm: Self::Comm<'_>) -> Result<Self>;

    /// The ranks' tensors one after the other, as a new tensor of a shape that has room for them.
    #[doc(hidden)]
    fn concatenate(self, operation: &'static str, shape: Vec<usize>, comm: Self::Comm<'_>) -> Result<Self>;

    /// This rank's part of the sum over the ranks, as a new tensor of a shape of which all ranks' make one of this.
    #[doc(hidden)]
    fn sum_part(self, operation: &'static str, shape: Vec<usize>, comm: Self::Comm<'_>) -> Result<Self>;
}
