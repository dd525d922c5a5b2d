//! Transfers in host memory: the CPU packs and unpacks payloads.

use std::ops::Range;

use super::BundleMemory;
use crate::comm::Communicator;
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::{Host, HostBuffer, WireSlice, WireSliceMut};
use crate::ops::send_recv::negotiation::Messages;

impl BundleMemory for Host {
    type Payload = HostBuffer;
    type End = ();

    fn queue<'a>(_: Self::Wire<'a>) -> &'a () {
        &()
    }

    fn check_queue(_: &'static str, (): &(), (): &()) -> Result<()> {
        Ok(())
    }

    fn reborrow_wire<'a>(data: &'a mut WireSliceMut<'_>) -> WireSliceMut<'a> {
        WireSliceMut::of_bytes(data.as_wire().dtype(), data.bytes_mut())
    }

    fn byte_range<'s, 'l: 's>(data: Self::Wire<'l>, range: Range<usize>) -> Self::Wire<'s> {
        data.bytes()[range].into()
    }

    fn split_bytes<'a>(data: Self::WireMut<'a>, at: usize) -> (Self::WireMut<'a>, Self::WireMut<'a>) {
        let (first, second) = data.into_bytes().split_at_mut(at);
        (first.into(), second.into())
    }

    fn lying<'a>(tensors: &[Self::Wire<'a>], _: &[Range<usize>]) -> Option<Self::Wire<'a>> {
        let [only] = tensors else { return None };
        Some(only.bytes().into())
    }

    fn lying_mut<'a, 't>(
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

    fn at<'a>(payload: &'a HostBuffer, place: Range<usize>, dtype: DType) -> Self::Wire<'a> {
        WireSlice::of_bytes(dtype, &payload.as_slice().as_bytes()[place])
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

    fn messages<'c>(comm: &'c dyn Communicator, _: &'c ()) -> Box<dyn Messages + 'c> {
        Box::new(Small(comm))
    }

    fn end(_: &()) -> Result<()> {
        Ok(())
    }

    fn has_passed(_: &()) -> Result<bool> {
        Ok(true)
    }
}

struct Small<'c>(&'c dyn Communicator);

impl Messages for Small<'_> {
    fn exchange(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()> {
        let sends: Vec<_> = sends.iter().map(|&(peer, bytes)| (peer, bytes.into())).collect();
        let mut receives: Vec<_> = receives.iter_mut().map(|(peer, bytes)| (*peer, (&mut **bytes).into())).collect();
        self.0.exchange(&sends, &mut receives)
    }
}
