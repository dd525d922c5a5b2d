//! [`Host`]: the memory of this process.

use std::ops::Range;

use super::{HostBuffer, Memory, SharedWindows, Work};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, same_len};
use crate::slice::{self, Slice, SliceMut};

/// The memory of this process. Work on it is complete when a call returns.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

impl Memory for Host {
    type Slice<'a> = Slice<'a>;
    type SliceMut<'a> = SliceMut<'a>;
    type Buffer = HostBuffer;
    type Queue = ();
    type Sharing = dyn SharedWindows;

    super::slice_functions!();

    fn clear(data: SliceMut<'_>) -> Result<()> {
        data.as_bytes_mut().fill(0);
        Ok(())
    }

    fn check_floats(operation: &'static str, data: Slice<'_>) -> Result<()> {
        slice::check_floats(operation, data)
    }

    fn to_vec<T: Element + bytemuck::Pod>(data: Slice<'_>) -> Result<Vec<T>> {
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

    fn check_same_queue(_: &'static str, _: Slice<'_>, _: Slice<'_>) -> Result<()> {
        Ok(())
    }

    fn kind(buffer: &HostBuffer) -> &'static str {
        if buffer.is_shared() { "shared memory" } else { "memory of its own" }
    }

    fn with_windows(sharing: &Self::Sharing, buffer: &mut HostBuffer, work: &mut Work<'_>) -> Result<bool> {
        if buffer.is_shared() { sharing.with_windows(buffer.as_mut_slice(), work) } else { Ok(false) }
    }
}
