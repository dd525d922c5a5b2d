//! Transfers in the memory of a GPU. Packing and unpacking are enqueued: tensors of whole 4-byte words in one launch, others in one copy
//! each. Small messages of the host are copied through device memory.

use std::cell::RefCell;
use std::ops::Range;

use super::BundleMemory;
use crate::comm::Communicator;
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Event, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{pack, unpack};
use crate::memory::{Cuda, DeviceWireSlice, DeviceWireSliceMut, RawSlice};
use crate::ops::send_recv::negotiation::{Messages, padded_len};
use crate::slice::{Slice, SliceMut};

/// The size of the element in which one launch copies.
const WORD: usize = 4;

impl BundleMemory for Cuda {
    type Payload = DeviceBuffer;
    type End = Event;

    fn queue<'a>(data: Self::Wire<'a>) -> &'a Queue {
        data.queue()
    }

    fn check_queue(operation: &'static str, queue: &Queue, other: &Queue) -> Result<()> {
        queue.check_same(operation, other)
    }

    fn reborrow_wire<'a>(data: &'a mut DeviceWireSliceMut<'_>) -> DeviceWireSliceMut<'a> {
        // SAFETY: the same elements, which are borrowed mutably.
        unsafe { DeviceWireSliceMut::from_raw_parts(data.queue(), data.raw()) }
    }

    fn byte_range<'s, 'l: 's>(data: Self::Wire<'l>, range: Range<usize>) -> Self::Wire<'s> {
        // SAFETY: a part of the elements.
        unsafe { DeviceWireSlice::from_raw_parts(data.queue(), bytes_of(data.raw()).range(range.start, range.len())) }
    }

    fn split_bytes<'a>(data: Self::WireMut<'a>, at: usize) -> (Self::WireMut<'a>, Self::WireMut<'a>) {
        let (queue, bytes) = (data.queue(), bytes_of(data.raw()));
        // SAFETY: two disjoint parts of the elements, which replace the whole.
        unsafe {
            (
                DeviceWireSliceMut::from_raw_parts(queue, bytes.range(0, at)),
                DeviceWireSliceMut::from_raw_parts(queue, bytes.range(at, bytes.len - at)),
            )
        }
    }

    fn lying<'a>(tensors: &[Self::Wire<'a>], places: &[Range<usize>]) -> Option<Self::Wire<'a>> {
        let raw: Vec<RawSlice> = tensors.iter().map(|tensor| bytes_of(tensor.raw())).collect();
        let payload = payload_of(&raw, places)?;
        // SAFETY: the range consists of the tensors' memory.
        Some(unsafe { DeviceWireSlice::from_raw_parts(tensors.first()?.queue(), payload) })
    }

    fn lying_mut<'a, 't>(
        tensors: Vec<&'a mut Self::WireMut<'t>>,
        places: &[Range<usize>],
    ) -> Result<Self::WireMut<'a>, Vec<&'a mut Self::WireMut<'t>>> {
        let raw: Vec<RawSlice> = tensors.iter().map(|tensor| bytes_of(tensor.raw())).collect();
        match (payload_of(&raw, places), tensors.first()) {
            // SAFETY: the range consists of the tensors' memory, which is borrowed mutably.
            (Some(payload), Some(first)) => Ok(unsafe { DeviceWireSliceMut::from_raw_parts(first.queue(), payload) }),
            _ => Err(tensors),
        }
    }

    /// The contents of the gaps are unspecified.
    fn allocate(_: &'static str, queue: &Queue, bytes: usize) -> Result<DeviceBuffer> {
        // The size is a multiple of 8 bytes, like the size of the host's payloads, to which this one is copied.
        DeviceBuffer::allocate(queue, DType::F32, bytes.div_ceil(DType::F64.size_bytes()) * 2)
    }

    fn at<'a>(payload: &'a DeviceBuffer, place: Range<usize>, dtype: DType) -> Self::Wire<'a> {
        let view = payload.as_slice();
        let address = view.address() + place.start as u64;
        let data = RawSlice { address, len: place.len() / dtype.size_bytes(), dtype };
        // SAFETY: a part of the buffer, which is borrowed.
        unsafe { DeviceWireSlice::from_raw_parts(view.queue(), data) }
    }

    fn bytes_mut(payload: &mut DeviceBuffer, bytes: usize) -> DeviceWireSliceMut<'_> {
        let view = payload.as_slice();
        let data = RawSlice { address: view.address(), len: bytes, dtype: DType::U8 };
        // SAFETY: a part of the buffer, which is borrowed mutably.
        unsafe { DeviceWireSliceMut::from_raw_parts(view.queue(), data) }
    }

    fn pack(payload: &mut DeviceBuffer, places: &[Range<usize>], tensors: &[DeviceWireSlice<'_>]) -> Result<()> {
        let (queue, address) = (payload.as_slice().queue().clone(), payload.as_slice().address());
        let (words, rest) = split(tensors.iter().map(DeviceWireSlice::raw), places);
        for (place, tensor) in rest {
            // SAFETY: the layout has a range for the tensor there, and the payload is memory of its own.
            unsafe { queue.copy_bytes(address + place as u64, tensor.address, tensor.len) }?;
        }
        let offsets: Vec<usize> = words.iter().map(|(place, _)| place / WORD).collect();
        let source = |(_, tensor): &(usize, RawSlice)| {
            // SAFETY: the tensor's memory, which is borrowed; its length in bytes is a multiple of a word.
            unsafe { DeviceSlice::from_raw_parts(&queue, tensor.address, DType::F32, tensor.len / WORD) }
        };
        pack(payload.as_mut_slice(), &offsets, &words.iter().map(source).collect::<Vec<_>>())
    }

    fn unpack(payload: &DeviceBuffer, places: &[Range<usize>], tensors: Vec<&mut Self::WireMut<'_>>) -> Result<()> {
        let (payload, queue) = (payload.as_slice(), payload.as_slice().queue());
        let (words, rest) = split(tensors.iter().map(|tensor| tensor.raw()), places);
        for (place, tensor) in rest {
            // SAFETY: the payload has the tensor at that offset; the tensor is borrowed mutably.
            unsafe { queue.copy_bytes(tensor.address, payload.address() + place as u64, tensor.len) }?;
        }
        let offsets: Vec<usize> = words.iter().map(|(place, _)| place / WORD).collect();
        let destination = |(_, tensor): &(usize, RawSlice)| {
            // SAFETY: the tensor's memory, borrowed mutably; its length in bytes is a multiple of a word.
            unsafe { DeviceSliceMut::from_raw_parts(queue, tensor.address, DType::F32, tensor.len / WORD) }
        };
        unpack(&mut words.iter().map(destination).collect::<Vec<_>>(), payload, &offsets)
    }

    fn messages<'c>(comm: &'c dyn Communicator<Cuda>, queue: &'c Queue) -> Box<dyn Messages + 'c> {
        Box::new(Small { comm, queue, out: RefCell::default(), back: RefCell::default() })
    }

    fn end(queue: &Queue) -> Result<Event> {
        let end = queue.event()?;
        end.record()?;
        Ok(end)
    }

    fn has_passed(end: &Event) -> Result<bool> {
        Ok(end.is_done()?)
    }
}

fn bytes_of(data: RawSlice) -> RawSlice {
    RawSlice { address: data.address, len: data.len * data.dtype.size_bytes(), dtype: DType::U8 }
}

/// The range of the payload, if the tensors already have its layout without gaps, so that it consists of their memory alone.
fn payload_of(tensors: &[RawSlice], places: &[Range<usize>]) -> Option<RawSlice> {
    let is_gapless = places.windows(2).all(|pair| pair[0].end == pair[1].start);
    let begin = |(tensor, place): (&RawSlice, &Range<usize>)| tensor.address.checked_sub(place.start as u64);
    let mut begins = tensors.iter().zip(places).filter(|(tensor, _)| tensor.len > 0).map(begin);
    let address = begins.next().unwrap_or_else(|| tensors.first().map(|tensor| tensor.address))?;
    let is_one = is_gapless && begins.all(|begin| begin == Some(address));
    is_one.then(|| RawSlice { address, len: places.last().map_or(0, |place| place.end), dtype: DType::U8 })
}

/// Splits tensors, as bytes with their offsets, into tensors of whole words, which one launch copies, and others.
#[expect(clippy::type_complexity, reason = "two lists of one kind")]
fn split(
    tensors: impl Iterator<Item = RawSlice>,
    places: &[Range<usize>],
) -> (Vec<(usize, RawSlice)>, Vec<(usize, RawSlice)>) {
    let placed = places.iter().map(|place| place.start).zip(tensors.map(bytes_of)).filter(|(_, tensor)| tensor.len > 0);
    placed.partition(|(_, tensor)| tensor.len % WORD == 0 && tensor.address % WORD as u64 == 0)
}

/// Messages in host memory, sent through device memory.
struct Small<'c> {
    comm: &'c dyn Communicator<Cuda>,
    queue: &'c Queue,
    /// The workspace for sent messages, one behind the other, each starting at a whole word; `back` is the workspace for received ones.
    out: RefCell<Option<DeviceBuffer>>,
    back: RefCell<Option<DeviceBuffer>>,
}

/// The size of the words of messages in bytes.
const NUMBER: usize = size_of::<f64>();

impl Small<'_> {
    fn grow(&self, workspace: &RefCell<Option<DeviceBuffer>>, bytes: usize) -> Result<()> {
        let mut workspace = workspace.borrow_mut();
        let capacity = workspace.as_ref().map_or(0, |buffer| buffer.as_slice().len() * NUMBER);
        if bytes > capacity {
            *workspace = Some(DeviceBuffer::allocate(self.queue, DType::F64, bytes.div_ceil(NUMBER))?);
        }
        Ok(())
    }

    /// The ranges of messages in a workspace, from its beginning; it must be large enough.
    fn places(
        workspace: Option<&DeviceBuffer>,
        messages: impl Iterator<Item = (usize, usize)>,
    ) -> Vec<(usize, RawSlice)> {
        let mut address = workspace.map_or(0, |buffer| buffer.as_slice().address());
        let place = |(peer, len): (usize, usize)| {
            let data = RawSlice { address, len, dtype: DType::U8 };
            address += padded_len(len) as u64;
            (peer, data)
        };
        messages.map(place).collect()
    }
}

impl Messages for Small<'_> {
    fn reserve_workspace(&self, sends: usize, receives: usize) -> Result<()> {
        self.grow(&self.out, sends)?;
        self.grow(&self.back, receives)
    }

    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()> {
        if sends.is_empty() && receives.is_empty() {
            return Ok(());
        }
        let mut words: Vec<f64> = Vec::new();
        for (_, message) in sends {
            let begin = words.len();
            words.resize(begin + message.len().div_ceil(NUMBER), 0.0);
            bytemuck::cast_slice_mut(&mut words[begin..])[..message.len()].copy_from_slice(message);
        }
        let received: usize = receives.iter().map(|(_, message)| padded_len(message.len())).sum();
        self.reserve_workspace(words.len() * NUMBER, received)?;
        let (mut out, back) = (self.out.borrow_mut(), self.back.borrow());
        if let Some(out) = out.as_mut().filter(|_| !words.is_empty()) {
            out.as_mut_slice().range_mut(0..words.len()).upload(Slice::from(&words))?;
        }
        let outgoing = Self::places(out.as_ref(), sends.iter().map(|(peer, message)| (*peer, message.len())));
        let incoming = Self::places(back.as_ref(), receives.iter().map(|(peer, message)| (*peer, message.len())));
        // SAFETY: memory of this queue, which returns to it when dropped; messages do not overlap.
        unsafe {
            let wire = |(peer, data)| (peer, DeviceWireSlice::from_raw_parts(self.queue, data));
            let wire_mut = |(peer, data)| (peer, DeviceWireSliceMut::from_raw_parts(self.queue, data));
            let sends: Vec<_> = outgoing.into_iter().map(wire).collect();
            let mut receives: Vec<_> = incoming.into_iter().map(wire_mut).collect();
            self.comm.exchange(&sends, &mut receives)?;
        }
        let Some(back) = back.as_ref().filter(|_| !receives.is_empty()) else { return Ok(()) };
        // Reports whether the exchange succeeded: after a failure, the memory is unspecified.
        self.comm.synchronize(self.queue)?;
        let mut words = vec![0.0; received / NUMBER];
        back.as_slice().range(0..words.len()).copy_to_host(SliceMut::from(&mut words))?;
        let mut rest: &[u8] = bytemuck::cast_slice(&words);
        for (_, message) in receives {
            let (own, behind) = rest.split_at(padded_len(message.len()));
            message.copy_from_slice(&own[..message.len()]);
            rest = behind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bundle::BundleLayout;

    #[test]
    fn a_payload_is_found_only_where_there_is_no_gap() {
        let begin = |tensors: &[(u64, usize)]| {
            let layout = BundleLayout::new(&tensors.iter().map(|(_, len)| *len).collect::<Vec<_>>()).unwrap();
            let raw = |&(address, len): &(u64, usize)| RawSlice { address, len, dtype: DType::U8 };
            let payload = payload_of(&tensors.iter().map(raw).collect::<Vec<_>>(), &layout.places)?;
            assert_eq!(payload.len, layout.len);
            Some(payload.address)
        };
        assert_eq!(begin(&[(1001, 300)]), Some(1001));
        assert_eq!(begin(&[(1001, 256), (1257, 512), (1769, 3)]), Some(1001));
        assert_eq!(begin(&[(1001, 256), (1258, 512)]), None);
        // The offsets match, but there is foreign memory between the tensors.
        assert_eq!(begin(&[(1024, 255), (1280, 512)]), None);
        // Empty tensors may have any address.
        assert_eq!(begin(&[(7, 0), (1024, 256), (9, 0), (1280, 1)]), Some(1024));
        assert_eq!(begin(&[(7, 0), (8, 0)]), Some(7));
        assert_eq!(begin(&[(1024, 255), (9, 0)]), None);
        assert_eq!(begin(&[(1280, 256), (1024, 256)]), None);
        assert_eq!(begin(&[(1024, 256), (5, 1)]), None);
    }
}
