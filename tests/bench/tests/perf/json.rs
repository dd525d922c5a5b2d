//! `--json` writes one document with consistent numbers.

use std::fs;

use serde_json::Value;

use crate::run::{QUICK, document, measured, perf, perf_in, rows};

#[test]
fn a_document_says_what_was_measured_and_where() {
    let document = measured(&["accumulate", "-d", "f32:bf16", "-b", "64K", "-e", "128K", "-f", "2"]);
    assert_eq!(document["schema"], 1);
    assert_eq!(document["program"], "cargo xtask perf");
    assert_eq!((&document["warm_ups"], &document["iterations"]), (&1.into(), &3.into()));
    assert_eq!(document["machine"]["version"], env!("CARGO_PKG_VERSION"));
    assert!(document["machine"]["cpu"]["threads"].as_u64().is_some_and(|threads| threads > 0), "{document:#}");
    assert!(document["machine"]["cpu"]["copy_gbs"].as_f64().is_some_and(|rate| rate > 0.0), "{document:#}");
    assert_eq!(document["machine"]["gpus"], serde_json::json!([]));
    assert_eq!(document["graph_calls"], 0);
    let rows = rows(&document);
    assert_eq!(rows.len(), 2);
    for (row, size) in rows.iter().zip([65536u64, 131_072]) {
        assert_eq!((&row["size_bytes"], &row["count"]), (&size.into(), &(size / 4).into()), "{row:#}");
        assert_eq!((&row["dtype"], &row["from_dtype"], &row["redop"]), (&"f32".into(), &"bf16".into(), &"none".into()));
        assert!(row["transport"].is_null() && row["out_of_place"].is_null(), "{row:#}");
        let number =
            |part: &str, field: &str| row[part][field].as_f64().unwrap_or_else(|| panic!("{part} {field}: {row:#}"));
        let (time, algbw) = (number("in_place", "time_us"), number("in_place", "algbw"));
        assert!((algbw - size as f64 / time / 1e3).abs() <= 1e-9 * algbw, "{row:#}");
        // For each f32 of the size, the memory moves two f32 and one bf16.
        assert!((number("in_place", "busbw") - 2.5 * algbw).abs() <= 1e-9 * algbw, "{row:#}");
        assert!((number("baseline", "ratio") - number("baseline", "time_us") / time).abs() <= 1e-9, "{row:#}");
        assert!(row["baseline"]["name"].as_str().is_some_and(|name| name.contains("memcpy")), "{row:#}");
        assert_eq!(row["limit_busbw"], document["machine"]["cpu"]["copy_gbs"], "{row:#}");
    }
}

#[test]
fn writes_are_held_against_a_copy_and_reads_against_a_sweep() {
    let document = measured(&["combine", "squared_norms", "dots", "gram", "-g", "3", "-b", "64K"]);
    let names = rows(&document).iter().map(|row| row["baseline"]["name"].as_str().expect("a name"));
    let sweep = "a parallel read of as many bytes";
    assert_eq!(names.collect::<Vec<_>>(), ["a parallel memcpy that moves as many bytes", sweep, sweep, sweep]);
    // Each vector is read once.
    let factors = rows(&document).iter().map(|row| {
        let side = &row["out_of_place"];
        side["busbw"].as_f64().expect("a number") / side["algbw"].as_f64().expect("a number")
    });
    for (factor, wanted) in factors.zip([4.0, 1.0, 2.0, 3.0]) {
        assert!((factor - wanted).abs() < 1e-9, "{factor} and not {wanted}");
    }
}

#[test]
fn a_limit_that_is_given_counts() {
    let document = measured(&["all_reduce", "-b", "4K", "-g", "2", "--limit", "12.5"]);
    assert_eq!(rows(&document)[0]["limit_busbw"], 12.5);
}

#[test]
fn tensors_of_a_model_are_measured_together() {
    let document = measured(&["--tensors", "resnet50"]);
    let rows = rows(&document);
    let operations = ["accumulate", "cast", "zero", "adamw_step"];
    assert_eq!(rows.iter().map(|row| &row["operation"]).collect::<Vec<_>>(), operations);
    let sides = [
        ("in_place", "f32", "bf16"),
        ("out_of_place", "bf16", "f32"),
        ("in_place", "f32", "f32"),
        ("in_place", "f32", "bf16"),
    ];
    for (row, (side, to, from)) in rows.iter().zip(sides) {
        assert_eq!((&row["count"], &row[side]["wrong"]), (&25_557_032.into(), &0.into()), "{row:#}");
        assert_eq!((&row["dtype"], &row["from_dtype"]), (&to.into(), &from.into()), "{row:#}");
    }
}

#[test]
fn the_json_goes_to_the_standard_output_and_the_table_to_stderr() {
    let finished = perf(&[&QUICK[..], &["zero", "-b", "1K", "--json", "-"]].concat()).succeeded("--json -");
    let document: Value = serde_json::from_str(&finished.stdout).expect("one document");
    assert_eq!(rows(&document).len(), 1, "{document:#}");
    assert!(finished.stderr.contains("# zero on cpu"), "{}", finished.stderr);
}

#[test]
fn nothing_is_left_behind_where_files_cannot_be_written() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for path in ["none/out.json", "."] {
        let finished = perf_in(folder.path(), &[&QUICK[..], &["zero", "-b", "1K", "--json", path]].concat());
        assert!(!finished.stdout.contains("busbw"), "it measured before it looked: {}", finished.stdout);
        finished.refused(path, &[path]);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

/// The size is more than a process can address.
#[test]
fn a_failure_keeps_the_rows_before_it() {
    let bytes = 1u64 << 48;
    for (arguments, reason) in [
        (["zero", "--backend", "cpu", "-c", "1"], format!("gradient buffer: no memory for {bytes} bytes")),
        // Two ranks read and write this many bytes.
        (["send_recv", "--transport", "local", "-g", "2"], format!("baseline: no memory for {} bytes", 2 * bytes)),
    ] {
        let (label, bytes) = (arguments.join(" "), bytes.to_string());
        let folder = tempfile::tempdir().expect("a temporary folder");
        let files = ["--json", "out.json"];
        let sizes = ["-n", "3", "-w", "1", "-b", "1K", "-e", &bytes, "-f", "274877906944"];
        let finished = perf_in(folder.path(), &[&arguments[..], &sizes, &files].concat());
        let document = document(folder.path());
        assert!(finished.code == Some(1) && finished.stderr.contains(&reason), "{label}: {}", finished.stderr);
        assert_eq!(rows(&document).len(), 1, "{label}: {document:#}");
        assert_eq!(document["failure"], reason, "{label}");
        assert!(
            finished.stdout.contains(&format!("# FAILED before the end: {reason}")),
            "{label}: {}",
            finished.stdout
        );
        // A failure before the first row keeps the existing file.
        let text = || fs::read_to_string(folder.path().join("out.json")).expect("a file");
        let before = text();
        let sizes = ["-n", "3", "-w", "1", "-b", &bytes];
        perf_in(folder.path(), &[&arguments[..], &sizes, &files].concat()).refused(&label, &[&reason]);
        assert_eq!(text(), before, "{label}");
    }
    assert!(measured(&["zero", "-b", "1K"])["failure"].is_null());
}
