//! Queues that have lost their owners while a pending operation of another thread still needed them.
//!
//! Destroying a queue frees its memory, for which the driver waits until the device is idle. A thread that drops the last handle of another
//! owner's queue must not wait for that: kernels on the device may be waiting for kernels that this very thread is going to launch. So such
//! a queue is retired. It is destroyed where a thread is about to wait for the device anyway: when memory of the device is short, and when
//! the owner of another queue of the device destroys it.

use std::sync::{Mutex, PoisonError};

use super::Queue;

static RETIRED: Mutex<Vec<Queue>> = Mutex::new(Vec::new());

impl Queue {
    /// Drops this handle without waiting for the device: a queue that has no other handle is retired.
    pub(super) fn retire(self) {
        if let Some(last) = self.into_last() {
            RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(last);
        }
    }
}

/// Destroys the retired queues of a device, which waits for the device.
pub(super) fn destroy(device: u32) {
    let ended = {
        let mut retired = RETIRED.lock().unwrap_or_else(PoisonError::into_inner);
        let (ended, others): (Vec<Queue>, Vec<Queue>) = retired.drain(..).partition(|queue| queue.ordinal() == device);
        *retired = others;
        ended
    };
    // Each of these queues calls this function when it is destroyed, and finds none.
    drop(ended);
}
