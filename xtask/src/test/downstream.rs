//! Checks that a project that depends on gradsync builds on stable Rust, with each feature: with `mpi` where MPI is installed, and with
//! nothing installed otherwise.
//!
//! The project is created outside the repository, so that it inherits no workspace, lock file or cargo configuration, and depends on the
//! crates in the form in which the registry would provide them.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

use super::package::{self, Package};
use crate::{
    process::{Cmd, root, target},
    toolchain,
};

/// A project and its expected output.
struct Project {
    dependencies: &'static str,
    /// The variables under `[env]` of its `.cargo/config.toml`, if it needs one.
    variables: &'static [(&'static str, &'static str)],
    program: &'static str,
    /// The lines that the program may print; it is only compiled if there are none.
    prints: &'static [&'static str],
}

/// Two ranks average a gradient and make a step: typical first code of a user.
const PLAIN: Project = Project {
    dependencies: "gradsync = '*'",
    variables: &[],
    program: include_str!("downstream_main.rs.txt"),
    prints: &["downstream: every rank has [-2.0, -3.0]"],
};

/// A logger of the crate `log` gets the library's messages.
const LOG: Project = Project {
    dependencies: "gradsync = { version = '*', features = ['log'] }\nlog = '0.4'",
    program: include_str!("downstream_log.rs.txt"),
    prints: &["downstream: WARN of gradsync"],
    ..PLAIN
};

/// Opens a queue of a GPU, if there is one; the program starts without a driver too.
const CUDA: Project = Project {
    dependencies: "gradsync = { version = '*', features = ['cuda'] }",
    variables: &[("CUDA_LIBRARY_PATH", "/usr")],
    program: include_str!("downstream_cuda.rs.txt"),
    prints: &["downstream: device 0 is here", "downstream: error 100, no device"],
};

/// The same without the code for GPUs other than H100 and H200.
const ONE_ARCHITECTURE: Project = Project {
    dependencies: "gradsync = { version = '*', features = ['cuda', 'nvtx'] }",
    variables: &[("CUDA_LIBRARY_PATH", "/usr"), ("GRADSYNC_CUDA_ARCHS", "sm_90")],
    ..CUDA
};
/// The bytes by which its program is smaller, at least: the PTX for 7.5, and the cubins for 8.0 and 10.0.
const LEFT_OUT: u64 = 12_000_000;

/// The library links MPI, which this program does not call.
const MPI: Project = Project { dependencies: "gradsync = { version = '*', features = ['mpi'] }", ..PLAIN };

/// The program in the README of gradsync-candle, and the library of gradsync-cli beside it.
fn candle() -> Result<Project> {
    let readme = include_str!("../../../host/candle/README.md");
    let program = readme.split_once("```rust\n").and_then(|(_, rest)| rest.split_once("```"));
    let (program, _) = program.context("the README of gradsync-candle has no program")?;
    let dependencies = "candle-core = '*'\ncandle-nn = '*'\ngradsync = '*'\ngradsync-candle = '*'\ngradsync-cli = '*'";
    Ok(Project { dependencies, variables: &[], program, prints: &[] })
}

/// Builds and runs the projects; returns a description of the check.
pub(super) fn build_and_run() -> Result<String> {
    let folder = TemporaryFolder::new()?;
    let packages = package::pack(&target("downstream"), &folder.path)?;
    let build = |name: &str, project: &Project| project.build_and_run(&folder.path.join(name), &packages);
    build("plain", &PLAIN)?;
    build("log", &LOG)?;
    let whole = build("cuda", &CUDA)?;
    let small = build("one-architecture", &ONE_ARCHITECTURE)?;
    ensure!(whole >= small + LEFT_OUT, "the program for sm_90 alone has {small} bytes, and that for all GPUs {whole}");
    let mut built = "default features, `log`, `cuda` and `nvtx`".to_owned();
    if toolchain::mpi::is_here() {
        build("mpi", &MPI)?;
        built += ", `mpi`";
    }
    if super::compiles_candle() {
        build("candle", &candle()?)?;
        built += ", candle";
    }
    let sizes =
        packages.iter().filter_map(|package| Some(format!("{} {} KiB", package.name, package.size?.div_ceil(1024))));
    let sizes = sizes.collect::<Vec<_>>().join(", ");
    let packed = if sizes.is_empty() { "not packed, which takes cargo 1.90" } else { &sizes };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Ok(format!(
        "{built}; a program with `cuda` has {} MiB, for sm_90 alone {} MiB; packages: {packed}",
        mib(whole),
        mib(small)
    ))
}

impl Project {
    /// Returns the size of the program in bytes, or 0 if it is only compiled.
    fn build_and_run(&self, folder: &Path, packages: &[Package]) -> Result<u64> {
        let mut manifest = format!(
            "[package]\nname = \"downstream\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
             [dependencies]\n{}\n\n[profile.dev]\ndebug = false\n\n[workspace]\n\n[patch.crates-io]\n",
            self.dependencies
        );
        for Package { name, folder, .. } in packages {
            manifest.push_str(&format!("{name} = {{ path = {folder:?} }}\n"));
        }
        write(&folder.join("Cargo.toml"), &manifest)?;
        write(&folder.join("src/main.rs"), self.program)?;
        let variables = self.variables.iter().map(|(name, value)| format!("{name} = {value:?}\n")).collect::<String>();
        write(&folder.join(".cargo/config.toml"), &format!("[env]\n{variables}"))?;
        // Dependencies have the versions of gradsync's lock file where possible, so that nothing is downloaded twice.
        let lock = root().join("Cargo.lock");
        if lock.is_file() {
            fs::copy(&lock, folder.join("Cargo.lock")).context("cannot copy the lock file")?;
        }
        if self.prints.is_empty() {
            bare(Cmd::cargo("check")).arg("--quiet").folder(folder).run()?;
            return Ok(0);
        }
        let printed = bare(Cmd::cargo("run")).arg("--quiet").folder(folder).read()?;
        let printed = printed.trim();
        println!("{printed}");
        ensure!(
            self.prints.contains(&printed),
            "a crate that depends on gradsync printed {printed:?}, expected {:?}",
            self.prints
        );
        let program = target("downstream").join("debug/downstream");
        Ok(fs::metadata(&program).with_context(|| format!("cannot find {}", program.display()))?.len())
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Removes everything from the environment that could help: device compiler, CUDA folder, MPI and compiler flags.
fn bare(mut cmd: Cmd) -> Cmd {
    let help = ["GRADSYNC_", "CUDA_", "MPI", "OMPI_", "CARGO_PROFILE_", "CARGO_BUILD_", "RUSTC_"];
    for (name, _) in env::vars_os() {
        let name = name.to_string_lossy();
        if help.iter().any(|prefix| name.starts_with(prefix)) || name == "RUSTFLAGS" {
            cmd = cmd.env_remove(&name);
        }
    }
    cmd.env("CARGO_TARGET_DIR", target("downstream"))
}

/// A folder that is removed on drop.
struct TemporaryFolder {
    path: PathBuf,
}

impl TemporaryFolder {
    fn new() -> Result<Self> {
        let path = env::temp_dir().join(format!("gradsync-downstream-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        if Path::new(&path).starts_with(root()) {
            bail!("the temporary folder {} is inside the repository", path.display());
        }
        Ok(Self { path })
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            eprintln!("cannot remove {}: {error}", self.path.display());
        }
    }
}
