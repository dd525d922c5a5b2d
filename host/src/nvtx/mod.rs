//! Ranges for the time line of a profiler (NVTX), one for each phase of a transfer.
//!
//! They need the feature `nvtx`, and a tool that reads them, such as Nsight Systems; otherwise they do nothing. The names are ONNX
//! Runtime's, `PreSend-3` for example, where 3 is the peer; sends are red and receives green. This module measures nothing, and never
//! fails: without a tool, or with one that cannot be loaded, there are no ranges.

#[cfg(feature = "nvtx")]
mod injection;

use std::fmt;
#[cfg(feature = "nvtx")]
use std::{cell::RefCell, ffi::CString};

/// The phase of a transfer that a range covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Tensors are packed. This comes first, so that a receiver only accepts a payload that exists.
    SendMemcpy,
    /// Shapes are sent, and the receiver answers.
    PreSend,
    /// The payload is sent.
    Send,
    /// Memory of the transfer is released.
    PostSend,
    /// Shapes are received, and memory for the payload is allocated.
    PreRecv,
    Recv,
    /// Tensors are unpacked.
    RecvMemcpy,
    PostRecv,
}

impl Phase {
    /// Alpha, red, green and blue.
    #[cfg(feature = "nvtx")]
    const fn color(self) -> u32 {
        match self {
            Phase::PreSend | Phase::SendMemcpy | Phase::Send | Phase::PostSend => 0xffff_0000,
            Phase::PreRecv | Phase::Recv | Phase::RecvMemcpy | Phase::PostRecv => 0xff00_ff00,
        }
    }
}

/// A range of this thread, which ends when it is dropped. Ranges nest.
#[derive(Debug)]
#[must_use]
pub(crate) struct Range {
    #[cfg(feature = "nvtx")]
    tool: Option<injection::Tool>,
}

/// Begins a range, whose name contains the peer.
#[inline]
pub(crate) fn range(phase: Phase, peer: usize) -> Range {
    #[cfg(not(feature = "nvtx"))]
    let range = {
        let _ = (phase, peer);
        Range {}
    };
    #[cfg(feature = "nvtx")]
    let range = {
        let tool = injection::tool();
        if let Some(tool) = tool {
            let name = BATCH.with_borrow(|batch| match batch {
                Some(batch) => format!("Batch-{batch} {phase:?}-{peer}"),
                None => format!("{phase:?}-{peer}"),
            });
            // A zero byte in a tag ends the name there, as it does in C.
            let end = name.find('\0').unwrap_or(name.len());
            tool.push(&CString::new(&name[..end]).unwrap_or_default(), phase.color());
        }
        Range { tool }
    };
    range
}

/// Begins a range for each peer, one inside the other.
pub(crate) fn ranges(phase: Phase, peers: impl Iterator<Item = usize>) -> Vec<Range> {
    if cfg!(feature = "nvtx") { peers.map(|peer| range(phase, peer)).collect() } else { Vec::new() }
}

#[cfg(feature = "nvtx")]
impl Drop for Range {
    fn drop(&mut self) {
        if let Some(tool) = self.tool {
            tool.pop();
        }
    }
}

#[cfg(feature = "nvtx")]
thread_local! {
    static BATCH: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A prefix for the names of this thread's ranges, for as long as it lives; created by [`batch`].
#[derive(Debug)]
#[must_use]
pub struct Batch {
    #[cfg(feature = "nvtx")]
    before: Option<String>,
}

/// Puts `Batch-`, the tag and a space before the names of this thread's ranges, until the result is dropped. Does nothing without the
/// feature `nvtx`.
///
/// ```
/// let _batch = gradsync::nvtx::batch(7);
/// // A send to rank 3 is now "Batch-7 Send-3".
/// ```
#[inline]
pub fn batch(tag: impl fmt::Display) -> Batch {
    #[cfg(not(feature = "nvtx"))]
    let batch = {
        let _ = tag;
        Batch {}
    };
    #[cfg(feature = "nvtx")]
    let batch = Batch { before: BATCH.replace(Some(tag.to_string())) };
    batch
}

#[cfg(feature = "nvtx")]
impl Drop for Batch {
    fn drop(&mut self) {
        BATCH.set(self.before.take());
    }
}
