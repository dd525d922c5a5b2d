//! `cargo xtask bundle`: the GPU tests in a folder that runs on a machine with a GPU and without Rust.
//!
//! The folder has release builds of the tests for one and for several GPUs, the program, `gradsync-bench`, and xtask itself, as one
//! archive, and `run`, a POSIX shell script that unpacks it; on request also an NCCL. Nothing is run here.

mod fatbin;
mod nccl;

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{
    flags, perf,
    process::{Cmd, root, target},
    toolchain::{Need, Toolchain},
};

/// The archive of all programs.
const ARCHIVE: &str = "programs.tar.xz";
const RUN: &str = include_str!("bundle/run.sh");

/// The name of the multi-GPU tests' rank program in the folder.
pub(crate) const MULTI_GPU: &str = "multi-gpu";
/// The largest size of the folder, which is copied to other machines repeatedly; a larger folder contains an unintended file.
const LARGEST: u64 = 64 << 20;

impl flags::Bundle {
    pub(crate) fn run(self) -> Result<()> {
        pack(&self.output, &self.setup, if self.nccl { &self.arch } else { &[] })
    }
}

/// Creates the folder, with an NCCL for these architectures if there are any; a relative path is relative to the repository's root.
pub(crate) fn pack(folder: &Path, setup: &flags::Setup, nccl: &[u32]) -> Result<()> {
    let toolchain = Toolchain::new(setup);
    toolchain.provide(&[Need::CCompiler, Need::Mpi, Need::Xz])?;
    if !nccl.is_empty() {
        toolchain.provide(&[Need::NcclLibrary])?;
    }
    let (folder, programs) = (root().join(folder), target("bundled"));
    for folder in [&folder, &programs] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    // The files of an earlier bundle, packed or unpacked by `run`, are removed.
    let names = BUILDS.map(|(name, _)| name);
    let stamps = [ARCHIVE, nccl::ARCHIVE].map(|archive| format!(".{archive}.unpacked"));
    let others = [ARCHIVE, nccl::ARCHIVE, nccl::LICENSE, nccl::LIBRARY];
    for name in names.into_iter().chain(others).chain(stamps.iter().map(String::as_str)) {
        let path = folder.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    if !nccl.is_empty() {
        nccl::pack(&folder, nccl)?;
    }
    for (name, build) in BUILDS {
        Cmd::new("strip").arg("-o").arg(programs.join(name)).arg(build()?).run()?;
    }
    compress(&folder.join(ARCHIVE), &programs, &names)?;
    let script = folder.join("run");
    fs::write(&script, RUN).with_context(|| format!("cannot write {}", script.display()))?;
    Cmd::new("chmod").arg("+x").arg(&script).run()?;
    println!("packed {}", folder.display());
    println!("on a machine with GPUs: ./run, or ./run --multi-gpu, or ./run --sanitizer memcheck");
    println!("with one GPU for many ranks: ./run --multi-gpu --ranks-per-gpu 8");
    print_sizes(&folder)
}

/// Packs files of a folder into an archive. Programs contain the same kernels, each copy within the dictionary's reach of the preceding one.
fn compress(archive: &Path, folder: &Path, names: &[&str]) -> Result<()> {
    Cmd::new("tar")
        .env("XZ_OPT", "--lzma2=preset=6,dict=64MiB")
        .arg("-cJf")
        .arg(archive)
        .arg("-C")
        .arg(folder)
        .args(names)
        .run()
}

/// Builds one program and returns its path.
type Build = fn() -> Result<PathBuf>;

/// The programs of the folder, with the functions that build them.
const BUILDS: [(&str, Build); 5] = [
    ("gpu-tests", || executable(tests().args(["--test", "gpu"]), "gpu")),
    (MULTI_GPU, build_multi_gpu),
    (perf::PROGRAM, || release(perf::PROGRAM, perf::PROGRAM)),
    ("gradsync", || release("gradsync-cli", "gradsync")),
    ("xtask", || executable(Cmd::cargo("build").args(["--release", "--package", "xtask", "--bin", "xtask"]), "xtask")),
];

/// Builds the rank program of the multi-GPU tests, which needs an MPI at build time, and MPI's libmpi at run time.
pub(crate) fn build_multi_gpu() -> Result<PathBuf> {
    let test = tests().args(["--features", "mpi", "--test", "multi_gpu"]);
    executable(test, "multi_gpu")
}

fn tests() -> Cmd {
    Cmd::cargo("test").args(["--no-run", "--release", "--package", "gradsync-tests", "--features", "gpus"])
}

/// Builds a program for GPUs.
fn release(package: &str, program: &str) -> Result<PathBuf> {
    let build = Cmd::cargo("build").args(["--release", "--package", package, "--features", "cuda"]);
    executable(build, program)
}

/// A program that cargo has built.
#[derive(Debug)]
pub(crate) struct Built {
    /// The name of the target.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
    /// The folder of the package, in which cargo runs tests.
    pub(crate) folder: PathBuf,
    /// Whether it is a test program.
    pub(crate) is_test: bool,
}

/// Runs a cargo command that builds, and returns the programs, in the order in which cargo finished them.
pub(crate) fn executables(cmd: Cmd) -> Result<Vec<Built>> {
    #[derive(Deserialize)]
    struct Message {
        target: Target,
        profile: Profile,
        manifest_path: PathBuf,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    #[derive(Deserialize)]
    struct Profile {
        test: bool,
    }
    let text = cmd.arg("--message-format=json-render-diagnostics").read()?;
    let built = text.lines().filter_map(|line| {
        let Message { target, profile, manifest_path, executable } = serde_json::from_str(line).ok()?;
        let folder = manifest_path.parent()?.to_owned();
        Some(Built { name: target.name, executable: executable?, folder, is_test: profile.test })
    });
    Ok(built.collect())
}

/// Runs a cargo command that builds, and returns the path of the named target's executable.
pub(crate) fn executable(cmd: Cmd, target: &str) -> Result<PathBuf> {
    Ok(named(&executables(cmd)?, target)?.executable.clone())
}

/// The program of the named target.
pub(crate) fn named<'a>(built: &'a [Built], target: &str) -> Result<&'a Built> {
    let found = built.iter().find(|built| built.name == target);
    found.with_context(|| format!("cargo built no executable called {target}"))
}

fn print_sizes(folder: &Path) -> Result<()> {
    let mut total = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let size = entry.metadata()?.len();
        total += size;
        println!("  {:>8} KiB  {}", size.div_ceil(1024), entry.file_name().to_string_lossy());
    }
    println!("  {:>8} KiB  together", total.div_ceil(1024));
    ensure!(total <= LARGEST, "{} is larger than {} MiB", folder.display(), LARGEST >> 20);
    Ok(())
}

#[cfg(test)]
mod tests {
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
    fn run_unpacks_programs_once_and_again_when_they_are_new() {
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
    fn run_uses_the_nccl_of_the_bundle() {
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
}
