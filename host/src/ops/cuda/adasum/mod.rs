//! Adasum all-reduce of gradient buffers in device memory, in each of the ways that ONNX Runtime names ([`AdasumAllReduce`]).
//!
//! The numerics are the same as in [`adasum_all_reduce`](crate::ops::adasum_all_reduce). The steps are in `plan`, the arithmetic in
//! `kernels`; nothing here depends on a transport.

mod gram;
mod hierarchical;
mod on_device;
mod over_peers;
mod staged;
mod tree;

use std::ops::Range;

pub use self::hierarchical::HierarchicalAdasum;
pub use self::on_device::Adasum;
pub use self::staged::StagedAdasum;
use crate::buffer::GradientBuffer;
use crate::comm::Communicator;
use crate::driver::DeviceSliceMut;
use crate::error::Result;
use crate::kernels::cuda::{SegmentWorkspace, zero_all};
use crate::memory::Cuda;
use crate::ops::{AdasumOptions, AdasumReport, Granularity, Nodes, WithinNode};
use crate::plan::segments;

const OPERATION: &str = "adasum_all_reduce";

/// Where and among whom gradients are reduced: ONNX Runtime's attribute `reduce_algo` with the groups that each choice needs.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ReduceAlgo<'a> {
    /// Staged through pinned memory and reduced by the processors over a host transport (CpuReduction).
    Cpu(&'a dyn Communicator),
    /// Sum, mean or Adasum inside nodes, Adasum across them, on the device (GpuHierarchicalReduction).
    GpuHierarchical(Nodes<'a, Cuda>, WithinNode),
    /// Adasum of all ranks, on the device.
    Gpu(&'a dyn Communicator<Cuda>),
}

/// Adasum of the gradient buffers of a group of ranks, with its workspace: made once, run at every step (AdasumAllReduce).
#[derive(Debug)]
#[non_exhaustive]
pub enum AdasumAllReduce<'c> {
    /// By the processors.
    Cpu(StagedAdasum<'c>),
    /// Inside nodes, then across.
    GpuHierarchical(HierarchicalAdasum<'c>),
    /// All ranks at once.
    Gpu(Adasum<'c>),
}

impl<'c> AdasumAllReduce<'c> {
    /// Prepares the reduction of buffers like this one; every rank must call it. The host waits for the other ranks.
    ///
    /// # Errors
    /// As [`StagedAdasum::new`], [`HierarchicalAdasum::new`] and [`Adasum::new`].
    pub fn new(algo: ReduceAlgo<'c>, buffer: &GradientBuffer<Cuda>, options: AdasumOptions) -> Result<Self> {
        Ok(match algo {
            ReduceAlgo::Cpu(comm) => Self::Cpu(StagedAdasum::new(comm, buffer, options)?),
            ReduceAlgo::GpuHierarchical(nodes, within_node) => {
                Self::GpuHierarchical(HierarchicalAdasum::new(nodes, buffer, within_node, options)?)
            }
            ReduceAlgo::Gpu(comm) => Self::Gpu(Adasum::new(comm, buffer, options)?),
        })
    }

    /// Replaces every rank's buffer by the result, in place and in the buffer's queue.
    ///
    /// # Errors
    /// As [`StagedAdasum::all_reduce`], [`HierarchicalAdasum::all_reduce`] and [`Adasum::all_reduce`].
    pub fn all_reduce(&mut self, buffer: &mut GradientBuffer<Cuda>) -> Result<()> {
        match self {
            Self::Cpu(staged) => staged.all_reduce(buffer),
            Self::GpuHierarchical(nodes) => nodes.all_reduce(buffer),
            Self::Gpu(adasum) => adasum.all_reduce(buffer),
        }
    }

    /// The report of the last reduction; waits for the queue.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda).
    pub fn report(&self) -> Result<AdasumReport> {
        match self {
            Self::Cpu(staged) => Ok(staged.report()),
            Self::GpuHierarchical(nodes) => nodes.report(),
            Self::Gpu(adasum) => adasum.report(),
        }
    }
}

/// The layers of a window of a buffer, for `vectors` vectors.
fn layers(
    buffer: &GradientBuffer<Cuda>,
    window: Range<usize>,
    granularity: Granularity,
    vectors: usize,
) -> Result<SegmentWorkspace> {
    let parts = segments::clip(buffer.table().segments(), window.clone());
    let layers = match granularity {
        Granularity::Tensor => SegmentWorkspace::new(buffer.queue(), window.len(), &parts, vectors),
        Granularity::Whole => SegmentWorkspace::new_shared(buffer.queue(), window.len(), &parts, vectors),
    };
    layers?.with_whole_lens(&whole_lens(buffer, granularity))
}

/// The elements of each layer of a buffer in all ranks' windows together, without gaps.
fn whole_lens(buffer: &GradientBuffer<Cuda>, granularity: Granularity) -> Vec<usize> {
    let segments = buffer.table().segments();
    match granularity {
        Granularity::Tensor => segments.iter().map(Range::len).collect(),
        Granularity::Whole if segments.is_empty() => Vec::new(),
        Granularity::Whole => vec![segments.iter().map(Range::len).sum()],
    }
}

/// The number of layers of `tensors` tensors.
fn layer_count(granularity: Granularity, tensors: usize) -> usize {
    match granularity {
        Granularity::Tensor => tensors,
        Granularity::Whole => tensors.min(1),
    }
}

/// Puts zeros between the tensors of an arena, in its queue: the processors, and the exact path of the kernels over peers' memory, multiply whole
/// arenas where these are one layer, and zeros change nothing there.
fn clear_gaps(arena: DeviceSliceMut<'_>, tensors: &[Range<usize>]) -> Result<()> {
    let len = arena.as_slice().len();
    let (mut rest, mut begin, mut gaps) = (arena, 0, Vec::new());
    for gap in segments::gaps(tensors, len) {
        let (_, from_gap) = rest.split_at_mut(gap.start - begin);
        let (elements, behind) = from_gap.split_at_mut(gap.len());
        gaps.push(elements);
        (rest, begin) = (behind, gap.end);
    }
    zero_all(&mut gaps)
}
