//! [`Host`]: the memory of this process.

use std::ops::Range;

use super::{HostBuffer, Memory, SharedWindows, WireSlice, WireSliceMut};
use crate::dtype::{DType, Float};
use crate::error::{Error, Result, same_len};
use crate::slice::{Slice, SliceMut};

/// The memory of this process. Work on it is complete when a call returns.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

impl Memory for Host {
    type Slice<'a> = Slice<'a>;
    type SliceMut<'a> = SliceMut<'a>;
    type Wire<'a> = WireSlice<'a>;
    type WireMut<'a> = WireSliceMut<'a>;
    type Buffer = HostBuffer;
    type Queue = ();
    type Sharing = dyn SharedWindows;

    fn buffer(buffer: &HostBuffer) -> Slice<'_> {
        buffer.as_slice()
    }

    fn buffer_mut(buffer: &mut HostBuffer) -> SliceMut<'_> {
        buffer.as_mut_slice()
    }

    fn clear(data: SliceMut<'_>) -> Result<()> {
        data.as_bytes_mut().fill(0);
        Ok(())
    }

    fn len(data: Slice<'_>) -> usize {
        data.len()
    }

    fn dtype(data: Slice<'_>) -> DType {
        data.dtype()
    }

    fn range(data: Self::Slice<'_>, range: Range<usize>) -> Self::Slice<'_> {
        data.range(range)
    }

    fn shortened<'short, 'long: 'short>(data: Self::Slice<'long>) -> Self::Slice<'short> {
        data
    }

    fn as_slice<'a>(data: &'a SliceMut<'_>) -> Slice<'a> {
        data.as_slice()
    }

    fn reborrow<'a>(data: &'a mut SliceMut<'_>) -> SliceMut<'a> {
        data.reborrow()
    }

    fn range_mut(data: Self::SliceMut<'_>, range: Range<usize>) -> Self::SliceMut<'_> {
        data.range_mut(range)
    }

    fn ranges_mut<'a>(data: Self::SliceMut<'a>, ranges: &[Range<usize>]) -> Vec<Self::SliceMut<'a>> {
        data.ranges_mut(ranges.iter().cloned())
    }

    fn wire_shape(data: WireSlice<'_>) -> (usize, DType) {
        (data.len(), data.dtype())
    }

    fn as_wire<'a>(data: &'a WireSliceMut<'_>) -> WireSlice<'a> {
        data.as_wire()
    }

    fn to_vec<T: Float>(data: Slice<'_>) -> Result<Vec<T>> {
        data.to_vec()
    }

    fn copy_from_slice(data: SliceMut<'_>, source: Slice<'_>) -> Result<()> {
        const OPERATION: &str = "copy_from_slice";
        same_len(OPERATION, ("the tensor", data.len()), ("the source", source.len()))?;
        let (left, right) = (data.dtype(), source.dtype());
        if left != right {
            return Err(Error::DTypeMismatch { operation: OPERATION, what: "tensor and source".into(), left, right });
        }
        data.as_bytes_mut().copy_from_slice(source.as_bytes());
        Ok(())
    }

    fn check_same_queue(_: &'static str, _: WireSlice<'_>, _: WireSlice<'_>) -> Result<()> {
        Ok(())
    }
}
