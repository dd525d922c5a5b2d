//! [`Bundle`], what is sent; [`Expected`], what a receiver knows of it; and [`Received`], what has come.
//!
//! They lie in the host's memory. Nothing here communicates.

use std::borrow::Cow;

use super::tensor::{TensorBytes, TensorBytesMut};
use crate::GradientBuffer;
use crate::buffer::Arena;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::plan::bundle::{BundleLayout, Header, Limits, TensorSpec};

/// What the receiver knows of the tensors that it gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shapes {
    /// Types and shapes: nothing but the payload travels.
    #[default]
    Known,
    /// Nothing but a tag, which must be the receiver's: a header with types and shapes travels first.
    Described {
        /// What tells this bundle from others between the two ranks: a micro-batch, for example.
        tag: u64,
    },
}

/// One or more tensors that travel as one payload, each at a multiple of 256 bytes.
///
/// A tensor alone, what has been [`Received`] and a [`GradientBuffer`] are sent from where they lie; others are copied together.
#[derive(Clone, Debug)]
pub struct Bundle<'a> {
    pub(super) shapes: Shapes,
    specs: Cow<'a, [TensorSpec]>,
    layout: Cow<'a, BundleLayout>,
    content: Content<'a>,
}

#[derive(Clone, Debug)]
enum Content<'a> {
    Apart(Vec<TensorBytes<'a>>),
    Laid(&'a [u8]),
}

impl<'a> Bundle<'a> {
    /// Tensors whose shapes the receiver knows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no tensors, or more than the address space holds.
    pub fn new(tensors: impl IntoIterator<Item: Into<TensorBytes<'a>>>) -> Result<Self> {
        let tensors: Vec<TensorBytes<'a>> = tensors.into_iter().map(Into::into).collect();
        let specs: Vec<TensorSpec> = tensors.iter().map(TensorBytes::spec).collect();
        let layout = layout("tensor bundle", &specs)?;
        let content = match &tensors[..] {
            [only] => Content::Laid(only.bytes()),
            _ => Content::Apart(tensors),
        };
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// All tensors of a gradient buffer, in its order.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_buffer(buffer: &'a GradientBuffer) -> Result<Self> {
        let spec = |index| super::tensor::spec(buffer.dtype().into(), buffer.shape(index));
        let specs: Vec<TensorSpec> = (0..buffer.tensor_count()).map(spec).collect();
        let layout = layout("tensor bundle", &specs)?;
        // Places are rounded up alike in both.
        let content = Content::Laid(&buffer.as_slice().as_bytes()[..layout.len]);
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), content })
    }

    /// The same for a receiver that does not know their shapes, and expects this tag.
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

    /// Memory for the payload, where tensors have to be copied together.
    pub(super) fn room(&self, operation: &'static str) -> Result<Room> {
        Ok(Room(match &self.content {
            Content::Laid(_) => None,
            Content::Apart(_) => Some(Memory::new(operation, self.layout.len)?),
        }))
    }

    /// The payload, copied together in the room that [`room`](Self::room) has made for it, if need be.
    pub(super) fn payload(&self, room: Room) -> Payload<'_> {
        match (&self.content, room.0) {
            (Content::Laid(payload), _) => Payload::Lying(payload),
            (Content::Apart(tensors), packed) => {
                let mut packed = packed.expect("room is made for tensors that lie apart");
                let bytes = packed.bytes_mut();
                for (place, tensor) in self.layout.places.iter().zip(tensors) {
                    bytes[place.clone()].copy_from_slice(tensor.bytes());
                }
                Payload::Packed(packed)
            }
        }
    }
}

impl<'a> From<&'a Received> for Bundle<'a> {
    /// To pass on, from where it lies.
    fn from(received: &'a Received) -> Self {
        Self {
            shapes: Shapes::Known,
            specs: received.specs[..].into(),
            layout: Cow::Borrowed(&received.layout),
            content: Content::Laid(received.memory.bytes()),
        }
    }
}

/// Memory for a payload, if it needs any.
pub(super) struct Room(Option<Memory>);

/// Bytes that are ready to be sent.
pub(super) enum Payload<'a> {
    Lying(&'a [u8]),
    Packed(Memory),
}

impl Payload<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Payload::Lying(bytes) => bytes,
            Payload::Packed(memory) => memory.bytes(),
        }
    }
}

/// What a receiver knows of a bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Types and shapes, which the sender must have too: the length of the payload is all that is compared.
    Known(Vec<TensorSpec>),
    /// Nothing but the tag. The sender describes what comes, and what exceeds the limits is refused.
    Described {
        /// The sender's tag.
        tag: u64,
        /// What is accepted.
        limits: Limits,
    },
}

impl Expected {
    /// Types and shapes.
    pub fn known(tensors: impl IntoIterator<Item = (crate::DataType, Vec<usize>)>) -> Self {
        Expected::Known(tensors.into_iter().map(|(dtype, shape)| super::tensor::spec(dtype, &shape)).collect())
    }

    /// Anything within the default [`Limits`].
    pub fn described(tag: u64) -> Self {
        Expected::Described { tag, limits: Limits::default() }
    }
}

/// Tensors that have come from a peer. Owns the payload, in which they lie as they travelled.
#[must_use = "it owns the tensors that have come"]
pub struct Received {
    specs: Vec<TensorSpec>,
    shapes: Vec<Vec<usize>>,
    layout: BundleLayout,
    memory: Memory,
}

impl Received {
    /// Memory for tensors that are still to come.
    pub(crate) fn reserve(operation: &'static str, specs: Vec<TensorSpec>, layout: BundleLayout) -> Result<Self> {
        let shapes = usize_shapes(operation, &specs)?;
        let memory = Memory::new(operation, layout.len)?;
        Ok(Self { specs, shapes, layout, memory })
    }

    pub(super) fn of_header(operation: &'static str, header: Header) -> Result<Self> {
        Self::reserve(operation, header.tensors, header.layout)
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

    /// Tensor `index`, where it lies; panics past the last. It is aligned for its type.
    pub fn tensor(&self, index: usize) -> TensorBytes<'_> {
        let bytes = &self.memory.bytes()[self.layout.places[index].clone()];
        TensorBytes::new(self.specs[index].dtype, &self.shapes[index][..], bytes)
            .expect("the layout gave the tensor its shape's bytes")
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorBytes<'_>> {
        (0..self.len()).map(|index| self.tensor(index))
    }

    pub(super) fn payload_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }

    /// The payload in numbers of 8 bytes, the last of which it may not fill.
    #[cfg(feature = "cuda")]
    pub(crate) fn words_mut(&mut self) -> crate::SliceMut<'_> {
        self.memory.arena.as_mut_slice()
    }

    /// Copies the tensors to where they are wanted; lengths agree.
    pub(super) fn unpack(&self, tensors: &mut [TensorBytesMut<'_>]) {
        for (place, tensor) in self.layout.places.iter().zip(tensors) {
            tensor.bytes_mut().copy_from_slice(&self.memory.bytes()[place.clone()]);
        }
    }
}

/// Types and shapes; never the elements.
impl std::fmt::Debug for Received {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Received").field("specs", &self.specs).finish_non_exhaustive()
    }
}

/// Zeroed bytes, aligned for every type.
pub(super) struct Memory {
    arena: Arena,
    len: usize,
}

impl Memory {
    fn new(operation: &'static str, len: usize) -> Result<Self> {
        Ok(Self { arena: Arena::zeroed(operation, DType::F64, len.div_ceil(DType::F64.size_bytes()))?, len })
    }

    fn bytes(&self) -> &[u8] {
        &self.arena.as_slice().as_bytes()[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.arena.as_mut_slice().as_bytes_mut()[..self.len]
    }
}

/// The places of tensors in a payload.
pub(crate) fn layout(operation: &'static str, specs: &[TensorSpec]) -> Result<BundleLayout> {
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

pub(crate) fn no_tensors(operation: &'static str) -> Error {
    Error::InvalidArgument { operation, reason: "a bundle has at least one tensor".into() }
}

/// The dimensions as the rest of the program counts them.
pub(crate) fn usize_shapes(operation: &'static str, specs: &[TensorSpec]) -> Result<Vec<Vec<usize>>> {
    let shape = |(index, spec): (usize, &TensorSpec)| {
        let dims = spec.dims.iter().map(|&dim| usize::try_from(dim));
        dims.collect::<Result<Vec<usize>, _>>().map_err(|_| Error::InvalidArgument {
            operation,
            reason: format!("tensor {index} exceeds the address space: {spec:?}"),
        })
    };
    specs.iter().enumerate().map(shape).collect()
}
