//! Transfers in the memory of a GPU. Packing and unpacking are enqueued: tensors of whole 4-byte words in one launch, others in one copy
//! each. Small messages of the host are copied through device memory.

use std::ops::Range;

use super::{BundleMemory, check_lens};
use crate::comm::Communicator;
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Event, Queue};
use crate::dtype::DType;
use crate::error::Result;
use crate::kernels::cuda::{pack, unpack};
use crate::memory::Cuda;
use crate::slice::{Slice, SliceMut};

/// The size of the element in which one launch copies.
const WORD: usize = 4;

impl BundleMemory for Cuda {
    type End = Event;
    /// Memory of `f64`, as which words are copied. Sent messages are in front of received ones.
    type Workspace = Option<DeviceBuffer>;

    fn queue<'a>(data: Self::Slice<'a>) -> &'a Queue {
        data.queue()
    }

    fn check_queue(operation: &'static str, queue: &Queue, other: &Queue) -> Result<()> {
        queue.check_same(operation, other)
    }

    fn part<'s, 'l: 's>(memory: Self::Slice<'l>, bytes: Range<usize>, dtype: DType) -> Self::Slice<'s> {
        assert!(bytes.start <= bytes.end && bytes.end <= memory.size_bytes(), "bytes {bytes:?} of {memory:?}");
        let address = memory.address() + bytes.start as u64;
        assert!(address % dtype.size_bytes() as u64 == 0, "{dtype} at bytes {bytes:?} of {memory:?}");
        // SAFETY: a part of the elements, at an address of their type.
        unsafe { DeviceSlice::from_raw_parts(memory.queue(), address, dtype, bytes.len() / dtype.size_bytes()) }
    }

    fn contiguous<'a>(tensors: &[Self::Slice<'a>], ranges: &[Range<usize>]) -> Option<Self::Slice<'a>> {
        let bytes: Vec<Bytes> = tensors.iter().map(|tensor| Bytes::of(*tensor)).collect();
        let Bytes { address, len } = payload_of(&bytes, ranges)?;
        // SAFETY: the range consists of the tensors' memory.
        Some(unsafe { DeviceSlice::from_raw_parts(tensors.first()?.queue(), address, DType::U8, len) })
    }

    fn contiguous_mut<'a>(
        tensors: Vec<Self::SliceMut<'a>>,
        ranges: &[Range<usize>],
    ) -> Result<Self::SliceMut<'a>, Vec<Self::SliceMut<'a>>> {
        let bytes: Vec<Bytes> = tensors.iter().map(|tensor| Bytes::of(tensor.as_slice())).collect();
        match (payload_of(&bytes, ranges), tensors.first()) {
            (Some(Bytes { address, len }), Some(first)) => {
                // SAFETY: the range consists of the tensors' memory, which is borrowed mutably.
                Ok(unsafe { DeviceSliceMut::from_raw_parts(first.queue(), address, DType::U8, len) })
            }
            _ => Err(tensors),
        }
    }

    /// The contents of the gaps are unspecified.
    fn allocate(_: &'static str, queue: &Queue, bytes: usize) -> Result<DeviceBuffer> {
        // The size is a multiple of 8 bytes, like the size of the host's payloads, to which this one is copied.
        DeviceBuffer::allocate(queue, DType::F32, bytes.div_ceil(DType::F64.size_bytes()) * 2)
    }

    fn bytes_mut(payload: &mut DeviceBuffer, bytes: usize) -> DeviceSliceMut<'_> {
        let view = payload.as_slice();
        assert!(bytes <= view.size_bytes(), "{bytes} bytes of {view:?}");
        // SAFETY: a part of the buffer, which is borrowed mutably.
        unsafe { DeviceSliceMut::from_raw_parts(view.queue(), view.address(), DType::U8, bytes) }
    }

    fn pack(payload: &mut DeviceBuffer, ranges: &[Range<usize>], tensors: &[DeviceSlice<'_>]) -> Result<()> {
        let (queue, address) = (payload.as_slice().queue().clone(), payload.as_slice().address());
        let (words, rest) = split(tensors.iter().copied(), ranges, payload.as_slice());
        for (offset, tensor) in rest {
            // SAFETY: `split` has checked that the payload has a range for the tensor there; it is memory of its own.
            unsafe { queue.copy_bytes(address + offset as u64, tensor.address, tensor.len) }?;
        }
        let offsets: Vec<usize> = words.iter().map(|(offset, _)| offset / WORD).collect();
        let source = |(_, tensor): &(usize, Bytes)| {
            // SAFETY: the tensor's memory, which is borrowed; its length in bytes is a multiple of a word.
            unsafe { DeviceSlice::from_raw_parts(&queue, tensor.address, DType::F32, tensor.len / WORD) }
        };
        pack(payload.as_mut_slice(), &offsets, &words.iter().map(source).collect::<Vec<_>>())
    }

    fn unpack(payload: &DeviceBuffer, ranges: &[Range<usize>], tensors: Vec<Self::SliceMut<'_>>) -> Result<()> {
        let (payload, queue) = (payload.as_slice(), payload.as_slice().queue());
        let (words, rest) = split(tensors.iter().map(|tensor| tensor.as_slice()), ranges, payload);
        for (offset, tensor) in rest {
            // SAFETY: `split` has checked that the payload has the tensor at that offset; the tensor is borrowed mutably.
            unsafe { queue.copy_bytes(tensor.address, payload.address() + offset as u64, tensor.len) }?;
        }
        let offsets: Vec<usize> = words.iter().map(|(offset, _)| offset / WORD).collect();
        let destination = |(_, tensor): &(usize, Bytes)| {
            // SAFETY: the tensor's memory, borrowed mutably; its length in bytes is a multiple of a word.
            unsafe { DeviceSliceMut::from_raw_parts(queue, tensor.address, DType::F32, tensor.len / WORD) }
        };
        unpack(&mut words.iter().map(destination).collect::<Vec<_>>(), payload, &offsets)
    }

    fn reserve(queue: &Queue, workspace: &mut Option<DeviceBuffer>, words: usize) -> Result<()> {
        if words > workspace.as_ref().map_or(0, |buffer| buffer.as_slice().len()) {
            *workspace = Some(DeviceBuffer::allocate(queue, DType::F64, words)?);
        }
        Ok(())
    }

    fn exchange_words(
        comm: &dyn Communicator<Cuda>,
        workspace: &mut Option<DeviceBuffer>,
        sends: &[(usize, Vec<u64>)],
        receives: &mut [(usize, Vec<u64>)],
    ) -> Result<()> {
        let sent: Vec<f64> = sends.iter().flat_map(|(_, words)| words).map(|&word| f64::from_bits(word)).collect();
        let received: usize = receives.iter().map(|(_, words)| words.len()).sum();
        let room = workspace.as_ref().map_or(0, |buffer| buffer.as_slice().len());
        assert!(sent.len() + received <= room, "{} and {received} words in a workspace of {room}", sent.len());
        let Some(workspace) = workspace else { return Ok(()) };
        if !sent.is_empty() {
            workspace.as_mut_slice().range_mut(0..sent.len()).upload(Slice::from(&sent))?;
        }
        let mut address = workspace.as_slice().address();
        let mut message = |(peer, words): &(usize, Vec<u64>)| {
            let begin = address;
            address += (words.len() * size_of::<u64>()) as u64;
            (*peer, begin, words.len())
        };
        let queue = &workspace.as_slice().queue().clone();
        // SAFETY: the workspace has room for all messages, which do not overlap, and returns to this queue when it is dropped.
        unsafe {
            let outgoing = sends.iter().map(&mut message);
            let outgoing = outgoing
                .map(|(peer, address, len)| (peer, DeviceSlice::from_raw_parts(queue, address, DType::U64, len)));
            let outgoing: Vec<_> = outgoing.collect();
            let incoming = receives.iter().map(&mut message);
            let incoming = incoming
                .map(|(peer, address, len)| (peer, DeviceSliceMut::from_raw_parts(queue, address, DType::U64, len)));
            comm.exchange(&outgoing, &mut incoming.collect::<Vec<_>>())?;
        }
        if receives.is_empty() {
            return Ok(());
        }
        // Reports whether the exchange succeeded: after a failure, the memory is unspecified.
        comm.synchronize(queue)?;
        let mut words = vec![0.0; received];
        workspace.as_slice().range(sent.len()..sent.len() + received).copy_to_host(SliceMut::from(&mut words))?;
        let mut words = words.into_iter().map(f64::to_bits);
        receives.iter_mut().flat_map(|(_, message)| message).zip(&mut words).for_each(|(to, word)| *to = word);
        Ok(())
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

/// The bytes of a tensor.
#[derive(Clone, Copy)]
struct Bytes {
    address: u64,
    len: usize,
}

impl Bytes {
    fn of(data: DeviceSlice<'_>) -> Self {
        Self { address: data.address(), len: data.size_bytes() }
    }
}

/// The range of the payload, if the tensors already have its layout without gaps, so that it consists of their memory alone. Panics as
/// [`check_lens`].
fn payload_of(tensors: &[Bytes], ranges: &[Range<usize>]) -> Option<Bytes> {
    check_lens(tensors.iter().map(|tensor| tensor.len), ranges);
    assert!(ranges.first().is_none_or(|range| range.start == 0), "a payload without its beginning: {ranges:?}");
    let is_gapless = ranges.windows(2).all(|pair| pair[0].end == pair[1].start);
    let begin = |(tensor, range): (&Bytes, &Range<usize>)| tensor.address.checked_sub(range.start as u64);
    let mut begins = tensors.iter().zip(ranges).filter(|(tensor, _)| tensor.len > 0).map(begin);
    let address = begins.next().unwrap_or_else(|| tensors.first().map(|tensor| tensor.address))?;
    let is_one = is_gapless && begins.all(|begin| begin == Some(address));
    is_one.then(|| Bytes { address, len: ranges.last().map_or(0, |range| range.end) })
}

/// Splits tensors, as bytes with their offsets in a payload, into tensors of whole words, which one launch copies, and others. Panics as
/// [`check_lens`], and for a range that leaves the payload.
#[expect(clippy::type_complexity, reason = "two lists of one kind")]
fn split<'a>(
    tensors: impl Iterator<Item = DeviceSlice<'a>>,
    ranges: &[Range<usize>],
    payload: DeviceSlice<'_>,
) -> (Vec<(usize, Bytes)>, Vec<(usize, Bytes)>) {
    let tensors: Vec<Bytes> = tensors.map(Bytes::of).collect();
    check_lens(tensors.iter().map(|tensor| tensor.len), ranges);
    let leaves = ranges.iter().find(|range| range.end > payload.size_bytes());
    assert!(leaves.is_none(), "{leaves:?} of a payload of {} bytes", payload.size_bytes());
    let placed = ranges.iter().map(|range| range.start).zip(tensors).filter(|(_, tensor)| tensor.len > 0);
    placed.partition(|(_, tensor)| tensor.len % WORD == 0 && tensor.address % WORD as u64 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::bundle::BundleLayout;

    #[test]
    fn payload_of_tensors_is_found_without_gaps_alone() {
        let begin = |tensors: &[(u64, usize)]| {
            let layout = BundleLayout::new(&tensors.iter().map(|(_, len)| *len).collect::<Vec<_>>()).unwrap();
            let raw = |&(address, len): &(u64, usize)| Bytes { address, len };
            let payload = payload_of(&tensors.iter().map(raw).collect::<Vec<_>>(), &layout.ranges)?;
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

    /// A view of such a payload would reach beyond the tensors.
    #[test]
    fn payload_of_refuses_other_ranges_than_the_tensors() {
        let tensors = [Bytes { address: 1024, len: 4 }, Bytes { address: 1028, len: 4 }];
        assert!(payload_of(&tensors, &[0..4, 4..8]).is_some_and(|payload| payload.len == 8));
        for ranges in [vec![0..4, 4..1000], vec![0..8], vec![8..12, 12..16], vec![0..4, 4..8, 8..8]] {
            let outcome = std::panic::catch_unwind(|| payload_of(&tensors, &ranges));
            assert!(outcome.is_err(), "{ranges:?}");
        }
    }
}
