//! Gradient buffers in the memory of a GPU: their allocation, and copies from and to the host.

use std::sync::Arc;

use super::{GradientBuffer, Scratch, TensorTable};
use crate::driver::{DeviceBuffer, DeviceMemory, Queue};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Cuda;

impl GradientBuffer<Cuda> {
    /// Allocates a buffer of zeros in device memory for tensors given by name and shape, to be divided among `world_size` ranks; clearing
    /// it is enqueued.
    ///
    /// # Errors
    /// The errors of [`GradientBuffer::new`], and [`Error::Cuda`], with code 2 when memory does not suffice.
    pub fn on_queue<N: Into<String>, S: Into<Vec<usize>>>(
        queue: &Queue,
        dtype: DType,
        world_size: usize,
        tensors: impl IntoIterator<Item = (N, S)>,
    ) -> Result<Self> {
        let table = TensorTable::new(dtype, world_size, tensors)?;
        let arena = DeviceBuffer::zeroed(queue, dtype, table.arena_len())?;
        Ok(Self { table: Arc::new(table), arena, scratch: Scratch::default() })
    }

    /// The queue on which work on this buffer is ordered.
    pub fn queue(&self) -> &Queue {
        self.arena.as_slice().queue()
    }

    /// The arena's allocation.
    pub(crate) fn memory(&self) -> &Arc<DeviceMemory> {
        self.arena.memory()
    }

    /// Copies all tensors from a buffer in host memory that has the same tensors.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other tensors; [`Error::Cuda`].
    pub fn copy_from_host(&mut self, host: &GradientBuffer) -> Result<()> {
        self.check_same(host)?;
        self.as_mut_slice().copy_from_host(host.as_slice())
    }

    /// Waits for the queue and copies all tensors to a buffer in host memory that has the same tensors.
    ///
    /// # Errors
    /// The errors of [`copy_from_host`](Self::copy_from_host), and of any work in the queue that failed.
    pub fn copy_to_host(&self, host: &mut GradientBuffer) -> Result<()> {
        self.check_same(host)?;
        self.as_slice().copy_to_host(host.as_mut_slice())
    }

    fn check_same(&self, host: &GradientBuffer) -> Result<()> {
        if self.table.is_same(host.table()) {
            return Ok(());
        }
        let reason = "the buffers have tensors of other names, shapes, order or dtype, or another world size".into();
        Err(Error::InvalidArgument { operation: "copy between gradient buffers", reason })
    }
}
