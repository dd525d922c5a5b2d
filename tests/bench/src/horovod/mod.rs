//! `gradsync-bench horovod`, which is `cargo xtask bench --peer horovod`: Adasum of MPI processes beside Horovod's own.
//!
//! Both take turns on the same sizes, a launch each, so that what changes on the machine meanwhile changes for both. Horovod's results are
//! checked by its rank program `horovod.cc`, which xtask compiles, gradsync's by `perf`. Horovod has no Adasum for bf16.

mod table;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};

use self::table::{Case, Measured, Side, heading, median};
use crate::mpirun;

const RANKS: [usize; 3] = [2, 4, 8];
const DTYPES: [&str; 3] = ["f32", "f64", "f16"];
const SMALL: [u64; 2] = [64 << 10, 1 << 20];
/// Turns of a case, and those of `--quick`. Multiples of the number of sides, each of which is first as often as the others.
const TURNS: [usize; 2] = [6, 3];
/// For one launch.
const DEADLINE: Duration = Duration::from_secs(300);
const NO_BF16: &str = "bf16: Horovod has no Adasum for it";

/// The largest vector of a job: eight processes of 64 MiB would take gigabytes.
fn large(ranks: usize) -> u64 {
    if ranks > 4 { 16 << 20 } else { 64 << 20 }
}

fn cases(is_quick: bool, has_f16: bool) -> Vec<Case> {
    let sizes = |ranks| SMALL.into_iter().chain((!is_quick).then(|| large(ranks)));
    let dtypes = || DTYPES.into_iter().filter(move |dtype| has_f16 || *dtype != "f16");
    let of_size = |(ranks, bytes)| dtypes().map(move |dtype| Case { ranks, dtype, bytes });
    RANKS.into_iter().flat_map(|ranks| sizes(ranks).map(move |bytes| (ranks, bytes))).flat_map(of_size).collect()
}

/// Calls before those that count, and calls that count, of one launch.
fn counts(bytes: u64) -> [String; 2] {
    let [warm_ups, iterations] = if bytes > 1 << 20 { [2, 7] } else { [20, 100] };
    [warm_ups, iterations].map(|count: usize| count.to_string())
}

/// The arguments of `gradsync-bench horovod`.
#[derive(Args)]
pub(crate) struct Horovod {
    /// Small sizes and few turns: whether everything runs, not how fast it is
    #[arg(long)]
    quick: bool,
    /// Where the table and the JSON go
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

/// What a launch found.
struct Found {
    time_us: f64,
    wrong: u64,
    /// What `perf` says of the machine.
    machine: Option<Value>,
}

impl Horovod {
    pub(crate) fn run(self) -> Result<()> {
        let start = Instant::now();
        mpirun::find().map_err(anyhow::Error::msg)?;
        fs::create_dir_all(&self.out).with_context(|| format!("cannot make {}", self.out.display()))?;
        let has_f16 = env::consts::ARCH == "x86_64";
        let mut left_out = vec![NO_BF16];
        if !has_f16 {
            left_out.push("f16: Horovod's Adasum has it on x86-64 only");
        }
        let (mut machine, mut measured) = (None, Vec::new());
        print!("\n{}", heading());
        for case in cases(self.quick, has_f16) {
            let mut row = Measured::new(case);
            for side in (0..TURNS[usize::from(self.quick)]).flat_map(Side::in_turn) {
                let found = self.launch(side, case)?;
                row.take(side, found.time_us, found.wrong);
                machine = machine.or(found.machine);
            }
            print!("{}", row.line());
            measured.push(row);
            self.write(&measured, machine.as_ref(), &left_out)?;
        }
        left_out.iter().for_each(|why| println!("not measured: {why}"));
        let shown = self.out.join("horovod.md");
        println!("wrote {} and horovod.json after {:.0} s", shown.display(), start.elapsed().as_secs_f64());
        match measured.iter().map(Measured::wrong).sum::<u64>() {
            0 => Ok(()),
            wrong => bail!("{wrong} wrong elements"),
        }
    }

    fn launch(&self, side: Side, case: Case) -> Result<Found> {
        let Case { ranks, dtype, bytes } = case;
        let [warm_ups, iterations] = counts(bytes);
        if side == Side::Horovod {
            let mut command = mpirun::command(ranks, DEADLINE, &self.program);
            command.args([dtype, &bytes.to_string(), &warm_ups, &iterations]);
            let printed = watch(command, case)?;
            return horovod_found(&printed).with_context(|| format!("Horovod's rank program printed: {printed}"));
        }
        let json = self.out.join("horovod-gradsync.json");
        let gradsync = env::current_exe().context("cannot find this program")?;
        let mut command = mpirun::command(ranks, DEADLINE, &gradsync);
        command.args(["perf", "adasum", "--transport", "mpi", "--layers", "1", "--no-baseline"]);
        command.args(["-d", dtype, "-b", &bytes.to_string(), "-w", &warm_ups, "-n", &iterations]);
        command.args((side == Side::Ordinary).then_some("--ordinary-buffers")).arg("--json").arg(&json);
        watch(command, case)?;
        let text = fs::read_to_string(&json).with_context(|| format!("cannot read {}", json.display()))?;
        fs::remove_file(&json).with_context(|| format!("cannot remove {}", json.display()))?;
        gradsync_found(&text).with_context(|| format!("`perf` wrote: {text}"))
    }

    /// Writes what there is so far, as JSON and as Markdown.
    fn write(&self, measured: &[Measured], machine: Option<&Value>, left_out: &[&str]) -> Result<()> {
        let Self { compiler, flags, horovod_version: version, .. } = self;
        let document = json!({
            "schema": 1,
            "program": "cargo xtask bench --peer horovod",
            "horovod": {"version": version, "compiler": compiler, "flags": flags},
            "machine": machine,
            "measurements": measured.iter().map(Measured::json).collect::<Vec<_>>(),
            "left_out": left_out,
            "wrong": measured.iter().map(Measured::wrong).sum::<u64>(),
        });
        let lines: String = measured.iter().map(Measured::line).collect();
        let left_out: String = left_out.iter().map(|why| format!("\nNot measured: {why}.\n")).collect();
        let with = format!("\nHorovod {version} by {compiler} with {flags}.\n");
        let json = serde_json::to_string_pretty(&document).context("cannot write JSON")? + "\n";
        put(&self.out.join("horovod.json"), &json)?;
        put(&self.out.join("horovod.md"), &(heading() + &lines + &left_out + &with))
    }
}

fn put(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The one line that Horovod's rank program prints.
fn horovod_found(printed: &str) -> Result<Found> {
    let document: Value = serde_json::from_str(printed.trim()).context("no JSON")?;
    let times = document["times_us"].as_array().context("no times")?;
    let times: Vec<f64> = times.iter().filter_map(Value::as_f64).collect();
    let time_us = median(&times).context("no times")?;
    Ok(Found { time_us, wrong: document["wrong"].as_u64().context("no wrong elements")?, machine: None })
}

/// The one row of `perf`.
fn gradsync_found(text: &str) -> Result<Found> {
    let mut document: Value = serde_json::from_str(text).context("no JSON")?;
    let timing = &document["measurements"][0]["in_place"];
    let time_us = timing["time_us"].as_f64().context("no time")?;
    let wrong = timing["wrong"].as_u64().context("no wrong elements")?;
    Ok(Found { time_us, wrong, machine: Some(document["machine"].take()) })
}

/// Runs a launch to its end, which has to be a good one, and gives back what it wrote to its standard output.
fn watch(mut command: Command, case: Case) -> Result<String> {
    let name = format!("{command:?}");
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {name}"))?;
    let (printed, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        bail!("{case:?}: {name} ended with {}\n{printed}{complaints}", output.status);
    }
    Ok(printed.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_all_sizes_worlds_and_dtypes() {
        assert_eq!(cases(false, true).len(), 27);
        assert!(cases(false, false).iter().all(|case| case.dtype != "f16"));
        assert!(cases(true, true).iter().all(|case| case.bytes <= 1 << 20));
        assert!(cases(false, true).contains(&Case { ranks: 8, dtype: "f64", bytes: 16 << 20 }));
        assert!(TURNS.iter().all(|turns| turns % Side::ALL.len() == 0));
    }

    #[test]
    fn what_both_programs_say_is_read() {
        let printed = r#"{"wrong": 2, "worst_error_of_bound": 0.9, "times_us": [30.5, 10.0, 20.0]}"#;
        let found = horovod_found(printed).expect("a row");
        assert_eq!((found.time_us, found.wrong), (20.0, 2));
        let row = json!({"in_place": {"time_us": 7.5, "wrong": 0}});
        let written = json!({"machine": {"mpi": "Open MPI"}, "measurements": [row]}).to_string();
        let found = gradsync_found(&written).expect("a row");
        assert_eq!((found.time_us, found.wrong, found.machine), (7.5, 0, Some(json!({"mpi": "Open MPI"}))));
        for text in ["", "{}", r#"{"wrong": 0, "times_us": []}"#] {
            assert!(horovod_found(text).is_err() && gradsync_found(text).is_err(), "{text}");
        }
    }
}
