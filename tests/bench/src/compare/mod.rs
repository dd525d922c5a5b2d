//! `cargo xtask compare PEER`: an operation of gradsync beside the same operation of another implementation.
//!
//! `perf` has baselines within its own process: NCCL, MPI, copies. A peer of this module is a program of its own, which checks its results.
//! In each turn both programs are started, one after the other; they are compared within a turn, during which the machine changes least.

mod launch;
mod peers;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use gradsync_cli::messages::Listener;
use gradsync_cli::output::Destination;
use serde::Deserialize;
use serde_json::Value;

use self::peers::Peer;
use crate::perf::operation::{Operation, Row};
use crate::perf::plan::Section;
use crate::perf::record::{Document, Measurement, SCHEMA};
use crate::perf::statistics::Times;
use crate::perf::subject::{Found, Side};
use crate::perf::table;

/// The arguments of `gradsync-bench compare`.
#[derive(Args)]
pub(crate) struct Compare {
    #[arg(value_name = "PEER", value_enum)]
    peer: Peer,
    /// Small sizes and few turns: whether everything runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Write all results as JSON too, in the format of `perf`; `-` is the standard output, and the table then goes to stderr
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Horovod's rank program
    #[arg(long, value_name = "FILE", required_if_eq("peer", "horovod"))]
    program: Option<PathBuf>,
    /// What the program is: version, compiler, flags
    #[arg(long, value_name = "TEXT", requires = "program")]
    about: Option<String>,
}

/// The results so far.
#[derive(Default)]
struct Results {
    measurements: Vec<Measurement>,
    /// What the peer is, and the machine as `perf` describes it.
    about: String,
    machine: Value,
    wrong: u64,
}

/// What a peer's program prints.
#[derive(Deserialize)]
struct Printed {
    by: Option<String>,
    times_us: Vec<f64>,
    wrong: u64,
}

/// The launches of one side of a row.
#[derive(Clone, Debug, Default)]
struct Launches {
    /// The median of each launch, in seconds.
    seconds: Vec<f64>,
    wrong: u64,
}

/// The sides of a row: the peer's first, then gradsync's.
struct Turns(Vec<Launches>);

impl Turns {
    /// The number of turns. Each side is first equally often.
    fn count(sides: usize, is_quick: bool) -> usize {
        if is_quick { sides } else { 2 * sides }
    }

    /// gradsync's side `side` beside the peer: the ratio is the median of the turns' ratios.
    fn measurement(&self, peer: Peer, section: &Section, row: &Row, side: usize) -> Option<Measurement> {
        let (theirs, ours) = (&self.0[0], &self.0[side]);
        let own = if row.operation == Operation::Cast { Side::OutOfPlace } else { Side::InPlace };
        let mut found = Found::default();
        found.seconds[own as usize].clone_from(&ours.seconds);
        found.seconds[Side::Baseline as usize].clone_from(&theirs.seconds);
        found.wrong[own as usize] = Some(ours.wrong);
        let mut measurement = Measurement::new(section, row, &found, peer.name(), None);
        let pairs = theirs.seconds.iter().zip(&ours.seconds);
        let ratios: Vec<f64> = pairs.map(|(theirs, ours)| theirs / ours).collect();
        let least = ratios.iter().copied().min_by(f64::total_cmp)?;
        let most = ratios.iter().copied().max_by(f64::total_cmp)?;
        let baseline = measurement.baseline.as_mut()?;
        (baseline.ratio, baseline.ratio_range) = (Times::of(&ratios)?.median, Some([least, most]));
        Some(measurement)
    }
}

impl Compare {
    pub(crate) fn run(self) -> Result<()> {
        let start = Instant::now();
        self.peer.find()?;
        let json = self.json.as_ref().map(|path| Destination::find(path, &[])).transpose()?;
        let listener = Listener::beside(&json);
        let json = json.map(Destination::open).transpose()?;
        let mut results = Results { about: self.about.clone().unwrap_or_default(), ..Results::default() };
        let outcome = self.measure(listener, &mut results);
        let Results { measurements, about, machine, wrong } = results;
        listener.print(&format!("\n# by {about}; {wrong} wrong; after {:.0} s\n", start.elapsed().as_secs_f64()))?;
        let [warm_ups, iterations] = counts(0);
        let document = Document {
            schema: SCHEMA,
            program: format!("cargo xtask compare, beside {about}"),
            machine,
            // These are the counts for small vectors; large ones have fewer.
            warm_ups,
            iterations,
            graph_calls: 0,
            measurements,
            loads: Vec::new(),
            left_out: Vec::new(),
            failure: outcome.as_ref().err().map(|error| format!("{error:#}")),
            wrong,
        };
        if let Some(file) = json {
            document.write(file)?;
        }
        outcome?;
        if wrong > 0 { bail!("{wrong} wrong elements") } else { Ok(()) }
    }

    fn measure(&self, listener: Listener, results: &mut Results) -> Result<()> {
        let (peer, place, memories) = (self.peer, self.peer.place(), self.peer.memories());
        let mut last = None;
        for row in peer.rows(self.quick) {
            let (operation, ranks) = (row.operation, row.ranks);
            let section = Section { operation, place, ranks, rows: vec![row], left_out: Vec::new() };
            if last.replace((operation, ranks)) != Some((operation, ranks)) {
                listener.print(&table::heading(&section, Some(peer.name()), None))?;
            }
            let sides = 1 + memories.len();
            let mut turns = Turns(vec![Launches::default(); sides]);
            let mut redop = String::new();
            for turn in 0..Turns::count(sides, self.quick) {
                for side in (0..sides).map(|place| (place + turn) % sides) {
                    let launches = &mut turns.0[side];
                    match side {
                        0 => self.theirs(&row, launches, results)?,
                        _ => redop = self.ours(&row, memories[side - 1], launches, results)?,
                    }
                }
            }
            results.wrong += turns.0.iter().map(|launches| launches.wrong).sum::<u64>();
            for (index, &shared_buffers) in memories.iter().enumerate() {
                let measurement = turns.measurement(peer, &section, &row, index + 1).context("no turns")?;
                let measurement = Measurement { redop: redop.clone(), shared_buffers, ..measurement };
                let memory = if shared_buffers { "memory that all ranks map" } else { "memory of its own" };
                let range = measurement.baseline.as_ref().and_then(|baseline| baseline.ratio_range);
                let [least, most] = range.unwrap_or_default();
                let note = format!("#  in {memory}; ratios of turns: {least:.3} to {most:.3}\n");
                listener.print(&(table::row(&measurement) + &note))?;
                results.measurements.push(measurement);
            }
        }
        Ok(())
    }

    /// Runs the peer's side of a turn.
    fn theirs(&self, row: &Row, launches: &mut Launches, results: &mut Results) -> Result<()> {
        let command = self.peer.theirs(self.program.as_deref(), row, counts(row.bytes()))?;
        let text = launch::run(self.peer.place(), row.ranks, &command)?;
        let Printed { by, times_us, wrong } =
            serde_json::from_str(text.trim()).with_context(|| format!("the peer's program printed: {text}"))?;
        launches.seconds.push(Times::of(&times_us).context("no times")?.median * 1e-6);
        launches.wrong += wrong;
        if let Some(by) = by {
            results.about = by;
        }
        Ok(())
    }

    /// Runs one of gradsync's sides of a turn, and returns the algorithm that ran.
    fn ours(&self, row: &Row, is_shared: bool, launches: &mut Launches, results: &mut Results) -> Result<String> {
        let command = self.peer.ours(row, is_shared, counts(row.bytes()))?;
        let text = launch::run(self.peer.place(), row.ranks, &command)?;
        let document: Document<Value> = serde_json::from_str(&text).with_context(|| format!("perf printed: {text}"))?;
        let mut rows = document.measurements.into_iter();
        let found = rows.find(|found| found.operation == row.operation.name());
        let found = found.with_context(|| format!("perf printed no such row: {text}"))?;
        launches.seconds.push(found.timing().context("no time")?.time_us * 1e-6);
        launches.wrong += found.wrong();
        results.machine = document.machine;
        Ok(found.redop)
    }
}

/// The numbers of warm-up and counted calls of one launch.
fn counts(bytes: usize) -> [usize; 2] {
    if bytes > 1 << 20 { [2, 7] } else { [20, 100] }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The machine is twice as slow in the second turn, and the peer is disturbed in the third.
    #[test]
    fn measurement_has_the_median_of_the_turns_ratios() {
        let row = Peer::Horovod.rows(true)[0];
        let (operation, place) = (row.operation, Peer::Horovod.place());
        let section = Section { operation, place, ranks: row.ranks, rows: vec![row], left_out: Vec::new() };
        let launches = |seconds: &[f64], wrong| Launches { seconds: seconds.to_vec(), wrong };
        let theirs = launches(&[100.0, 200.0, 300.0, 99.0, 101.0], 4);
        let turns = Turns(vec![theirs, launches(&[25.0, 50.0, 25.0, 25.0, 25.0], 3), Launches::default()]);
        let found = turns.measurement(Peer::Horovod, &section, &row, 1).expect("turns");
        let baseline = found.baseline.as_ref().expect("the peer");
        assert_eq!((baseline.ratio, baseline.ratio_range), (4.0, Some([3.96, 12.0])));
        assert_eq!((baseline.time_us, found.timing().map(|timing| timing.time_us)), (101e6, Some(25e6)));
        assert_eq!(found.wrong(), 3);
        assert!(turns.measurement(Peer::Horovod, &section, &row, 2).is_none());
    }
}
