//! Transfers in host memory: the CPU packs and unpacks payloads.

use std::ops::Range;

use super::{BundleMemory, check_lens};
use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Host, HostBuffer};
use crate::slice::{Slice, SliceMut};

impl BundleMemory for Host {
    type End = ();
    type Workspace = ();

    fn queue<'a>(_: Self::Slice<'a>) -> &'a () {
        &()
    }

    fn check_queue(_: &'static str, (): &(), (): &()) -> Result<()> {
        Ok(())
    }

    fn part<'s, 'l: 's>(memory: Self::Slice<'l>, bytes: Range<usize>, dtype: DType) -> Self::Slice<'s> {
        Slice::of_bytes(dtype, &memory.as_bytes()[bytes])
    }

    fn contiguous<'a>(tensors: &[Self::Slice<'a>], ranges: &[Range<usize>]) -> Option<Self::Slice<'a>> {
        check_lens(tensors.iter().map(|tensor| tensor.as_bytes().len()), ranges);
        let [only] = tensors else { return None };
        Some(only.as_bytes().into())
    }

    fn contiguous_mut<'a>(
        mut tensors: Vec<Self::SliceMut<'a>>,
        ranges: &[Range<usize>],
    ) -> Result<Self::SliceMut<'a>, Vec<Self::SliceMut<'a>>> {
        check_lens(tensors.iter().map(|tensor| tensor.as_slice().as_bytes().len()), ranges);
        match (tensors.len(), tensors.pop()) {
            (1, Some(only)) => Ok(only.as_bytes_mut().into()),
            (_, last) => Err(tensors.into_iter().chain(last).collect()),
        }
    }

    fn allocate(operation: &'static str, _: &(), bytes: usize) -> Result<HostBuffer> {
        HostBuffer::zeroed(operation, DType::F64, bytes.div_ceil(DType::F64.size_bytes()))
    }

    fn bytes_mut(payload: &mut HostBuffer, bytes: usize) -> SliceMut<'_> {
        SliceMut::from(&mut payload.as_mut_slice().as_bytes_mut()[..bytes])
    }

    fn pack(payload: &mut HostBuffer, ranges: &[Range<usize>], tensors: &[Slice<'_>]) -> Result<()> {
        check_lens(tensors.iter().map(|tensor| tensor.as_bytes().len()), ranges);
        let bytes = payload.as_mut_slice().as_bytes_mut();
        ranges.iter().zip(tensors).for_each(|(range, data)| bytes[range.clone()].copy_from_slice(data.as_bytes()));
        Ok(())
    }

    fn unpack(payload: &HostBuffer, ranges: &[Range<usize>], tensors: Vec<Self::SliceMut<'_>>) -> Result<()> {
        check_lens(tensors.iter().map(|tensor| tensor.as_slice().as_bytes().len()), ranges);
        let bytes = payload.as_slice().as_bytes();
        ranges.iter().zip(tensors).for_each(|(range, data)| data.as_bytes_mut().copy_from_slice(&bytes[range.clone()]));
        Ok(())
    }

    fn reserve(_: &(), (): &mut (), _: usize) -> Result<()> {
        Ok(())
    }

    fn exchange_words(
        comm: &dyn Communicator,
        (): &mut (),
        sends: &[(usize, Vec<u64>)],
        receives: &mut [(usize, Vec<u64>)],
    ) -> Result<()> {
        let sends: Vec<_> = sends.iter().map(|(peer, words)| (*peer, words.into())).collect();
        let mut receives: Vec<_> = receives.iter_mut().map(|(peer, words)| (*peer, words.into())).collect();
        comm.exchange(&sends, &mut receives)
    }

    fn end(_: &()) -> Result<()> {
        Ok(())
    }

    fn has_passed(_: &()) -> Result<bool> {
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pack_and_unpack_refuse_other_ranges_than_the_tensors() {
        let tensors = [[1.0f32, 2.0], [3.0, 4.0]];
        let slices = || tensors.iter().map(Slice::from).collect::<Vec<_>>();
        let pack = |ranges: &[Range<usize>]| {
            let mut payload = Host::allocate("a test", &(), 16)?;
            Host::pack(&mut payload, ranges, &slices())?;
            Ok::<_, crate::Error>(payload)
        };
        let payload = pack(&[0..8, 8..16]).unwrap();
        for ranges in [vec![0..8], vec![0..8, 8..12], vec![0..8, 8..16, 16..16], vec![0..8, 16..24]] {
            let mut room = tensors;
            let unpack = || Host::unpack(&payload, &ranges, room.iter_mut().map(SliceMut::from).collect());
            assert!(std::panic::catch_unwind(|| pack(&ranges)).is_err(), "{ranges:?}");
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(unpack)).is_err(), "{ranges:?}");
        }
    }
}
