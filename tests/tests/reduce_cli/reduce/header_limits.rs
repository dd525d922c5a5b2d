//! The cost of a file's header, and the cost of many tensors.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, entry, load, save_raw, tensor};
use crate::program::{Finished, binary};

/// A file for each of two ranks, with this header and `bytes` bytes of data.
fn two(header: &str, bytes: usize) -> Ranks {
    let ranks = Ranks::new(&[vec![], vec![]]);
    for input in &ranks.inputs {
        save_raw(input, header, &vec![0; bytes]);
    }
    ranks
}

#[test]
fn a_header_beyond_each_limit_is_refused_by_its_option() {
    let three = format!(
        "{{{},{},{}}}",
        entry("a", "F32", &[1], 0, 4),
        entry("b", "F32", &[1, 1, 1], 4, 8),
        entry("c", "F32", &[], 8, 12)
    );
    let ranks = two(&three, 12);
    let bytes = three.len().to_string();
    let few = (three.len() - 1).to_string();
    for (option, limit, enough, words) in [
        ("--max-header-bytes", few.as_str(), bytes.as_str(), [bytes.as_str(), few.as_str()]),
        ("--max-tensors", "2", "3", ["2 tensors", "more than"]),
        ("--max-dimensions", "2", "3", ["2 dimensions", "\"b\""]),
    ] {
        let words = [&words[..], &[option, "in0.safetensors"]].concat();
        ranks.refuses(option, &["--op", "sum", option, limit], &words);
        ranks.reduce(&["--op", "sum", option, enough]).succeeded(option);
        fs::remove_file(ranks.output()).unwrap();
    }
}

#[test]
fn dimensions_are_limited_unless_that_is_raised() {
    let shape = vec![1; 100];
    let ranks = two(&format!("{{{}}}", entry("deep", "F32", &shape, 0, 4)), 4);
    ranks.refuses("100 dimensions", &["--op", "sum"], &["\"deep\"", "64 dimensions", "--max-dimensions"]);
    ranks.reduce(&["--op", "sum", "--max-dimensions", "100"]).succeeded("raised");
    assert_eq!(load(&ranks.output())["deep"].shape, shape);
}

/// The peak memory of a command, in bytes.
#[cfg(target_os = "linux")]
fn memory(command: &[&str], folder: &Path) -> usize {
    let mut child = std::process::Command::new(binary());
    let mut child = child.current_dir(folder).args(command).stdout(std::process::Stdio::null()).spawn().unwrap();
    let mut most = 0;
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let peak =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        most = most.max(peak.unwrap_or(0usize));
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{command:?}");
            return most << 10;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// For each tensor, memory holds the name and some tens of bytes once, and an offset for every file.
#[cfg(target_os = "linux")]
#[test]
fn many_tensors_take_little_more_memory_than_their_headers() {
    const TENSORS: usize = 200_000;
    let mut header = String::from("{");
    for tensor in 0..TENSORS {
        let comma = if tensor > 0 { "," } else { "" };
        write!(header, "{comma}{}", entry(&format!("t{tensor:06}"), "F32", &[1], 4 * tensor, 4 * tensor + 4)).unwrap();
    }
    header += "}";
    let ranks = two(&header, 4 * TENSORS);
    let arguments = ["reduce", "--op", "sum", "--json", "-o", "out", "in0.safetensors", "in1.safetensors"];
    let few = Ranks::new(&vec![vec![tensor("a", Format::F32, &[1], &[1.0])]; 2]);
    let of_many = memory(&arguments, ranks.folder.path()).saturating_sub(memory(&arguments, few.folder.path()));
    // The allowance covers the two headers, each in its file's pages while it is read, and about 150 bytes of names and numbers per tensor.
    let allowed = 2 * header.len() + 150 * TENSORS;
    assert!(of_many <= allowed, "{of_many} bytes for {TENSORS} tensors, {allowed} allowed");
    assert_eq!(load(&ranks.folder.path().join("out")).len(), TENSORS);
}

#[test]
fn names_that_are_there_twice_and_metadata_that_are_no_strings() {
    let twice = format!("{{{},{}}}", entry("a", "F32", &[1], 0, 4), entry("a", "F32", &[1], 4, 8));
    two(&twice, 8).refuses("twice", &["--op", "sum"], &["\"a\"", "twice", "in0.safetensors"]);
    let numbers = format!("{{\"__metadata__\":{{\"step\":7}},{}}}", entry("a", "F32", &[1], 0, 4));
    two(&numbers, 4).refuses("metadata", &["--op", "sum"], &["__metadata__", "in0.safetensors"]);
}

/// Other programs may write the header in another order than the data.
#[test]
fn a_header_in_another_order_than_its_data() {
    let header = format!("{{{},{}}}", entry("late", "F32", &[1], 4, 8), entry("early", "F32", &[1], 0, 4));
    let ranks = Ranks::new(&[vec![], vec![]]);
    for input in &ranks.inputs {
        save_raw(input, &header, &[1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat());
    }
    ranks.reduce(&["--op", "sum"]).succeeded("order");
    let got = load(&ranks.output());
    assert_eq!((got["early"].data.values(), got["late"].data.values()), (vec![2.0], vec![4.0]));
    let mut command = std::process::Command::new(binary());
    command.current_dir(ranks.folder.path()).args(["reduce", "--op", "adasum", "-o", "-", "in0.safetensors"]);
    Finished::of(&mut command).succeeded("to the standard output");
}

/// All inputs are open at the same time, and a shell's soft limit may be low.
#[test]
fn more_inputs_than_the_soft_limit_on_open_files() {
    let ranks = Ranks::new(&vec![vec![tensor("a", Format::F32, &[1], &[1.0])]; 100]);
    let mut command = std::process::Command::new("sh");
    command.current_dir(ranks.folder.path()).args(["-c", "ulimit -Sn 64; exec \"$@\"", "sh"]).arg(binary());
    command
        .env("CUDA_VISIBLE_DEVICES", "")
        .args(["reduce", "--op", "sum", "-o", "out.safetensors"])
        .args(&ranks.inputs);
    Finished::of(&mut command).succeeded("100 inputs");
    assert_eq!(load(&ranks.output())["a"].data.values(), [100.0]);
}
