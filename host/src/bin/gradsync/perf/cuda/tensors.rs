//! Many tensors in one launch.

use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::kernels::cuda;
use gradsync::{DType, GradientBuffer};

use super::timing;
use super::vectors::{Copy, wrong};
use crate::perf::PerfError;
use crate::perf::data::{fill, value};
use crate::perf::operation::{Operation, Row};
use crate::perf::output::Output;
use crate::perf::plan::Section;
use crate::perf::subject::{self, Found, Side, Subject};
use crate::perf::tensors::{TYPES, expected};

/// Measures a section's rows on the first device.
pub(crate) fn run(section: &Section, lens: &[usize], output: &Output) -> Result<(), PerfError> {
    output.begin(section, Copy::NAME)?;
    let queue = Queue::new(0)?;
    for row in &section.rows {
        let mut tensors = Tensors::new(&queue, row, lens, output)?;
        let seconds = timing::time(&queue, &mut tensors, output.counts)?;
        let wrong = subject::check(&mut tensors, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, Copy::NAME)?;
    }
    Ok(())
}

struct Tensors {
    operation: Operation,
    sums: Vec<DeviceBuffer>,
    values: Vec<DeviceBuffer>,
    copy: Option<Copy>,
}

/// Tensors of a rank's values, each allocated on its own.
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
            sums: allocate(queue, TYPES.to, 1, lens)?,
            values: if is_zero { Vec::new() } else { allocate(queue, TYPES.from, 0, lens)? },
            copy: output.counts.baseline.then(|| Copy::new(queue, row.traffic(), 1)).transpose()?,
        })
    }

    fn run(&mut self) -> Result<(), PerfError> {
        let mut sums: Vec<DeviceSliceMut<'_>> = self.sums.iter_mut().map(DeviceBuffer::as_mut_slice).collect();
        let values: Vec<DeviceSlice<'_>> = self.values.iter().map(DeviceBuffer::as_slice).collect();
        match self.operation {
            Operation::Zero => cuda::zero_all(&mut sums)?,
            _ => cuda::accumulate_all(&mut sums, &values)?,
        }
        Ok(())
    }
}

impl Subject for Tensors {
    fn has(&self, side: Side) -> bool {
        side == Side::InPlace || side == Side::Baseline && self.copy.is_some()
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match (side, &mut self.copy) {
            (Side::Baseline, Some(copy)) => copy.call(round),
            _ => self.run(),
        }
    }

    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        for sum in &mut self.sums {
            let mut host = GradientBuffer::new(TYPES.to, 1, [("tensor", [sum.as_slice().len()])])?;
            fill(host.tensor_mut(0).into_data(), |index| value(1, index));
            sum.as_mut_slice().copy_from_host(host.tensor(0).data())?;
        }
        self.run()?;
        let operation = self.operation;
        self.sums.iter().map(|sum| wrong(sum.as_slice(), 0.0, |index| expected(operation, index))).sum()
    }
}
