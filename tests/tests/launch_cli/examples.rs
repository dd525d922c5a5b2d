//! The examples of the library, as their readers start them: each prints the text of its own header.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use gradsync_tests::programs::Finished;

use crate::job::gradsync;
use crate::program::built;

/// Examples that are programs of one rank, or have threads as ranks.
const ALONE: [&str; 3] = ["adasum_of_files", "sequence_parallel", "tensor_parallel"];
/// Examples whose four ranks the launcher starts.
const LAUNCHED: [&str; 1] = ["processes"];
/// Examples that the tests of several GPUs run.
const ON_GPUS: [&str; 1] = ["raw_stream"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/examples")
}

/// The block of text in the header of an example.
fn promised(name: &str) -> String {
    let source = fs::read_to_string(folder().join(format!("{name}.rs"))).expect("an example");
    let (_, block) = source.split_once("//! ```text\n").expect("a header with the output");
    let lines = block.lines().map(|line| line.trim_start_matches("//!").trim_start());
    lines.take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect()
}

fn program(name: &str) -> PathBuf {
    built("gradsync", "--example", name, &[])
}

#[test]
fn examples_print_the_text_of_their_headers() {
    for name in ALONE {
        let finished = Finished::of(&mut Command::new(program(name))).succeeded(name);
        assert_eq!(finished.stdout, promised(name), "{name}");
    }
    for name in LAUNCHED {
        let mut launch = gradsync(&["launch", "-n", "4", "--"]);
        let finished = Finished::of(launch.arg(program(name))).succeeded(name);
        assert_eq!(finished.stdout, promised(name), "{name}");
    }
}

#[test]
fn every_example_is_run_by_a_test_and_is_a_recipe() {
    let mut found: Vec<String> = fs::read_dir(folder())
        .expect("the examples' folder")
        .map(|entry| entry.expect("an entry").path())
        .map(|path| path.file_stem().expect("a file").to_string_lossy().into_owned())
        .collect();
    found.sort_unstable();
    let mut run = [&ALONE[..], &LAUNCHED, &ON_GPUS].concat();
    run.sort_unstable();
    assert_eq!(found, run);
    let recipes = fs::read_to_string(folder().join("../docs/recipes.md")).expect("the page");
    found.iter().for_each(|name| assert!(recipes.contains(&format!("/host/examples/{name}.rs")), "{name}"));
}
