//! Transfers in host memory: the CPU packs and unpacks payloads.

use std::ops::Range;

use super::BundleMemory;
use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Host, HostBuffer, WireSlice, WireSliceMut};

impl BundleMemory for Host {
    type End = ();
    type Workspace = ();

    fn queue<'a>(_: Self::Wire<'a>) -> &'a () {
        &()
    }

    fn check_queue(_: &'static str, (): &(), (): &()) -> Result<()> {
        Ok(())
    }

    fn reborrow_wire<'a>(data: &'a mut WireSliceMut<'_>) -> WireSliceMut<'a> {
        WireSliceMut::of_bytes(data.as_wire().dtype(), data.bytes_mut())
    }

    fn part<'s, 'l: 's>(memory: Self::Wire<'l>, bytes: Range<usize>, dtype: DType) -> Self::Wire<'s> {
        WireSlice::of_bytes(dtype, &memory.bytes()[bytes])
    }

    fn contiguous<'a>(tensors: &[Self::Wire<'a>], _: &[Range<usize>]) -> Option<Self::Wire<'a>> {
        let [only] = tensors else { return None };
        Some(only.bytes().into())
    }

    fn contiguous_mut<'a, 't>(
        mut tensors: Vec<&'a mut Self::WireMut<'t>>,
        _: &[Range<usize>],
    ) -> Result<Self::WireMut<'a>, Vec<&'a mut Self::WireMut<'t>>> {
        match (tensors.len(), tensors.pop()) {
            (1, Some(only)) => Ok(only.bytes_mut().into()),
            (_, last) => Err(tensors.into_iter().chain(last).collect()),
        }
    }

    fn allocate(operation: &'static str, _: &(), bytes: usize) -> Result<HostBuffer> {
        HostBuffer::zeroed(operation, DType::F64, bytes.div_ceil(DType::F64.size_bytes()))
    }

    fn bytes_mut(payload: &mut HostBuffer, bytes: usize) -> WireSliceMut<'_> {
        WireSliceMut::from(&mut payload.as_mut_slice().as_bytes_mut()[..bytes])
    }

    fn pack(payload: &mut HostBuffer, places: &[Range<usize>], tensors: &[WireSlice<'_>]) -> Result<()> {
        let bytes = payload.as_mut_slice().as_bytes_mut();
        places.iter().zip(tensors).for_each(|(place, data)| bytes[place.clone()].copy_from_slice(data.bytes()));
        Ok(())
    }

    fn unpack(payload: &HostBuffer, places: &[Range<usize>], tensors: Vec<&mut Self::WireMut<'_>>) -> Result<()> {
        let bytes = payload.as_slice().as_bytes();
        places.iter().zip(tensors).for_each(|(place, data)| data.bytes_mut().copy_from_slice(&bytes[place.clone()]));
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
