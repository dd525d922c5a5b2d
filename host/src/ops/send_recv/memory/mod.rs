//! [`BundleMemory`]: the steps of a transfer that differ between the kinds of memory.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use std::fmt::Debug;
use std::ops::Range;

use super::negotiation::Messages;
use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Memory;

/// A kind of memory from which bundles of tensors are sent and into which they are received: [`Host`](crate::memory::Host) and `Cuda`.
#[doc(hidden)]
pub trait BundleMemory: Memory {
    /// Owned memory of a payload, aligned to 256 bytes.
    type Payload: Debug;
    /// The end of a transfer.
    type End: Debug;

    /// The queue on which work on the elements is ordered.
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

    /// Splits the bytes at `at`.
    fn split_bytes<'a>(data: Self::WireMut<'a>, at: usize) -> (Self::WireMut<'a>, Self::WireMut<'a>);

    /// The bytes of a payload, if these tensors already have these offsets in it, without foreign memory between them.
    fn lying<'a>(tensors: &[Self::Wire<'a>], places: &[Range<usize>]) -> Option<Self::Wire<'a>>;

    /// The writable bytes of such a payload; returns the tensors as an error if they have another layout.
    ///
    /// # Errors
    /// The tensors.
    fn lying_mut<'a, 't>(
        tensors: Vec<&'a mut Self::WireMut<'t>>,
        places: &[Range<usize>],
    ) -> Result<Self::WireMut<'a>, Vec<&'a mut Self::WireMut<'t>>>;

    /// Allocates `bytes` bytes.
    ///
    /// # Errors
    /// The error of memory that does not suffice: [`Error::OutOfMemory`], or `Error::Cuda` with code 2.
    fn allocate(operation: &'static str, queue: &Self::Queue, bytes: usize) -> Result<Self::Payload>;

    /// The elements in a range of a payload.
    fn at<'a>(payload: &'a Self::Payload, place: Range<usize>, dtype: DType) -> Self::Wire<'a>;

    /// The first `bytes` bytes, to write.
    fn bytes_mut(payload: &mut Self::Payload, bytes: usize) -> Self::WireMut<'_>;

    /// Copies tensors to their ranges of a payload.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn pack(payload: &mut Self::Payload, places: &[Range<usize>], tensors: &[Self::Wire<'_>]) -> Result<()>;

    /// Copies tensors from their ranges of a payload.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn unpack(payload: &Self::Payload, places: &[Range<usize>], tensors: Vec<&mut Self::WireMut<'_>>) -> Result<()>;

    /// A channel for small messages in host memory between the ranks of a communicator.
    fn messages<'c>(comm: &'c dyn Communicator<Self>, queue: &'c Self::Queue) -> Box<dyn Messages + 'c>;

    /// The end of everything that is in the queue now.
    ///
    /// # Errors
    /// `Error::Cuda`.
    fn end(queue: &Self::Queue) -> Result<Self::End>;

    /// Whether the queue has passed this end. Does not wait.
    ///
    /// # Errors
    /// `Error::Cuda` for work that failed while it ran.
    fn has_passed(end: &Self::End) -> Result<bool>;
}
