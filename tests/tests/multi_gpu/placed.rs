//! Data of a case on the device, between guards that reveal a write beside them, and the copy back.

use std::rc::Rc;

use gradsync::DType;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, ReduceOp, Scaling};
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::memory::Cuda;
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Expected;
use gradsync_tests::suite::operands::Operands;

use crate::checks::reduced;

/// The number of guard elements after the data.
const BEHIND: usize = 3;
/// The fill byte of guards.
const GUARD: u8 = 0x77;

/// An array on the device that begins any number of elements after an aligned address.
pub(crate) struct Placed {
    buffer: DeviceBuffer,
    format: Format,
    begin: usize,
    len: usize,
}

impl Placed {
    pub(crate) fn new(queue: &Queue, data: &Array, begin: usize) -> Self {
        let mut placed = Self::unwritten(queue, data.format(), data.len(), begin);
        placed.slice_mut().copy_from_host(data.slice()).unwrap();
        placed
    }

    /// Memory in which an unwritten element is recognisable.
    pub(crate) fn unwritten(queue: &Queue, format: Format, len: usize, begin: usize) -> Self {
        let whole = Array::unwritten(format, begin + len + BEHIND);
        let buffer = DeviceBuffer::from_host(queue, whole.slice()).unwrap();
        Placed { buffer, format, begin, len }
    }

    pub(crate) fn slice(&self) -> DeviceSlice<'_> {
        self.buffer.as_slice().range(self.begin..self.begin + self.len)
    }

    pub(crate) fn slice_mut(&mut self) -> DeviceSliceMut<'_> {
        self.buffer.as_mut_slice().range_mut(self.begin..self.begin + self.len)
    }

    /// Waits for the communicator's work, and returns the data.
    pub(crate) fn read(&self, comm: &dyn Communicator<Cuda>) -> Array {
        comm.synchronize(self.slice().queue()).unwrap();
        self.read_after_failure()
    }

    /// Like [`read`](Self::read), after a failure of the communicator: waits for the queue only.
    pub(crate) fn read_after_failure(&self) -> Array {
        let mut whole = Array::unwritten(self.format, self.begin + self.len + BEHIND);
        self.buffer.as_slice().copy_to_host(whole.slice_mut()).unwrap();
        let patterns = whole.patterns();
        let guard = Array::unwritten(self.format, 1).patterns()[0];
        let (before, rest) = patterns.split_at(self.begin);
        let (data, behind) = rest.split_at(self.len);
        assert!(before.iter().chain(behind).all(|&pattern| pattern == guard), "memory beside the data was written");
        Array::from_patterns(self.format, data.iter().copied())
    }
}

/// Operands on this rank's GPU, for calls over NCCL.
pub(crate) struct OnDevice<'c> {
    pub(crate) queue: &'c Queue,
    pub(crate) comm: &'c NcclCommunicator,
}

impl Operands for OnDevice<'_> {
    type Memory = Cuda;
    type Placed = Placed;

    fn comm(&self) -> &dyn Communicator<Cuda> {
        self.comm
    }

    fn place(&self, data: &Array, begin: usize) -> Placed {
        Placed::new(self.queue, data, begin)
    }

    fn slice(placed: &Placed) -> DeviceSlice<'_> {
        placed.slice()
    }

    fn slice_mut(placed: &mut Placed) -> DeviceSliceMut<'_> {
        placed.slice_mut()
    }

    fn read(&self, placed: &Placed) -> Array {
        placed.read(self.comm)
    }

    fn reduced(&self, op: ReduceOp, format: Format, scaling: Scaling, inputs: &[Vec<f64>]) -> Rc<Expected> {
        reduced(op, format, scaling, inputs)
    }
}

/// Bytes on the device, for types that only raw calls accept; the buffer's own dtype has no meaning.
pub(crate) struct RawBytes {
    buffer: DeviceBuffer,
    begin: usize,
    len: usize,
}

impl RawBytes {
    pub(crate) fn new(queue: &Queue, bytes: &[u8], begin: usize) -> Self {
        let mut whole = vec![GUARD; (begin + bytes.len() + BEHIND).next_multiple_of(8)];
        whole[begin..begin + bytes.len()].copy_from_slice(bytes);
        let words: Vec<f64> =
            whole.chunks_exact(8).map(|word| f64::from_le_bytes(word.try_into().expect("8 bytes"))).collect();
        let buffer = DeviceBuffer::from_host(queue, (&words).into()).unwrap();
        RawBytes { buffer, begin, len: bytes.len() }
    }

    /// Memory in which an unwritten byte is recognisable.
    pub(crate) fn unwritten(queue: &Queue, len: usize, begin: usize) -> Self {
        Self::new(queue, &vec![GUARD; len], begin)
    }

    pub(crate) fn address(&self) -> u64 {
        self.buffer.as_slice().address() + self.begin as u64
    }

    /// All bytes, as elements of a type whose size divides the length.
    pub(crate) fn elements(&self, dtype: DType) -> DeviceSlice<'_> {
        assert_eq!(self.len % dtype.size_bytes(), 0, "{} bytes are no {dtype}", self.len);
        let (queue, len) = (self.buffer.as_slice().queue(), self.len / dtype.size_bytes());
        // SAFETY: a part of the buffer, which is borrowed.
        unsafe { DeviceSlice::from_raw_parts(queue, self.address(), dtype, len) }
    }

    /// Some of the bytes.
    pub(crate) fn range(&self, range: std::ops::Range<usize>) -> DeviceSlice<'_> {
        self.elements(DType::U8).range(range)
    }

    /// Waits for the communicator's work, and returns the bytes.
    pub(crate) fn read(&self, comm: &dyn Communicator<Cuda>) -> Vec<u8> {
        let view = self.buffer.as_slice();
        assert_eq!(view.dtype(), DType::F64);
        comm.synchronize(view.queue()).unwrap();
        let mut words = vec![0.0f64; view.len()];
        view.copy_to_host((&mut words).into()).unwrap();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (before, rest) = bytes.split_at(self.begin);
        let (data, behind) = rest.split_at(self.len);
        assert!(before.iter().chain(behind).all(|&byte| byte == GUARD), "memory beside the data was written");
        data.to_vec()
    }
}
