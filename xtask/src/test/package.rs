//! The published crates as `cargo publish` would upload them: packed, checked, and unpacked so that another crate can depend on them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::process::Cmd;

/// The largest package in bytes: kernels grow, and the registry takes no more than 10 MiB.
const LARGEST: u64 = 6_300_000;
/// The files that every package has at its root.
const FILES: [&str; 4] = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];
/// The manifest fields that the registry expects, and those by which a crate is found.
const FIELDS: [&str; 7] = ["categories", "description", "documentation", "keywords", "license", "readme", "repository"];

/// The first cargo version that packs interdependent crates before the registry has them.
const PACKS_SEVERAL: (u32, u32) = (1, 90);

/// A crate that another crate can depend on.
pub(super) struct Package {
    pub(super) name: String,
    pub(super) folder: PathBuf,
    /// The size in bytes of the archive; `None` if this is the workspace member itself.
    pub(super) size: Option<u64>,
}

/// Packs every published member of the workspace into cargo's output folder `target`, and unpacks it in `to`. If cargo is too old for that,
/// returns the members themselves.
pub(super) fn pack(target: &Path, to: &Path) -> Result<Vec<Package>> {
    let members = published()?;
    if cargo_version()? < PACKS_SEVERAL {
        let folder = |member: &Member| member.manifest_path.with_file_name("");
        return Ok(members
            .into_iter()
            .map(|member| Package { folder: folder(&member), name: member.name, size: None })
            .collect());
    }
    // Nothing is compiled here: the crate that depends on the unpacked crates compiles them.
    let pack = Cmd::cargo("package").args(["--quiet", "--no-verify", "--allow-dirty", "--target-dir"]).arg(target);
    pack.args(members.iter().flat_map(|member| ["--package", member.name.as_str()])).run()?;
    members.into_iter().map(|member| unpack(target, to, member)).collect()
}

fn unpack(target: &Path, to: &Path, member: Member) -> Result<Package> {
    let full_name = format!("{}-{}", member.name, member.version);
    let archive = target.join("package").join(format!("{full_name}.crate"));
    let size = fs::metadata(&archive).with_context(|| format!("cannot find {}", archive.display()))?.len();
    ensure!(size <= LARGEST, "{} has {size} bytes, more than {LARGEST}", archive.display());
    Cmd::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(to).quiet().run()?;
    let folder = to.join(full_name);
    for file in FILES {
        // A packed symbolic link would be dangling.
        let is_file = fs::symlink_metadata(folder.join(file)).is_ok_and(|found| found.is_file());
        ensure!(is_file, "{} has no {file}", archive.display());
    }
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).context("cannot read a packed manifest")?;
    for field in FIELDS {
        let is_there = manifest.lines().any(|line| line.starts_with(&format!("{field} = ")));
        ensure!(is_there, "{} does not say its {field}", archive.display());
    }
    Ok(Package { name: member.name, folder, size: Some(size) })
}

/// A member of the workspace.
#[derive(Deserialize)]
struct Member {
    name: String,
    version: String,
    manifest_path: PathBuf,
    /// The registries that may have it; any if the field is missing.
    publish: Option<Vec<String>>,
}

/// The members that may be published.
fn published() -> Result<Vec<Member>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Member>,
    }
    let text = Cmd::cargo("metadata").args(["--format-version", "1", "--no-deps"]).quiet().read()?;
    let metadata: Metadata = serde_json::from_str(&text).context("cannot understand `cargo metadata`")?;
    let members: Vec<_> = metadata.packages.into_iter().filter(|member| member.publish.is_none()).collect();
    ensure!(!members.is_empty(), "no member of the workspace is published");
    Ok(members)
}

/// The version of `cargo 1.90.0 (840b83a10 2025-07-30)` is (1, 90).
fn cargo_version() -> Result<(u32, u32)> {
    let text = Cmd::cargo("--version").quiet().read()?;
    let mut numbers = text.split([' ', '.']).skip(1).map_while(|number| number.parse().ok());
    numbers.next().zip(numbers.next()).with_context(|| format!("cannot understand cargo's version, {text:?}"))
}
