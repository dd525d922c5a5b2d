//! [`DeviceBundle`], what is sent, and [`DeviceReceived`], what has come: payloads in device memory.
//!
//! Packing and unpacking are put into the queue: tensors of whole 4-byte words by one launch, others by a copy each. Nothing here
//! communicates or waits.

use std::borrow::Cow;

use super::tensor::{DeviceTensorView, DeviceTensorViewMut};
use crate::DeviceGradientBuffer;
use crate::comm::RawSlice;
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::{DType, DataType};
use crate::error::Result;
use crate::kernels::cuda::{pack, unpack};
use crate::ops::send_recv::{Received, Shapes, layout, spec, usize_shapes};
use crate::plan::bundle::{BundleLayout, Header, TensorSpec};

const WORD: usize = 4;

/// One or more tensors that travel as one payload, each at a multiple of 256 bytes; all of one queue.
///
/// A tensor alone, tensors of which each begins where the one before ends and at such a multiple, what has been
/// [received](DeviceReceived) and a [`DeviceGradientBuffer`] are sent from where they lie; others are copied together.
#[derive(Clone, Debug)]
pub struct DeviceBundle<'a> {
    pub(super) shapes: Shapes,
    specs: Cow<'a, [TensorSpec]>,
    layout: Cow<'a, BundleLayout>,
    queue: &'a Queue,
    content: Content<'a>,
}

#[derive(Clone, Debug)]
enum Content<'a> {
    Apart(Vec<DeviceTensorView<'a>>),
    /// The address of the payload.
    Laid(u64),
}

impl<'a> DeviceBundle<'a> {
    /// Tensors whose shapes the receiver knows.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no tensors, tensors of different queues, or more than the address
    /// space holds.
    pub fn new(tensors: impl IntoIterator<Item: Into<DeviceTensorView<'a>>>) -> Result<Self> {
        let tensors: Vec<DeviceTensorView<'a>> = tensors.into_iter().map(Into::into).collect();
        let specs: Vec<TensorSpec> = tensors.iter().map(DeviceTensorView::spec).collect();
        let layout = layout("tensor bundle", &specs)?;
        let queue = tensors[0].queue();
        tensors.iter().try_for_each(|tensor| queue.check_same("tensor bundle", tensor.queue()))?;
        let bytes: Vec<RawSlice> = tensors.iter().map(DeviceTensorView::bytes).collect();
        let content = payload_of(&bytes, &layout).map_or(Content::Apart(tensors), Content::Laid);
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), queue, content })
    }

    /// All tensors of a gradient buffer, in its order.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_buffer(buffer: &'a DeviceGradientBuffer) -> Result<Self> {
        let table = buffer.table();
        let specs: Vec<TensorSpec> =
            (0..table.tensor_count()).map(|index| spec(table.dtype().into(), table.shape(index))).collect();
        // Places are rounded up alike in both.
        let layout = layout("tensor bundle", &specs)?;
        let content = Content::Laid(buffer.as_slice().address());
        let queue = buffer.queue();
        Ok(Self { shapes: Shapes::Known, specs: specs.into(), layout: Cow::Owned(layout), queue, content })
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

    /// The queue that work on the tensors is ordered on.
    pub fn queue(&self) -> &'a Queue {
        self.queue
    }

    /// The payload, and the memory that it has been copied to, if need be, which must be kept until it has been sent.
    pub(super) fn payload(&self) -> Result<(RawSlice, Option<DeviceBuffer>)> {
        let tensors = match &self.content {
            Content::Laid(address) => return Ok((bytes(*address, self.layout.len), None)),
            Content::Apart(tensors) => tensors,
        };
        let mut packed = scratch(self.queue, self.layout.len)?;
        let (words, rest) = split(tensors.iter().map(DeviceTensorView::bytes), &self.layout);
        let address = packed.as_slice().address();
        for (place, tensor) in rest {
            // SAFETY: the layout has room for the tensor there, in memory of its own.
            unsafe { self.queue.copy_bytes(address + place as u64, tensor.address, tensor.len) }?;
        }
        let offsets: Vec<usize> = words.iter().map(|(place, _)| place / WORD).collect();
        // SAFETY: the tensors' memory, borrowed by this bundle; their number of bytes is a multiple of a word's.
        let sources: Vec<DeviceSlice<'_>> = words.iter().map(|(_, tensor)| unsafe { self.words(*tensor) }).collect();
        pack(packed.as_mut_slice(), &offsets, &sources)?;
        Ok((bytes(address, self.layout.len), Some(packed)))
    }

    /// # Safety
    /// Whole words of device memory of this queue.
    unsafe fn words(&self, data: RawSlice) -> DeviceSlice<'_> {
        // SAFETY: the caller's promise.
        unsafe { DeviceSlice::from_raw_parts(self.queue, data.address, DType::F32, data.len / WORD) }
    }
}

impl<'a> From<&'a DeviceReceived> for DeviceBundle<'a> {
    /// To pass on, from where it lies.
    fn from(received: &'a DeviceReceived) -> Self {
        let view = received.buffer.as_slice();
        Self {
            shapes: Shapes::Known,
            specs: received.specs[..].into(),
            layout: Cow::Borrowed(&received.layout),
            queue: view.queue(),
            content: Content::Laid(view.address()),
        }
    }
}

/// Tensors that have come, or are coming in the order of their queue, from a peer. Owns the payload, in which they lie as they
/// travelled.
#[must_use = "it owns the tensors that have come"]
#[derive(Debug)]
pub struct DeviceReceived {
    specs: Vec<TensorSpec>,
    shapes: Vec<Vec<usize>>,
    layout: BundleLayout,
    buffer: DeviceBuffer,
}

impl DeviceReceived {
    /// Memory for tensors that are still to come.
    pub(super) fn reserve(queue: &Queue, specs: Vec<TensorSpec>, layout: BundleLayout) -> Result<Self> {
        let shapes = usize_shapes("recv", &specs)?;
        let buffer = scratch(queue, layout.len)?;
        Ok(Self { specs, shapes, layout, buffer })
    }

    pub(super) fn of_header(queue: &Queue, header: Header) -> Result<Self> {
        Self::reserve(queue, header.tensors, header.layout)
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
    pub fn tensor(&self, index: usize) -> DeviceTensorView<'_> {
        let (place, dtype) = (&self.layout.places[index], self.specs[index].dtype);
        let view = self.buffer.as_slice();
        let data =
            RawSlice { address: view.address() + place.start as u64, len: place.len() / dtype.size_bytes(), dtype };
        // SAFETY: a part of the buffer, which is borrowed.
        unsafe { DeviceTensorView::from_raw_parts(view.queue(), data, &self.shapes[index][..]) }
            .expect("the layout gave the tensor its shape's bytes")
    }

    /// The tensors, in order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = DeviceTensorView<'_>> {
        (0..self.len()).map(|index| self.tensor(index))
    }

    /// Waits for the queue and copies the tensors to the host's memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory), and [`Error::Cuda`](crate::Error::Cuda) for any work in the queue that failed.
    /// Whether the transfer did is for [`Completion::wait`](super::Completion::wait) to say, before.
    pub fn to_host(&self) -> Result<Received> {
        let mut host = Received::reserve("copy to host", self.specs.clone(), self.layout.clone())?;
        let words = host.words_mut();
        // SAFETY: as many words as the payload was rounded up to when the buffer was made.
        let payload = unsafe {
            let view = self.buffer.as_slice();
            DeviceSlice::from_raw_parts(view.queue(), view.address(), words.dtype(), words.len())
        };
        payload.copy_to_host(words)?;
        Ok(host)
    }

    pub(super) fn payload(&self) -> RawSlice {
        bytes(self.buffer.as_slice().address(), self.layout.len)
    }

    /// Puts copies of the tensors to where they are wanted into the queue; lengths and queues agree.
    pub(super) fn unpack(&self, tensors: &mut [DeviceTensorViewMut<'_>]) -> Result<()> {
        let (payload, queue) = (self.buffer.as_slice(), self.buffer.as_slice().queue());
        let (words, rest) = split(tensors.iter().map(|tensor| tensor.as_tensor().bytes()), &self.layout);
        for (place, tensor) in rest {
            // SAFETY: the tensor lies there in the payload, and is borrowed mutably.
            unsafe { queue.copy_bytes(tensor.address, payload.address() + place as u64, tensor.len) }?;
        }
        let offsets: Vec<usize> = words.iter().map(|(place, _)| place / WORD).collect();
        let destination = |(_, tensor): &(usize, RawSlice)| {
            // SAFETY: the tensor's memory, borrowed mutably; its number of bytes is a multiple of a word's.
            unsafe { DeviceSliceMut::from_raw_parts(queue, tensor.address, DType::F32, tensor.len / WORD) }
        };
        unpack(&mut words.iter().map(destination).collect::<Vec<_>>(), payload, &offsets)
    }
}

/// Where the payload begins, if tensors lie as they would in it and leave no gap, so that it is their memory and no other.
pub(super) fn payload_of(tensors: &[RawSlice], layout: &BundleLayout) -> Option<u64> {
    let is_gapless = layout.places.windows(2).all(|pair| pair[0].end == pair[1].start);
    let begin = |(tensor, place): (&RawSlice, &std::ops::Range<usize>)| tensor.address.checked_sub(place.start as u64);
    let mut begins = tensors.iter().zip(&layout.places).filter(|(tensor, _)| tensor.len > 0).map(begin);
    let first = begins.next().unwrap_or_else(|| tensors.first().map(|tensor| tensor.address))?;
    (is_gapless && begins.all(|begin| begin == Some(first))).then_some(first)
}

/// Tensors with their places in bytes: those of whole words, which one launch copies, and the others.
#[expect(clippy::type_complexity, reason = "two lists of one kind")]
fn split(
    tensors: impl Iterator<Item = RawSlice>,
    layout: &BundleLayout,
) -> (Vec<(usize, RawSlice)>, Vec<(usize, RawSlice)>) {
    let placed = layout.places.iter().map(|place| place.start).zip(tensors).filter(|(_, tensor)| tensor.len > 0);
    placed.partition(|(_, tensor)| tensor.len % WORD == 0 && tensor.address % WORD as u64 == 0)
}

/// Memory for a payload, rounded up to numbers of 8 bytes. What the gaps hold is whatever was there.
fn scratch(queue: &Queue, len: usize) -> Result<DeviceBuffer> {
    let words = len.div_ceil(DType::F64.size_bytes()) * (DType::F64.size_bytes() / WORD);
    DeviceBuffer::allocate(queue, DType::F32, words)
}

fn bytes(address: u64, len: usize) -> RawSlice {
    RawSlice { address, len, dtype: DataType::U8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_found_only_where_there_is_no_gap() {
        let begin = |tensors: &[(u64, usize)]| {
            let layout = BundleLayout::new(&tensors.iter().map(|(_, len)| *len).collect::<Vec<_>>()).unwrap();
            let tensors: Vec<RawSlice> = tensors.iter().map(|&(address, len)| bytes(address, len)).collect();
            payload_of(&tensors, &layout)
        };
        assert_eq!(begin(&[(1001, 300)]), Some(1001));
        assert_eq!(begin(&[(1001, 256), (1257, 512), (1769, 3)]), Some(1001));
        assert_eq!(begin(&[(1001, 256), (1258, 512)]), None);
        // At their places, but between them is memory of somebody else.
        assert_eq!(begin(&[(1024, 255), (1280, 512)]), None);
        // Empty tensors lie anywhere.
        assert_eq!(begin(&[(7, 0), (1024, 256), (9, 0), (1280, 1)]), Some(1024));
        assert_eq!(begin(&[(7, 0), (8, 0)]), Some(7));
        assert_eq!(begin(&[(1024, 255), (9, 0)]), None);
        assert_eq!(begin(&[(1280, 256), (1024, 256)]), None);
        assert_eq!(begin(&[(1024, 256), (5, 1)]), None);
    }
}
