//! [`DeviceRank`]: a rank whose tensors are on the device, between guards that reveal a write beside them.

use gradsync::comm::Communicator;
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::kernels::cuda;
use gradsync::memory::{Cuda, Memory};
use gradsync::ops::send_recv::{Received, SendRecv};
use gradsync::{DType, GradientBuffer, TensorView, TensorViewMut};
use gradsync_tests::transfers::{Owned, Rank};

const GUARD: u8 = 0x66;
const WORD: usize = 8;

/// A rank with tensors in the memory of a GPU.
pub(crate) struct DeviceRank<'c> {
    pub(crate) comm: &'c dyn Communicator<Cuda>,
    pub(crate) queue: &'c Queue,
}

/// A tensor in memory of its own. The buffer is one of `f64`, whatever the type of the elements.
pub(crate) struct Tensor {
    buffer: DeviceBuffer,
    /// The offset in bytes of the first element.
    begin: usize,
    dtype: DType,
    shape: Vec<usize>,
}

impl Tensor {
    /// All elements of a buffer.
    fn of(buffer: DeviceBuffer) -> Self {
        Tensor { begin: 0, dtype: DType::F64, shape: vec![buffer.as_slice().len()], buffer }
    }

    fn slice(&self) -> DeviceSlice<'_> {
        let whole = self.buffer.as_slice();
        let (address, len) = (whole.address() + self.begin as u64, self.shape.iter().product());
        // SAFETY: a part of the buffer, which is borrowed.
        unsafe { DeviceSlice::from_raw_parts(whole.queue(), address, self.dtype, len) }
    }
}

impl Rank for DeviceRank<'_> {
    type Memory = Cuda;
    type Tensor = Tensor;

    const HUGE: (usize, usize) = (256 << 20, 1 << 13);
    const NO_MEMORY: &'static str = "failed with code 2";

    fn comm(&self) -> &dyn Communicator<Cuda> {
        self.comm
    }

    fn transfers(&self) -> SendRecv<'_, Cuda> {
        SendRecv::on_queue(self.comm, self.queue)
    }

    fn synchronize(&self) {
        self.comm.synchronize(self.queue).unwrap();
    }

    fn tensor(&self, data: &Owned, index: usize) -> Tensor {
        let begin = index % 3 * data.dtype.size_bytes();
        let mut whole = vec![GUARD; (begin + data.bytes.len() + 5).next_multiple_of(WORD)];
        whole[begin..begin + data.bytes.len()].copy_from_slice(&data.bytes);
        let words: Vec<f64> =
            whole.chunks_exact(WORD).map(|word| f64::from_ne_bytes(word.try_into().expect("8 bytes"))).collect();
        let buffer = DeviceBuffer::from_host(self.queue, (&words).into()).unwrap();
        Tensor { buffer, begin, dtype: data.dtype, shape: data.shape.clone() }
    }

    fn zeros(&self, len: usize) -> Tensor {
        Tensor::of(DeviceBuffer::zeroed(self.queue, DType::F64, len).unwrap())
    }

    fn scaled(&self, tensor: TensorView<'_, Cuda>, factor: f64) -> Tensor {
        let data = tensor.data();
        let mut product = DeviceBuffer::zeroed(self.queue, DType::F64, data.len()).unwrap();
        cuda::scale(product.as_mut_slice(), data, factor).unwrap();
        Tensor::of(product)
    }

    fn read(tensor: &Tensor) -> Owned {
        let words = Cuda::to_vec::<f64>(tensor.buffer.as_slice()).unwrap();
        let mut before: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let behind = before.split_off(tensor.begin + tensor.slice().len() * tensor.dtype.size_bytes());
        let bytes = before.split_off(tensor.begin);
        assert!(before.iter().chain(&behind).all(|&byte| byte == GUARD), "memory beside the tensor was written");
        Owned { dtype: tensor.dtype, shape: tensor.shape.clone(), bytes }
    }

    fn read_all(received: &Received<Cuda>) -> Vec<Owned> {
        received.to_host().unwrap().tensors().map(Owned::from).collect()
    }

    fn view(tensor: &Tensor) -> TensorView<'_, Cuda> {
        TensorView::on_device(tensor.slice(), &tensor.shape[..]).unwrap()
    }

    fn view_mut(tensor: &mut Tensor) -> TensorViewMut<'_, Cuda> {
        let slice = tensor.slice();
        let (queue, address, dtype, len) = (slice.queue(), slice.address(), slice.dtype(), slice.len());
        // SAFETY: a part of the buffer, which is borrowed mutably.
        let data = unsafe { DeviceSliceMut::from_raw_parts(queue, address, dtype, len) };
        TensorViewMut::on_device(data, &tensor.shape[..]).unwrap()
    }

    fn gradients(&self, dtype: DType, shards: usize, shapes: &[(&str, Vec<usize>)]) -> GradientBuffer<Cuda> {
        GradientBuffer::on_queue(self.queue, dtype, shards, shapes.to_vec()).unwrap()
    }
}
