//! `cargo xtask bundle`: the GPU tier in a folder that runs where there is a GPU and no Rust.
//!
//! Release builds of the GPU tests, the bandwidth measurement and the program, and `run`, a POSIX shell script.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::{
    flags, libcuda,
    process::{Cmd, root},
};

const RUN: &str = include_str!("bundle/run.sh");

impl flags::Bundle {
    pub(crate) fn run(self) -> Result<()> {
        let folder = root().join(&self.output);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let tests = ["--package", "gradsync-tests", "--features", "cuda"];
        let built = [
            (
                "gpu-tests",
                "gpu",
                Cmd::cargo("test").args(["--release", "--no-run"]).args(tests).args(["--test", "gpu"]),
            ),
            ("bandwidth", "bandwidth", Cmd::cargo("bench").arg("--no-run").args(tests).args(["--bench", "bandwidth"])),
            (
                "gradsync",
                "gradsync",
                Cmd::cargo("build").args([
                    "--release",
                    "--package",
                    "gradsync",
                    "--features",
                    "cuda",
                    "--bin",
                    "gradsync",
                ]),
            ),
        ];
        for (name, target, cmd) in built {
            let executable = executable(libcuda::linked(cmd)?, target)?;
            let copy = folder.join(name);
            Cmd::new("strip").arg("-o").arg(&copy).arg(&executable).run()?;
        }
        let script = folder.join("run");
        fs::write(&script, RUN).with_context(|| format!("cannot write {}", script.display()))?;
        Cmd::new("chmod").arg("+x").arg(&script).run()?;
        println!("packed {}; on a machine with a GPU: ./run, or ./run --sanitizer memcheck", folder.display());
        print_sizes(&folder)
    }
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
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        println!("  {:>8} KiB  {}", entry.metadata()?.len().div_ceil(1024), entry.file_name().to_string_lossy());
    }
    Ok(())
}
