//! `cargo xtask demo`: fetches images, and runs the example that trains on them.
//!
//! The training, its table and its report are in `tests/examples/convergence`; this command does not read the results.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::{
    flags,
    process::{Cmd, target},
    toolchain::{Need, Toolchain, images::Images},
};

impl flags::Demo {
    pub(crate) fn run(self) -> Result<()> {
        Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Images])?;
        println!("compiling candle takes about three minutes the first time");
        train("demo", &["--release"], &[])
    }
}

/// Runs the example's own tests, the other tests that use candle, and a short training, in the profile of the other tests. `programs` is the
/// variable with the folder of the programs that the tests start.
pub(crate) fn check((variable, programs): (&str, &Path)) -> Result<()> {
    example("test", &[]).run()?;
    candle("test").args(TESTS).env(variable, programs).run()?;
    candle("test").arg("--doc").run()?;
    train("demo-quick", &[], &["--quick"])
}

/// The tests that use candle, apart from the example's own.
const TESTS: [&str; 4] = ["--test", "linear_layers", "--test", "ranks"];

/// The commands that build the programs of [`check`], apart from the documentation's, and of [`first`].
pub(crate) fn builds() -> Vec<Cmd> {
    vec![first(), example("test", &["--no-run"]), candle("test").args(TESTS).arg("--no-run"), example("build", &[])]
}

/// The command that builds the first example of training with candle.
pub(crate) fn first() -> Cmd {
    candle("build").args(["--example", "first"])
}

/// The packages with tests that use candle under a subcommand of cargo.
pub(crate) fn candle(subcommand: &str) -> Cmd {
    let packages = ["--package", "gradsync-tests", "--package", "gradsync-candle"];
    Cmd::cargo(subcommand).args(packages).args(["--features", "gradsync-tests/demo"])
}

fn train(folder: &str, profile: &[&str], flags: &[&str]) -> Result<()> {
    let images = Images::find().context("there are no images to train on")?;
    let output = target(folder);
    let run = example("run", profile).args(["--", "demo"]).args(flags).args(images.arguments());
    run.arg("--output").arg(&output).run()?;
    report(&output)
}

/// The example under a subcommand of cargo.
pub(crate) fn example(command: &str, profile: &[&str]) -> Cmd {
    let package = ["--package", "gradsync-tests", "--features", "demo", "--example", "convergence"];
    Cmd::cargo(command).args(profile).args(package)
}

/// Checks that the training wrote its report; the training itself prints the path.
fn report(folder: &Path) -> Result<()> {
    let report = folder.join("report.html");
    ensure!(report.is_file(), "the training ended without writing {}", report.display());
    Ok(())
}
