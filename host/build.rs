//! For the feature `cuda`: compiles `libcuda.rs`, the forwarders of the CUDA driver's functions, and links them, so that neither building nor
//! starting a program takes NVIDIA's library.
//!
//! The compiler is the one that compiles everything else, so that nothing else has to be installed, for another target either. What it makes is a
//! Rust library, which to a linker is an archive of machine code like others. It carries none of the flags of the build: with some
//! of them (`-C linker-plugin-lto`) the optimiser would see the forwarders and their callers together.

//!
//! It also tells the crate which GPUs' code to leave out of programs.

#![forbid(unsafe_code)]

// Never compiled here; but `cargo fmt` formats it.
#[cfg(rustfmt)]
mod libcuda;

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

/// The variable that lists the GPUs for which a program is built, to leave out the code for others.
const ARCHITECTURES: &str = "GRADSYNC_CUDA_ARCHS";
/// The architectures for which the crate has PTX or cubins that a program can leave out.
const KNOWN: [&str; 4] = ["sm_75", "sm_80", "sm_90", "sm_100"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=libcuda.rs");
    leave_out_architectures();
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

/// Sets `cfg(gradsync_left_out = "sm_80")` for each architecture that is not among those of the variable, if that is set.
fn leave_out_architectures() {
    println!("cargo::rerun-if-env-changed={ARCHITECTURES}");
    println!("cargo::rustc-check-cfg=cfg(gradsync_left_out, values(\"{}\"))", KNOWN.join("\", \""));
    let Some(value) = env::var_os(ARCHITECTURES) else { return };
    let value = value.to_string_lossy();
    let wanted: Vec<&str> = value.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if let Some(unknown) = wanted.iter().find(|name| !KNOWN.contains(name)) {
        let known = KNOWN.join(", ");
        println!("cargo::error=the variable {ARCHITECTURES} is {value:?}: {unknown:?} is none of {known}");
        return;
    }
    for left_out in KNOWN.iter().filter(|name| !wanted.is_empty() && !wanted.contains(name)) {
        println!("cargo::rustc-cfg=gradsync_left_out=\"{left_out}\"");
    }
}

fn variable(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| panic!("cargo did not set {name}"))
}
