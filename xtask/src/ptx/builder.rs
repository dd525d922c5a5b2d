//! From a device crate to PTX text: one run of a nightly-capable compiler per architecture, and nothing after it.
//!
//! The vocabulary is that of rust-cuda's `CudaBuilder` (`arch`, `release`, `fma_contraction`, `copy_to`, `build`), with its defaults but for the
//! architecture. It writes no file outside `target/` but the copy asked for.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{
    process::{Cmd, root, target},
    toolchain::device_compiler::DeviceCompiler,
};

/// The architectures that PTX is generated for. The driver carries PTX forward, so these two serve sm_75 to sm_120.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Arch {
    /// Turing: the oldest supported one. f16 conversions in hardware, bf16 in integer arithmetic.
    Sm75,
    /// Ampere and later: bf16 conversions in hardware.
    Sm80,
}

impl Arch {
    pub(crate) const ALL: [Self; 2] = [Self::Sm75, Self::Sm80];

    /// As rustc's `target-cpu` and ptxas's `--gpu-name` have it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sm75 => "sm_75",
            Self::Sm80 => "sm_80",
        }
    }

    /// What selects the device crate's code for it, in any builder: upstream's takes such arguments too.
    fn build_args(self) -> &'static [&'static str] {
        match self {
            Self::Sm75 => &[],
            Self::Sm80 => &["--features", "sm_80"],
        }
    }

    /// The architectures whose ptxas must accept this one's PTX.
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

/// What shapes the generated code, for the manifest; the target CPU and its feature come on top. Kept beside
/// [`PtxBuilder::build`], which is where they are passed.
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

/// Register arrays live in registers only where every loop over them is unrolled, and the widest Gram tile has 36 sums.
const UNROLL: &str = "-Cllvm-args=-unroll-threshold=8000";
/// Loops whose length is not known stay as they are: unrolled, they and their remainders are up to half of what the driver has to compile.
const NO_REMAINDERS: &str = "-Cllvm-args=-unroll-runtime=false";
/// `x × y + z` stays two operations, each of which rounds, unless the source asks for one.
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

    /// Compile; gives back the path of the PTX.
    pub(crate) fn build(self) -> Result<PathBuf> {
        // One target folder per architecture: RUSTFLAGS differ, and cargo would build `core` anew at every change.
        let target_folder = target("nvptx").join(self.arch.name());
        let (name, opt_level) = (self.crate_name()?, if self.release { "3" } else { "1" });
        let output = target_folder.join("nvptx64-nvidia-cuda/release/deps").join(format!("{name}.s"));
        // Cargo does not know that the .s file is its output, and calls a build fresh without it. Without it or with an
        // old one, a compiler run costs seconds; a stale file would cost a wrong answer.
        self.forget_last_build(&target_folder, &name)?;
        if output.exists() {
            fs::remove_file(&output).with_context(|| format!("cannot remove {}", output.display()))?;
        }

        // -Ctarget-cpu must be the same for `core` and for our crate, hence RUSTFLAGS and not arguments of the last
        // compiler run. No panic location: our kernels have nowhere to print them, and they hold paths.
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
            // A cdylib is what makes rustc run fat LTO over `core` and our crate, and leave one complete module.
            .args(["--crate-type", "cdylib", "--target-dir"])
            .arg(&target_folder)
            // The PTX is complete before the linker (llvm-bitcode-linker) would start; `true` stands in for it.
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
