//! `gradsync perf`: how fast operations are, in the manner of nccl-tests, each beside a baseline from the same run.
//!
//! Times are taken in rounds in which the operation and its baseline take turns; the median and the 99th percentile of the slowest rank
//! count. Results are checked afterwards, on fresh data of small integers. Ranks other than 0 print nothing. Nothing is compared with a
//! number from another run.

mod arguments;
#[cfg(feature = "cuda")]
mod cuda;
mod data;
mod host;
mod limits;
mod machine;
mod model;
#[cfg(feature = "mpi")]
mod mpi;
mod operation;
mod output;
mod places;
mod plan;
mod plot;
mod record;
mod sizes;
mod statistics;
mod subject;
mod table;
mod tensors;

use std::io;
use std::path::{Path, PathBuf};

pub(crate) use arguments::Perf;
use arguments::{Settings, Task, TransportChoice};
use machine::Machine;
use operation::Operation;
use output::{Output, Results};
use places::Places;
use plan::Place;
use record::{Document, SCHEMA};

use crate::print;

/// Bytes that the host's copy is measured with: more than caches hold, where there is one for a few cores.
const COPY_BYTES: usize = 64 << 20;

/// Why nothing could be measured, or what was measured is no good.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PerfError {
    #[error("{0}")]
    Arguments(String),
    #[error("no driver: {0}")]
    #[cfg(feature = "cuda")]
    NoDriver(gradsync::driver::CudaError),
    #[error("{what} needs the feature `{feature}`, and this program was built without it")]
    NotBuilt { what: String, feature: &'static str },
    #[error(transparent)]
    Gradsync(#[from] gradsync::Error),
    #[error("rank {rank} panicked")]
    Panicked { rank: usize },
    #[error("{call} of plain NCCL failed with code {code}")]
    #[cfg(feature = "cuda")]
    Nccl { call: &'static str, code: i32 },
    #[error("{path}: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("standard output: {0}")]
    Stdout(#[from] io::Error),
    #[error("{0} wrong elements")]
    Wrong(u64),
}

#[cfg(feature = "cuda")]
impl From<gradsync::driver::CudaError> for PerfError {
    fn from(error: gradsync::driver::CudaError) -> Self {
        PerfError::Gradsync(error.into())
    }
}

impl Perf {
    pub(crate) fn run(self) -> Result<(), PerfError> {
        let settings = self.settings()?;
        if let Task::Model { fit, ranks_per_node } = self.task() {
            let (text, document) = model::report(&fit, ranks_per_node, &settings)?;
            print(&text)?;
            return match self.json() {
                Some(path) => write(path, &(serde_json::to_string_pretty(&document).map_err(io::Error::from)? + "\n")),
                None => Ok(()),
            };
        }
        let places = Places::find(&settings, matches!(self.task(), Task::Tensors(_)))?;
        if places.is_speaker {
            [self.json(), self.plot()].into_iter().flatten().try_for_each(|path| check_writable(path))?;
        }
        let all: Vec<Place> = places.all().collect();
        let needs_copy = places.is_speaker && all.iter().any(|place| place.backend() == "cpu");
        let machine = Machine::look(&all, needs_copy.then(|| host::vectors::copy_rate(COPY_BYTES)));
        let output = Output::new(settings.counts, machine.limits(settings.limit));
        if places.is_speaker {
            print(&header(&machine, &settings))?;
        }
        match self.task() {
            Task::Tensors(model) => tensors::run(model, &places, &output)?,
            _ => measure(&settings, &places, &output)?,
        }
        if places.is_speaker { finish(&self, &settings, machine, output.into_results()) } else { Ok(()) }
    }
}

/// Goes through the grid, one group of ranks after the other.
fn measure(settings: &Settings, places: &Places, output: &Output) -> Result<(), PerfError> {
    let kernels = settings.operations.iter().filter(|operation| operation.is_kernel() && places.is_speaker);
    for (&operation, place) in kernels.flat_map(|operation| places.kernels.iter().map(move |place| (operation, *place)))
    {
        for ranks in places.vectors(operation, settings) {
            for section in settings.sections(|wanted| wanted == operation, place, ranks)? {
                match place {
                    #[cfg(feature = "cuda")]
                    Place::Cuda => cuda::kernels::run(&section, output)?,
                    _ => host::kernels::run(&section, output)?,
                }
            }
        }
    }
    let collective = |operation: Operation| !operation.is_kernel();
    if !settings.operations.iter().any(|&operation| collective(operation)) {
        return Ok(());
    }
    for &transport in &places.transports {
        let place = Place::Ranks(transport);
        for ranks in places.ranks(transport, settings)? {
            let sections = settings.sections(collective, place, ranks)?;
            match transport {
                TransportChoice::Local if places.is_speaker => host::local::run(ranks, &sections, output)?,
                TransportChoice::Local => {}
                #[cfg(feature = "mpi")]
                TransportChoice::Mpi => mpi::run(&sections, output)?,
                #[cfg(feature = "cuda")]
                TransportChoice::Nccl | TransportChoice::Peer => cuda::ranks::run(places, ranks, &sections, output)?,
                #[allow(unreachable_patterns)] // without a feature, its transports were refused when places were found
                _ => {}
            }
        }
    }
    Ok(())
}

fn header(machine: &Machine, settings: &Settings) -> String {
    let counts = settings.counts;
    let check = if counts.check { "results checked" } else { "results not checked" };
    let set = match counts.working_set {
        Some(bytes) => format!("buffers in turn, {} together", sizes::shown(bytes)),
        None => "buffers in turn on GPUs, three times the L2 cache together".into(),
    };
    let (warm_ups, iterations) = (counts.warm_ups, counts.iterations);
    let rounds = format!("# {warm_ups} warm-up rounds, {iterations} counted; {check}; {set}\n");
    let times = "# time: the median of the slowest rank's times; ratio: the baseline's time over it\n";
    machine.lines() + &rounds + times
}

/// Prints the footer, writes the files, and fails if results were wrong.
fn finish(perf: &Perf, settings: &Settings, machine: Machine, results: Results) -> Result<(), PerfError> {
    let Results { measurements, left_out } = results;
    let wrong = measurements.iter().map(record::Measurement::wrong).sum();
    print(&table::footer(&measurements, &left_out, wrong, settings.counts.check))?;
    let document = Document {
        schema: SCHEMA,
        program: "gradsync perf".into(),
        machine,
        warm_ups: settings.counts.warm_ups,
        iterations: settings.counts.iterations,
        measurements,
        left_out,
        wrong,
    };
    if let Some(path) = perf.json() {
        write(path, &(serde_json::to_string_pretty(&document).map_err(io::Error::from)? + "\n"))?;
    }
    if let Some(path) = perf.plot() {
        let refused = |reason| PerfError::File { path: path.clone(), reason };
        write(path, &plot::svg(&document.measurements).map_err(refused)?)?;
    }
    if wrong > 0 { Err(PerfError::Wrong(wrong)) } else { Ok(()) }
}

/// Refuses a file that could not be written at the end, before anything is measured.
fn check_writable(path: &Path) -> Result<(), PerfError> {
    let refused = |reason: &str| Err(PerfError::File { path: path.into(), reason: reason.into() });
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match () {
        () if path.is_dir() => refused("is a folder"),
        () if !folder.is_dir() => refused("its folder does not exist"),
        () => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<(), PerfError> {
    std::fs::write(path, text).map_err(|error| PerfError::File { path: path.into(), reason: error.to_string() })
}
