//! [`Bundle`], the tensors of one transfer; [`Expected`], the receiver's knowledge of them; and [`Received`], the received tensors.
//!
//! Nothing here communicates or waits.

use std::borrow::Cow;

use super::memory::BundleMemory;
use super::tensor::{WireTensor, spec};
use crate::buffer::GradientBuffer;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::{Host, Memory};
use crate::plan::bundle::{BundleLayout, Limits, TensorSpec};

/// The receiver's knowledge of the tensors that it receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shapes {
    /// The receiver knows types and shapes: only the payload is sent.
    #[default]
    Known,
    /// The receiver knows only a tag, which must be the sender's: a header with types and shapes is sent first.
    Described {
        /// A number that distinguishes this bundle from others between the two ranks: a micro-batch, for example.
        tag: u64,
    },
}

/// One or more tensors that are sent as one payload, each at a multiple of 256 bytes; on a GPU all of one queue.
///
/// A single tensor, [`Received`] tensors and a [`GradientBuffer`] are sent without a copy, and so are tensors in device memory that are
/// contiguous and begin at such multiples; others are packed.
#[derive(Clone, Debug)]
pub struct Bundle<'a, M: BundleMemory = Host> {
    pub(super) shapes: Shapes,
    specs: Cow<'a, [TensorSpec]>,
    layout: Cow<'a, BundleLayout>,
    content: Content<'a, M>,
}

#[derive(Clone, Debug)]
enum Content<'a, M: Memory> {
    /// Tensors that have to be packed.
    Apart(Vec<M::Wire<'a>>),
    /// The bytes of the payload, in place.
    Lying(M::Wire<'a>),
}

impl<'a, M: BundleMemory> Bundle<'a, M> {
    /// Combines tensors into a bundle for a receiver that knows their types and shapes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no tensors, tensors of different queues, or more bytes than the address space.
    pub fn new(tensors: impl IntoIterator<Item: Into<WireTensor<'a, M>>>) -> Result<Self> {
        let tensors: Vec<WireTensor<'a, M>> = tensors.into_iter().map(Into::into).collect();
        let specs: Vec<TensorSpec> = tensors.iter().map(WireTensor::spec).collect();
        let layout = layout(OPERATION, &specs)?;
        let tensors: Vec<M::Wire<'a>> = tensors.iter().map(WireTensor::data).collect();
        tensors.iter().try_for_each(|tensor| M::check_same_queue(OPERATION, tensors[0], *tensor))?;
        let content = M::lying(&tensors, &layout.places).map_or(Content::Apart(tensors), Content::Lying);
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// Makes a bundle of all tensors of a gradient buffer, in its order, without a copy.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn of_buffer(buffer: &'a GradientBuffer<M>) -> Result<Self> {
        let of_tensor = |index| spec(buffer.dtype(), buffer.shape(index));
        let specs: Vec<TensorSpec> = (0..buffer.tensor_count()).map(of_tensor).collect();
        let layout = layout(OPERATION, &specs)?;
        // Both layouts round the offsets up alike.
        let content = Content::Lying(M::byte_range(buffer.as_slice().into(), 0..layout.len));
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// Returns this bundle as a described one: its transfer begins with a header of types and shapes, for a receiver that does not know them
    /// and expects this tag.
    #[must_use]
    pub fn described(self, tag: u64) -> Self {
        Self { shapes: Shapes::Described { tag }, ..self }
    }

    /// The types and shapes of the tensors.
    pub fn specs(&self) -> &[TensorSpec] {
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
            Content::Lying(payload) => *payload,
        })
    }

    /// The packed tensors, unless they already are in memory in the layout of the payload.
    pub(super) fn packed(&self) -> Result<Option<M::Payload>> {
        let Content::Apart(tensors) = &self.content else { return Ok(None) };
        let mut payload = M::allocate("send", self.queue(), self.layout.len)?;
        M::pack(&mut payload, &self.layout.places, tensors)?;
        Ok(Some(payload))
    }

    /// The bytes to send: for tensors that are not contiguous, the [`packed`](Self::packed) bytes.
    pub(super) fn payload<'p>(&'p self, packed: &'p Option<M::Payload>) -> M::Wire<'p> {
        match (&self.content, packed) {
            (Content::Lying(payload), _) => M::byte_range(*payload, 0..self.layout.len),
            (Content::Apart(_), packed) => {
                let packed = packed.as_ref().expect("tensors that lie apart were packed");
                M::at(packed, 0..self.layout.len, DType::U8)
            }
        }
    }
}

const OPERATION: &str = "tensor bundle";

impl<'a, M: BundleMemory> From<&'a Received<M>> for Bundle<'a, M> {
    /// A bundle that sends received tensors on, without a copy.
    fn from(received: &'a Received<M>) -> Self {
        Self {
            shapes: Shapes::Known,
            specs: received.specs[..].into(),
            layout: Cow::Borrowed(&received.layout),
            content: Content::Lying(M::at(&received.payload, 0..received.layout.len, DType::U8)),
        }
    }
}

/// The receiver's expectation of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// The receiver expects these types and shapes, which must be the sender's: only the length of the payload is compared.
    Known(Vec<TensorSpec>),
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
        Expected::Known(tensors.into_iter().map(|(dtype, shape)| spec(dtype, &shape)).collect())
    }

    /// Expects any tensors within the default [`Limits`].
    pub fn described(tag: u64) -> Self {
        Expected::Described { tag, limits: Limits::default() }
    }
}

/// Tensors received from a peer, on a GPU possibly still pending in the order of their queue. Owns the payload, with the tensors in its
/// layout.
#[must_use = "it owns the tensors that have come"]
pub struct Received<M: BundleMemory = Host> {
    specs: Vec<TensorSpec>,
    shapes: Vec<Vec<usize>>,
    layout: BundleLayout,
    payload: M::Payload,
}

impl<M: BundleMemory> Received<M> {
    /// Allocates memory for tensors that are to be received.
    pub(super) fn reserve(
        operation: &'static str,
        queue: &M::Queue,
        specs: Vec<TensorSpec>,
        layout: BundleLayout,
    ) -> Result<Self> {
        let shapes = usize_shapes(operation, &specs)?;
        let payload = M::allocate(operation, queue, layout.len)?;
        Ok(Self { specs, shapes, layout, payload })
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.specs.len()
    }

    /// Always false: there is at least one tensor.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// The types and shapes.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// Tensor `index`, in place, at a multiple of 256 bytes; panics beyond the last.
    pub fn tensor(&self, index: usize) -> WireTensor<'_, M> {
        let data = M::at(&self.payload, self.layout.places[index].clone(), self.specs[index].dtype);
        WireTensor::of_wire(data, Cow::Borrowed(&self.shapes[index]))
            .expect("the layout gave the tensor its shape's bytes")
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = WireTensor<'_, M>> {
        (0..self.len()).map(|index| self.tensor(index))
    }

    pub(super) fn payload_mut(&mut self) -> M::WireMut<'_> {
        M::bytes_mut(&mut self.payload, self.layout.len)
    }

    /// Copies the tensors to their destinations, which have the same lengths.
    pub(super) fn unpack(&self, tensors: Vec<&mut M::WireMut<'_>>) -> Result<()> {
        M::unpack(&self.payload, &self.layout.places, tensors)
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

/// The layout of tensors in a payload.
pub(super) fn layout(operation: &'static str, specs: &[TensorSpec]) -> Result<BundleLayout> {
    if specs.is_empty() {
        return Err(no_tensors(operation));
    }
    let size = |(index, spec): (usize, &TensorSpec)| {
        spec.bytes().and_then(|bytes| usize::try_from(bytes).ok()).ok_or_else(|| Error::InvalidArgument {
            operation,
            reason: format!("tensor {index} exceeds the address space: {spec:?}"),
        })
    };
    BundleLayout::new(&specs.iter().enumerate().map(size).collect::<Result<Vec<usize>>>()?)
}

pub(super) fn no_tensors(operation: &'static str) -> Error {
    Error::InvalidArgument { operation, reason: "a bundle has at least one tensor".into() }
}

/// The shapes with dimensions of type `usize`.
fn usize_shapes(operation: &'static str, specs: &[TensorSpec]) -> Result<Vec<Vec<usize>>> {
    let shape = |(index, spec): (usize, &TensorSpec)| {
        let dims = spec.dims.iter().map(|&dim| usize::try_from(dim));
        dims.collect::<Result<Vec<usize>, _>>().map_err(|_| Error::InvalidArgument {
            operation,
            reason: format!("tensor {index} exceeds the address space: {spec:?}"),
        })
    };
    specs.iter().enumerate().map(shape).collect()
}
