//! Tensors in the memory of GPUs: candle's streams and events (cudarc) together with gradsync's queues.
//!
//! candle computes on the stream of its device. cudarc keeps two events for each allocation, one of its last read and one of its last
//! write; [`DevicePtrMut`] makes a stream wait for both, and records the end of the stream's own work as a write. So a second stream can
//! take a gradient as soon as it is computed, although candle has already enqueued the whole backward pass. `DevicePtr` would not be
//! enough: candle's kernels of two operands record their output as read, and `DevicePtr` waits for writes alone.

use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Device, DeviceLocation, Layout, Shape, Storage, Tensor, bail};
use gradsync::Float;
use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::driver::{DeviceSlice, DeviceSliceMut, Queue};
use gradsync::memory::Cuda;
use gradsync::train::{Parameter, Reducer, ReducerOptions};

use crate::error::{Error, Result};
use crate::memory::TensorMemory;
use crate::tensor_parallel::collective::{PassFunction, part};

/// The stream on which gradients are reduced, and a queue on it.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Streams {
    // The queue uses the stream, and is dropped first.
    queue: Queue,
    stream: Arc<CudaStream>,
}

impl Streams {
    /// # Errors
    /// [`Error::Device`], [`Error::PerThreadStream`], CUDA's errors.
    fn new(device: &Device, is_forked: bool) -> Result<Self> {
        let Device::Cuda(cuda) = device else {
            let wanted = "the memory of a GPU".into();
            return Err(Error::Device { name: "the first one".into(), found: device.location(), wanted });
        };
        let stream = cuda.cuda_stream();
        let ordinal = stream.context().ordinal();
        if stream.cu_stream().addr() == 2 {
            return Err(Error::PerThreadStream { ordinal });
        }
        // Without cudarc's events nothing tells when a gradient is computed; then all work is ordered on candle's stream.
        let stream = if is_forked && cuda.is_event_tracking() { stream.fork().w()? } else { stream };
        // SAFETY: a stream of the device's primary context, which cudarc retains; it lives in this object beside the queue, and everything
        // created with the queue is dropped before.
        let queue = unsafe { Queue::from_raw_stream(ordinal as u32, stream.cu_stream().cast::<c_void>()) };
        Ok(Self { queue: queue.map_err(gradsync::Error::from)?, stream })
    }
}

impl TensorMemory for Cuda {
    type Context = Streams;
    type Guard<'a> = SyncOnDrop<'a>;

    fn context(device: &Device, is_forked: bool) -> Result<Streams> {
        Streams::new(device, is_forked)
    }

    fn refuses(device: &Device, like: &Device) -> Option<String> {
        let stream = |device: &Device| match device {
            Device::Cuda(device) => Some(device.cuda_stream().cu_stream()),
            _ => None,
        };
        match like.location() {
            _ if stream(device).is_some() && stream(device) == stream(like) => None,
            DeviceLocation::Cuda { gpu_id } => {
                Some(format!("the memory of GPU {gpu_id}, on the stream of the first variable"))
            }
            _ => Some("the memory of a GPU".into()),
        }
    }

    fn reducer<'c>(
        context: &Streams,
        comm: &'c dyn Communicator<Self>,
        parameters: Vec<Parameter>,
        options: ReducerOptions,
    ) -> gradsync::Result<Reducer<'c, Self>> {
        Reducer::on_queue(&context.queue, comm, parameters, options)
    }

    fn borrow<'a>(
        context: &'a Streams,
        storage: &'a mut Storage,
        layout: &Layout,
    ) -> Option<(DeviceSliceMut<'a>, SyncOnDrop<'a>)> {
        let Streams { queue, stream } = context;
        let Storage::Cuda(storage) = storage else { return None };
        let ((address, guard), dtype) = match &mut storage.slice {
            CudaStorageSlice::F64(data) => (data.device_ptr_mut(stream), gradsync::DType::F64),
            CudaStorageSlice::F32(data) => (data.device_ptr_mut(stream), gradsync::DType::F32),
            CudaStorageSlice::F16(data) => (data.device_ptr_mut(stream), gradsync::DType::F16),
            CudaStorageSlice::BF16(data) => (data.device_ptr_mut(stream), gradsync::DType::BF16),
            _ => return None,
        };
        let begin = address + (layout.start_offset() * dtype.size_bytes()) as u64;
        // SAFETY: that many elements of that dtype, which are borrowed mutably as long as the slice. The stream of the queue waits for all
        // earlier work on them; the guard, which is dropped behind all uses of the slice, makes later work wait for the stream.
        let slice = unsafe { DeviceSliceMut::from_raw_parts(queue, begin, dtype, layout.shape().elem_count()) };
        Some((slice, guard))
    }

    fn clip(_: &Streams, tensors: &[(&str, &Tensor)], max_norm: f64) -> Result<(Tensor, Vec<Tensor>)> {
        let Some((_, first)) = tensors.first() else { return Ok((Tensor::new(0f32, &Device::Cpu)?, Vec::new())) };
        let is_wide = tensors.iter().any(|(_, tensor)| tensor.dtype() == DType::F64);
        let dtype = if is_wide { DType::F64 } else { DType::F32 };
        let squares = tensors.iter().map(|(_, tensor)| tensor.to_dtype(dtype)?.sqr()?.sum_all());
        let squares = squares.collect::<candle_core::Result<Vec<_>>>()?;
        let norm = Tensor::stack(&squares, 0)?.sum_all()?.sqrt()?;
        let one = Tensor::ones((), dtype, first.device())?;
        let factor = norm.recip()?.affine(max_norm, 0.0)?.minimum(&one)?;
        let clipped =
            tensors.iter().map(|(_, tensor)| tensor.to_dtype(dtype)?.broadcast_mul(&factor)?.to_dtype(tensor.dtype()));
        let clipped = clipped.collect::<candle_core::Result<Vec<_>>>()?;
        Ok((norm.to_dtype(DType::F32)?, clipped))
    }
}

/// The communicator of a tensor-parallel group on GPUs. Its collectives run on candle's own stream.
pub(crate) struct SharedCommunicator {
    comm: Mutex<Box<dyn Communicator<Cuda> + Send>>,
    streams: Streams,
    device: CudaDevice,
}

impl SharedCommunicator {
    pub(crate) fn new(comm: impl Communicator<Cuda> + Send + 'static, device: &Device) -> Result<Self> {
        let streams = Streams::new(device, false)?;
        Ok(Self { comm: Mutex::new(Box::new(comm)), streams, device: device.as_cuda_device()?.clone() })
    }

    pub(crate) fn run(
        &self,
        step: PassFunction,
        storage: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        if storage.device.cuda_stream().cu_stream() != self.streams.stream.cu_stream() {
            bail!("{}: a tensor of another device or stream than the group's", step.name());
        }
        match storage.dtype() {
            DType::F64 => self.typed::<f64>(step, storage, layout),
            DType::F32 => self.typed::<f32>(step, storage, layout),
            DType::F16 => self.typed::<gradsync::f16>(step, storage, layout),
            DType::BF16 => self.typed::<gradsync::bf16>(step, storage, layout),
            _ => bail!("{}: only tensors of f64, f32, f16 and bf16 can be passed", step.name()),
        }
    }

    fn typed<T: CudaDType + DeviceRepr + Float>(
        &self,
        step: PassFunction,
        storage: &CudaStorage,
        layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let Some((begin, end)) = layout.contiguous_offsets() else {
            bail!("{}: the tensor is not contiguous", step.name())
        };
        let comm = self.comm.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (rank, world_size) = (comm.rank(), comm.world_size());
        let mut dims = layout.dims().to_vec();
        let mut source = begin..end;
        match step {
            PassFunction::Same | PassFunction::Sum => {}
            PassFunction::Concatenate => match dims.first_mut() {
                Some(first) => *first *= world_size,
                None => bail!("{}: a tensor without dimensions", step.name()),
            },
            PassFunction::Part | PassFunction::SumPart => {
                let (range, own) = part(step, &dims, rank, world_size)?;
                dims = own;
                if step == PassFunction::Part {
                    source = begin + range.start..begin + range.end;
                }
            }
        }
        let shape = Shape::from(dims);
        let input = storage.as_cuda_slice::<T>()?.slice(source);
        // SAFETY: every element is written below before it is read.
        let mut output = unsafe { self.device.alloc::<T>(shape.elem_count()) }?;
        let Streams { queue, stream } = &self.streams;
        let in_place = !matches!(step, PassFunction::Concatenate | PassFunction::SumPart);
        if in_place {
            self.device.memcpy_dtod(&input, &mut output)?;
        }
        if !matches!(step, PassFunction::Same | PassFunction::Part) {
            let (from, _from_guard) = input.device_ptr(stream);
            let (to, _to_guard) = output.device_ptr_mut(stream);
            // SAFETY: that many elements of that dtype, which the guards borrow; all work on them is in this stream, which has waited for
            // all other work.
            let (from, to) = unsafe {
                (
                    DeviceSlice::from_raw_parts(queue, from, T::DTYPE, end - begin),
                    DeviceSliceMut::from_raw_parts(queue, to, T::DTYPE, shape.elem_count()),
                )
            };
            let outcome = match step {
                PassFunction::Concatenate => comm.all_gather(from, to),
                PassFunction::SumPart => comm.reduce_scatter(from, to, ReduceOp::Sum),
                _ => comm.all_reduce(to, ReduceOp::Sum),
            };
            outcome.map_err(candle_core::Error::wrap)?;
        }
        Ok((CudaStorage::wrap_cuda_slice(output, self.device.clone()), shape))
    }
}
