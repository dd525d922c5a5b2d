//! The flight recorder: which collective this rank has come to, and its last calls.
//!
//! Never talks to anybody: others ask for the number.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::matching::peers;
use crate::error::Call;

/// How many calls are remembered.
const REMEMBERED: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Recorder {
    /// A copy of the number, so that who asks for it waits for nobody.
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
