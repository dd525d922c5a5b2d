//! Rows of ranks that are processes without MPI, in private memory and in memory that all of them map.
#![cfg(target_os = "linux")]

use std::path::Path;

use gradsync_tests::programs::{Finished, as_ranks};

use crate::run::{BINARY, document, rows};

const RANKS: usize = 2;

/// Measures all-reduces of two sizes, and returns the output of rank 0, which writes the JSON.
fn measure(folder: &Path, flags: &[&str]) -> String {
    let arguments = ["perf", "all_reduce", "--transport", "process", "--backend", "cpu", "-n", "2", "-w", "1"];
    let sizes = ["-b", "64K", "-e", "1M", "-f", "16", "--json", "out.json"];
    let arguments = [&arguments[..], &sizes, flags].concat();
    let ends: Vec<Finished> = std::thread::scope(|scope| {
        let start = |mut command: std::process::Command| scope.spawn(move || Finished::of(command.current_dir(folder)));
        let ranks: Vec<_> = as_ranks(Path::new(BINARY), RANKS, &arguments).into_iter().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect()
    });
    ends.into_iter().map(|end| end.succeeded("a rank").stdout).next().expect("rank 0")
}

#[test]
fn all_reduces_are_measured_in_both_kinds_of_memory() {
    for (flags, is_shared) in [(&[][..], false), (&["--shared-buffers"], true)] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let printed = measure(folder.path(), flags);
        assert_eq!(printed.contains("memory that all processes map"), is_shared, "{printed}");
        let document = document(folder.path());
        assert_eq!(rows(&document).len(), 2);
        for row in rows(&document) {
            assert_eq!(row["shared_buffers"], is_shared, "{row:#}");
            assert_eq!((&row["transport"], &row["ranks"]), (&"process".into(), &RANKS.into()), "{row:#}");
            assert_eq!(row["in_place"]["wrong"], 0, "{row:#}");
        }
    }
}
