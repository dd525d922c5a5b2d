//! Permitted outputs: a file, the file behind links, a pipe, a device, the standard output.

use std::fs;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, load, tensor};
use crate::program::{binary, fifo, reduce};

fn one() -> Ranks {
    Ranks::new(&[vec![tensor("weight", Format::F32, &[4], &[1.5; 4])]])
}

#[track_caller]
fn sum(folder: &Path, output: &str) {
    reduce(folder, ["--op", "sum", "--output", output, "in0.safetensors"]).succeeded(output);
}

fn is_link(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|facts| facts.is_symlink())
}

#[test]
fn links_that_lead_to_no_file_yet_stay_and_the_file_is_made() {
    let ranks = one();
    let folder = ranks.folder.path();
    fs::create_dir(folder.join("sub")).unwrap();
    symlink("sub/second", folder.join("first")).unwrap();
    symlink("../real.safetensors", folder.join("sub/second")).unwrap();
    sum(folder, "first");
    assert!(is_link(&folder.join("first")) && is_link(&folder.join("sub/second")), "a link was replaced");
    assert!(!is_link(&folder.join("real.safetensors")));
    assert_eq!(load(&folder.join("real.safetensors"))["weight"].data.values(), [1.5; 4]);
    let names: Vec<String> = ranks.contents().into_keys().collect();
    assert_eq!(names, ["first", "in0.safetensors", "real.safetensors", "sub"]);
}

#[test]
fn links_that_lead_nowhere_are_refused() {
    let ranks = one();
    let folder = ranks.folder.path();
    symlink("none/out", folder.join("hanging")).unwrap();
    symlink("loop", folder.join("loop")).unwrap();
    for output in ["hanging", "loop"] {
        reduce(folder, ["--op", "sum", "--output", output, "in0.safetensors"]).refused(output, &[output]);
        assert!(is_link(&folder.join(output)), "{output} was replaced");
    }
}

#[test]
fn a_pipe_is_written_to() {
    let ranks = one();
    let folder = ranks.folder.path();
    sum(folder, "file");
    let expected = fs::read(folder.join("file")).unwrap();
    let pipe = fifo(folder);
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || fs::read(pipe).unwrap()
    });
    sum(folder, "pipe");
    // If the program had replaced the pipe, its reader would wait for a writer for ever.
    if !pipe.symlink_metadata().unwrap().file_type().is_fifo() {
        panic!("the pipe was replaced");
    }
    assert!(reader.join().unwrap() == expected);
}

#[test]
fn the_standard_output_by_each_of_its_names() {
    let ranks = one();
    let folder = ranks.folder.path();
    sum(folder, "file");
    let expected = fs::read(folder.join("file")).unwrap();
    symlink("/dev/stdout", folder.join("link")).unwrap();
    for output in ["-", "/dev/stdout", "link"] {
        let run = |stdout: Stdio| {
            let arguments = ["reduce", "--op", "sum", "-o", output, "in0.safetensors"];
            let mut command = Command::new(binary());
            command.current_dir(folder).args(arguments).stdout(stdout).stderr(Stdio::piped());
            command.spawn().unwrap().wait_with_output().unwrap()
        };
        let piped = run(Stdio::piped());
        assert!(piped.status.success() && piped.stdout == expected, "{output}");
        // The report is printed to standard error instead.
        assert!(String::from_utf8_lossy(&piped.stderr).contains("sum of 1 tensor"), "{output}");
        // A shell's redirection gives the program the descriptor of a file.
        let redirected = run(fs::File::create(folder.join("redirected")).unwrap().into());
        assert!(redirected.status.success(), "{output}");
        assert!(fs::read(folder.join("redirected")).unwrap() == expected, "{output}");
        assert!(is_link(&folder.join("link")), "{output}");
    }
}

#[test]
fn a_device_is_written_to_and_a_full_one_is_named() {
    let ranks = one();
    let folder = ranks.folder.path();
    // The outputs are links: a program that replaces its output must not destroy the machine's own devices.
    for device in ["null", "full"] {
        symlink(Path::new("/dev").join(device), folder.join(device)).unwrap();
    }
    sum(folder, "null");
    reduce(folder, ["--op", "sum", "--output", "full", "in0.safetensors"]).refused("full", &["full", "No space"]);
    assert!(is_link(&folder.join("null")) && is_link(&folder.join("full")));
}

/// Under `ulimit -f`, the system would end the program by a signal.
#[test]
fn a_file_beyond_the_limit_on_its_size_is_named() {
    let ranks = Ranks::new(&[vec![tensor("weight", Format::F64, &[100_000], &[1.5; 100_000])]]);
    fs::write(ranks.output(), b"an older result").unwrap();
    let before = ranks.contents();
    let mut command = Command::new("sh");
    command.current_dir(ranks.folder.path()).args(["-c", "ulimit -f 64; exec \"$@\"", "sh"]).arg(binary());
    command.args(["reduce", "--op", "sum", "-o", "out.safetensors", "in0.safetensors"]);
    crate::program::Finished::of(&mut command).refused("limit", &["out.safetensors", "File too large"]);
    assert!(ranks.contents() == before, "the folder holds {:?}", ranks.contents().keys());
}
