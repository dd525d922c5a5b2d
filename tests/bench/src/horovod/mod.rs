//! `gradsync-bench horovod`, which `cargo xtask bench --peer horovod` runs: Adasum of MPI processes compared with Horovod's.
//!
//! The sides alternate on equal sizes, with one launch per turn, so that changes of the machine affect all of them. Horovod's results are
//! checked by its rank program `horovod.cc`, which xtask compiles, gradsync's by `perf`. Horovod has no Adasum for bf16.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context, Result, bail};
use clap::Args;
use gradsync::DType;
use gradsync::ops::Algorithm;
use serde::Deserialize;
use serde_json::Value;

use crate::mpirun;
use crate::perf::arguments::TransportChoice;
use crate::perf::layers::Layers;
use crate::perf::operation::{Operation, Redop, Row, Types};
use crate::perf::plan::{Place, Section};
use crate::perf::record::{BaselineName, Document, Measurement, SCHEMA};
use crate::perf::statistics::Times;
use crate::perf::subject::Found;
use crate::perf::table;

const RANKS: [usize; 3] = [2, 4, 8];
const DTYPES: [DType; 3] = [DType::F32, DType::F64, DType::F16];
const SMALL: [usize; 2] = [64 << 10, 1 << 20];
/// Turns of a row, in full runs and with `--quick`. Both are multiples of the number of sides, so that each side is first equally often.
const TURNS: [usize; 2] = [6, 3];
/// The deadline of one launch.
const DEADLINE: Duration = Duration::from_secs(300);
const NO_BF16: &str = "bf16: Horovod has no Adasum for it";
const NAME: BaselineName = BaselineName { column: "Horovod", full: "Horovod's Adasum" };

/// The arguments of `gradsync-bench horovod`.
#[derive(Args)]
pub(crate) struct Horovod {
    /// Small sizes and few turns: whether everything runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Where the JSON goes
    #[arg(long, value_name = "FOLDER", default_value = "bench")]
    out: PathBuf,
    /// The rank program of Horovod
    #[arg(long, value_name = "FILE")]
    program: PathBuf,
    /// The version of Horovod
    #[arg(long, value_name = "VERSION")]
    horovod_version: String,
    /// What compiled it
    #[arg(long, value_name = "NAME")]
    compiler: String,
    /// With which flags
    #[arg(long, value_name = "FLAGS", allow_hyphen_values = true)]
    flags: String,
}

/// The programs and memory kinds that alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Horovod,
    /// gradsync, with gradients in memory that all processes of the machine map.
    Shared,
    /// gradsync, with gradients in the private memory of each process.
    Ordinary,
}

impl Side {
    const ALL: [Side; 3] = [Side::Horovod, Side::Shared, Side::Ordinary];

    /// The order within a turn: over all turns, each side is first, second and last equally often.
    fn in_turn(turn: usize) -> [Side; 3] {
        let mut sides = Self::ALL;
        sides.rotate_left(turn % Self::ALL.len());
        sides
    }
}

/// The largest vector of a job: eight processes with vectors of 64 MiB would need gigabytes.
fn large(ranks: usize) -> usize {
    if ranks > 4 { 16 << 20 } else { 64 << 20 }
}

/// A section for each number of ranks.
fn sections(is_quick: bool, has_f16: bool) -> Vec<Section> {
    let section = |ranks| {
        let sizes = SMALL.into_iter().chain((!is_quick).then(|| large(ranks)));
        let dtypes = || DTYPES.into_iter().filter(|dtype| has_f16 || *dtype != DType::F16);
        let row = |bytes: usize, dtype: DType| Row {
            operation: Operation::Adasum,
            types: Types::both(dtype),
            redop: Redop::Adasum(Algorithm::Auto),
            ranks,
            len: bytes / dtype.size_bytes(),
            layers: Layers::Equal(1),
        };
        let rows = sizes.flat_map(|bytes| dtypes().map(move |dtype| row(bytes, dtype))).collect();
        let place = Place::Ranks(TransportChoice::Mpi);
        Section { operation: Operation::Adasum, place, ranks, rows, left_out: Vec::new() }
    };
    RANKS.into_iter().map(section).collect()
}

/// The numbers of warm-up and counted calls of one launch.
fn counts(bytes: usize) -> [usize; 2] {
    if bytes > 1 << 20 { [2, 7] } else { [20, 100] }
}

/// The results of a row's launches.
#[derive(Clone, Debug, Default)]
struct Turns {
    /// The median of each launch in seconds, by side.
    seconds: [Vec<f64>; 3],
    wrong: [u64; 3],
    /// The algorithm that gradsync chose.
    redop: String,
}

impl Turns {
    /// The row of one of gradsync's sides. Sides are compared within a turn, during which the machine changes least: the ratio is the
    /// median of the turns' ratios.
    fn measurement(&self, section: &Section, row: &Row, side: Side) -> Option<Measurement> {
        let [horovod, own] = [Side::Horovod, side].map(|side| &self.seconds[side as usize]);
        let found = Found {
            seconds: [vec![], own.clone(), horovod.clone()],
            wrong: [None, Some(self.wrong[side as usize]), None],
        };
        let mut measurement = Measurement::new(section, row, &found, NAME, None);
        let ratios: Vec<f64> = horovod.iter().zip(own).map(|(horovod, own)| horovod / own).collect();
        let least = ratios.iter().copied().min_by(f64::total_cmp)?;
        let most = ratios.iter().copied().max_by(f64::total_cmp)?;
        let baseline = measurement.baseline.as_mut()?;
        (baseline.ratio, baseline.ratio_range) = (Times::of(&ratios)?.median, Some([least, most]));
        measurement.redop.clone_from(&self.redop);
        Some(measurement)
    }
}

/// All results so far.
struct Results {
    sections: Vec<(Section, Vec<Turns>)>,
    machine: Value,
    left_out: Vec<String>,
}

impl Horovod {
    pub(crate) fn run(self) -> Result<()> {
        let start = Instant::now();
        mpirun::find().map_err(anyhow::Error::msg)?;
        fs::create_dir_all(&self.out).with_context(|| format!("cannot make {}", self.out.display()))?;
        let has_f16 = env::consts::ARCH == "x86_64";
        let mut left_out = vec![NO_BF16.to_owned()];
        if !has_f16 {
            left_out.push("f16: Horovod's Adasum has it on x86-64 only".to_owned());
        }
        let mut results = Results { sections: Vec::new(), machine: Value::Null, left_out };
        for section in sections(self.quick, has_f16) {
            print!("{}", table::heading(&section, Some(NAME), None));
            results.sections.push((section.clone(), Vec::new()));
            for row in &section.rows {
                let mut turns = Turns::default();
                for side in (0..TURNS[usize::from(self.quick)]).flat_map(Side::in_turn) {
                    self.launch(side, row, &mut turns, &mut results.machine)?;
                }
                for (side, name) in [(Side::Shared, "shared"), (Side::Ordinary, "ordinary")] {
                    let measurement = turns.measurement(&section, row, side);
                    print!("{}", measurement.as_ref().map_or(String::new(), table::row));
                    let range = measurement.and_then(|row| row.baseline?.ratio_range);
                    let [least, most] = range.unwrap_or_default();
                    println!("#  in {name} buffers; ratios of turns: {least:.3} to {most:.3}");
                }
                if let Some((_, rows)) = results.sections.last_mut() {
                    rows.push(turns);
                }
                self.write(&results)?;
            }
        }
        println!("\n# by {}", self.program_name());
        results.left_out.iter().for_each(|why| println!("# not measured: {why}"));
        let folder = self.out.display();
        println!("wrote {folder}/horovod-shared.json and -ordinary.json after {:.0} s", start.elapsed().as_secs_f64());
        let turns = results.sections.iter().flat_map(|(_, rows)| rows);
        match turns.flat_map(|turns| turns.wrong).sum::<u64>() {
            0 => Ok(()),
            wrong => bail!("{wrong} wrong elements"),
        }
    }

    fn program_name(&self) -> String {
        let Self { horovod_version, compiler, flags, .. } = self;
        format!("cargo xtask bench --peer horovod, Horovod {horovod_version} by {compiler} with {flags}")
    }

    /// Runs one side of a turn.
    fn launch(&self, side: Side, row: &Row, turns: &mut Turns, machine: &mut Value) -> Result<()> {
        let [warm_ups, iterations] = counts(row.bytes()).map(|count| count.to_string());
        let (dtype, bytes) = (row.types.to.name(), row.bytes().to_string());
        let (seconds, wrong) = if side == Side::Horovod {
            let mut command = mpirun::command(row.ranks, DEADLINE, &self.program);
            let printed = finished(command.args([dtype, &bytes, &warm_ups, &iterations]))?;
            horovod_found(&printed).with_context(|| format!("Horovod's rank program printed: {printed}"))?
        } else {
            let json = self.out.join("horovod-turn.json");
            let gradsync = env::current_exe().context("cannot find this program")?;
            let mut command = mpirun::command(row.ranks, DEADLINE, &gradsync);
            command.args(["perf", "adasum", "--transport", "mpi", "--layers", "1", "--no-baseline"]);
            command.args(["-d", dtype, "-b", &bytes, "-w", &warm_ups, "-n", &iterations]);
            command.args((side == Side::Ordinary).then_some("--ordinary-buffers")).arg("--json").arg(&json);
            finished(&mut command)?;
            let text = fs::read_to_string(&json).with_context(|| format!("cannot read {}", json.display()))?;
            fs::remove_file(&json).with_context(|| format!("cannot remove {}", json.display()))?;
            let document: Document<Value> =
                serde_json::from_str(&text).with_context(|| format!("perf wrote: {text}"))?;
            let measurement = document.measurements.first().context("no row")?;
            let timing = measurement.timing().context("no time")?;
            turns.redop.clone_from(&measurement.redop);
            *machine = document.machine;
            (timing.time_us * 1e-6, timing.wrong.context("no wrong elements")?)
        };
        turns.seconds[side as usize].push(seconds);
        turns.wrong[side as usize] += wrong;
        Ok(())
    }

    /// Writes the results so far, a document for each of gradsync's sides.
    fn write(&self, results: &Results) -> Result<()> {
        for (side, name) in [(Side::Shared, "shared"), (Side::Ordinary, "ordinary")] {
            let of_section = |(section, rows): &(Section, Vec<Turns>)| -> Vec<Measurement> {
                let rows = section.rows.iter().zip(rows);
                rows.filter_map(|(row, turns)| turns.measurement(section, row, side)).collect()
            };
            let turns = results.sections.iter().flat_map(|(_, rows)| rows);
            let document = Document {
                schema: SCHEMA,
                program: self.program_name(),
                machine: &results.machine,
                // These are the counts for small vectors; large ones have fewer.
                warm_ups: counts(0)[0],
                iterations: counts(0)[1],
                graph_calls: 0,
                ordinary_buffers: side == Side::Ordinary,
                shared_buffers: false,
                measurements: results.sections.iter().flat_map(of_section).collect(),
                launches: None,
                loads: Vec::new(),
                left_out: results.left_out.clone(),
                failure: None,
                wrong: turns.map(|turns| turns.wrong[Side::Horovod as usize] + turns.wrong[side as usize]).sum(),
            };
            let path = self.out.join(format!("horovod-{name}.json"));
            let json = serde_json::to_string_pretty(&document).context("cannot write JSON")? + "\n";
            fs::write(&path, json).with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }
}

/// The median in seconds and the number of wrong elements, from the line that Horovod's rank program prints.
fn horovod_found(printed: &str) -> Result<(f64, u64)> {
    #[derive(Deserialize)]
    struct Line {
        times_us: Vec<f64>,
        wrong: u64,
    }
    let Line { times_us, wrong } = serde_json::from_str(printed.trim())?;
    Ok((Times::of(&times_us).context("no times")?.median * 1e-6, wrong))
}

/// Runs a launch to its end and returns its standard output; fails unless the launch succeeded.
fn finished(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    let (printed, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        bail!("{command:?} ended with {}\n{printed}{complaints}", output.status);
    }
    Ok(printed.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_all_sizes_worlds_and_dtypes() {
        let rows = |is_quick, has_f16| -> Vec<Row> {
            sections(is_quick, has_f16).into_iter().flat_map(|section| section.rows).collect()
        };
        assert_eq!(rows(false, true).len(), 27);
        assert!(rows(false, false).iter().all(|row| row.types.to != DType::F16));
        assert!(rows(true, true).iter().all(|row| row.bytes() <= 1 << 20));
        let is_largest = |row: &Row| (row.ranks, row.types.to, row.bytes()) == (8, DType::F64, 16 << 20);
        assert!(rows(false, true).iter().any(is_largest));
        assert!(TURNS.iter().all(|turns| turns % Side::ALL.len() == 0));
    }

    #[test]
    fn each_side_has_each_place() {
        for place in 0..3 {
            let mut sides: Vec<usize> = (0..3).map(|turn| Side::in_turn(turn)[place] as usize).collect();
            sides.sort_unstable();
            assert_eq!(sides, [0, 1, 2]);
        }
    }

    /// The machine is twice as slow in the second turn, and Horovod is disturbed in the third.
    #[test]
    fn ratios_are_those_of_turns() {
        let horovod = vec![100.0, 200.0, 300.0, 99.0, 101.0];
        let shared = vec![25.0, 50.0, 25.0, 25.0, 25.0];
        let turns = Turns { seconds: [horovod, shared, vec![]], wrong: [4, 3, 0], redop: "gram".into() };
        let section = &sections(true, true)[0];
        let row = turns.measurement(section, &section.rows[0], Side::Shared).expect("turns");
        let baseline = row.baseline.as_ref().expect("Horovod");
        assert_eq!((baseline.ratio, baseline.ratio_range), (4.0, Some([3.96, 12.0])));
        assert_eq!((baseline.time_us, row.timing().map(|timing| timing.time_us)), (101e6, Some(25e6)));
        assert_eq!((row.wrong(), row.redop.as_str()), (3, "gram"));
        assert!(turns.measurement(section, &section.rows[0], Side::Ordinary).is_none());
    }

    #[test]
    fn what_horovods_program_says_is_read() {
        let (seconds, wrong) =
            horovod_found(r#"{"wrong": 2, "worst_error_of_bound": 0.9, "times_us": [30.5, 10.0, 20.0]}"#).unwrap();
        assert!((seconds - 20e-6).abs() < 1e-12 && wrong == 2, "{seconds} s, {wrong} wrong");
        for text in ["", "{}", r#"{"wrong": 0, "times_us": []}"#] {
            assert!(horovod_found(text).is_err(), "{text}");
        }
    }
}
