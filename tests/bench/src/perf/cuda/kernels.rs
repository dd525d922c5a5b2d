//! Measurements of the CUDA backend's kernels, on the first device.

use gradsync::driver::{DeviceSlice, Queue};
use gradsync::internal::kernels::cpu::Coefficients;
use gradsync::internal::kernels::cuda::{self, SegmentWorkspace};

use super::baseline::Baseline;
use super::vectors::{Vectors, slots};
use super::{loads, timing};
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::data::{FACTOR, PERIOD, count_differing, product, value, weight, weighted};
use crate::perf::operation::{Operation, Row};
use crate::perf::output::Output;
use crate::perf::plan::Section;
use crate::perf::subject::{self, Found, Side, Subject};
use crate::perf::watch;

/// The largest number of sets of buffers with a workspace of their own.
const MOST_WORKSPACES: usize = 64;
/// The largest number of sets of buffers.
const MOST_SLOTS: usize = 4096;

/// Measures a section's rows.
pub(crate) fn run(section: &Section, output: &Output) -> Result<(), PerfError> {
    let name = Baseline::name(section.operation, output.counts);
    output.begin(section, name)?;
    let queue = Queue::new(0)?;
    for row in &section.rows {
        let _watched = watch::row(row.described());
        let mut kernel = Kernel::new(&queue, row, output.counts)?;
        let seconds = timing::time(&queue, &mut kernel, output.counts, &mut timing::alone)?;
        let wrong = subject::check(&mut kernel, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, name)?;
    }
    output.loaded(loads(&queue));
    Ok(())
}

struct Kernel {
    row: Row,
    /// The destination.
    to: Vectors,
    /// The inputs.
    from: Vec<Vectors>,
    /// The workspaces of products and weighted sums, one for each set of buffers.
    layers: Vec<SegmentWorkspace>,
    baseline: Option<Baseline>,
}

impl Kernel {
    fn new(queue: &Queue, row: &Row, counts: Counts) -> Result<Self, PerfError> {
        let Row { operation, types, ranks, len, .. } = *row;
        let vectors = operation.vectors(ranks);
        let has_workspace = operation.only_reads() || operation == Operation::Combine;
        let most = if has_workspace { MOST_WORKSPACES } else { MOST_SLOTS };
        let slots = slots(queue, counts.working_set, row.traffic() as usize, most)?;
        // Products return numbers and need no destination vector.
        let to_len = if operation.only_reads() { 0 } else { len };
        let mut to = Vectors::new(queue, types.to, to_len, slots)?;
        to.repeat(|index| value(0, index))?;
        let mut from = Vec::new();
        for vector in 0..vectors {
            let mut vectors = Vectors::new(queue, types.from, len, slots)?;
            vectors.repeat(|index| value(vector, index))?;
            from.push(vectors);
        }
        let mut layers = Vec::new();
        for _ in 0..if has_workspace { slots } else { 0 } {
            let mut workspace = SegmentWorkspace::new(queue, len, &[0..len], vectors)?;
            let weights = (0..vectors).map(weight).collect();
            workspace.write_coefficients(&Coefficients { weights, cancelled: vec![false] })?;
            layers.push(workspace);
        }
        let baseline = counts.baseline.then(|| Baseline::new(queue, row, slots, counts)).transpose()?;
        Ok(Self { row: *row, to, from, layers, baseline })
    }

    fn run(&mut self, round: usize) -> Result<(), PerfError> {
        let place = round % self.to.slots();
        let vectors: Vec<DeviceSlice<'_>> = self.from.iter().map(|vectors| vectors.slice(round)).collect();
        match self.row.operation {
            Operation::Zero => cuda::zero(self.to.slice_mut(round))?,
            Operation::Cast => cuda::cast(self.to.slice_mut(round), vectors[0])?,
            Operation::Scale => cuda::scale(self.to.slice_mut(round), vectors[0], FACTOR)?,
            Operation::Accumulate => cuda::accumulate(self.to.slice_mut(round), vectors[0])?,
            Operation::SquaredNorms => self.layers[place].squared_norms(vectors[0])?,
            Operation::Dots => self.layers[place].dots(vectors[0], vectors[1])?,
            Operation::Gram => self.layers[place].gram(&vectors)?,
            Operation::Combine => self.layers[place].combine(self.to.slice_mut(round), &vectors)?,
            other => unreachable!("{} is no kernel", other.name()),
        }
        Ok(())
    }
}

impl Subject for Kernel {
    fn has(&self, side: Side) -> bool {
        let is_in_place = matches!(self.row.operation, Operation::Zero | Operation::Accumulate);
        match side {
            Side::OutOfPlace => !is_in_place,
            Side::InPlace => is_in_place,
            Side::Baseline => self.baseline.is_some(),
        }
    }

    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError> {
        match (side, &mut self.baseline) {
            (Side::Baseline, Some(baseline)) => baseline.call(round),
            _ => self.run(round),
        }
    }

    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        let Row { operation, ranks, len, .. } = self.row;
        self.to.repeat(|index| value(1, index))?;
        self.run(0)?;
        let pairs = (0..ranks).flat_map(|left| (left..ranks).map(move |right| product(left, right, len)));
        match operation {
            Operation::Zero => self.to.count_wrong(0.0, |_| 0.0),
            Operation::Cast => self.to.count_wrong(0.0, |index| value(0, index)),
            Operation::Scale => self.to.count_wrong(0.0, |index| FACTOR * value(0, index)),
            Operation::Accumulate => self.to.count_wrong(0.0, |index| value(0, index) + value(1, index)),
            Operation::SquaredNorms => {
                Ok(count_differing(&self.layers[0].read_totals(1)?, [product(0, 0, len)].into_iter()))
            }
            Operation::Dots => {
                let expected = [product(0, 1, len), product(0, 0, len), product(1, 1, len)];
                Ok(count_differing(&self.layers[0].read_totals(3)?, expected.into_iter()))
            }
            Operation::Gram => {
                let found = self.layers[0].read_totals(ranks * (ranks + 1) / 2)?;
                Ok(count_differing(&found, pairs))
            }
            _ => {
                let table = weighted(ranks);
                self.to.count_wrong(0.0, |index| table[index % PERIOD])
            }
        }
    }
}
