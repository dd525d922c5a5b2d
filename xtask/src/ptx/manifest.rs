//! host/ptx/manifest.json: the sources, compiler and entry points of the PTX, and the files that were assembled from it.
//!
//! The host crate's tests compare the same file with their table of launches; it contains no path and no date.

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
/// The version of the format, which increases when existing readers would misinterpret the manifest.
const FORMAT: u32 = 2;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) format: u32,
    /// The hash of device/Cargo.toml and device/src, including paths.
    pub(crate) source_sha256: String,
    /// The first line of `rustc -vV`.
    pub(crate) compiler: String,
    pub(crate) llvm: String,
    pub(crate) flags: Vec<String>,
    pub(crate) archs: Vec<String>,
    pub(crate) cubins: Cubins,
    pub(crate) entries: Vec<EntryPoint>,
}

/// The files in host/cubin.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cubins {
    /// The release line of `ptxas --version`.
    pub(crate) assembler: String,
    pub(crate) files: Vec<Cubin>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Cubin {
    /// The path relative to host/cubin.
    pub(crate) path: String,
    /// The hash of the assembled text, which is the text that the loader would give to the driver.
    pub(crate) ptx_sha256: String,
    /// The hash of the file.
    pub(crate) sha256: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EntryPoint {
    pub(crate) name: String,
    pub(crate) family: String,
    pub(crate) params: Vec<String>,
}

impl Manifest {
    pub(super) fn new(
        compiler: &DeviceCompiler,
        source_sha256: String,
        cubins: Cubins,
        entries: Vec<EntryPoint>,
    ) -> Self {
        Self {
            format: FORMAT,
            source_sha256,
            compiler: compiler.version.clone(),
            llvm: compiler.llvm.clone(),
            flags: FLAGS.map(str::to_owned).to_vec(),
            archs: Arch::ALL.map(|arch| arch.name().to_owned()).to_vec(),
            cubins,
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

    /// The JSON with one entry or file per line: the lists are long, and are read in diffs.
    pub(super) fn to_text(&self) -> Result<String> {
        Ok(format!(
            "{{\n  \"format\": {},\n  \"source_sha256\": {},\n  \"compiler\": {},\n  \"llvm\": {},\n  \"flags\": {},\n  \
             \"archs\": {},\n  \"cubins\": {{\"assembler\": {}, \"files\": [\n{}\n  ]}},\n  \"entries\": [\n{}\n  ]\n}}\n",
            self.format,
            serde_json::to_string(&self.source_sha256)?,
            serde_json::to_string(&self.compiler)?,
            serde_json::to_string(&self.llvm)?,
            serde_json::to_string(&self.flags)?,
            serde_json::to_string(&self.archs)?,
            serde_json::to_string(&self.cubins.assembler)?,
            one_a_line(&self.cubins.files)?,
            one_a_line(&self.entries)?
        ))
    }

    /// Entry points that exist on one side only, or have other parameters there.
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

fn one_a_line<T: Serialize>(items: &[T]) -> Result<String> {
    let lines: Vec<String> = items.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
    Ok(lines.iter().map(|line| format!("    {line}")).collect::<Vec<_>>().join(",\n"))
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
