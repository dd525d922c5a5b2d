//! [`Cuda`]: the memory of a GPU.

use std::ops::Range;

use super::{Memory, PeerMemory, Work};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, check_float};
use crate::slice::{Slice, SliceMut, check_dtype};

/// The memory of a GPU. Work on it runs in the order of a queue, and may be pending when a call returns.
#[derive(Clone, Copy, Debug)]
pub enum Cuda {}

impl Memory for Cuda {
    type Slice<'a> = DeviceSlice<'a>;
    type SliceMut<'a> = DeviceSliceMut<'a>;
    type Buffer = DeviceBuffer;
    type Queue = Queue;
    type Sharing = dyn PeerMemory;

    super::slice_functions!();

    fn clear(mut data: DeviceSliceMut<'_>) -> Result<()> {
        Ok(data.clear()?)
    }

    /// Slices of device memory are aligned.
    fn check_floats(operation: &'static str, data: DeviceSlice<'_>) -> Result<()> {
        check_float(operation, data.dtype())
    }

    fn to_vec<T: Element + bytemuck::Pod>(data: DeviceSlice<'_>) -> Result<Vec<T>> {
        check_dtype::<T>("to_vec", data.dtype())?;
        let bytes = data.len() * size_of::<T>();
        let no_memory = |()| Error::OutOfMemory { operation: "to_vec", bytes };
        let mut copy = bytemuck::allocation::try_zeroed_vec(data.len()).map_err(no_memory)?;
        data.copy_to_host(SliceMut::from(&mut copy))?;
        Ok(copy)
    }

    fn copy_from_slice(mut data: DeviceSliceMut<'_>, source: Slice<'_>) -> Result<()> {
        data.copy_from_host(source)
    }

    fn check_same_queue(operation: &'static str, one: DeviceSlice<'_>, other: DeviceSlice<'_>) -> Result<()> {
        one.queue().check_same(operation, other.queue())
    }

    fn kind(_: &DeviceBuffer) -> &'static str {
        "device memory"
    }

    fn with_windows(_: &Self::Sharing, _: &mut DeviceBuffer, _: &mut Work<'_>) -> Result<bool> {
        Ok(false)
    }
}
