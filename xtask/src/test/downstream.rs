//! Checks that a project that depends on gradsync builds on stable Rust with nothing installed, also with the feature `cuda`.
//!
//! The project is created outside the repository, so that it inherits no workspace, lock file or cargo configuration, and depends on the
//! crates in the form in which the registry would provide them.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

use super::package::{self, Package};
use crate::process::{Cmd, root, target};

/// A project and its expected output.
struct Project {
    /// The value of `gradsync = ` in its manifest.
    dependency: &'static str,
    /// The whole `.cargo/config.toml`, if it needs one.
    configuration: Option<&'static str>,
    program: &'static str,
    prints: &'static [&'static str],
}

/// Two ranks average a gradient and make a step: typical first code of a user.
const PLAIN: Project = Project {
    dependency: r#""*""#,
    configuration: None,
    program: include_str!("downstream_main.rs.txt"),
    prints: &["downstream: every rank has [-2.0, -3.0]"],
};

/// Opens a queue of a GPU, if there is one; the program starts without a driver too.
const CUDA: Project = Project {
    dependency: r#"{ version = "*", features = ["cuda"] }"#,
    configuration: Some("[env]\nCUDA_LIBRARY_PATH = \"/usr\"\n"),
    program: include_str!("downstream_cuda.rs.txt"),
    prints: &["downstream: device 0 is here", "downstream: error 100, no device"],
};

/// Builds and runs the projects; returns a description of the check.
pub(super) fn build_and_run() -> Result<String> {
    let folder = TemporaryFolder::new()?;
    let packages = package::pack(&target("downstream"), &folder.path)?;
    for (name, project) in [("plain", PLAIN), ("cuda", CUDA)] {
        project.build_and_run(&folder.path.join(name), &packages)?;
    }
    let sizes =
        packages.iter().filter_map(|package| Some(format!("{} {} KiB", package.name, package.size?.div_ceil(1024))));
    let sizes = sizes.collect::<Vec<_>>().join(", ");
    let packed = if sizes.is_empty() { "not packed, which takes cargo 1.90" } else { &sizes };
    Ok(format!("default features and `cuda`, nothing installed; packages: {packed}"))
}

impl Project {
    fn build_and_run(&self, folder: &Path, packages: &[Package]) -> Result<()> {
        let mut manifest = format!(
            "[package]\nname = \"downstream\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
             [dependencies]\ngradsync = {}\n\n[profile.dev]\ndebug = false\n\n[workspace]\n\n[patch.crates-io]\n",
            self.dependency
        );
        for Package { name, folder, .. } in packages {
            manifest.push_str(&format!("{name} = {{ path = {folder:?} }}\n"));
        }
        write(&folder.join("Cargo.toml"), &manifest)?;
        write(&folder.join("src/main.rs"), self.program)?;
        if let Some(configuration) = self.configuration {
            write(&folder.join(".cargo/config.toml"), configuration)?;
        }
        // Dependencies have the versions of gradsync's lock file where possible, so that nothing is downloaded twice.
        let lock = root().join("Cargo.lock");
        if lock.is_file() {
            fs::copy(&lock, folder.join("Cargo.lock")).context("cannot copy the lock file")?;
        }
        let printed = bare(Cmd::cargo("run")).arg("--quiet").folder(folder).read()?;
        let printed = printed.trim();
        println!("{printed}");
        ensure!(
            self.prints.contains(&printed),
            "a crate that depends on gradsync printed {printed:?}, expected {:?}",
            self.prints
        );
        Ok(())
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
