//! [`Ballast`]: work that keeps a queue busy for some milliseconds, so that later work in the queue starts only after the host has gone on.

use gradsync::DType;
use gradsync::driver::{DeviceBuffer, Queue};

/// Two buffers of 256 MiB.
pub(crate) struct Ballast {
    from: DeviceBuffer,
    to: DeviceBuffer,
}

impl Ballast {
    pub(crate) fn new(queue: &Queue) -> Self {
        let zeros = || DeviceBuffer::zeroed(queue, DType::F32, 64 << 20).unwrap();
        Ballast { from: zeros(), to: zeros() }
    }

    /// Enqueues this many copies of one buffer to the other.
    pub(crate) fn put(&mut self, copies: usize) {
        for _ in 0..copies {
            self.to.as_mut_slice().copy_from_device(self.from.as_slice()).unwrap();
        }
    }
}
