//! [`Memory`]: host memory and GPU memory as one type parameter of everything that works on either.
//!
//! Buffers, views, communicators and operations take it as `M`, which is [`Host`] by default and may be `Cuda` with the feature `cuda`. A
//! call has the same arguments and checks in both: [`docs::architecture`](crate::docs::architecture) lists the differences.
//!
//! [`Host`] and `Cuda` are the two memories. Eight types join memory, element type and shape. A slice of GPU memory has a type of its own,
//! since no safe code may take it for host memory; the types with `<M>` work in either memory:
//!
//! | type | contents | used for |
//! |---|---|---|
//! | `Slice`, `SliceMut` | borrowed elements in host memory; their type is known at run time | collectives, kernels on the CPU |
//! | `DeviceSlice`, `DeviceSliceMut` | the same in CUDA memory, with the queue that orders work on it | collectives, kernels on a GPU |
//! | `TensorView<M>`, `TensorViewMut<M>` | a slice with a shape | operations that compare shapes; borrowing tensors of the types below |
//! | `OwnedTensor<M>` | owned elements with a shape | tensor parallelism, whose operations take a tensor and return one |
//! | `GradientBuffer<M>` | owned elements of many tensors with names and shapes | gradients and weights that one call reduces |
//! | `DeviceBuffer` | owned elements in CUDA memory | a vector on a GPU; host memory has `Vec` |
//! | `Bundle<M>` | borrowed tensors of any types | a send of several tensors |
//! | `Received<M>` | owned tensors of any types | the result of a receive |
//!
//! Nothing here communicates or does arithmetic.

mod buffer;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod file;
mod host;
pub(crate) mod shared_bytes;
pub(crate) mod sharing;
mod tensor;

use std::fmt::Debug;
use std::ops::Range;

pub(crate) use self::buffer::HostBuffer;
#[cfg(feature = "cuda")]
pub use self::cuda::Cuda;
pub use self::host::Host;
#[cfg(feature = "cuda")]
pub(crate) use self::sharing::{PeerMemory, SharedMemory, expose, share};
pub(crate) use self::sharing::{SharedWindows, Work};
pub use self::tensor::{TensorView, TensorViewMut};
use crate::dtype::{DType, Element};
use crate::error::Result;
use crate::slice::{Floats, Slice};

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Host {}
    #[cfg(feature = "cuda")]
    impl Sealed for super::Cuda {}
}

/// The functions of [`Memory`] that are the same code for both.
macro_rules! slice_functions {
    () => {
        fn buffer(buffer: &Self::Buffer) -> Self::Slice<'_> {
            buffer.as_slice()
        }

        fn buffer_mut(buffer: &mut Self::Buffer) -> Self::SliceMut<'_> {
            buffer.as_mut_slice()
        }

        fn len(data: Self::Slice<'_>) -> usize {
            data.len()
        }

        fn dtype(data: Self::Slice<'_>) -> DType {
            data.dtype()
        }

        fn range(data: Self::Slice<'_>, range: Range<usize>) -> Self::Slice<'_> {
            data.range(range)
        }

        fn shortened<'short, 'long: 'short>(data: Self::Slice<'long>) -> Self::Slice<'short> {
            data
        }

        fn as_slice<'a>(data: &'a Self::SliceMut<'_>) -> Self::Slice<'a> {
            data.as_slice()
        }

        fn into_slice(data: Self::SliceMut<'_>) -> Self::Slice<'_> {
            data.into_slice()
        }

        fn reborrow<'a>(data: &'a mut Self::SliceMut<'_>) -> Self::SliceMut<'a> {
            data.reborrow()
        }

        fn range_mut(data: Self::SliceMut<'_>, range: Range<usize>) -> Self::SliceMut<'_> {
            data.range_mut(range)
        }

        fn ranges_mut<'a>(data: Self::SliceMut<'a>, ranges: &[Range<usize>]) -> Vec<Self::SliceMut<'a>> {
            let (mut rest, mut at, mut found) = (data, 0, Vec::new());
            for range in ranges {
                let (elements, behind) = rest.split_at_mut(range.end - at);
                found.push(elements.range_mut(range.start - at..range.end - at));
                (rest, at) = (behind, range.end);
            }
            found
        }
    };
}
use slice_functions;

/// A kind of memory: [`Host`], or `Cuda` with the feature `cuda`.
///
/// The types are the arguments and results of operations; the functions serve code that is written once for both memories.
pub trait Memory: sealed::Sealed + Copy + Debug + 'static {
    /// Elements of a type known at run time, to read or send.
    type Slice<'a>: Copy + Debug + Floats;
    /// Elements of a type known at run time, to write or receive into.
    type SliceMut<'a>: Debug + Floats;
    /// Owned elements of one dtype.
    type Buffer: Debug;
    /// The type of queue that orders work in this memory; `()` for host memory.
    type Queue: Debug;
    /// The interface to the memory of other ranks: [`SharedWindows`] or `PeerMemory`.
    type Sharing: ?Sized;

    /// The elements of a buffer.
    fn buffer(buffer: &Self::Buffer) -> Self::Slice<'_>;

    /// The elements of a buffer, to write.
    fn buffer_mut(buffer: &mut Self::Buffer) -> Self::SliceMut<'_>;

    /// Sets all elements to zero, in the order of all work on them.
    ///
    /// # Errors
    /// `Error::Cuda`; never on the host.
    fn clear(data: Self::SliceMut<'_>) -> Result<()>;

    /// The number of elements.
    fn len(data: Self::Slice<'_>) -> usize;

    /// The type of every element.
    fn dtype(data: Self::Slice<'_>) -> DType;

    /// The elements of a range; panics as slicing does when it is out of bounds.
    fn range(data: Self::Slice<'_>, range: Range<usize>) -> Self::Slice<'_>;

    /// The same elements for a shorter borrow.
    fn shortened<'short, 'long: 'short>(data: Self::Slice<'long>) -> Self::Slice<'short>;

    /// The elements, to read.
    fn as_slice<'a>(data: &'a Self::SliceMut<'_>) -> Self::Slice<'a>;

    /// The elements, to read, for the whole borrow.
    fn into_slice(data: Self::SliceMut<'_>) -> Self::Slice<'_>;

    /// The same elements for a shorter borrow.
    fn reborrow<'a>(data: &'a mut Self::SliceMut<'_>) -> Self::SliceMut<'a>;

    /// The elements of a range, to write; panics as slicing does when it is out of bounds.
    fn range_mut(data: Self::SliceMut<'_>, range: Range<usize>) -> Self::SliceMut<'_>;

    /// The elements of each range, writable together. The ranges must ascend; panics as slicing does where they overlap or are out of
    /// bounds.
    fn ranges_mut<'a>(data: Self::SliceMut<'a>, ranges: &[Range<usize>]) -> Vec<Self::SliceMut<'a>>;

    /// Refuses elements with which nothing can be computed: integers, `bool`, and elements that are not aligned.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming the type or the address.
    fn check_floats(operation: &'static str, data: Self::Slice<'_>) -> Result<()>;

    /// Copies the elements to a vector in host memory; on a GPU the call waits for the queue.
    ///
    /// # Errors
    /// [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) unless `T` is the type of the elements; `Error::Cuda` for any work in the
    /// queue that failed.
    fn to_vec<T: Element + bytemuck::Pod>(data: Self::Slice<'_>) -> Result<Vec<T>>;

    /// Copies elements of the same dtype and number from host memory; on a GPU the call waits for the queue.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) and [`Error::DTypeMismatch`](crate::Error::DTypeMismatch), where nothing is
    /// written; `Error::Cuda`.
    fn copy_from_slice(data: Self::SliceMut<'_>, source: Slice<'_>) -> Result<()>;

    /// Refuses two operands whose work is ordered on different queues.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming the operation.
    fn check_same_queue(operation: &'static str, one: Self::Slice<'_>, other: Self::Slice<'_>) -> Result<()>;

    /// The kind of a buffer's memory, which ranks compare.
    #[doc(hidden)]
    fn kind(buffer: &Self::Buffer) -> &'static str;

    /// [`SharedWindows::with_windows`] of a buffer that all ranks can map; `false`, on every rank, for any other buffer.
    #[doc(hidden)]
    fn with_windows(sharing: &Self::Sharing, buffer: &mut Self::Buffer, work: &mut Work<'_>) -> Result<bool>;
}
