//! Where results go: rows to stdout as they come, and all of them to files at the end.
//!
//! One rank, and no other, has an output that speaks.

use std::sync::{Mutex, PoisonError};

use super::PerfError;
use super::arguments::Counts;
use super::limits::Limits;
use super::operation::Row;
use super::plan::Section;
use super::record::Measurement;
use super::subject::Found;
use super::table;
use crate::print;

/// The results so far.
#[derive(Debug, Default)]
pub(crate) struct Results {
    pub(crate) measurements: Vec<Measurement>,
    pub(crate) left_out: Vec<String>,
}

/// What all sections share: how to measure, and where results go.
pub(crate) struct Output {
    pub(crate) counts: Counts,
    limits: Limits,
    results: Mutex<Results>,
}

impl Output {
    pub(crate) fn new(counts: Counts, limits: Limits) -> Self {
        Self { counts, limits, results: Mutex::default() }
    }

    /// Begins a section's table; `baseline` is what its rows are held against.
    pub(crate) fn begin(&self, section: &Section, baseline: &str) -> Result<(), PerfError> {
        let mut results = self.results.lock().unwrap_or_else(PoisonError::into_inner);
        let (operation, place) = (section.operation.name(), section.place);
        let on = place.transport().unwrap_or(place.backend());
        results.left_out.extend(section.left_out.iter().map(|reason| format!("{operation} on {on}: {reason}")));
        if section.rows.is_empty() {
            return Ok(());
        }
        let baseline = self.counts.baseline.then_some(baseline);
        Ok(print(&table::heading(section, baseline, &table::note(section)))?)
    }

    /// Takes the result of a row.
    pub(crate) fn row(&self, section: &Section, row: &Row, found: &Found, baseline: &str) -> Result<(), PerfError> {
        let limit = self.limits.of(section.place, row);
        let measurement = Measurement::new(section, row, found, baseline, limit);
        print(&table::row(&measurement))?;
        self.results.lock().unwrap_or_else(PoisonError::into_inner).measurements.push(measurement);
        Ok(())
    }

    pub(crate) fn into_results(self) -> Results {
        self.results.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}
