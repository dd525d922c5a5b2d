//! The systems on which the tests do not run: the crates are checked for macOS, for Windows and for Linux on aarch64, without warnings.
//!
//! The compiler of device code has the sources of the standard library, so that no component of rustup, linker or C library is needed.

use anyhow::{Result, ensure};

use super::compiles_candle;
use crate::process::{Cmd, target};
use crate::toolchain::device_compiler::DeviceCompiler;

/// A system, and the name of its target.
type System = (&'static str, &'static str);

const MACOS: System = ("macOS", "aarch64-apple-darwin");
const WINDOWS: System = ("Windows", "x86_64-pc-windows-msvc");
const LINUX: System = ("Linux on aarch64", "aarch64-unknown-linux-gnu");

/// The arguments of the checks of the library, and of the program where it has commands for the system.
const CHECKS: [(System, &[&str]); 4] = [
    (MACOS, &["--package", "gradsync", "--package", "gradsync-cli"]),
    (WINDOWS, &["--package", "gradsync"]),
    (LINUX, &["--package", "gradsync", "--package", "gradsync-cli"]),
    (LINUX, &["--package", "gradsync", "--package", "gradsync-cli", "--features", "gradsync-cli/cuda"]),
];

/// The checks of the crate for candle, with README's program.
const CHECKS_WITH_CANDLE: [(System, &[&str]); 2] = [
    (MACOS, &["--package", "gradsync-candle", "--lib", "--example", "first"]),
    (WINDOWS, &["--package", "gradsync-candle", "--lib", "--example", "first"]),
];

pub(super) fn check() -> Result<String> {
    let compiler = DeviceCompiler::find()?;
    let with_candle: &[_] = if compiles_candle() { &CHECKS_WITH_CANDLE } else { &[] };
    for ((system, triple), arguments) in CHECKS.iter().chain(with_candle) {
        let check = Cmd::cargo("check").args(["--quiet", "-Zbuild-std=std,panic_abort", "--target", triple]);
        let check = check.arg("--target-dir").arg(target("systems")).args(*arguments);
        // The standard library is compiled as dependencies are, and never linked.
        let check = check.env("RUSTC", &compiler.rustc).env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zno-codegen");
        eprintln!("$ {check}");
        let (works, text) = check.probe();
        let is_clean = works && text.trim().is_empty();
        ensure!(is_clean, "`{check}` has errors or warnings for {system}:\n{}", text.trim());
    }
    let candle = if compiles_candle() { ", candle's crate" } else { "" };
    Ok(format!(
        "gradsync{candle} for macOS and Windows, the program for macOS, both for Linux on aarch64 with and without `cuda`"
    ))
}
