//! [`Rank`]: a rank of a case, with its communicator and the memory of its tensors; and [`HostRank`], for tensors in host memory.

use gradsync::comm::Communicator;
use gradsync::internal::BundleMemory;
use gradsync::memory::Host;
use gradsync::ops::send_recv::{Bundle, Expected, Received, SendRecv};
use gradsync::{DType, GradientBuffer, TensorView, TensorViewMut};

use crate::inputs::Random;

/// A tensor of arbitrary bytes in host memory; floating-point elements may be NaN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: Vec<u8>,
}

impl Owned {
    /// A tensor with pseudo-random bytes that depend on all arguments.
    pub fn new(dtype: DType, shape: &[usize], seed: u64) -> Self {
        let len = shape.iter().product::<usize>() * dtype.size_bytes();
        let mut random = Random::new(seed * 1000 + len as u64 + dtype.size_bytes() as u64);
        Self { dtype, shape: shape.to_vec(), bytes: (0..len).map(|_| random.bits() as u8).collect() }
    }

    /// A vector of numbers.
    pub fn of(values: &[f64]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        Self { dtype: DType::F64, shape: vec![values.len()], bytes }
    }

    /// A tensor of equal type and shape, with other bytes.
    pub fn blank(&self) -> Self {
        Self { bytes: vec![0x77; self.bytes.len()], ..self.clone() }
    }
}

impl From<TensorView<'_>> for Owned {
    fn from(tensor: TensorView<'_>) -> Self {
        Self { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes: tensor.data().as_bytes().to_vec() }
    }
}

/// The expectation of a receiver that knows the tensors' types and shapes.
pub fn known(tensors: &[Owned]) -> Expected {
    Expected::known(tensors.iter().map(|tensor| (tensor.dtype, tensor.shape.clone())))
}

/// A rank of a case.
pub trait Rank {
    /// The memory of its tensors.
    type Memory: BundleMemory;
    /// A tensor of its own.
    type Tensor;

    /// The size in bytes of the parts of a bundle that exceeds all memory, and their number.
    const HUGE: (usize, usize);
    /// A part of the error for a copy of that bundle.
    const NO_MEMORY: &'static str;

    /// The communicator.
    fn comm(&self) -> &dyn Communicator<Self::Memory>;

    /// The transfers of the communicator.
    fn transfers(&self) -> SendRecv<'_, Self::Memory>;

    /// Waits for all transfers.
    fn synchronize(&self);

    /// A tensor with a copy of the data, at an address that is aligned to the type only; it varies with the index.
    fn tensor(&self, data: &Owned, index: usize) -> Self::Tensor;

    /// A tensor of so many zeros of type `f64`.
    fn zeros(&self, len: usize) -> Self::Tensor;

    /// A vector of the products of a tensor's elements, of type `f64`, and a factor. Does not wait.
    fn scaled(&self, tensor: TensorView<'_, Self::Memory>, factor: f64) -> Self::Tensor;

    /// Waits for all work, and returns the data. Panics if memory beside the tensor was written.
    fn read(tensor: &Self::Tensor) -> Owned;

    /// Waits for all work, and returns the data of received tensors.
    fn read_all(received: &Received<Self::Memory>) -> Vec<Owned>;

    /// The tensor as an argument of a send.
    fn view(tensor: &Self::Tensor) -> TensorView<'_, Self::Memory>;

    /// The tensor as an argument of a receive.
    fn view_mut(tensor: &mut Self::Tensor) -> TensorViewMut<'_, Self::Memory>;

    /// A buffer of zeros.
    fn gradients(&self, dtype: DType, shards: usize, shapes: &[(&str, Vec<usize>)]) -> GradientBuffer<Self::Memory>;

    /// The number of this rank.
    fn rank(&self) -> usize {
        self.comm().rank()
    }

    /// The number of ranks.
    fn world_size(&self) -> usize {
        self.comm().world_size()
    }

    /// Each tensor in memory of its own.
    fn tensors(&self, data: &[Owned]) -> Vec<Self::Tensor> {
        data.iter().enumerate().map(|(index, data)| self.tensor(data, index)).collect()
    }

    /// A bundle of all tensors.
    fn bundle(tensors: &[Self::Tensor]) -> Bundle<'_, Self::Memory> {
        Bundle::new(tensors.iter().map(Self::view)).expect("at least one tensor")
    }

    /// Sends one message that is no bundle.
    fn send_message(&self, data: &Owned, to: usize) {
        let tensor = self.tensor(data, 0);
        self.comm().exchange(&[(to, Self::view(&tensor).data())], &mut []).unwrap();
        self.synchronize();
    }

    /// Receives one message that is no bundle, like this one.
    fn recv_message(&self, like: &Owned, from: usize) -> Vec<u8> {
        let mut tensor = self.tensor(&like.blank(), 0);
        self.comm().exchange(&[], &mut [(from, Self::view_mut(&mut tensor).into_data())]).unwrap();
        self.synchronize();
        Self::read(&tensor).bytes
    }
}

/// A rank with tensors in host memory.
pub struct HostRank<'c>(pub &'c dyn Communicator);

impl Rank for HostRank<'_> {
    type Memory = Host;
    type Tensor = Owned;

    const HUGE: (usize, usize) = (1 << 30, 1 << 18);
    const NO_MEMORY: &'static str = "no memory for 281474976710656 bytes";

    fn comm(&self) -> &dyn Communicator {
        self.0
    }

    fn transfers(&self) -> SendRecv<'_> {
        SendRecv::new(self.0)
    }

    fn synchronize(&self) {}

    fn tensor(&self, data: &Owned, _: usize) -> Owned {
        data.clone()
    }

    fn zeros(&self, len: usize) -> Owned {
        Owned { dtype: DType::F64, shape: vec![len], bytes: vec![0; len * size_of::<f64>()] }
    }

    fn scaled(&self, tensor: TensorView<'_>, factor: f64) -> Owned {
        let values = tensor.as_slice::<f64>().expect("f64");
        Owned::of(&values.iter().map(|value| factor * value).collect::<Vec<f64>>())
    }

    fn read(tensor: &Owned) -> Owned {
        tensor.clone()
    }

    fn read_all(received: &Received) -> Vec<Owned> {
        received.tensors().map(Owned::from).collect()
    }

    fn view(tensor: &Owned) -> TensorView<'_> {
        TensorView::of_bytes(tensor.dtype, &tensor.shape[..], &tensor.bytes).expect("the shape's bytes")
    }

    fn view_mut(tensor: &mut Owned) -> TensorViewMut<'_> {
        TensorViewMut::of_bytes(tensor.dtype, &tensor.shape[..], &mut tensor.bytes).expect("the shape's bytes")
    }

    fn gradients(&self, dtype: DType, shards: usize, shapes: &[(&str, Vec<usize>)]) -> GradientBuffer {
        GradientBuffer::new(dtype, shards, shapes.to_vec()).unwrap()
    }
}
