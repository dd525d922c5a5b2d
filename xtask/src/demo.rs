//! `cargo xtask demo`: fetches the digits, and runs the example that trains on them.
//!
//! The training, its table and its report are `tests/examples/digits`; nothing here looks at the numbers.

use std::path::Path;

use anyhow::{Result, ensure};

use crate::{
    flags,
    process::{Cmd, target},
    toolchain::{Need, Toolchain, python},
};

impl flags::Demo {
    pub(crate) fn run(self) -> Result<()> {
        Toolchain::new(&self.setup).provide(&[Need::CCompiler, Need::Digits])?;
        let output = target("demo");
        println!(
            "data: {} (UCI Optical Recognition of Handwritten Digits, CC BY 4.0, as shipped in scikit-learn's wheel)",
            python::digits().display()
        );
        println!("compiling candle takes about three minutes the first time");
        example("run", &["--release"])
            .args(["--", "--data"])
            .arg(python::digits())
            .arg("--output")
            .arg(&output)
            .run()?;
        report(&output)
    }
}

/// The example's own tests, the tests of linear layers that use candle too, and a short training, in the profile that the other tests are built in.
pub(crate) fn check() -> Result<()> {
    example("test", &[]).run()?;
    let layers = ["--package", "gradsync-tests", "--features", "demo", "--test", "linear_layers"];
    Cmd::cargo("test").args(layers).run()?;
    let output = target("demo-quick");
    example("run", &[]).args(["--", "--quick", "--data"]).arg(python::digits()).arg("--output").arg(&output).run()?;
    report(&output)
}

fn example(command: &str, profile: &[&str]) -> Cmd {
    let package = ["--package", "gradsync-tests", "--features", "demo", "--example", "digits"];
    Cmd::cargo(command).args(profile).args(package)
}

/// The training says where its report lies; here it is only looked for.
fn report(folder: &Path) -> Result<()> {
    let report = folder.join("report.html");
    ensure!(report.is_file(), "the training ended without writing {}", report.display());
    Ok(())
}
