//! Tests of the bundle's `run` with shell scripts as programs: the files that it unpacks, and the programs that it starts.

use std::process::Command;

use tempfile::TempDir;

use super::*;
use crate::process::write_program;

/// A folder with `run` and an archive of programs that print who packed them.
fn folder(packer: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("run"), RUN).unwrap();
    pack_programs(&folder, packer);
    folder
}

fn pack_programs(folder: &TempDir, packer: &str) {
    let programs = tempfile::tempdir().unwrap();
    write_script(&programs.path().join("xtask"), &format!("echo \"{packer}: $*, ${{GRADSYNC_LIBNCCL-none}}\""));
    compress(&folder.path().join(ARCHIVE), programs.path(), &["xtask"]).unwrap();
}

fn write_script(path: &Path, line: &str) {
    write_program(path, &format!("#!/bin/sh\n{line}\n"));
}

/// The output of `run` with these arguments, on a machine that seems to have a GPU.
fn run(folder: &TempDir, arguments: &[&str]) -> String {
    let bin = tempfile::tempdir().unwrap();
    write_script(&bin.path().join("nvidia-smi"), "echo 'a GPU, 1.2'");
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.arg("run").args(arguments).current_dir(folder).env("PATH", path).env_remove("GRADSYNC_LIBNCCL");
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    text
}

fn has_xz() -> bool {
    let has_it = Cmd::new("xz").arg("--version").probe().0;
    if !has_it {
        eprintln!("not run: there is no xz here, by which a bundle is packed");
    }
    has_it
}

#[test]
fn programs_are_unpacked_once_and_again_when_they_are_new() {
    if !has_xz() {
        return;
    }
    let folder = folder("one");
    assert_eq!(run(&folder, &["--unpack"]), "");
    let program = folder.path().join("xtask");
    assert!(program.is_file());
    let arguments = ["--multi-gpu", "--ranks-per-gpu", "4"];
    let said = |packer: &str| format!("\n{packer}: test-multi-gpu --prebuilt . --ranks-per-gpu 4, none\n");
    assert!(run(&folder, &arguments).contains(&said("one")));
    // `run` does not unpack the same archive again over existing files.
    write_script(&program, "echo \"mine: $*, none\"");
    assert!(run(&folder, &arguments).contains(&said("mine")));
    pack_programs(&folder, "two");
    assert!(run(&folder, &arguments).contains(&said("two")));
}

#[test]
fn the_nccl_of_the_bundle_is_used() {
    if !has_xz() {
        return;
    }
    let (folder, library) = (folder("one"), tempfile::tempdir().unwrap());
    fs::write(library.path().join(nccl::LIBRARY), "a library").unwrap();
    compress(&folder.path().join(nccl::ARCHIVE), library.path(), &[nccl::LIBRARY]).unwrap();
    let printed = run(&folder, &["--multi-gpu"]);
    let expected = fs::canonicalize(folder.path()).unwrap().join(nccl::LIBRARY);
    assert!(printed.contains(&format!("one: test-multi-gpu --prebuilt ., {}\n", expected.display())), "{printed}");
}
