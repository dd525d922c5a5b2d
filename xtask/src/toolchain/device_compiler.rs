//! Finds a compiler for device code: any rustc with the sources of its own `core`.
//!
//! This module installs nothing; [`super::Toolchain`] does.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::{APT_FLAGS, variable};
use crate::process::Cmd;

/// The variable that names a rustc, which has precedence over all other places.
const VARIABLE: &str = "GRADSYNC_DEVICE_RUSTC";
/// Debian's packages of the compiler and of the sources of `core`; they are used if their version is sufficient.
pub(super) const PACKAGES: [&str; 2] = ["rustc-web", "rust-web-src"];
/// The first version that compiles edition 2024 and the device crate's use of `extern "ptx-kernel"`.
const OLDEST: (u32, u32) = (1, 89);

/// A compiler that was checked and is sufficient.
#[derive(Clone, Debug)]
pub(crate) struct DeviceCompiler {
    pub(crate) rustc: PathBuf,
    /// `rustc 1.96.0 (ac68faa20 2026-05-25)`, with any additions of a distribution.
    pub(crate) version: String,
    pub(crate) llvm: String,
}

impl DeviceCompiler {
    /// Whether the variable names a compiler.
    pub(super) fn is_named() -> bool {
        variable(VARIABLE).is_some()
    }

    /// The first sufficient compiler: only the variable's if it is set, otherwise rustup's (nightly first), then the distribution's. The
    /// error lists every place with the reason, and the commands that install one.
    pub(crate) fn find() -> Result<Self> {
        let mut tried = Vec::new();
        for (place, rustc) in candidates(&mut tried) {
            match Self::examine(&rustc) {
                Ok(compiler) => return Ok(compiler),
                Err(why) => tried.push(format!("{place}: {}: {why:#}", rustc.display())),
            }
        }
        bail!(
            "no compiler for device code; tried:\n  {}\ninstall one with `apt-get install --no-install-recommends {}` \
             (Debian), or `rustup component add rust-src --toolchain nightly`, or name one in {VARIABLE}",
            tried.join("\n  "),
            PACKAGES.join(" ")
        )
    }

    fn examine(rustc: &Path) -> Result<Self> {
        let (works, text) = Cmd::new(rustc).arg("-vV").probe();
        if !works {
            bail!("{}", text.trim());
        }
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let release = field("release:").context("`rustc -vV` prints no release")?;
        if version_pair(release) < Some(OLDEST) {
            bail!("{release} is too old, {}.{} is the oldest that will do", OLDEST.0, OLDEST.1);
        }
        let (_, sysroot) = Cmd::new(rustc).args(["--print", "sysroot"]).probe();
        let core = Path::new(sysroot.trim()).join("lib/rustlib/src/rust/library/core/src/lib.rs");
        if !core.is_file() {
            bail!("{release}, but there is no {}", core.display());
        }
        let version = text.lines().next().unwrap_or_default().to_owned();
        let llvm = field("LLVM version:").unwrap_or("unknown").to_owned();
        Ok(Self { rustc: rustc.to_path_buf(), version, llvm })
    }
}

/// The candidates in order; places without a compiler are added to `tried`.
fn candidates(tried: &mut Vec<String>) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    match variable(VARIABLE) {
        // If the user names a compiler, only that one is tried, so that its error is reported.
        Some(path) => return vec![(VARIABLE.to_owned(), PathBuf::from(path))],
        None => tried.push(format!("{VARIABLE}: not set")),
    }

    let (works, list) = Cmd::new("rustup").args(["toolchain", "list"]).probe();
    let mut names: Vec<&str> = match works {
        true => list.lines().filter_map(|line| line.split_whitespace().next()).collect(),
        false => Vec::new(),
    };
    if !names.iter().any(|name| name.starts_with("nightly")) {
        tried.push("rustup: no nightly toolchain".to_owned());
    }
    // RUSTC_BOOTSTRAP lets any toolchain compile device code; nightly comes first, because it does not need the variable.
    names.sort_by_key(|name| !name.starts_with("nightly"));
    for name in names {
        let (works, sysroot) = Cmd::new("rustup").args(["run", name, "rustc", "--print", "sysroot"]).probe();
        if works {
            found.push((format!("rustup {name}"), Path::new(sysroot.trim()).join("bin/rustc")));
        } else {
            tried.push(format!("rustup {name}: {}", sysroot.trim()));
        }
    }

    // The package's own file list is used, because a `rustc` on the path is usually rustup's.
    let (works, files) = Cmd::new("dpkg").args(["-L", PACKAGES[0]]).probe();
    match files.lines().find(|line| works && line.ends_with("/bin/rustc")) {
        Some(path) => found.push((format!("Debian's {}", PACKAGES[0]), PathBuf::from(path))),
        None => tried.push(format!("Debian's {}: not installed", PACKAGES[0])),
    }
    found
}

/// Whether the distribution's package is sufficient and can be installed without removing others.
pub(super) fn apt_candidate() -> bool {
    candidate_of(PACKAGES[0]).and_then(|version| version_pair(&version)) >= Some(OLDEST)
        && Cmd::new("apt-get").args(["install", "--simulate"]).args(APT_FLAGS).args(PACKAGES).probe().0
}

/// Whether there are package lists at all: then apt knows a package that is not installed.
pub(super) fn apt_has_lists() -> bool {
    let (works, text) = Cmd::new("apt-cache").args(["search", "--names-only", "^gcc"]).env("LC_ALL", "C").probe();
    let installed = |name: &str| Cmd::new("dpkg").args(["-s", name]).probe().0;
    works && text.lines().filter_map(|line| line.split_whitespace().next()).any(|name| !installed(name))
}

/// The version of a package that apt would install.
pub(super) fn candidate_of(package: &str) -> Option<String> {
    let (works, text) = Cmd::new("apt-cache").args(["policy", package]).env("LC_ALL", "C").probe();
    let candidate = text.lines().find_map(|line| line.trim().strip_prefix("Candidate:"))?.trim().to_owned();
    works.then_some(candidate)
}

/// The version pair of `1.96.0+dfsg1-1` is (1, 96).
fn version_pair(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_pair_compares_versions_of_distributions() {
        assert!(version_pair("1.96.0+dfsg1-1~deb12u2") >= Some(OLDEST));
        assert!(version_pair("1.85.0+dfsg3-1") < Some(OLDEST));
        assert!(version_pair("(none)") < Some(OLDEST));
    }
}
