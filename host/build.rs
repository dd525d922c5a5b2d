//! For the feature `cuda`: compiles `libcuda.rs`, the forwarders of the CUDA driver's functions, and links them, so that neither building nor
//! starting a program takes NVIDIA's library.
//!
//! The compiler is the one that compiles everything else, so that nothing else has to be installed, for another target either. What it makes is a
//! Rust library, which to a linker is an archive of machine code like others. It carries none of the flags of the build: with some
//! of them (`-C linker-plugin-lto`) the optimiser would see the forwarders and their callers together.

#![forbid(unsafe_code)]

// Never compiled here; but `cargo fmt` formats it.
#[cfg(rustfmt)]
mod libcuda;

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=libcuda.rs");
    let target_has = |name: &str, known: &[&str]| env::var(name).is_ok_and(|value| known.contains(&value.as_str()));
    // Elsewhere the calling conventions may be others than those that forwarders rely on: there `cust` links NVIDIA's library.
    let is_known =
        target_has("CARGO_CFG_TARGET_OS", &["linux"]) && target_has("CARGO_CFG_TARGET_ARCH", &["x86_64", "aarch64"]);
    // Without machine code (`cargo check` for a system that has no standard library here) nothing is linked.
    let has_code = !env::var("CARGO_ENCODED_RUSTFLAGS").is_ok_and(|flags| flags.contains("no-codegen"));
    if env::var_os("CARGO_FEATURE_CUDA").is_none() || !is_known || !has_code {
        return;
    }

    let folder = PathBuf::from(variable("OUT_DIR"));
    let mut compile = Command::new(variable("RUSTC"));
    compile
        .args(["--crate-name", "gradsync_libcuda", "--crate-type", "rlib", "--edition", "2024"])
        .args(["-C", "opt-level=2", "-C", "panic=abort", "-C", "codegen-units=1", "-C", "embed-bitcode=no"])
        .arg("--target")
        .arg(variable("TARGET"))
        .arg("-o")
        .arg(folder.join("libcuda.a"))
        .arg("libcuda.rs");
    match compile.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("cannot compile the forwarders of libcuda: {compile:?} failed ({status})"),
        Err(error) => panic!("cannot compile the forwarders of libcuda: cannot start {compile:?}: {error}"),
    }
    // `cust` asks for `-lcuda`, whichever the linker finds. Naming the archive here too puts it in front of that, right behind this crate: then
    // the forwarders are the ones also where a toolkit's stub is found first.
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=static:-bundle=cuda");
}

fn variable(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| panic!("cargo did not set {name}"))
}
