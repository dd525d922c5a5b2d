//! [`DeviceGradientBuffer`]: a gradient buffer in the memory of a GPU.
//!
//! It owns memory and knows names, shapes and places. It never communicates and does no arithmetic.

use std::sync::Arc;

use super::{GradientBuffer, TensorTable};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Memory, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result};

/// One contiguous arena of one dtype in device memory for many tensors, laid out as a [`GradientBuffer`] is.
///
/// The gaps between tensors are zero when the buffer is made, and every operation of this crate keeps zeros zero. Whatever else has been written
/// there changes no result: kernels multiply tensors only, and what is multiplied on the host has its gaps cleared before.
#[derive(Debug)]
pub struct DeviceGradientBuffer {
    table: TensorTable,
    arena: DeviceBuffer,
}

impl DeviceGradientBuffer {
    /// Makes a buffer of zeros for tensors given by name and shape, to be shared out over `world_size` ranks; clearing it is put
    /// into the queue.
    ///
    /// # Errors
    /// As [`GradientBuffer::new`], and [`Error::Cuda`], code 2 when memory does not suffice.
    pub fn new<N: Into<String>, S: Into<Vec<usize>>>(
        queue: &Queue,
        dtype: DType,
        world_size: usize,
        tensors: impl IntoIterator<Item = (N, S)>,
    ) -> Result<Self> {
        let table = TensorTable::new(dtype, world_size, tensors)?;
        let arena = DeviceBuffer::zeroed(queue, dtype, table.arena_len())?;
        Ok(Self { table, arena })
    }

    /// Which tensors it holds, and where.
    pub fn table(&self) -> &TensorTable {
        &self.table
    }

    /// The queue that work on it is ordered on.
    pub fn queue(&self) -> &Queue {
        self.arena.as_slice().queue()
    }

    /// The elements of tensor `index`; panics past the last.
    pub fn tensor(&self, index: usize) -> DeviceSlice<'_> {
        self.arena.as_slice().range(self.table.segments()[index].clone())
    }

    /// The elements of tensor `index`, to write.
    pub fn tensor_mut(&mut self, index: usize) -> DeviceSliceMut<'_> {
        self.arena.as_mut_slice().range_mut(self.table.segments()[index].clone())
    }

    /// The arena's allocation.
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        self.arena.memory()
    }

    /// The whole arena.
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        self.arena.as_slice()
    }

    /// The whole arena, to write. What is written to the gaps between tensors may be lost, and changes no result.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_> {
        self.arena.as_mut_slice()
    }

    /// Copies all tensors from a buffer in the host's memory that holds the same.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other tensors; [`Error::Cuda`].
    pub fn copy_from_host(&mut self, host: &GradientBuffer) -> Result<()> {
        self.check_same(host)?;
        self.as_mut_slice().copy_from_host(host.as_slice())
    }

    /// Waits for the queue and copies all tensors to a buffer in the host's memory that holds the same.
    ///
    /// # Errors
    /// As [`copy_from_host`](Self::copy_from_host), and of any work in the queue that failed.
    pub fn copy_to_host(&self, host: &mut GradientBuffer) -> Result<()> {
        self.check_same(host)?;
        self.as_slice().copy_to_host(host.as_mut_slice())
    }

    fn check_same(&self, host: &GradientBuffer) -> Result<()> {
        if self.table.fingerprint() == host.table().fingerprint() {
            return Ok(());
        }
        let reason = "the buffers have tensors of other names, shapes, order or dtype, or another world size".into();
        Err(Error::InvalidArgument { operation: "copy between gradient buffers", reason })
    }
}
