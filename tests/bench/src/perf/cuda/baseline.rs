//! Baselines of kernels on a GPU: pure memory traffic, or an empty launch.
//!
//! The baseline of kernels that write is the driver's copy, and of kernels that only read a sweep; both move as many bytes.

use gradsync::DType;
use gradsync::driver::Queue;
use gradsync::internal::kernels::cuda::baseline::{empty, sweep, sweep_sums};

use super::vectors::{Copy, Vectors};
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::data::PERIOD;
use crate::perf::operation::{Operation, Row};
use crate::perf::record::BaselineName;

/// A baseline that alternates with a kernel.
pub(super) enum Baseline {
    Copy(Copy),
    Sweep(Sweep),
    /// A kernel that does nothing.
    Empty(Queue),
}

impl Baseline {
    pub(super) fn name(operation: Operation, counts: Counts) -> BaselineName {
        if counts.against_empty {
            BaselineName { column: "empty kernel", full: "a kernel that does nothing" }
        } else if operation.only_reads() {
            Sweep::NAME
        } else {
            Copy::NAME
        }
    }

    /// A baseline with as many sets of buffers as the operation has.
    pub(super) fn new(queue: &Queue, row: &Row, slots: usize, counts: Counts) -> Result<Self, PerfError> {
        Ok(if counts.against_empty {
            Baseline::Empty(queue.clone())
        } else if row.operation.only_reads() {
            Baseline::Sweep(Sweep::new(queue, row.traffic(), slots)?)
        } else {
            Baseline::Copy(Copy::new(queue, row.traffic(), slots)?)
        })
    }

    pub(super) fn call(&mut self, round: usize) -> Result<(), PerfError> {
        match self {
            Baseline::Copy(copy) => copy.call(round),
            Baseline::Sweep(sweep) => sweep.call(round),
            Baseline::Empty(queue) => Ok(empty(queue)?),
        }
    }
}

/// A kernel that reads as many bytes as an operation, with almost no arithmetic.
pub(super) struct Sweep {
    from: Vectors,
    sums: Vectors,
}

impl Sweep {
    pub(super) const NAME: BaselineName = BaselineName {
        column: "read-only sweep",
        full: "a kernel that reads as many bytes and does nothing with them",
    };

    fn new(queue: &Queue, traffic: f64, slots: usize) -> Result<Self, PerfError> {
        let len = (traffic as usize).div_ceil(DType::F32.size_bytes()).max(1);
        let mut from = Vectors::new(queue, DType::F32, len, slots)?;
        from.repeat(|index| (index % PERIOD) as f64)?;
        let sums = sweep_sums(len * DType::F32.size_bytes());
        Ok(Self { from, sums: Vectors::new(queue, DType::F32, sums, slots)? })
    }

    fn call(&mut self, round: usize) -> Result<(), PerfError> {
        Ok(sweep(self.sums.slice_mut(round), self.from.slice(round))?)
    }
}
