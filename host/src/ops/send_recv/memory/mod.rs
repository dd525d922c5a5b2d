//! [`BundleMemory`]: the steps of a transfer that are other ones in each kind of memory.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use std::fmt::Debug;
use std::ops::Range;

use super::negotiation::Messages;
use crate::comm::Communicator;
use crate::dtype::DataType;
use crate::error::Result;
use crate::memory::Memory;

/// Memory that bundles of tensors are sent from and received into: [`Host`](crate::memory::Host) and `Cuda`.
#[doc(hidden)]
pub trait BundleMemory: Memory {
    /// Owned memory of a payload, at a multiple of 256 bytes.
    type Payload: Debug;
    /// The end of a transfer.
    type End: Debug;

    /// The queue that work on the elements is ordered on.
    fn queue<'a>(data: Self::Wire<'a>) -> &'a Self::Queue;

    /// Refuses operands whose work is ordered on another queue.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument).
    fn check_queue(operation: &'static str, queue: &Self::Queue, other: &Self::Queue) -> Result<()>;

    /// The same elements for a shorter borrow.
    fn reborrow_wire<'a>(data: &'a mut Self::WireMut<'_>) -> Self::WireMut<'a>;

    /// The bytes of a range, which lies within the elements.
    fn byte_range<'s, 'l: 's>(data: Self::Wire<'l>, range: Range<usize>) -> Self::Wire<'s>;

    /// The first so many bytes, and the others.
    fn split_bytes<'a>(data: Self::WireMut<'a>, at: usize) -> (Self::WireMut<'a>, Self::WireMut<'a>);

    /// The bytes of a payload in which these tensors lie already at these places, with nothing of anybody else's between them.
    fn lying<'a>(tensors: &[Self::Wire<'a>], places: &[Range<usize>]) -> Option<Self::Wire<'a>>;

    /// The same to write; the tensors again where they lie otherwise.
    ///
    /// # Errors
    /// The tensors.
    fn lying_mut<'a, 't>(
        tensors: Vec<&'a mut Self::WireMut<'t>>,
        places: &[Range<usize>],
    ) -> Result<Self::WireMut<'a>, Vec<&'a mut Self::WireMut<'t>>>;

    /// Memory for so many bytes.
    ///
    /// # Errors
    /// The error of memory that does not suffice: [`Error::OutOfMemory`], or `Error::Cuda` with code 2.
    fn allocate(operation: &'static str, queue: &Self::Queue, bytes: usize) -> Result<Self::Payload>;

    /// The elements at a place of a payload.
    fn at<'a>(payload: &'a Self::Payload, place: Range<usize>, dtype: DataType) -> Self::Wire<'a>;

    /// The first so many bytes, to write.
    fn bytes_mut(payload: &mut Self::Payload, bytes: usize) -> Self::WireMut<'_>;

    /// Copies tensors to their places.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn pack(payload: &mut Self::Payload, places: &[Range<usize>], tensors: &[Self::Wire<'_>]) -> Result<()>;

    /// Copies tensors from their places.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn unpack(payload: &Self::Payload, places: &[Range<usize>], tensors: Vec<&mut Self::WireMut<'_>>) -> Result<()>;

    /// A way for small messages of the host between the ranks of a communicator.
    fn messages<'c>(comm: &'c dyn Communicator<Self>, queue: &'c Self::Queue) -> Box<dyn Messages + 'c>;

    /// The end of everything that is in the queue now.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn end(queue: &Self::Queue) -> Result<Self::End>;

    /// Whether that end has passed. Does not wait.
    ///
    /// # Errors
    /// `Error::Cuda` for work that failed while it ran.
    fn has_passed(end: &Self::End) -> Result<bool>;
}
