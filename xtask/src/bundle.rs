//! `cargo xtask bundle`: the GPU tier in a folder that runs where there is a GPU and no Rust.
//!
//! Release builds of the tests for one and for several GPUs, the bandwidth measurement, the program and xtask itself, and
//! `run`, a POSIX shell script. Nothing is run here.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{
    flags, libcuda,
    process::{Cmd, root},
    toolchain::{Need, Toolchain},
};

const RUN: &str = include_str!("bundle/run.sh");

/// The rank program of the multi-GPU tests, as it is called in the folder.
pub(crate) const MULTI_GPU: &str = "multi-gpu";
/// The folder is copied to other machines, again and again; more than this is something that does not belong in it.
const LARGEST: u64 = 64 << 20;

impl flags::Bundle {
    pub(crate) fn run(self) -> Result<()> {
        pack(&self.output, &self.setup)
    }
}

/// Makes the folder; a relative path starts at the repository's root.
pub(crate) fn pack(folder: &Path, setup: &flags::Setup) -> Result<()> {
    Toolchain::new(setup).provide(&[Need::CCompiler, Need::Mpi])?;
    let folder = root().join(folder);
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, build) in BUILDS {
        let copy = folder.join(name);
        Cmd::new("strip").arg("-o").arg(&copy).arg(build()?).run()?;
    }
    let script = folder.join("run");
    fs::write(&script, RUN).with_context(|| format!("cannot write {}", script.display()))?;
    Cmd::new("chmod").arg("+x").arg(&script).run()?;
    println!("packed {}", folder.display());
    println!("on a machine with GPUs: ./run, or ./run --multi-gpu, or ./run --sanitizer memcheck");
    print_sizes(&folder)
}

/// Builds one program, and gives back its path.
type Build = fn() -> Result<PathBuf>;

/// What is in the folder, and how it gets there.
const BUILDS: [(&str, Build); 5] = [
    ("gpu-tests", || executable(libcuda::linked(tests("test").args(["--release", "--test", "gpu"]))?, "gpu")),
    (MULTI_GPU, build_multi_gpu),
    ("bandwidth", || executable(libcuda::linked(tests("bench").args(["--bench", "bandwidth"]))?, "bandwidth")),
    ("gradsync", || {
        let program = ["--package", "gradsync", "--features", "cuda", "--bin", "gradsync"];
        executable(libcuda::linked(Cmd::cargo("build").arg("--release").args(program))?, "gradsync")
    }),
    ("xtask", || executable(Cmd::cargo("build").args(["--release", "--package", "xtask", "--bin", "xtask"]), "xtask")),
];

/// Builds the rank program of the multi-GPU tests, which needs an MPI here, and its libmpi where it runs.
pub(crate) fn build_multi_gpu() -> Result<PathBuf> {
    let test = tests("test").args(["--features", "mpi", "--release", "--test", "multi_gpu"]);
    executable(libcuda::linked(test)?, "multi_gpu")
}

fn tests(subcommand: &str) -> Cmd {
    Cmd::cargo(subcommand).args(["--no-run", "--package", "gradsync-tests", "--features", "cuda"])
}

/// Runs a cargo command that builds, and gives back the path of the named target's executable.
pub(crate) fn executable(cmd: Cmd, target: &str) -> Result<PathBuf> {
    #[derive(Deserialize)]
    struct Message {
        target: Option<Target>,
        executable: Option<PathBuf>,
    }
    #[derive(Deserialize)]
    struct Target {
        name: String,
    }
    let text = cmd.arg("--message-format=json-render-diagnostics").read()?;
    for line in text.lines() {
        let Ok(message) = serde_json::from_str::<Message>(line) else { continue };
        if let (Some(found), Some(executable)) = (message.target, message.executable) {
            if found.name == target {
                return Ok(executable);
            }
        }
    }
    bail!("cargo built no executable called {target}")
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
