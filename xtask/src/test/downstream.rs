//! A project that depends on gradsync with default features builds on stable with nothing installed: the proof.
//!
//! The project is made outside the repository, so that it inherits no workspace, lock file or cargo configuration.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::process::{Cmd, root, target};

/// Two ranks average a gradient: whoever depends on gradsync writes this first.
const PROGRAM: &str = include_str!("downstream_main.rs.txt");
const EXPECTED: &str = "downstream: every rank has [2.0, 3.0]";

/// Gives back what the program printed.
pub(super) fn build_and_run() -> Result<String> {
    let folder = TemporaryFolder::new()?;
    let source = folder.path.join("src");
    fs::create_dir_all(&source).with_context(|| format!("cannot make {}", source.display()))?;
    let manifest = format!(
        "[package]\nname = \"downstream\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\ngradsync = {{ path = {:?} }}\n\n[workspace]\n",
        root().join("host")
    );
    fs::write(folder.path.join("Cargo.toml"), manifest).context("cannot write the manifest")?;
    fs::write(source.join("main.rs"), PROGRAM).context("cannot write the program")?;
    // The same versions as ours where there is a choice, so that nothing is downloaded twice.
    let lock = root().join("Cargo.lock");
    if lock.is_file() {
        fs::copy(&lock, folder.path.join("Cargo.lock")).context("cannot copy the lock file")?;
    }

    let printed = bare(Cmd::cargo("run")).arg("--quiet").folder(&folder.path).read()?;
    let printed = printed.trim();
    println!("{printed}");
    if printed != EXPECTED {
        bail!("a crate that depends on gradsync printed {printed:?}, expected {EXPECTED:?}");
    }
    Ok("default features, nothing installed".to_owned())
}

/// Without anything that could help: no device compiler, CUDA folder, MPI or compiler flag in the environment.
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

/// Removed when dropped, whatever happened in between.
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
