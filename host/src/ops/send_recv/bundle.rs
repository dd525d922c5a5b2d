//! [`Bundle`], the tensors of one transfer; [`Expected`], the receiver's knowledge of them; and [`Received`], the received tensors.
//!
//! Nothing here communicates or waits.

use std::borrow::Cow;

use super::memory::BundleMemory;
use crate::buffer::GradientBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Host, Memory, TensorView};
use crate::plan::bundle::{BundleLayout, Limits, TensorSpec};

/// One or more borrowed tensors that are sent as one payload, each at a multiple of 256 bytes: the argument of a send. On a GPU all belong to
/// one queue.
///
/// A single tensor and [`Received`] tensors are sent without a copy, and so are a [`GradientBuffer`] with the payload's offsets, and
/// tensors in device memory that are contiguous and begin at such multiples; others are packed.
#[derive(Clone, Debug)]
pub struct Bundle<'a, M: BundleMemory = Host> {
    /// The tag of a bundle that is sent with a header of types and shapes.
    pub(super) tag: Option<u64>,
    specs: Cow<'a, [TensorSpec]>,
    layout: Cow<'a, BundleLayout>,
    content: Content<'a, M>,
}

#[derive(Clone, Debug)]
enum Content<'a, M: Memory> {
    /// Tensors that have to be packed.
    Apart(Vec<M::Slice<'a>>),
    /// Memory that has the layout of the payload.
    Contiguous(M::Slice<'a>),
}

impl<'a, M: BundleMemory> Bundle<'a, M> {
    /// Combines tensors into a bundle for a receiver that knows their types and shapes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no tensors, tensors of different queues, or more bytes than the address space.
    pub fn new(tensors: impl IntoIterator<Item: Into<TensorView<'a, M>>>) -> Result<Self> {
        let tensors: Vec<TensorView<'a, M>> = tensors.into_iter().map(Into::into).collect();
        let specs: Vec<TensorSpec> = tensors.iter().map(|tensor| spec(tensor.dtype(), tensor.shape())).collect();
        let layout = layout(&specs)?;
        let tensors: Vec<M::Slice<'a>> = tensors.iter().map(TensorView::data).collect();
        tensors.iter().try_for_each(|tensor| M::check_same_queue(OPERATION, tensors[0], *tensor))?;
        let content = M::contiguous(&tensors, &layout.ranges).map_or(Content::Apart(tensors), Content::Contiguous);
        Ok(Self { tag: None, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// Makes a bundle of all tensors of a gradient buffer, in its order; without a copy if they have the offsets of the payload, as they
    /// have unless one of them crosses a shard's edge.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn of_buffer(buffer: &'a GradientBuffer<M>) -> Result<Self> {
        let mut bundle = Self::new((0..buffer.tensor_count()).map(|index| buffer.tensor(index)))?;
        let begins = buffer.segments().iter().map(|segment| segment.start * buffer.dtype().size_bytes());
        if begins.eq(bundle.layout.ranges.iter().map(|range| range.start)) {
            let payload = M::part(buffer.as_slice(), 0..bundle.layout.len, DType::U8);
            bundle.content = Content::Contiguous(payload);
        }
        Ok(bundle)
    }

    /// Returns this bundle as a described one: its transfer begins with a header of types and shapes, for a receiver that does not know
    /// them and expects this tag, a number that distinguishes the bundle from others between the two ranks: a micro-batch, for example.
    #[must_use]
    pub fn described(self, tag: u64) -> Self {
        Self { tag: Some(tag), ..self }
    }

    /// The types and shapes of the tensors.
    pub(super) fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// The size of the payload in bytes.
    pub fn len_bytes(&self) -> usize {
        self.layout.len
    }

    /// The queue on which work on the tensors is ordered.
    pub fn queue(&self) -> &'a M::Queue {
        M::queue(match &self.content {
            Content::Apart(tensors) => tensors[0],
            Content::Contiguous(payload) => *payload,
        })
    }

    /// The packed tensors, unless their memory has the layout of the payload.
    pub(super) fn packed(&self) -> Result<Option<M::Buffer>> {
        let Content::Apart(tensors) = &self.content else { return Ok(None) };
        let mut payload = M::allocate("send", self.queue(), self.layout.len)?;
        M::pack(&mut payload, &self.layout.ranges, tensors)?;
        Ok(Some(payload))
    }

    /// The bytes to send: the [`packed`](Self::packed) ones where there are any.
    pub(super) fn payload<'p>(&'p self, packed: Option<&'p M::Buffer>) -> M::Slice<'p> {
        let bytes = 0..self.layout.len;
        match (&self.content, packed) {
            (_, Some(packed)) => M::part(M::buffer(packed), bytes, DType::U8),
            (Content::Contiguous(payload), None) => M::part(*payload, bytes, DType::U8),
            (Content::Apart(_), None) => {
                unreachable!("tensors that are not contiguous are packed before they are sent")
            }
        }
    }
}

const OPERATION: &str = "tensor bundle";

impl<'a, M: BundleMemory> From<&'a Received<M>> for Bundle<'a, M> {
    /// A bundle that sends received tensors on, without a copy.
    fn from(received: &'a Received<M>) -> Self {
        Self {
            tag: None,
            specs: received.specs[..].into(),
            layout: Cow::Borrowed(&received.layout),
            content: Content::Contiguous(M::buffer(&received.payload)),
        }
    }
}

/// The receiver's expectation of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// The receiver expects these types and shapes, which must be the sender's: only the length of the payload is compared.
    Known(Vec<(DType, Vec<usize>)>),
    /// The receiver expects only a tag. The sender describes the tensors, and a bundle beyond the limits is refused.
    Described {
        /// The sender's tag.
        tag: u64,
        /// The limits of an accepted bundle.
        limits: Limits,
    },
}

impl Expected {
    /// Expects these types and shapes.
    pub fn known(tensors: impl IntoIterator<Item = (DType, Vec<usize>)>) -> Self {
        Expected::Known(tensors.into_iter().collect())
    }

    /// Expects any tensors within the default [`Limits`].
    pub fn described(tag: u64) -> Self {
        Expected::Described { tag, limits: Limits::default() }
    }
}

/// Owned tensors that came from a peer as one payload: the result of a receive. On a GPU they may still be pending in the order of their
/// queue.
#[must_use = "it owns the tensors that have come"]
pub struct Received<M: BundleMemory = Host> {
    specs: Vec<TensorSpec>,
    layout: BundleLayout,
    payload: M::Buffer,
}

impl<M: BundleMemory> Received<M> {
    /// Allocates memory for tensors that are to be received.
    pub(super) fn reserve(
        operation: &'static str,
        queue: &M::Queue,
        specs: Vec<TensorSpec>,
        layout: BundleLayout,
    ) -> Result<Self> {
        let payload = M::allocate(operation, queue, layout.len)?;
        Ok(Self { specs, layout, payload })
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Always false: there is at least one tensor.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// Tensor `index`, in place, at a multiple of 256 bytes; panics beyond the last.
    pub fn tensor(&self, index: usize) -> TensorView<'_, M> {
        let TensorSpec { dtype, dims } = &self.specs[index];
        let data = M::part(M::buffer(&self.payload), self.layout.ranges[index].clone(), *dtype);
        TensorView::of(data, Cow::Borrowed(dims)).expect("the layout gave the tensor its shape's bytes")
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorView<'_, M>> {
        (0..self.len()).map(|index| self.tensor(index))
    }

    pub(super) fn payload_mut(&mut self) -> M::SliceMut<'_> {
        M::bytes_mut(&mut self.payload, self.layout.len)
    }

    /// Copies the tensors to their destinations, which have the same lengths.
    pub(super) fn unpack(&self, tensors: Vec<M::SliceMut<'_>>) -> Result<()> {
        M::unpack(&self.payload, &self.layout.ranges, tensors)
    }
}

#[cfg(feature = "cuda")]
impl Received<crate::memory::Cuda> {
    /// Waits for the queue and copies the tensors to host memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], and [`Error::Cuda`] for any work in the queue that failed. A failure of the transfer is reported by
    /// [`Completion::wait`](super::Completion::wait), which comes first.
    pub fn to_host(&self) -> Result<Received> {
        let mut host: Received = Received::reserve("copy to host", &(), self.specs.clone(), self.layout.clone())?;
        let words = host.payload.as_mut_slice();
        // SAFETY: the buffer has as many words as the payload was rounded up to.
        let payload = unsafe {
            let view = self.payload.as_slice();
            crate::driver::DeviceSlice::from_raw_parts(view.queue(), view.address(), words.dtype(), words.len())
        };
        payload.copy_to_host(words)?;
        Ok(host)
    }
}

/// Shows types and shapes; never the elements.
impl<M: BundleMemory> std::fmt::Debug for Received<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Received").field("specs", &self.specs).finish_non_exhaustive()
    }
}

pub(super) fn spec(dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { dtype, dims: shape.to_vec() }
}

/// The layout of tensors in a payload.
pub(super) fn layout(specs: &[TensorSpec]) -> Result<BundleLayout> {
    if specs.is_empty() {
        let reason = "a bundle has at least one tensor".into();
        return Err(Error::InvalidArgument { operation: OPERATION, reason });
    }
    BundleLayout::of(specs)
}
