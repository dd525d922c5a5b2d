//! `cargo xtask demo`: fetches the digits, and runs the example that trains on them.
//!
//! The training, its table and its report are `tests/examples/digits`; nothing here looks at the numbers.

use anyhow::Result;

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
        Cmd::cargo("run")
            .args(["--release", "--package", "gradsync-tests", "--features", "demo", "--example", "digits", "--"])
            .arg("--data")
            .arg(python::digits())
            .arg("--output")
            .arg(&output)
            .run()?;
        println!("report: {}", output.join("report.html").display());
        Ok(())
    }
}
