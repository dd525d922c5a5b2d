//! The destinations of results: rows go to stdout as they are measured (to stderr if the JSON goes to stdout), all results go to the JSON at
//! the end. Exactly one rank has an output that prints.

use std::sync::{Mutex, PoisonError};

use super::PerfError;
use super::arguments::Counts;
use super::limits::Limits;
use super::operation::Row;
use super::plan::Section;
use super::record::{BaselineName, Load, Measurement};
use super::subject::Found;
use super::table;
use gradsync_cli::messages::Listener;

/// The results so far.
#[derive(Debug, Default)]
pub(crate) struct Results {
    pub(crate) measurements: Vec<Measurement>,
    pub(crate) loads: Vec<Load>,
    pub(crate) left_out: Vec<String>,
}

impl Results {
    /// If several queues have loaded a kernel, the longest time is kept.
    fn take(&mut self, load: Load) {
        match self.loads.binary_search_by(|known| known.kernel.cmp(&load.kernel)) {
            Ok(at) if self.loads[at].load_ms >= load.load_ms => {}
            Ok(at) => self.loads[at] = load,
            Err(at) => self.loads.insert(at, load),
        }
    }
}

/// The parts that all sections share: the method of measuring, and the destination of results.
pub(crate) struct Output {
    pub(crate) counts: Counts,
    limits: Limits,
    listener: Listener,
    results: Mutex<Results>,
}

impl Output {
    pub(crate) fn new(counts: Counts, limits: Limits, listener: Listener) -> Self {
        Self { counts, limits, listener, results: Mutex::default() }
    }

    /// Prints a row, or a text around rows.
    pub(crate) fn say(&self, text: &str) -> Result<(), PerfError> {
        Ok(self.listener.print(text)?)
    }

    /// Begins a section's table; `baseline` is the name of its rows' baseline.
    pub(crate) fn begin(&self, section: &Section, baseline: BaselineName) -> Result<(), PerfError> {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let (operation, place) = (section.operation.name(), section.place);
        let on = place.transport().unwrap_or(place.backend());
        results.left_out.extend(section.left_out.iter().map(|reason| format!("{operation} on {on}: {reason}")));
        if section.rows.is_empty() {
            return Ok(());
        }
        let baseline = self.counts.baseline.then_some(baseline);
        let limit = self.limits.of(place, &section.rows[0]);
        self.say(&table::heading(section, baseline, limit))
    }

    /// Adds the result of a row.
    pub(crate) fn row(
        &self,
        section: &Section,
        row: &Row,
        found: &Found,
        baseline: BaselineName,
    ) -> Result<(), PerfError> {
        let limit = self.limits.of(section.place, row);
        let shared_buffers = self.counts.shared_buffers;
        let measurement = Measurement { shared_buffers, ..Measurement::new(section, row, found, baseline, limit) };
        let line = table::row(&measurement);
        self.results.lock().unwrap_or_else(PoisonError::into_inner).measurements.push(measurement);
        self.say(&line)
    }

    /// Adds the kernels that a queue has loaded.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "kernels are loaded onto GPUs"))]
    pub(crate) fn loaded(&self, loads: impl IntoIterator<Item = Load>) {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        loads.into_iter().for_each(|load| results.take(load));
    }

    pub(crate) fn into_results(self) -> Results {
        self.results.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_longest_load_of_a_kernel() {
        let load = |kernel: &str, load_ms| Load { kernel: kernel.into(), source: "ptx".into(), load_ms };
        let (mut results, loads) =
            (Results::default(), [("zero", 3.0), ("dots_f32", 9.0), ("zero", 12.0), ("zero", 1.0)]);
        loads.into_iter().for_each(|(kernel, load_ms)| results.take(load(kernel, load_ms)));
        assert_eq!(results.loads, [load("dots_f32", 9.0), load("zero", 12.0)]);
    }
}
