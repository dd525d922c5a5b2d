//! [`Bundle`], the tensors of one transfer; [`Expected`], what a receiver knows of them; and [`Received`], the tensors that have come.
//!
//! Nothing here communicates or waits.

use std::borrow::Cow;

use super::memory::BundleMemory;
use super::tensor::{WireTensor, spec};
use crate::buffer::GradientBuffer;
use crate::dtype::DataType;
use crate::error::{Error, Result};
use crate::memory::{Host, Memory};
use crate::plan::bundle::{BundleLayout, Limits, TensorSpec};

/// The receiver's knowledge of the tensors that it gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shapes {
    /// Types and shapes: nothing but the payload travels.
    #[default]
    Known,
    /// Nothing but a tag, which must be the receiver's: a header with types and shapes travels first.
    Described {
        /// A number that tells this bundle from others between the two ranks: a micro-batch, for example.
        tag: u64,
    },
}

/// One or more tensors that travel as one payload, each at a multiple of 256 bytes; on a GPU all of one queue.
///
/// A tensor alone, [`Received`] tensors and a [`GradientBuffer`] are sent from where they lie, and so are tensors in device memory of which each
/// begins where the one before ends and at such a multiple; others are copied together.
#[derive(Clone, Debug)]
pub struct Bundle<'a, M: BundleMemory = Host> {
    pub(super) shapes: Shapes,
    specs: Cow<'a, [TensorSpec]>,
    layout: Cow<'a, BundleLayout>,
    content: Content<'a, M>,
}

#[derive(Clone, Debug)]
enum Content<'a, M: Memory> {
    /// Tensors that have to be copied to their places.
    Apart(Vec<M::Wire<'a>>),
    /// The bytes of the payload.
    Lying(M::Wire<'a>),
}

impl<'a, M: BundleMemory> Bundle<'a, M> {
    /// Tensors whose shapes the receiver knows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no tensors, tensors of different queues, or more than the address space holds.
    pub fn new(tensors: impl IntoIterator<Item: Into<WireTensor<'a, M>>>) -> Result<Self> {
        let tensors: Vec<WireTensor<'a, M>> = tensors.into_iter().map(Into::into).collect();
        let specs: Vec<TensorSpec> = tensors.iter().map(WireTensor::spec).collect();
        let layout = layout(OPERATION, &specs)?;
        let tensors: Vec<M::Wire<'a>> = tensors.iter().map(WireTensor::data).collect();
        tensors.iter().try_for_each(|tensor| M::check_same_queue(OPERATION, tensors[0], *tensor))?;
        let content = M::lying(&tensors, &layout.places).map_or(Content::Apart(tensors), Content::Lying);
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// All tensors of a gradient buffer, in its order.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_buffer(buffer: &'a GradientBuffer<M>) -> Result<Self> {
        let of_tensor = |index| spec(buffer.dtype().into(), buffer.shape(index));
        let specs: Vec<TensorSpec> = (0..buffer.tensor_count()).map(of_tensor).collect();
        let layout = layout(OPERATION, &specs)?;
        // Places are rounded up alike in both.
        let content = Content::Lying(M::byte_range(buffer.as_slice().into(), 0..layout.len));
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// Sends shapes along, for a receiver that does not know them and expects this tag.
    #[must_use]
    pub fn described(self, tag: u64) -> Self {
        Self { shapes: Shapes::Described { tag }, ..self }
    }

    /// The types and shapes.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// Bytes of the payload.
    pub fn len_bytes(&self) -> usize {
        self.layout.len
    }

    /// The queue that work on the tensors is ordered on.
    pub fn queue(&self) -> &'a M::Queue {
        M::queue(match &self.content {
            Content::Apart(tensors) => tensors[0],
            Content::Lying(payload) => *payload,
        })
    }

    /// The tensors copied together, unless they lie in memory as they travel.
    pub(super) fn packed(&self) -> Result<Option<M::Payload>> {
        let Content::Apart(tensors) = &self.content else { return Ok(None) };
        let mut payload = M::allocate("send", self.queue(), self.layout.len)?;
        M::pack(&mut payload, &self.layout.places, tensors)?;
        Ok(Some(payload))
    }

    /// The bytes to send: of tensors that lie apart, those that were [`packed`](Self::packed).
    pub(super) fn payload<'p>(&'p self, packed: &'p Option<M::Payload>) -> M::Wire<'p> {
        match (&self.content, packed) {
            (Content::Lying(payload), _) => M::byte_range(*payload, 0..self.layout.len),
            (Content::Apart(_), packed) => {
                let packed = packed.as_ref().expect("tensors that lie apart were packed");
                M::at(packed, 0..self.layout.len, DataType::U8)
            }
        }
    }
}

const OPERATION: &str = "tensor bundle";

impl<'a, M: BundleMemory> From<&'a Received<M>> for Bundle<'a, M> {
    /// To pass on, from where it lies.
    fn from(received: &'a Received<M>) -> Self {
        Self {
            shapes: Shapes::Known,
            specs: received.specs[..].into(),
            layout: Cow::Borrowed(&received.layout),
            content: Content::Lying(M::at(&received.payload, 0..received.layout.len, DataType::U8)),
        }
    }
}

/// The receiver's expectation of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// Types and shapes, which the sender must have too: the length of the payload is all that is compared.
    Known(Vec<TensorSpec>),
    /// Nothing but the tag. The sender describes what comes, and what exceeds the limits is refused.
    Described {
        /// The sender's tag.
        tag: u64,
        /// The limits of an accepted bundle.
        limits: Limits,
    },
}

impl Expected {
    /// Types and shapes.
    pub fn known(tensors: impl IntoIterator<Item = (DataType, Vec<usize>)>) -> Self {
        Expected::Known(tensors.into_iter().map(|(dtype, shape)| spec(dtype, &shape)).collect())
    }

    /// Anything within the default [`Limits`].
    pub fn described(tag: u64) -> Self {
        Expected::Described { tag, limits: Limits::default() }
    }
}

/// Tensors that have come, or on a GPU are coming in the order of their queue, from a peer. Owns the payload, in which they lie as they travelled.
#[must_use = "it owns the tensors that have come"]
pub struct Received<M: BundleMemory = Host> {
    specs: Vec<TensorSpec>,
    shapes: Vec<Vec<usize>>,
    layout: BundleLayout,
    payload: M::Payload,
}

impl<M: BundleMemory> Received<M> {
    /// Memory for tensors that are still to come.
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

    /// Never: there is at least one.
    pub fn is_empty(&self) -> bool {
        self.specs.is_empty()
    }

    /// The types and shapes.
    pub fn specs(&self) -> &[TensorSpec] {
        &self.specs
    }

    /// Tensor `index`, where it lies, at a multiple of 256 bytes; panics past the last.
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

    /// Copies the tensors to where they are wanted; lengths agree.
    pub(super) fn unpack(&self, tensors: Vec<&mut M::WireMut<'_>>) -> Result<()> {
        M::unpack(&self.payload, &self.layout.places, tensors)
    }
}

#[cfg(feature = "cuda")]
impl Received<crate::memory::Cuda> {
    /// Waits for the queue and copies the tensors to the host's memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], and [`Error::Cuda`] for any work in the queue that failed.
    /// Whether the transfer did is for [`Completion::wait`](super::Completion::wait) to say, before.
    pub fn to_host(&self) -> Result<Received> {
        let mut host: Received = Received::reserve("copy to host", &(), self.specs.clone(), self.layout.clone())?;
        let words = host.payload.as_mut_slice();
        // SAFETY: as many words as the payload was rounded up to when the buffer was made.
        let payload = unsafe {
            let view = self.payload.as_slice();
            crate::driver::DeviceSlice::from_raw_parts(view.queue(), view.address(), words.dtype(), words.len())
        };
        payload.copy_to_host(words)?;
        Ok(host)
    }
}

/// Types and shapes; never the elements.
impl<M: BundleMemory> std::fmt::Debug for Received<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Received").field("specs", &self.specs).finish_non_exhaustive()
    }
}

/// The places of tensors in a payload.
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

/// The dimensions as the rest of the program counts them.
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
