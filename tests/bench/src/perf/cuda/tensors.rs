//! Many tensors in one launch.

use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::kernels::cuda;
use gradsync::{DType, GradientBuffer};

use super::baseline::Baseline;
use super::vectors::wrong;
use super::{loads, timing};
use crate::perf::PerfError;
use crate::perf::data::{fill, value};
use crate::perf::operation::{Operation, Row};
use crate::perf::output::Output;
use crate::perf::plan::Section;
use crate::perf::subject::{self, Found, Side, Subject};
use crate::perf::tensors::{Steps, expected, named, own_side};

/// Measures a section's rows on the first device.
pub(crate) fn run(section: &Section, lens: &[usize], output: &Output) -> Result<(), PerfError> {
    let name = Baseline::name(section.operation, output.counts);
    output.begin(section, name)?;
    let queue = Queue::new(0)?;
    for row in &section.rows {
        let mut tensors = Tensors::new(&queue, row, lens, output)?;
        let seconds = timing::time(&queue, &mut tensors, output.counts, &mut timing::alone)?;
        let wrong = subject::check(&mut tensors, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, name)?;
    }
    output.loaded(loads(&queue));
    Ok(())
}

/// Measures a section of optimizer steps on the first device.
pub(crate) fn run_steps(section: &Section, lens: &[usize], output: &Output) -> Result<(), PerfError> {
    let name = Baseline::name(section.operation, output.counts);
    output.begin(section, name)?;
    let queue = Queue::new(0)?;
    for row in &section.rows {
        let buffer = || GradientBuffer::on_queue(&queue, DType::BF16, 1, named(lens));
        let mut baseline = output.counts.baseline.then(|| Baseline::new(&queue, row, 1, output.counts)).transpose()?;
        let call = baseline.as_mut().map(|baseline| |round| baseline.call(round));
        let mut steps = Steps::new([buffer()?, buffer()?], call)?;
        let seconds = timing::time(&queue, &mut steps, output.counts, &mut timing::alone)?;
        let wrong = subject::check(&mut steps, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, name)?;
        output.say(&format!("\n{}\n", steps.host_time()))?;
    }
    output.loaded(loads(&queue));
    Ok(())
}

struct Tensors {
    operation: Operation,
    to: Vec<DeviceBuffer>,
    from: Vec<DeviceBuffer>,
    baseline: Option<Baseline>,
}

/// Tensors with the values of a rank, each in a separate allocation.
fn allocate(queue: &Queue, dtype: DType, rank: usize, lens: &[usize]) -> Result<Vec<DeviceBuffer>, PerfError> {
    let longest = lens.iter().copied().max().unwrap_or(0);
    let mut host = GradientBuffer::new(dtype, 1, [("tensor", [longest])])?;
    fill(host.tensor_mut(0).into_data(), |index| value(rank, index));
    let data = host.tensor(0).data();
    Ok(lens.iter().map(|&len| DeviceBuffer::from_host(queue, data.range(0..len))).collect::<gradsync::Result<_>>()?)
}

impl Tensors {
    fn new(queue: &Queue, row: &Row, lens: &[usize], output: &Output) -> Result<Self, PerfError> {
        let is_zero = row.operation == Operation::Zero;
        Ok(Self {
            operation: row.operation,
            to: allocate(queue, row.types.to, 1, lens)?,
            from: if is_zero { Vec::new() } else { allocate(queue, row.types.from, 0, lens)? },
            baseline: output.counts.baseline.then(|| Baseline::new(queue, row, 1, output.counts)).transpose()?,
        })
    }

    fn run(&mut self) -> Result<(), PerfError> {
        let mut to: Vec<DeviceSliceMut<'_>> = self.to.iter_mut().map(DeviceBuffer::as_mut_slice).collect();
        let from: Vec<DeviceSlice<'_>> = self.from.iter().map(DeviceBuffer::as_slice).collect();
        match self.operation {
            Operation::Zero => cuda::zero_all(&mut to)?,
            Operation::Cast => cuda::cast_all(&mut to, &from)?,
            _ => cuda::accumulate_all(&mut to, &from)?,
        }
        Ok(())
    }
}

impl Subject for Tensors {
    fn has(&self, side: Side) -> bool {
        side == own_side(self.operation) || side == Side::Baseline && self.baseline.is_some()
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match (side, &mut self.baseline) {
            (Side::Baseline, Some(baseline)) => baseline.call(round),
            _ => self.run(),
        }
    }

    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        for to in &mut self.to {
            let view = to.as_slice();
            let mut host = GradientBuffer::new(view.dtype(), 1, [("tensor", [view.len()])])?;
            fill(host.tensor_mut(0).into_data(), |index| value(1, index));
            to.as_mut_slice().copy_from_host(host.tensor(0).data())?;
        }
        self.run()?;
        let operation = self.operation;
        self.to.iter().map(|to| wrong(to.as_slice(), 0.0, |index| expected(operation, index))).sum()
    }
}
