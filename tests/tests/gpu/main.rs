//! The GPU tier: every kernel on a real device against the CPU backend, which the other tiers compare with the oracle.
//!
//! `cargo xtask bundle`'s runner starts it on a machine with an NVIDIA GPU. Without a GPU every test here fails with an error that names
//! the missing part; nothing is skipped. It never tests more than one GPU.

#![deny(unsafe_code)]

mod coefficients;
mod elementwise;
mod graph;
mod large_counts;
mod optimizers;
#[allow(unsafe_code, reason = "queues and memory from raw handles")]
mod reductions;

use gradsync::driver::{DeviceBuffer, Queue};
use gradsync::internal::kernels::cpu;
use gradsync::{DType, GradientBuffer, Slice};

/// The queue on device 0 that a test uses.
fn queue() -> Queue {
    Queue::new(0).expect("the GPU tier needs an NVIDIA GPU and its driver")
}

/// Lengths around every border in the kernels: warps, blocks, vectors, tiles, chunks.
const LENS: [usize; 22] = [
    0, 1, 2, 31, 32, 33, 255, 256, 257, 511, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 16_383, 16_385,
    100_003,
];

/// The generator splitmix64, which gives the same bits in every run.
struct Bits(u64);

impl Bits {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Uniform in -1..1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// A host vector of any dtype.
fn host(dtype: DType, len: usize) -> GradientBuffer {
    GradientBuffer::new(dtype, 1, [("data", [len])]).expect("a small vector")
}

/// A host vector of random bit patterns: every kind of number, NaN, infinities and subnormals included.
fn any_bits(dtype: DType, len: usize, seed: u64) -> GradientBuffer {
    let mut vector = host(dtype, len);
    let mut bits = Bits(seed);
    vector.tensor_mut(0).into_data().as_bytes_mut().chunks_mut(8).for_each(|chunk| {
        chunk.copy_from_slice(&bits.next().to_le_bytes()[..chunk.len()]);
    });
    vector
}

/// A host vector of numbers in -1..1.
fn uniform(dtype: DType, len: usize, seed: u64) -> GradientBuffer {
    let mut bits = Bits(seed);
    let numbers: Vec<f64> = (0..len).map(|_| bits.unit()).collect();
    let mut vector = host(dtype, len);
    cpu::cast(vector.tensor_mut(0).into_data(), Slice::from(&numbers)).unwrap();
    vector
}

/// A copy on the device that begins `shift` elements after an aligned address.
fn upload(queue: &Queue, data: Slice<'_>, shift: usize) -> DeviceBuffer {
    let mut buffer = DeviceBuffer::zeroed(queue, data.dtype(), data.len() + shift).unwrap();
    buffer.as_mut_slice().range_mut(shift..shift + data.len()).copy_from_host(data).unwrap();
    buffer
}

/// The elements after the first `shift`.
fn download(buffer: &DeviceBuffer, shift: usize) -> GradientBuffer {
    let view = buffer.as_slice();
    let view = view.range(shift..view.len());
    let mut vector = host(view.dtype(), view.len());
    view.copy_to_host(vector.tensor_mut(0).into_data()).unwrap();
    vector
}

/// Asserts equal bits, where all NaNs count as equal: IEEE 754 leaves their payload open.
fn assert_same(actual: Slice<'_>, expected: Slice<'_>, what: &str) {
    assert_eq!((actual.dtype(), actual.len()), (expected.dtype(), expected.len()), "{what}");
    let (left, right) = (actual.to_f64_vec(), expected.to_f64_vec());
    for (index, (left, right)) in left.into_iter().zip(right).enumerate() {
        let same = left.to_bits() == right.to_bits() || (left.is_nan() && right.is_nan());
        assert!(same, "{what}: element {index} is {left:e} on the GPU and {right:e} on the CPU");
    }
}
