//! Transfers in host memory: the CPU packs and unpacks payloads.

use std::ops::Range;

use super::BundleMemory;
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

    fn contiguous<'a>(tensors: &[Self::Slice<'a>], _: &[Range<usize>]) -> Option<Self::Slice<'a>> {
        let [only] = tensors else { return None };
        Some(only.as_bytes().into())
    }

    fn contiguous_mut<'a>(
        mut tensors: Vec<Self::SliceMut<'a>>,
        _: &[Range<usize>],
    ) -> Result<Self::SliceMut<'a>, Vec<Self::SliceMut<'a>>> {
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
        let bytes = payload.as_mut_slice().as_bytes_mut();
        ranges.iter().zip(tensors).for_each(|(range, data)| bytes[range.clone()].copy_from_slice(data.as_bytes()));
        Ok(())
    }

    fn unpack(payload: &HostBuffer, ranges: &[Range<usize>], tensors: Vec<Self::SliceMut<'_>>) -> Result<()> {
        let bytes = payload.as_slice().as_bytes();
        ranges.iter().zip(tensors).for_each(|(range, data)| data.as_bytes_mut().copy_from_slice(&bytes[range.clone()]));
        Ok(())
    }

    fn reserve(_: &(), (): &mut (), _: usize) -> Result<()> {
        Ok(())
    }

    fn exchange_words(
        comm: &dyn Communicator,
        _: &(),
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
