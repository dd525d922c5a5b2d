//! Runs of `gradsync-bench perf`.

use std::path::Path;
use std::process::Command;

use gradsync_tests::programs::Finished;
use serde_json::Value;

/// The program.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_gradsync-bench");

/// Runs the command in `folder`.
pub(crate) fn perf_in(folder: &Path, arguments: &[&str]) -> Finished {
    Finished::of(alone(&mut Command::new(BINARY)).current_dir(folder).arg("perf").args(arguments))
}

/// Removes the variables of a launcher that may have started this test.
pub(crate) fn alone(command: &mut Command) -> &mut Command {
    let launchers = ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"];
    launchers
        .into_iter()
        .chain(["SLURM_PROCID", "SLURM_NTASKS"])
        .fold(command, |command, name| command.env_remove(name))
}

pub(crate) fn perf(arguments: &[&str]) -> Finished {
    perf_in(&std::env::temp_dir(), arguments)
}

/// Arguments for few iterations on the CPU.
pub(crate) const QUICK: [&str; 6] = ["-n", "3", "-w", "1", "--backend", "cpu"];

/// The JSON of a quick run, which must succeed.
pub(crate) fn measured(arguments: &[&str]) -> Value {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = [&QUICK[..], arguments, &["--json", "out.json"]].concat();
    let label = arguments.join(" ");
    perf_in(folder.path(), &arguments).succeeded(&label);
    document(folder.path())
}

/// The document that a run wrote to `out.json`.
pub(crate) fn document(folder: &Path) -> Value {
    let text = std::fs::read_to_string(folder.join("out.json")).expect("the JSON was written");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// The rows of a run.
pub(crate) fn rows(document: &Value) -> &[Value] {
    document["measurements"].as_array().expect("a list of rows")
}
