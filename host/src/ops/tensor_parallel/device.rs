//! [`DeviceTensor`]: an owned tensor in the memory of a GPU that is passed from operation to operation.
//!
//! It is created from a buffer, or from another crate's memory, and returns it without a copy. It does no arithmetic and decides nothing.

use std::any::Any;

use super::tensor::sealed::Sealed;
use super::{HostTensor, Tensor};
use crate::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use crate::dtype::DType;
use crate::error::{Result, check_float, same_len};
use crate::memory::{Cuda, TensorView, TensorViewMut};
use crate::slice::shape_len;

const NAME: &str = "device tensor";

/// The storage of the elements.
enum Memory {
    Buffer(DeviceBuffer),
    Lent { queue: Queue, address: u64, dtype: DType, len: usize, owner: Box<dyn Any + Send> },
}

/// A tensor that owns its elements, in device memory and row-major order. `[]` is the shape of a scalar, with one element.
///
/// All work on it is ordered on its queue. An operation that creates a new tensor drops its argument while work in the queue still reads
/// it; the next owner of the memory uses it behind that work.
///
/// ```no_run
/// use gradsync::comm::Communicator;
/// use gradsync::driver::Queue;
/// use gradsync::memory::Cuda;
/// use gradsync::ops::tensor_parallel::{AllGather, DeviceTensor, HostTensor, Pipeline, ReduceScatter, TensorOp};
///
/// fn step(comm: &dyn Communicator<Cuda>, queue: &Queue) -> gradsync::Result<HostTensor> {
///     let input = DeviceTensor::from_host(queue, &HostTensor::new(vec![1.0f32; 3], [1, 3])?)?;
///     let mut pipeline = Pipeline::new().then(AllGather).then(ReduceScatter);
///     let output = pipeline.forward(input, comm)?;
///     let gradient = pipeline.backward(output, comm)?;
///     comm.synchronize(queue)?; // or the error of a rank that failed
///     gradient.to_host()
/// }
/// ```
pub struct DeviceTensor {
    memory: Memory,
    shape: Vec<usize>,
}

impl DeviceTensor {
    /// Combines a buffer with a shape.
    ///
    /// # Errors
    /// [`Error::LengthMismatch`](crate::Error::LengthMismatch) unless the shape has as many elements as the buffer.
    pub fn new(buffer: DeviceBuffer, shape: impl Into<Vec<usize>>) -> Result<Self> {
        let shape = shape.into();
        let (len, expected) = (buffer.as_slice().len(), shape_len(NAME, &shape)?);
        same_len(NAME, (&format!("shape {shape:?}"), expected), ("the buffer", len))?;
        Ok(Self { memory: Memory::Buffer(buffer), shape })
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
        let memory = Memory::Lent { queue: queue.clone(), address, dtype, len, owner: Box::new(owner) };
        Ok(Self { memory, shape })
    }

    /// Copies a tensor in host memory to the device; waits for the queue.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda), code 2 when memory does not suffice.
    pub fn from_host(queue: &Queue, tensor: &HostTensor) -> Result<Self> {
        let buffer = DeviceBuffer::from_host(queue, tensor.as_slice())?;
        Ok(Self { memory: Memory::Buffer(buffer), shape: tensor.shape().to_vec() })
    }

    /// Waits for the queue and copies the tensor to host memory. After a failed collective the elements are unspecified: call
    /// [`Communicator::synchronize`](crate::comm::Communicator::synchronize) first.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda) for any work in the queue that failed;
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    pub fn to_host(&self) -> Result<HostTensor> {
        let mut tensor = HostTensor::zeroed("copy to host", self.dtype(), self.shape.clone())?;
        self.as_slice().copy_to_host(tensor.as_mut_slice())?;
        Ok(tensor)
    }

    /// Enqueues a copy into new memory of the same queue, for a caller who keeps one of the two.
    ///
    /// # Errors
    /// The errors of [`from_host`](Self::from_host).
    pub fn try_clone(&self) -> Result<Self> {
        let mut copy = Self::allocated(self.queue(), self.dtype(), self.shape.clone())?;
        copy.as_mut_slice().copy_from_device(self.as_slice())?;
        Ok(copy)
    }

    /// Allocates memory for a shape. The caller writes all elements before they are read.
    fn allocated(queue: &Queue, dtype: DType, shape: Vec<usize>) -> Result<Self> {
        let buffer = DeviceBuffer::allocate(queue, dtype, shape_len(NAME, &shape)?)?;
        Ok(Self { memory: Memory::Buffer(buffer), shape })
    }

    /// The dimensions, outermost first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The type of every element.
    pub fn dtype(&self) -> DType {
        self.as_slice().dtype()
    }

    /// The queue on which work on the tensor is ordered.
    pub fn queue(&self) -> &Queue {
        self.as_slice().queue()
    }

    /// The elements.
    pub fn as_slice(&self) -> DeviceSlice<'_> {
        match &self.memory {
            Memory::Buffer(buffer) => buffer.as_slice(),
            // SAFETY: the promise of `from_raw_parts`; the owner lives as long as this tensor.
            Memory::Lent { queue, address, dtype, len, .. } => unsafe {
                DeviceSlice::from_raw_parts(queue, *address, *dtype, *len)
            },
        }
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> DeviceSliceMut<'_> {
        match &mut self.memory {
            Memory::Buffer(buffer) => buffer.as_mut_slice(),
            // SAFETY: as above, and this tensor is borrowed mutably.
            Memory::Lent { queue, address, dtype, len, .. } => unsafe {
                DeviceSliceMut::from_raw_parts(queue, *address, *dtype, *len)
            },
        }
    }

    /// The tensor, to read.
    pub fn view(&self) -> TensorView<'_, Cuda> {
        TensorView::on_device(self.as_slice(), &self.shape).expect("a tensor has its shape's length")
    }

    /// The tensor, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_, Cuda> {
        let shape = self.shape.clone();
        TensorViewMut::on_device(self.as_mut_slice(), shape).expect("a tensor has its shape's length")
    }

    /// The buffer, if the elements are in one: the argument of [`new`](Self::new), or the result of an operation.
    pub fn into_buffer(self) -> Option<DeviceBuffer> {
        match self.memory {
            Memory::Buffer(buffer) => Some(buffer),
            Memory::Lent { .. } => None,
        }
    }

    /// The owner of the memory, if it was passed to [`from_raw_parts`](Self::from_raw_parts) and `O` is its type.
    pub fn into_owner<O: Any>(self) -> Option<O> {
        match self.memory {
            Memory::Lent { owner, .. } => owner.downcast().ok().map(|owner| *owner),
            Memory::Buffer(_) => None,
        }
    }
}

impl Sealed for DeviceTensor {}

impl Tensor for DeviceTensor {
    type Memory = Cuda;

    fn dtype(&self) -> DType {
        self.dtype()
    }

    fn shape(&self) -> &[usize] {
        self.shape()
    }

    fn as_slice(&self) -> DeviceSlice<'_> {
        self.as_slice()
    }

    fn as_mut_slice(&mut self) -> DeviceSliceMut<'_> {
        self.as_mut_slice()
    }

    fn unwritten(&self, _: &'static str, shape: Vec<usize>) -> Result<Self> {
        Self::allocated(self.queue(), self.dtype(), shape)
    }
}

/// Shows dtype and shape; never the elements.
impl std::fmt::Debug for DeviceTensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceTensor").field("dtype", &self.dtype()).field("shape", &self.shape).finish_non_exhaustive()
    }
}
