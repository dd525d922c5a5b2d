//! Tensors of any type on the device, between guards that reveal a write beside them, and the copy back.

use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::memory::{Cuda, DeviceWireSlice, DeviceWireSliceMut, RawSlice};
use gradsync::ops::send_recv::{Bundle, Received, WireTensor, WireTensorMut};
use gradsync_tests::transfers::Owned;

const GUARD: u8 = 0x66;
const WORD: usize = 8;

/// A tensor in memory of its own; the buffer's dtype means nothing.
pub(super) struct Tensor {
    buffer: DeviceBuffer,
    begin: usize,
    like: Owned,
}

impl Tensor {
    /// A tensor that begins `begin` elements after an aligned address.
    pub(super) fn new(queue: &Queue, data: &Owned, begin: usize) -> Self {
        let begin = begin * data.dtype.size_bytes();
        let mut whole = vec![GUARD; (begin + data.bytes.len() + 5).next_multiple_of(WORD)];
        whole[begin..begin + data.bytes.len()].copy_from_slice(&data.bytes);
        let words: Vec<f64> =
            whole.chunks_exact(WORD).map(|word| f64::from_ne_bytes(word.try_into().expect("8 bytes"))).collect();
        Tensor { buffer: DeviceBuffer::from_host(queue, (&words).into()).unwrap(), begin, like: data.blank() }
    }

    fn raw(&self) -> RawSlice {
        let (dtype, len) = (self.like.dtype, self.like.bytes.len() / self.like.dtype.size_bytes());
        RawSlice { address: self.buffer.as_slice().address() + self.begin as u64, len, dtype }
    }

    pub(super) fn view(&self) -> WireTensor<'_, Cuda> {
        // SAFETY: a part of the buffer, which is borrowed.
        let data = unsafe { DeviceWireSlice::from_raw_parts(self.buffer.as_slice().queue(), self.raw()) };
        WireTensor::on_device(data, &self.like.shape[..]).unwrap()
    }

    pub(super) fn wire_mut(&mut self) -> DeviceWireSliceMut<'_> {
        let raw = self.raw();
        // SAFETY: a part of the buffer, which is borrowed mutably.
        unsafe { DeviceWireSliceMut::from_raw_parts(self.buffer.as_slice().queue(), raw) }
    }

    pub(super) fn view_mut(&mut self) -> WireTensorMut<'_, Cuda> {
        let shape = self.like.shape.clone();
        WireTensorMut::on_device(self.wire_mut(), shape).unwrap()
    }

    /// Waits for the queue, and returns the data.
    pub(super) fn read(&self) -> Owned {
        let mut words = vec![0.0f64; self.buffer.as_slice().len()];
        self.buffer.as_slice().copy_to_host((&mut words).into()).unwrap();
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let behind = bytes.split_off(self.begin + self.like.bytes.len());
        let data = bytes.split_off(self.begin);
        assert!(bytes.iter().chain(&behind).all(|&byte| byte == GUARD), "memory beside the tensor was written");
        Owned { bytes: data, ..self.like.clone() }
    }
}

/// Places each tensor in memory of its own, at an address that is aligned to its type only.
pub(super) fn place(queue: &Queue, tensors: &[Owned]) -> Vec<Tensor> {
    tensors.iter().enumerate().map(|(index, data)| Tensor::new(queue, data, index % 3)).collect()
}

pub(super) fn bundle(tensors: &[Tensor]) -> Bundle<'_, Cuda> {
    Bundle::new(tensors.iter().map(Tensor::view)).unwrap()
}

/// Waits for the queue, and returns the received tensors.
pub(super) fn read(received: &Received<Cuda>) -> Vec<Owned> {
    received.to_host().unwrap().tensors().map(Owned::from).collect()
}
