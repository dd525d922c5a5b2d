//! `mpirun -n N gradsync-bench perf … --transport mpi`: every operation with plain MPI as its baseline, one table and one file for all
//! ranks.
//!
//! As in `perf`, the measured times do not matter here. The tests need `mpirun`, or the program that the variable `MPIRUN` names.

#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::Command;

use gradsync_tests::programs::Finished;
use serde_json::Value;

use crate::run::{BINARY, alone, document, rows};

// The module with the helpers for runs is shared with `perf`, which uses more of it.
#[allow(dead_code)]
#[path = "../perf/run.rs"]
mod run;

/// Arguments for few iterations.
const QUICK: [&str; 4] = ["-n", "2", "-w", "1"];

/// Runs the program as `ranks` ranks in `folder`.
fn perf(ranks: usize, folder: &Path, arguments: &[&str]) -> Finished {
    Finished::of(alone(&mut command(ranks, folder, arguments)))
}

fn command(ranks: usize, folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("MPIRUN").unwrap_or("mpirun".into()));
    // Open MPI runs more ranks than cores, or runs as root, only with these variables; other MPIs do not read them.
    for name in ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"] {
        command.env(name, "1");
    }
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe").env("MPIEXEC_TIMEOUT", "120");
    command.current_dir(folder).args(["-n", &ranks.to_string()]).arg(BINARY).arg("perf").args(QUICK).args(arguments);
    command
}

/// Checks the timed sides of a row, none of which may have wrong elements.
fn check_row(row: &Value, ranks: usize) {
    assert_eq!((&row["transport"], &row["ranks"]), (&"mpi".into(), &ranks.into()), "{row:#}");
    let sides: Vec<&Value> =
        ["out_of_place", "in_place"].iter().map(|&side| &row[side]).filter(|side| !side.is_null()).collect();
    assert!(!sides.is_empty(), "{row:#}");
    for side in sides {
        assert_eq!(side["wrong"], 0, "{row:#}");
        assert!(side["time_us"].as_f64().is_some_and(|time| time > 0.0), "{row:#}");
    }
    assert!(row["baseline"]["time_us"].as_f64().is_some_and(|time| time > 0.0), "{row:#}");
}

#[test]
fn every_operation_is_measured_beside_plain_mpi() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let operations = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "adasum"];
    let arguments = ["--transport", "mpi", "-d", "f32,bf16", "-b", "4K", "-e", "64K", "-f", "16", "--json", "out.json"];
    let finished = perf(2, folder.path(), &[&operations[..], &arguments].concat()).succeeded("perf");
    let document = document(folder.path());
    assert_eq!(rows(&document).len(), operations.len() * 2 * 2);
    assert!(document["machine"]["mpi"].is_string(), "{}", document["machine"]);
    for operation in operations {
        // There is one table, whatever the number of ranks.
        let title = format!("# {operation} on cpu over mpi, 2 ranks; baseline: ");
        assert_eq!(finished.stdout.matches(&title).count(), 1, "{operation}: {}", finished.stdout);
        let of_operation = rows(&document).iter().filter(|row| row["operation"] == operation);
        for row in of_operation.inspect(|row| check_row(row, 2)) {
            let name = row["baseline"]["name"].as_str().expect("a name");
            let sums_16_bits = row["dtype"] == "bf16" && row["redop"] == "sum";
            match operation {
                "adasum" => assert!(name.starts_with("plain MPI's sum of as many bytes"), "{row:#}"),
                _ if sums_16_bits => assert!(name.contains("by an operation given to it"), "{row:#}"),
                _ => assert!(name.starts_with("plain MPI"), "{row:#}"),
            }
        }
    }
}

#[test]
fn how_ranks_of_one_machine_meet_is_said() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (messages_only, said) in [("0", "they meet in memory of each other"), ("1", "they meet by messages alone")] {
        let arguments = ["all_reduce", "--transport", "mpi", "-b", "1K", "--json", "out.json"];
        let mut command = command(2, folder.path(), &arguments);
        let finished = Finished::of(alone(command.env("GRADSYNC_MPI_MESSAGES_ONLY", messages_only))).succeeded(said);
        assert!(finished.stdout.contains(said), "{}", finished.stdout);
        let document = document(folder.path());
        assert_eq!(document["machine"]["cpu"]["processes"]["share_memory"], messages_only == "0");
        rows(&document).iter().for_each(|row| check_row(row, 2));
    }
}

#[test]
fn adasum_is_measured_in_nodes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let algorithms = "gram,tree,gram+gram,gram+tree,sum+gram,sum+tree";
    let arguments = ["adasum", "--transport", "mpi", "--algorithm", algorithms, "--ranks-per-node", "2"];
    perf(4, folder.path(), &[&arguments[..], &["-b", "64K", "--json", "out.json"]].concat()).succeeded("perf");
    let document = document(folder.path());
    rows(&document).iter().for_each(|row| check_row(row, 4));
    let measured: Vec<&str> = rows(&document).iter().filter_map(|row| row["redop"].as_str()).collect();
    assert_eq!(measured.join(","), algorithms);
}

#[test]
fn all_reduce_and_adasum_are_measured_in_shared_memory_too() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (flag, is_shared) in [(&[][..], false), (&["--shared-buffers"], true)] {
        let arguments =
            ["all_reduce", "adasum", "--transport", "mpi", "-d", "f32,bf16", "-b", "64K", "--json", "out.json"];
        let finished = perf(2, folder.path(), &[&arguments[..], flag].concat()).succeeded("perf");
        assert_eq!(finished.stdout.contains("memory that all processes map"), is_shared, "{}", finished.stdout);
        let document = document(folder.path());
        assert_eq!(rows(&document).len(), 4);
        for row in rows(&document) {
            check_row(row, 2);
            assert_eq!(row["shared_buffers"], is_shared, "{row:#}");
        }
    }
}

#[test]
fn shared_memory_alone_is_measured_beside_plain_mpi() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["all_reduce", "--transport", "process", "--backend", "cpu", "-b", "64K", "--json", "out.json"];
    perf(2, folder.path(), &arguments).succeeded("perf");
    let document = document(folder.path());
    let row = &rows(&document)[0];
    assert_eq!((&row["transport"], &row["in_place"]["wrong"]), (&"process".into(), &0.into()), "{row:#}");
    assert!(row["baseline"]["name"].as_str().is_some_and(|name| name.starts_with("plain MPI")), "{row:#}");
}

#[test]
fn a_failure_keeps_the_rows_before_it() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bytes = (1u64 << 48).to_string();
    let sizes = ["-b", "1K", "-e", &bytes, "-f", "274877906944", "--json", "out.json"];
    let finished = perf(2, folder.path(), &[&["all_reduce", "--transport", "mpi"][..], &sizes].concat());
    let reason = format!("gradient buffer: no memory for {bytes} bytes");
    assert!(finished.stdout.contains(&format!("# FAILED before the end: {reason}")), "{finished:?}");
    finished.refused("no memory", &[&reason]);
    let document = document(folder.path());
    assert_eq!((rows(&document).len(), &document["failure"]), (1, &reason.into()));
}

#[test]
fn what_the_job_cannot_do_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cases: [(usize, &[&str], &str); 4] = [
        (2, &["all_reduce", "-g", "3"], "-g 3: the launcher started 2 ranks"),
        (3, &["adasum", "--algorithm", "tree", "-b", "1K"], "needs a power of two, not 3 ranks"),
        (
            2,
            &["all_gather", "--shared-buffers"],
            "only all_reduce, adasum and reducer with --transport mpi or process have them",
        ),
        (2, &["all_reduce", "-b", "1K", "--json", "missing/out.json"], "missing/out.json: its folder does not exist"),
    ];
    for (ranks, arguments, reason) in cases {
        perf(ranks, folder.path(), &[arguments, &["--transport", "mpi"]].concat())
            .refused(&arguments.join(" "), &[reason]);
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}
