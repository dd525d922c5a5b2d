//! From a device crate to PTX text: one run of a nightly-capable compiler per architecture, without post-processing.
//!
//! Names and defaults follow rust-cuda's `CudaBuilder` (`arch`, `release`, `fma_contraction`, `copy_to`, `build`), except for the default
//! architecture. It writes no file outside `target/` but the requested copy.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{
    process::{Cmd, root, target},
    toolchain::device_compiler::DeviceCompiler,
};

/// The architectures for which PTX is generated. PTX is forward-compatible, so these two serve sm_75 to sm_120.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Arch {
    /// Turing: the oldest supported architecture. f16 conversions in hardware, bf16 in integer arithmetic.
    Sm75,
    /// Ampere and later: bf16 conversions in hardware.
    Sm80,
}

impl Arch {
    pub(crate) const ALL: [Self; 2] = [Self::Sm75, Self::Sm80];

    /// The name for rustc's `target-cpu` and ptxas's `--gpu-name`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sm75 => "sm_75",
            Self::Sm80 => "sm_80",
        }
    }

    /// The cargo arguments that select the device crate's code for the architecture; upstream's builder takes such arguments too.
    fn build_args(self) -> &'static [&'static str] {
        match self {
            Self::Sm75 => &[],
            Self::Sm80 => &["--features", "sm_80"],
        }
    }

    /// The architectures for which ptxas must accept this architecture's PTX.
    pub(crate) fn assembled_for(self) -> &'static [u32] {
        match self {
            Self::Sm75 => &[75],
            Self::Sm80 => &[80, 86, 89, 90, 100, 120],
        }
    }
}

/// Compiles a device crate.
#[derive(Debug)]
pub(crate) struct PtxBuilder<'a> {
    crate_folder: PathBuf,
    compiler: &'a DeviceCompiler,
    arch: Arch,
    release: bool,
    fma_contraction: bool,
    copy_to: Option<PathBuf>,
}

/// The flags that affect the generated code, for the manifest, without the target CPU and its feature. They must match
/// [`PtxBuilder::build`], which passes them.
pub(crate) const FLAGS: [&str; 10] = [
    "-Zbuild-std=core",
    "--crate-type=cdylib",
    "--emit=asm",
    "-Copt-level=3",
    "-Clto=fat",
    "-Ccodegen-units=1",
    "-Cpanic=abort",
    UNROLL,
    NO_REMAINDERS,
    NO_CONTRACTION,
];

/// Arrays are kept in registers only if every loop over them is unrolled, and the widest Gram tile has 36 sums.
const UNROLL: &str = "-Cllvm-args=-unroll-threshold=8000";
/// Loops of unknown length are not unrolled: with their remainder loops, they would be up to half of the code that the driver has to
/// compile.
const NO_REMAINDERS: &str = "-Cllvm-args=-unroll-runtime=false";
/// `x × y + z` remains two operations with a rounding each, unless the source asks for a fused one.
const NO_CONTRACTION: &str = "-Cllvm-args=-nvptx-fma-level=0";
const CONTRACTION: &str = "-Cllvm-args=-nvptx-fma-level=2";

impl<'a> PtxBuilder<'a> {
    pub(crate) fn new(crate_folder: impl Into<PathBuf>, compiler: &'a DeviceCompiler) -> Self {
        let crate_folder = crate_folder.into();
        Self { crate_folder, compiler, arch: Arch::Sm80, release: true, fma_contraction: true, copy_to: None }
    }

    pub(crate) fn arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    pub(crate) fn release(mut self, release: bool) -> Self {
        self.release = release;
        self
    }

    pub(crate) fn fma_contraction(mut self, fma_contraction: bool) -> Self {
        self.fma_contraction = fma_contraction;
        self
    }

    pub(crate) fn copy_to(mut self, path: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(path.into());
        self
    }

    /// Compiles, and returns the path of the PTX.
    pub(crate) fn build(self) -> Result<PathBuf> {
        // There is one target folder per architecture, because the RUSTFLAGS differ and cargo would rebuild `core` at every change.
        let target_folder = target("nvptx").join(self.arch.name());
        let (name, opt_level) = (self.crate_name()?, if self.release { "3" } else { "1" });
        let output = target_folder.join("nvptx64-nvidia-cuda/release/deps").join(format!("{name}.s"));
        // Cargo does not know that the .s file is its output, and considers a build fresh without it. A missing or outdated file therefore
        // triggers a compiler run, which costs seconds; a stale file would give a wrong result.
        self.forget_last_build(&target_folder, &name)?;
        if output.exists() {
            fs::remove_file(&output).with_context(|| format!("cannot remove {}", output.display()))?;
        }

        // -Ctarget-cpu must be equal for `core` and for the device crate, so it is in RUSTFLAGS and not among the arguments of the last
        // compiler run. Panic locations are left out: kernels cannot print them, and they contain paths.
        let rustflags = format!(
            "-Ctarget-cpu={} {UNROLL} {NO_REMAINDERS} {} -Zlocation-detail=none",
            self.arch.name(),
            if self.fma_contraction { CONTRACTION } else { NO_CONTRACTION }
        );
        let mut cmd = Cmd::cargo("rustc")
            .args(["--release", "--lib", "-Zbuild-std=core", "--target", "nvptx64-nvidia-cuda"])
            .arg("--manifest-path")
            .arg(self.crate_folder.join("Cargo.toml"))
            .args(self.arch.build_args())
            // With the crate type cdylib, rustc runs fat LTO over `core` and the device crate, and produces one complete module.
            .args(["--crate-type", "cdylib", "--target-dir"])
            .arg(&target_folder)
            // The PTX is complete before the linker (llvm-bitcode-linker) would start, so `true` replaces the linker.
            .args(["--", "--emit=asm", "-Clinker=true"]);
        for (variable, _) in std::env::vars_os() {
            let variable = variable.to_string_lossy();
            let shapes_code = ["CARGO_PROFILE_", "CARGO_BUILD_", "CARGO_TARGET_NVPTX64_"];
            if shapes_code.iter().any(|prefix| variable.starts_with(prefix)) {
                cmd = cmd.env_remove(&variable);
            }
        }
        for variable in ["CARGO_ENCODED_RUSTFLAGS", "RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER"] {
            cmd = cmd.env_remove(variable);
        }
        cmd.env("RUSTC", &self.compiler.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env("RUSTFLAGS", rustflags)
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", opt_level)
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
            // An incremental compilation divides the crate, whatever the profile says, and gives other PTX, which spills registers.
            .env("CARGO_INCREMENTAL", "0")
            .run()?;

        if !output.is_file() {
            bail!("the compiler succeeded but wrote no {}", output.display());
        }
        match self.copy_to {
            None => Ok(output),
            Some(copy) => {
                if let Some(folder) = copy.parent() {
                    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
                }
                fs::copy(&output, &copy).with_context(|| format!("cannot write {}", copy.display()))?;
                Ok(copy)
            }
        }
    }

    /// The library's name, from its folder's manifest.
    fn crate_name(&self) -> Result<String> {
        let path = root().join(&self.crate_folder).join("Cargo.toml");
        let manifest = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
        Ok(name.with_context(|| format!("{} has no line name = \"..\"", path.display()))?.replace('-', "_"))
    }

    fn forget_last_build(&self, target_folder: &Path, name: &str) -> Result<()> {
        let fingerprints = target_folder.join("nvptx64-nvidia-cuda/release/.fingerprint");
        let Ok(entries) = fs::read_dir(&fingerprints) else { return Ok(()) };
        let prefix = format!("{}-", name.replace('_', "-"));
        for entry in entries {
            let path = entry?.path();
            if path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&prefix)) {
                fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
        }
        Ok(())
    }
}
