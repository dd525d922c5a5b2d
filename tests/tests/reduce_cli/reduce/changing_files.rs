//! Inputs that other programs write to while they are read.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, tensor};
use crate::program::{Finished, binary};
use crate::reduce::signals::Long;

/// Reduces two files of many short tensors to a pipe, and calls `change` with the second file when the first results have been written, and
/// not nearly all. Returns the outcome, and the number of bytes written.
fn changed_by(change: impl FnOnce(&Path)) -> (Finished, usize) {
    const LEN: usize = 4096;
    let tensors: Vec<_> = (0..256).map(|i| tensor(&format!("t{i:03}"), Format::F64, &[LEN], &[1.0; LEN])).collect();
    let ranks = Ranks::new(&[tensors.clone(), tensors]);
    let mut command = Command::new(binary());
    command.env("CUDA_VISIBLE_DEVICES", "").current_dir(ranks.folder.path());
    command.args(["reduce", "--op", "sum", "-o", "-", "in0.safetensors", "in1.safetensors"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The program waits for the reader of the pipe, which holds less than the results.
    let mut output = child.stdout.take().unwrap();
    output.read_exact(&mut [0; 1]).unwrap();
    change(&ranks.inputs[1]);
    let mut rest = Vec::new();
    output.read_to_end(&mut rest).unwrap();
    let ended = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(ended.stderr).unwrap();
    (Finished { code: ended.status.code(), stdout: String::new(), stderr }, 1 + rest.len())
}

#[track_caller]
fn is_noticed(label: &str, change: impl FnOnce(&Path)) {
    let (finished, _) = changed_by(change);
    assert_eq!(finished.code, Some(1), "{label}: {}", finished.stderr);
    finished.refused(label, &["in1.safetensors: changed while it was read"]);
}

#[track_caller]
fn is_harmless(label: &str, change: impl FnOnce(&Path)) {
    let (finished, written) = changed_by(change);
    finished.succeeded(label);
    assert!(written > 256 * 4096 * 8, "{label}: {written} bytes");
}

fn open(path: &Path) -> File {
    File::options().write(true).open(path).unwrap()
}

#[test]
fn a_file_that_is_written_to_while_it_is_read_is_an_error() {
    let overwrite = |path: &Path| open(path).write_all_at(&[0x40; 8], fs::metadata(path).unwrap().len() - 8).unwrap();
    is_noticed("overwritten at its end", overwrite);
    is_noticed("overwritten where it was read", |path| open(path).write_all_at(&[0x40; 8], 100_000).unwrap());
    is_noticed("truncated", |path| open(path).set_len(100_000).unwrap());
    is_noticed("empty", |path| open(path).set_len(0).unwrap());
    is_noticed("longer", |path| File::options().append(true).open(path).unwrap().write_all(b"x").unwrap());
    is_noticed("written anew", |path| fs::write(path, fs::read(path).unwrap()).unwrap());
}

/// The open file stays what it was.
#[test]
fn a_replaced_or_removed_file_is_read_to_its_end() {
    is_harmless("replaced", |path| {
        let new = path.with_extension("new");
        fs::write(&new, b"another file").unwrap();
        fs::rename(new, path).unwrap();
    });
    is_harmless("removed", |path| fs::remove_file(path).unwrap());
    is_harmless("with another mode", |path| {
        let mut mode = fs::metadata(path).unwrap().permissions();
        mode.set_readonly(true);
        fs::set_permissions(path, mode).unwrap();
    });
}

/// A file that shrinks would end by a signal a program that has mapped it.
#[test]
fn long_files_that_change_end_the_program_at_once() {
    let shrink = |path: &Path| open(path).set_len(1 << 20).unwrap();
    let overwrite = |path: &Path| open(path).write_all_at(&[0x40; 64], 1 << 29).unwrap();
    for change in [&shrink as &dyn Fn(&Path), &overwrite] {
        let long = Long::new();
        let mut child = long.started("");
        change(&long.folder.path().join("in2"));
        let mut waited = Duration::ZERO;
        while child.try_wait().unwrap().is_none() {
            assert!(waited < Duration::from_secs(60), "the program goes on");
            std::thread::sleep(Duration::from_millis(20));
            waited += Duration::from_millis(20);
        }
        let ended = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("in2: changed while it was read"), "{stderr}");
        assert_eq!(long.parts(), [] as [std::path::PathBuf; 0]);
        assert_eq!(fs::read(long.folder.path().join("out")).unwrap(), b"an older result");
    }
}
