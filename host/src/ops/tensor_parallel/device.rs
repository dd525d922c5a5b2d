//! Owned tensors in the memory of a GPU, which are created from a buffer or from another crate's memory and return it without a copy.

use std::any::Any;

use super::host::Elements;
use super::tensor::{OwnedTensor, OwnedTensorMemory};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::{Result, check_float, same_len};
use crate::memory::Cuda;
use crate::slice::shape_len;

const NAME: &str = "device tensor";

/// A buffer, or memory of another crate that its owner keeps alive.
pub struct Storage(StorageKind);

enum StorageKind {
    Buffer(DeviceBuffer),
    Lent { queue: Queue, address: u64, dtype: DType, len: usize, owner: Box<dyn Any + Send> },
}

impl OwnedTensorMemory for Cuda {
    type Storage = Storage;

    fn elements(storage: &Storage) -> DeviceSlice<'_> {
        match &storage.0 {
            StorageKind::Buffer(buffer) => buffer.as_slice(),
            // SAFETY: the promise of `from_raw_parts`; the owner lives as long as the storage.
            StorageKind::Lent { queue, address, dtype, len, .. } => unsafe {
                DeviceSlice::from_raw_parts(queue, *address, *dtype, *len)
            },
        }
    }

    fn elements_mut(storage: &mut Storage) -> DeviceSliceMut<'_> {
        match &mut storage.0 {
            StorageKind::Buffer(buffer) => buffer.as_mut_slice(),
            // SAFETY: as above, and the storage is borrowed mutably.
            StorageKind::Lent { queue, address, dtype, len, .. } => unsafe {
                DeviceSliceMut::from_raw_parts(queue, *address, *dtype, *len)
            },
        }
    }

    fn unwritten(_: &'static str, like: &Storage, len: usize) -> Result<Storage> {
        let like = Self::elements(like);
        Ok(Storage(StorageKind::Buffer(DeviceBuffer::allocate(like.queue(), like.dtype(), len)?)))
    }
}

impl OwnedTensor<Cuda> {
    /// Combines a buffer with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the buffer.
    pub fn on_device(buffer: DeviceBuffer, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        let (len, expected) = (buffer.as_slice().len(), shape_len(NAME, &shape)?);
        same_len(NAME, (&format!("shape {shape:?}"), expected), ("the buffer", len))?;
        Ok(Self { storage: Storage(StorageKind::Buffer(buffer)), shape })
    }

    /// Takes over the memory of another crate's tensor, without a copy; operations that work in place modify it.
    ///
    /// `owner` keeps the memory alive; it can be that tensor itself. It is dropped with this tensor, or returned by
    /// [`into_owner`](Self::into_owner).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an integer type and for a shape beyond the address space.
    ///
    /// # Safety
    /// The elements of the shape are at `address`, on `queue`'s device, aligned for `dtype`. They stay valid until `owner` has been dropped
    /// and `queue` has passed everything that was enqueued before that. Graphs that record work with this tensor are dropped before
    /// `owner`. Until then, only work ordered on `queue` reads or writes them, and while this tensor exists, only work on this tensor
    /// writes them.
    pub unsafe fn from_raw_parts(
        queue: &Queue,
        address: u64,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        owner: impl Any + Send,
    ) -> Result<Self> {
        check_float(NAME, dtype)?;
        let shape = shape.into();
        let len = shape_len(NAME, &shape)?;
        let memory = StorageKind::Lent { queue: queue.clone(), address, dtype, len, owner: Box::new(owner) };
        Ok(Self { storage: Storage(memory), shape })
    }

    /// Copies a tensor in host memory to the device; waits for the queue.
    ///
    /// ```no_run
    /// use gradsync::comm::Communicator;
    /// use gradsync::driver::Queue;
    /// use gradsync::memory::Cuda;
    /// use gradsync::ops::tensor_parallel::{AllGather, OwnedTensor, Pipeline, ReduceScatter, TensorOp};
    ///
    /// fn step(comm: &dyn Communicator<Cuda>, queue: &Queue) -> gradsync::Result<OwnedTensor> {
    ///     let input = OwnedTensor::from_host(queue, &OwnedTensor::new(vec![1.0f32; 3], [1, 3])?)?;
    ///     let mut pipeline = Pipeline::new().then(AllGather).then(ReduceScatter);
    ///     let output = pipeline.forward(input, comm)?;
    ///     let gradient = pipeline.backward(output, comm)?;
    ///     comm.synchronize(queue)?; // or the error of a rank that failed
    ///     gradient.to_host()
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), code 2 when memory does not suffice.
    pub fn from_host(queue: &Queue, tensor: &OwnedTensor) -> Result<Self> {
        let buffer = DeviceBuffer::from_host(queue, tensor.as_slice())?;
        Ok(Self { storage: Storage(StorageKind::Buffer(buffer)), shape: tensor.shape().to_vec() })
    }

    /// Waits for the queue and copies the tensor to host memory. After a failed collective the elements are unspecified: call
    /// [`Communicator::synchronize`](crate::comm::Communicator::synchronize) first.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda) for any work in the queue that failed;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn to_host(&self) -> Result<OwnedTensor> {
        let elements = self.as_slice();
        let storage = Elements::zeroed("copy to host", elements.dtype(), elements.len())?;
        let mut tensor = OwnedTensor { storage, shape: self.shape.clone() };
        elements.copy_to_host(tensor.as_mut_slice())?;
        Ok(tensor)
    }

    /// Enqueues a copy into new memory of the same queue, for a caller who keeps one of the two.
    ///
    /// # Errors
    /// The errors of [`from_host`](Self::from_host).
    pub fn try_clone(&self) -> Result<Self> {
        let mut copy = self.unwritten(NAME, self.shape.clone())?;
        copy.as_mut_slice().copy_from_device(self.as_slice())?;
        Ok(copy)
    }

    /// The queue on which work on the tensor is ordered.
    pub fn queue(&self) -> &Queue {
        self.as_slice().queue()
    }

    /// The buffer, if the elements are in one: the argument of [`on_device`](Self::on_device), or the result of an operation.
    pub fn into_buffer(self) -> Option<DeviceBuffer> {
        match self.storage.0 {
            StorageKind::Buffer(buffer) => Some(buffer),
            StorageKind::Lent { .. } => None,
        }
    }

    /// The owner of the memory, if it was passed to [`from_raw_parts`](Self::from_raw_parts) and `O` is its type.
    pub fn into_owner<O: Any>(self) -> Option<O> {
        match self.storage.0 {
            StorageKind::Lent { owner, .. } => owner.downcast().ok().map(|owner| *owner),
            StorageKind::Buffer(_) => None,
        }
    }
}
