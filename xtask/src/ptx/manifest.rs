//! host/ptx/manifest.json: what the PTX was made from and with, and which entry points it has.
//!
//! The host crate's tests read the same file and hold it against their table of launches; it holds no path and no date.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::builder::{Arch, FLAGS};
use crate::toolchain::device_compiler::DeviceCompiler;

pub(super) const FILE: &str = "manifest.json";
/// Raised when a reader of the manifest would misunderstand it.
const FORMAT: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    /// Over device/Cargo.toml and device/src, with paths.
    pub(crate) source_sha256: String,
    /// The first line of `rustc -vV`.
    pub(crate) compiler: String,
    pub(crate) llvm: String,
    pub(crate) flags: Vec<String>,
    pub(crate) archs: Vec<String>,
    pub(crate) entries: Vec<EntryPoint>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EntryPoint {
    pub(crate) name: String,
    pub(crate) family: String,
    pub(crate) params: Vec<String>,
}

impl Manifest {
    pub(super) fn new(compiler: &DeviceCompiler, source_sha256: String, entries: Vec<EntryPoint>) -> Self {
        Self {
            format: FORMAT,
            source_sha256,
            compiler: compiler.version.clone(),
            llvm: compiler.llvm.clone(),
            flags: FLAGS.map(str::to_owned).to_vec(),
            archs: Arch::ALL.map(|arch| arch.name().to_owned()).to_vec(),
            entries,
        }
    }

    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let text = fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}; run `cargo xtask ptx`", path.display()))?;
        let manifest: Self =
            serde_json::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))?;
        if manifest.format != FORMAT {
            bail!(
                "{} has format {}, this xtask writes {FORMAT}; run `cargo xtask ptx`",
                path.display(),
                manifest.format
            );
        }
        Ok(manifest)
    }

    /// One entry a line: the list is long, and read in diffs.
    pub(super) fn to_text(&self) -> Result<String> {
        let mut entries = Vec::new();
        for entry in &self.entries {
            entries.push(format!("    {}", serde_json::to_string(entry)?));
        }
        Ok(format!(
            "{{\n  \"format\": {},\n  \"source_sha256\": {},\n  \"compiler\": {},\n  \"llvm\": {},\n  \"flags\": {},\n  \
             \"archs\": {},\n  \"entries\": [\n{}\n  ]\n}}\n",
            self.format,
            serde_json::to_string(&self.source_sha256)?,
            serde_json::to_string(&self.compiler)?,
            serde_json::to_string(&self.llvm)?,
            serde_json::to_string(&self.flags)?,
            serde_json::to_string(&self.archs)?,
            entries.join(",\n")
        ))
    }

    /// Entry points that are on one side only, or have other parameters there.
    pub(super) fn differing_entries(&self, recorded: &Self) -> Vec<String> {
        let mut differences = Vec::new();
        for entry in &self.entries {
            match recorded.entries.iter().find(|other| other.name == entry.name) {
                None => differences.push(format!("entry {} is new", entry.name)),
                Some(other) if other != entry => differences.push(format!(
                    "entry {} takes ({}), recorded ({})",
                    entry.name,
                    entry.params.join(" "),
                    other.params.join(" ")
                )),
                Some(_) => {}
            }
        }
        let gone = recorded.entries.iter().filter(|other| self.entries.iter().all(|entry| entry.name != other.name));
        differences.extend(gone.map(|other| format!("entry {} is gone", other.name)));
        differences
    }
}

/// SHA-256 over the device crate's manifest and sources, each with its path and length, in order of path.
pub(super) fn hash_sources(root: &Path) -> Result<String> {
    let mut paths = vec![PathBuf::from("device/Cargo.toml")];
    find_sources(root, Path::new("device/src"), &mut paths)?;
    paths.sort();
    let mut hash = Sha256::new();
    for path in paths {
        let content = fs::read(root.join(&path)).with_context(|| format!("cannot read {}", path.display()))?;
        hash.update(path.to_string_lossy().as_bytes());
        hash.update([0]);
        hash.update(u64::try_from(content.len())?.to_le_bytes());
        hash.update(&content);
    }
    Ok(crate::toolchain::hex(&hash.finalize()))
}

fn find_sources(root: &Path, folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(root.join(folder)).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            find_sources(root, &path, paths)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            paths.push(path);
        }
    }
    Ok(())
}
