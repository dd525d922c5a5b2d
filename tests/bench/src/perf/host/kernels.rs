//! Measurements of the CPU backend's kernels.

use std::hint::black_box;
use std::ops::Range;

use gradsync::Slice;
use gradsync::internal::kernels::cpu;

use super::baseline::Baseline;
use super::vectors::{Vectors, slots};
use crate::perf::PerfError;
use crate::perf::data::{FACTOR, PERIOD, count_differing, count_wrong, product, value, weight, weighted};
use crate::perf::operation::{Operation, Row};
use crate::perf::output::Output;
use crate::perf::plan::Section;
use crate::perf::subject::{self, Found, Side, Subject};
use crate::perf::watch;

/// Measures a section's rows.
pub(crate) fn run(section: &Section, output: &Output) -> Result<(), PerfError> {
    let name = Baseline::name(section.operation);
    output.begin(section, name)?;
    for row in &section.rows {
        let _watched = watch::row(row.described());
        let mut kernel = Kernel::new(row, output)?;
        let seconds = subject::time(&mut kernel, output.counts, || Ok(()))?;
        let wrong = subject::check(&mut kernel, output.counts)?;
        output.row(section, row, &Found { seconds, wrong }, name)?;
    }
    Ok(())
}

struct Kernel {
    row: Row,
    /// The destination.
    to: Vectors,
    /// The inputs.
    from: Vec<Vectors>,
    /// The whole vector as one layer.
    whole: [Range<usize>; 1],
    weights: Vec<f64>,
    baseline: Option<Baseline>,
}

impl Kernel {
    fn new(row: &Row, output: &Output) -> Result<Self, PerfError> {
        let Row { operation, types, ranks, len, .. } = *row;
        let slots = slots(output.counts.working_set, row.traffic() as usize);
        // Products return numbers and need no destination vector.
        let to_len = if operation.only_reads() { 0 } else { len };
        let mut to = Vectors::new(types.to, to_len, slots)?;
        to.fill(|index| value(0, index));
        let mut from = Vec::new();
        for vector in 0..operation.vectors(ranks) {
            let mut vectors = Vectors::new(types.from, len, slots)?;
            vectors.fill(|index| value(vector, index));
            from.push(vectors);
        }
        Ok(Self {
            row: *row,
            to,
            whole: [0..len],
            weights: (0..from.len()).map(weight).collect(),
            from,
            baseline: output.counts.baseline.then(|| Baseline::new(row, slots)).transpose()?,
        })
    }

    fn vectors(&self, round: usize) -> Vec<Slice<'_>> {
        self.from.iter().map(|vectors| vectors.slice(round)).collect()
    }

    /// Runs the kernel; returns the numbers of products, and nothing for other kernels.
    fn run(&mut self, round: usize) -> Result<Vec<f64>, PerfError> {
        match self.row.operation {
            Operation::Zero => cpu::zero(self.to.slice_mut(round)),
            Operation::Cast => cpu::cast(self.to.slice_mut(round), self.from[0].slice(round))?,
            Operation::Scale => cpu::scale(self.to.slice_mut(round), self.from[0].slice(round), FACTOR)?,
            Operation::Accumulate => cpu::accumulate(self.to.slice_mut(round), self.from[0].slice(round))?,
            Operation::SquaredNorms => return Ok(cpu::squared_norms(self.from[0].slice(round), &self.whole)?),
            Operation::Dots => {
                let dots = cpu::dots(self.from[0].slice(round), self.from[1].slice(round), &self.whole)?;
                return Ok(dots.concat());
            }
            Operation::Gram => return Ok(cpu::gram(&self.vectors(round), &self.whole)?),
            Operation::Combine => {
                let vectors: Vec<Slice<'_>> = self.from.iter().map(|vectors| vectors.slice(round)).collect();
                cpu::combine(self.to.slice_mut(round), &vectors, &self.weights, &self.whole)?;
            }
            other => unreachable!("{} is no kernel", other.name()),
        }
        Ok(Vec::new())
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
            _ => _ = black_box(self.run(round)?),
        }
        Ok(())
    }

    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        let Row { operation, ranks, len, .. } = self.row;
        self.to.fill(|index| value(1, index));
        let found = self.run(0)?;
        let result = self.to.slice(0);
        let pairs = (0..ranks).flat_map(|left| (left..ranks).map(move |right| product(left, right, len)));
        Ok(match operation {
            Operation::Zero => count_wrong(result, 0.0, |_| 0.0),
            Operation::Cast => count_wrong(result, 0.0, |index| value(0, index)),
            Operation::Scale => count_wrong(result, 0.0, |index| FACTOR * value(0, index)),
            Operation::Accumulate => count_wrong(result, 0.0, |index| value(0, index) + value(1, index)),
            Operation::SquaredNorms => count_differing(&found, [product(0, 0, len)].into_iter()),
            Operation::Dots => {
                let expected = [product(0, 1, len), product(0, 0, len), product(1, 1, len)];
                count_differing(&found, expected.into_iter())
            }
            Operation::Gram => count_differing(&found, pairs),
            _ => {
                let table = weighted(ranks);
                count_wrong(result, 0.0, |index| table[index % PERIOD])
            }
        })
    }
}
