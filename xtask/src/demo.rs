//! `cargo xtask demo`: fetches images, and runs the example that trains on them.
//!
//! The training, its table and its report are in `tests/examples/convergence`; this command does not read the results.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::{
    bundle::Built,
    flags,
    process::{Cmd, target},
    toolchain::{Need, Toolchain, images::Images},
};

impl flags::Demo {
    pub(crate) fn run(self) -> Result<()> {
        Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Images])?;
        train("demo", example("run").args(["--", "demo"]))
    }
}

/// The test that `mpirun` starts, as a rank of several.
pub(crate) const RANK_OF_MPI: &str = "rank_of_an_mpi_job";

/// Runs the example's own tests, the other tests that use candle, and a short training, which cargo has built. `programs` is the variable with
/// the folder of the programs that tests start.
pub(crate) fn check(built: &[Built], (variable, programs): (&str, &Path)) -> Result<()> {
    for test in built.iter().filter(|built| built.is_test) {
        let cmd = Cmd::new(&test.executable).folder(&test.folder).env(variable, programs);
        cmd.args(["--skip", RANK_OF_MPI]).run()?;
    }
    let example = built.iter().find(|built| !built.is_test && built.name == "convergence");
    let example = example.context("cargo built no example convergence")?;
    train("demo-quick", Cmd::new(&example.executable).args(["demo", "--quick"]))
}

fn train(folder: &str, example: Cmd) -> Result<()> {
    let images = Images::find().context("there are no images to train on")?;
    let output = target(folder);
    example.args(images.arguments()).arg("--output").arg(&output).run()?;
    report(&output)
}

/// The optimised example under a subcommand of cargo.
pub(crate) fn example(command: &str) -> Cmd {
    let package = ["--package", "gradsync-tests", "--features", "demo", "--example", "convergence"];
    Cmd::cargo(command).arg("--release").args(package)
}

/// Checks that the training wrote its report; the training itself prints the path.
fn report(folder: &Path) -> Result<()> {
    let report = folder.join("report.html");
    ensure!(report.is_file(), "the training ended without writing {}", report.display());
    Ok(())
}
