//! `cargo xtask perf`: the speed of operations, in the manner of nccl-tests, each with a baseline from the same run.
//!
//! Times are taken in rounds in which the operation and its baseline alternate; the reported times are the median and the 99th percentile
//! of the slowest rank. Results are checked afterwards, on fresh data of small integers. Ranks other than 0 print nothing. No result is
//! compared with a result of another run.

pub(crate) mod arguments;
#[cfg(feature = "cuda")]
mod cuda;
mod data;
mod host;
pub(crate) mod layers;
mod limits;
mod machine;
#[cfg(feature = "mpi")]
mod mpi;
mod nodes;
pub(crate) mod operation;
mod output;
pub(crate) mod places;
pub(crate) mod plan;
#[cfg(unix)]
mod process;
pub(crate) mod record;
pub(crate) mod sizes;
pub(crate) mod statistics;
pub(crate) mod subject;
pub(crate) mod table;
pub(crate) mod tensors;
#[allow(unsafe_code, reason = "an exit that does not wait for the device")]
mod watch;

use std::io;

pub(crate) use arguments::Perf;
use arguments::{Settings, TransportChoice};
use machine::{Machine, Measured, Processes};
use operation::Operation;
use output::{Output, Results};
use places::Places;
use plan::{Place, Section};
use record::{Document, SCHEMA};

use gradsync_cli::messages::Listener;
use gradsync_cli::output::{Destination, OutputError, OutputFile};

/// Bytes of the copy that measures the host's bandwidth: more than the caches hold, even if a cache is shared by only a few cores.
const COPY_BYTES: usize = 64 << 20;

/// The reason why nothing could be measured, or why the results are invalid.
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
    #[error(transparent)]
    Output(#[from] OutputError),
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
        watch::start(self.deadline());
        let places = Places::find(&settings)?;
        check_gpus(&settings, &places)?;
        let json = self.json().filter(|_| places.is_speaker).map(|path| Destination::find(path, &[])).transpose()?;
        let listener = Listener::beside(&json);
        let json = json.map(Destination::open).transpose()?;
        let groups = groups(&settings, &places)?;
        let all: Vec<Place> = places.all().collect();
        let machine = Machine::look(&all, measured(&places)?);
        let output = Output::new(settings.counts, machine.limits(settings.limit), listener);
        if places.is_speaker {
            listener.print(&header(&machine, &settings, all.iter().any(|place| place.backend() == "cuda")))?;
        }
        let outcome = match settings.tensors {
            Some(model) => tensors::run(model, &places, &output),
            None => measure(&groups, &places, &output),
        };
        let failure = outcome.as_ref().err();
        let finished = if places.is_speaker {
            finish(json, listener, &settings, machine, failure, output.into_results())
        } else {
            Ok(())
        };
        if let (Err(_), Err(error)) = (&outcome, &finished) {
            gradsync_cli::messages::complain(error);
        }
        #[cfg(feature = "mpi")]
        match &outcome {
            // Argument errors are equal on all ranks and need no abort.
            Err(error)
                if places.transports.iter().any(|transport| transport.is_over_mpi())
                    && !matches!(error, PerfError::Arguments(_)) =>
            {
                mpi::abort(places.is_speaker, error)?;
            }
            _ => {}
        }
        outcome.and(finished)
    }
}

/// Refuses options that only GPUs support if there are none: graphs, packets and other baselines.
fn check_gpus(settings: &Settings, places: &Places) -> Result<(), PerfError> {
    let refuse = |reason: String| Err(PerfError::Arguments(reason));
    if settings.counts.graph_calls > 0 && places.all().any(|place| place.backend() != "cuda") {
        return refuse(format!("-G {}: graphs are for GPUs; leave --backend cpu out", settings.counts.graph_calls));
    }
    if settings.counts.graph_calls > 0 && places.transports.contains(&TransportChoice::MpiDevice) {
        return refuse(format!("-G {}: no graph records calls over mpi-device", settings.counts.graph_calls));
    }
    let is_adasum_of_gpus = settings.operations.contains(&Operation::Adasum)
        && places.transports.iter().any(|&transport| Place::Ranks(transport).backend() == "cuda");
    if settings.counts.against_sum && !is_adasum_of_gpus {
        return refuse("--against-sum: only adasum of GPUs is held against something else".into());
    }
    let is_over_nccl = places.transports.contains(&TransportChoice::Nccl);
    if let Some(bytes) = settings.counts.low_latency.filter(|_| !is_adasum_of_gpus && !is_over_nccl) {
        return refuse(format!(
            "--low-latency {bytes}: only small sums over nccl and adasum of GPUs are reduced by packets"
        ));
    }
    if let Some(bytes) = settings.counts.one_shot.filter(|_| !is_adasum_of_gpus && !is_over_nccl) {
        return refuse(format!("--one-shot {bytes}: only small sums over nccl and adasum of GPUs have shots"));
    }
    if settings.counts.against_empty && places.kernels != [Place::Cuda] {
        return refuse("--against-empty: only kernels of GPUs are held against an empty one".into());
    }
    Ok(())
}

/// The properties of the machine that are measured before everything else.
fn measured(places: &Places) -> Result<Measured, PerfError> {
    let needs_copy = places.is_speaker && places.all().any(|place| place.backend() == "cpu");
    Ok(Measured {
        processes: processes(places)?,
        copy_rate: needs_copy.then(|| host::vectors::copy_rate(COPY_BYTES)).transpose()?,
    })
}

fn processes(places: &Places) -> Result<Option<Processes>, PerfError> {
    let is_wanted = |transport| places.transports.contains(&transport) && places.is_one_machine();
    #[cfg(feature = "mpi")]
    if is_wanted(TransportChoice::Mpi) {
        return mpi::look().map(Some);
    }
    #[cfg(unix)]
    if is_wanted(TransportChoice::Process) {
        return process::look(places).map(Some);
    }
    let _ = is_wanted;
    Ok(None)
}

/// Sections that one set of ranks measures.
struct Group {
    place: Place,
    ranks: usize,
    sections: Vec<Section>,
}

/// The grid: kernels on rank 0, and collectives on all ranks. A grid without rows is an error, which lists the reasons.
fn groups(settings: &Settings, places: &Places) -> Result<Vec<Group>, PerfError> {
    let mut groups = Vec::new();
    for &operation in settings.operations.iter().filter(|operation| operation.is_kernel() && places.is_speaker) {
        for &place in &places.kernels {
            for ranks in places.vectors(operation, settings) {
                let sections = settings.sections(|wanted| wanted == operation, place, ranks);
                groups.push(Group { place, ranks, sections });
            }
        }
    }
    let collective = |operation: Operation| !operation.is_kernel();
    if settings.operations.iter().any(|&operation| collective(operation)) {
        for &transport in &places.transports {
            let place = Place::Ranks(transport);
            for ranks in places.ranks(transport, settings)? {
                groups.push(Group { place, ranks, sections: settings.sections(collective, place, ranks) });
            }
        }
    }
    let sections = || groups.iter().flat_map(|group| &group.sections);
    // Ranks other than 0 do not have the kernels' rows.
    let knows_all = places.is_speaker || !settings.operations.iter().any(|operation| operation.is_kernel());
    if knows_all && sections().next().is_some() && sections().all(|section| section.rows.is_empty()) {
        let mut reasons: Vec<&str> = Vec::new();
        for reason in sections().flat_map(|section| &section.left_out) {
            if !reasons.contains(&reason.as_str()) {
                reasons.push(reason);
            }
        }
        return Err(PerfError::Arguments(format!("nothing to measure: {}", reasons.join("; "))));
    }
    Ok(groups)
}

/// Measures the grid, one group of ranks after the other.
fn measure(groups: &[Group], places: &Places, output: &Output) -> Result<(), PerfError> {
    for Group { place, ranks, sections } in groups {
        match place {
            #[cfg(feature = "cuda")]
            Place::Cuda => sections.iter().try_for_each(|section| cuda::kernels::run(section, output))?,
            Place::Ranks(TransportChoice::Local) if places.is_speaker => host::local::run(*ranks, sections, output)?,
            Place::Ranks(TransportChoice::Local) => {}
            #[cfg(unix)]
            Place::Ranks(TransportChoice::Process) => process::run(places, sections, output)?,
            #[cfg(feature = "mpi")]
            Place::Ranks(TransportChoice::Mpi) => mpi::run(sections, output)?,
            #[cfg(all(feature = "cuda", feature = "mpi"))]
            Place::Ranks(TransportChoice::MpiDevice) => cuda::mpi::run(places, sections, output)?,
            #[cfg(feature = "cuda")]
            Place::Ranks(TransportChoice::Nccl | TransportChoice::Peer) => {
                cuda::ranks::run(places, *ranks, sections, output)?;
            }
            // Places of features that are not compiled in were refused earlier.
            _ => sections.iter().try_for_each(|section| host::kernels::run(section, output))?,
        }
    }
    Ok(())
}

fn header(machine: &Machine, settings: &Settings, has_gpus: bool) -> String {
    let counts = settings.counts;
    let check = if counts.check { "results checked" } else { "results not checked" };
    let set = match counts.working_set {
        Some(bytes) => format!("buffers in turn, {} together", sizes::shown(bytes)),
        None if has_gpus => "two buffers in turn on GPUs, or more, which hold three times the L2 cache".into(),
        None => "one set of buffers, which stays in the caches if it fits".into(),
    };
    let (warm_ups, iterations) = (counts.warm_ups, counts.iterations);
    let mut rounds = format!("# {warm_ups} warm-up rounds, {iterations} counted; {check}; {set}\n");
    if counts.graph_calls > 0 {
        rounds += &format!("# times are those of graphs of {} calls, divided by that\n", counts.graph_calls);
    }
    if counts.shared_buffers {
        rounds += "# vectors of all_reduce and adasum lie in memory that all processes map\n";
    }
    let times = "# time: the median of the slowest rank's times; ratio: the baseline's time over it\n";
    machine.lines() + &rounds + times
}

/// Writes the JSON, prints the footer, and fails if results were wrong. `failure` is the error that ended the measurement early; earlier
/// results are kept.
fn finish(
    json: Option<OutputFile>,
    listener: Listener,
    settings: &Settings,
    machine: Machine,
    failure: Option<&PerfError>,
    results: Results,
) -> Result<(), PerfError> {
    let Results { measurements, loads, left_out } = results;
    let wrong = measurements.iter().map(record::Measurement::wrong).sum::<u64>();
    let failure = failure.map(ToString::to_string);
    let footer = table::footer(&measurements, &loads, &left_out, wrong, settings.counts.check, failure.as_deref());
    // A failed run without results keeps the file of an earlier run.
    let json = json.filter(|_| failure.is_none() || !measurements.is_empty());
    let document = Document {
        schema: SCHEMA,
        program: "cargo xtask perf".into(),
        machine,
        warm_ups: settings.counts.warm_ups,
        iterations: settings.counts.iterations,
        graph_calls: settings.counts.graph_calls,
        measurements,
        loads,
        left_out,
        failure,
        wrong,
    };
    if let Some(file) = json {
        document.write(file)?;
    }
    listener.print(&footer)?;
    if wrong > 0 { Err(PerfError::Wrong(wrong)) } else { Ok(()) }
}
