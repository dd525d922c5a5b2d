//! `--launch`: the time of small launches beyond an empty kernel's time and the time of their memory traffic, plain and recorded.

use std::time::Instant;

use gradsync::driver::Queue;

use super::kernels::Kernel;
use super::vectors::Copy;
use super::{first_use, timing};
use crate::perf::PerfError;
use crate::perf::arguments::Counts;
use crate::perf::launch::{Excess, Launch, Launches};
use crate::perf::operation::Row;
use crate::perf::output::Output;
use crate::perf::plan::Section;
use crate::perf::statistics::Times;
use crate::perf::subject::{self, Side, Subject};

/// Bytes that the reference copy reads and writes; its rate is the memory bandwidth.
const COPY_TRAFFIC: f64 = (2u64 << 30) as f64;
/// Calls per graph if -G is not given.
const GRAPH_CALLS: usize = 20;

/// Measures all rows on the first device, and stores them in `launches`, including the rows before a failure. `rate` is the memory
/// bandwidth in bytes per second, if the user gives it.
pub(crate) fn run(
    sections: &[Section],
    counts: Counts,
    rate: Option<f64>,
    output: &Output,
    launches: &mut Option<Launches>,
) -> Result<(), PerfError> {
    // A new queue has loaded no kernels yet.
    let queue = Queue::new(0)?;
    // The default is one set of buffers, which stays in the cache.
    let working_set = counts.working_set.unwrap_or(1);
    let counts = Counts { working_set: Some(working_set), baseline: true, ..counts };
    let graph_calls = if counts.graph_calls > 0 { counts.graph_calls } else { GRAPH_CALLS };
    let memory_rate = match rate {
        Some(rate) => rate,
        None => copy_rate(&queue, counts)?,
    };
    let begun = Launches { memory_gbs: memory_rate / 1e9, graph_calls, working_set, rows: Vec::new() };
    let rows = &mut launches.insert(begun).rows;
    for (section, row) in sections.iter().flat_map(|section| section.rows.iter().map(move |row| (section, row))) {
        rows.push(measure(&queue, section, row, counts, (graph_calls, memory_rate))?);
        output.advance();
    }
    output.loaded(first_use::loads(&queue));
    Ok(())
}

fn measure(
    queue: &Queue,
    section: &Section,
    row: &Row,
    counts: Counts,
    (graph_calls, memory_rate): (usize, f64),
) -> Result<Launch, PerfError> {
    let mut kernel = Kernel::beside_empty(queue, row, counts)?;
    let side = if kernel.has(Side::InPlace) { Side::InPlace } else { Side::OutOfPlace };
    queue.synchronize()?;
    let start = Instant::now();
    kernel.call(side, 0)?;
    queue.synchronize()?;
    let first_call = start.elapsed().as_secs_f64();
    let bytes_us = row.traffic() / memory_rate * 1e6;
    let mut excess = |graph_calls: usize| {
        let seconds = timing::time(queue, &mut kernel, Counts { graph_calls, ..counts }, &mut timing::alone)?;
        let median = |side: Side| Times::of(&seconds[side as usize]).map_or(f64::NAN, |times| times.median * 1e6);
        let (time_us, empty_us) = (median(side), median(Side::Baseline));
        Ok::<_, PerfError>(Excess { time_us, empty_us, above_us: time_us - empty_us - bytes_us })
    };
    let (plain, graph) = (excess(0)?, excess(graph_calls)?);
    let wrong = subject::check(&mut kernel, counts)?[side as usize];
    Ok(Launch {
        operation: section.operation.name().into(),
        ranks: row.ranks,
        dtype: row.types.to.name().into(),
        from_dtype: row.types.from.name().into(),
        size_bytes: row.bytes(),
        first_call_ms: first_call * 1e3,
        bytes_us,
        plain,
        graph,
        wrong,
    })
}

/// The median bandwidth, in bytes per second read and written, of the driver's copy of 1 GiB.
fn copy_rate(queue: &Queue, counts: Counts) -> Result<f64, PerfError> {
    let mut alone = Alone(Copy::new(queue, COPY_TRAFFIC, 1)?);
    let counts = Counts { graph_calls: 0, ..counts };
    let seconds = timing::time(queue, &mut alone, counts, &mut timing::alone)?;
    let times = Times::of(&seconds[Side::OutOfPlace as usize]);
    Ok(COPY_TRAFFIC / times.map_or(f64::NAN, |times| times.median))
}

struct Alone(Copy);

impl Subject for Alone {
    fn has(&self, side: Side) -> bool {
        side == Side::OutOfPlace
    }

    fn call(&mut self, _: Side, round: usize) -> Result<(), PerfError> {
        self.0.call(round)
    }

    fn wrong(&mut self, _: Side) -> Result<u64, PerfError> {
        Ok(0)
    }
}
