//! The flight recorder: the number of the collective that this rank has reached, and its last calls.
//!
//! Sends no messages; others read the number.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::matching::peers;
use crate::error::Call;

/// How many calls are remembered.
const REMEMBERED: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// A copy of the number that can be read without the lock.
    sequence: AtomicU64,
    calls: Mutex<VecDeque<(u64, Call)>>,
}

impl Recorder {
    pub(super) fn posted(&self, call: Call) -> u64 {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let is_collective = peers(call.operation) == (None, None);
        // Only ever changed under the lock.
        let sequence = self.sequence.load(Ordering::Acquire) + u64::from(is_collective);
        self.sequence.store(sequence, Ordering::Release);
        if calls.len() == REMEMBERED {
            calls.pop_front();
        }
        calls.push_back((sequence, call));
        sequence
    }

    /// The number of collectives started.
    pub(super) fn sequence(&self) -> u64 {
        self.sequence.load(Ordering::Acquire)
    }

    pub(super) fn recent(&self) -> Vec<(u64, Call)> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }
}
