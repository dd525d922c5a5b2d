//! How graphs, queues and memory that peers have mapped obey the rules of the driver, tested with a driver made here that runs nothing: no
//! GPU is needed.
//!
//! Each case is a process of its own, running this program again. The variable that the forwarders of `host/libcuda.rs` read names its
//! driver, `driver.c`. The GPU tier tests the results of graphs.

mod connect_peers;
mod graph_resources;
mod queue_clones;
mod transport_operands;

use std::fs;

use gradsync::driver::Queue;
use gradsync_tests::programs::{printed_by, shared_library};

const DRIVER: &str = "GRADSYNC_LIBCUDA";

/// Prints a marker line between the lines of the driver.
fn say(what: &str) {
    println!("\ndriver: -- {what}");
}

/// A queue of the driver that the environment names, or `None` where it names none, as in the parent process.
fn queue_of(device: u32) -> Option<Queue> {
    std::env::var_os(DRIVER)?;
    Some(Queue::new(device).expect("the driver of this program"))
}

fn queue() -> Option<Queue> {
    queue_of(0)
}

/// The lines that a case prints in a process with the driver.
fn lines(case: &str) -> Vec<String> {
    lines_with(case, &[])
}

/// Like [`lines`], with variables.
fn lines_with(case: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (library, source) = (folder.path().join("driver.so"), folder.path().join("driver.c"));
    fs::write(&source, include_str!("driver.c")).expect("a writable folder");
    shared_library(&library, &source, &[]);
    let printed = printed_by(case, |command| {
        command.env(DRIVER, &library).envs(variables.iter().copied());
    });
    printed.lines().filter_map(|line| line.strip_prefix("driver: ")).map(str::to_owned).collect()
}

/// The lines from one [marker](say) up to the next.
fn after<'a>(lines: &'a [String], what: &str) -> Vec<&'a str> {
    let begin = lines.iter().position(|line| line.strip_prefix("-- ") == Some(what)).expect("said");
    lines[begin + 1..].iter().map(String::as_str).take_while(|line| !line.starts_with("-- ")).collect()
}
