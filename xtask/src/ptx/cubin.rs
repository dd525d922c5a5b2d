//! host/cubin/: the kernels with the longest compilation by the driver, as machine code for some architectures.
//!
//! The files are assembled from host/ptx, which remains the source of all code: if no file fits the device, or the driver refuses it, the
//! loader uses the PTX. This module does not inspect the code; a byte-for-byte comparison checks that it is the assembler's output for the
//! current PTX.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::manifest::{Cubin, Cubins};
use crate::{
    process::{Cmd, root, target},
    toolchain::{
        hex,
        python::{self, PTXAS_VERSION},
    },
};

/// The driver would need up to a second to compile one kernel of the first two families, which are Adasum in one launch; it needs at most
/// 0.1 s for others. The kernels of the last two are all loaded before the first small sum.
const FAMILIES: [&str; 4] = ["packet_adasum", "peer_adasum", "one_shot", "two_shot"];
/// Architectures with GPUs that are connected by NVLink. Code for 8.0 runs on all of 8.x, and so on.
const SMS: [u32; 3] = [80, 90, 100];
/// The architecture of the PTX that all files are assembled from.
const PTX: &str = "sm_80";

pub(super) fn folder() -> PathBuf {
    root().join("host/cubin")
}

/// Architecture, family and path of every file; the path is relative to host/cubin.
fn all() -> impl Iterator<Item = (u32, &'static str, String)> {
    let of_arch = |sm| FAMILIES.map(|family| (sm, family, format!("sm_{sm}/{family}.cubin")));
    SMS.into_iter().flat_map(of_arch)
}

/// The output of [`assemble`].
#[derive(Debug)]
pub(crate) struct Assembled {
    pub(crate) path: PathBuf,
    /// The message of `ptxas -v` about registers, stack and spills.
    pub(crate) said: String,
}

/// Assembles one family for one architecture, into `target/ptxas/sm_NN`.
pub(crate) fn assemble(ptxas: &Path, family: &str, text: &str, sm: u32) -> Result<Assembled> {
    let folder = target("ptxas").join(format!("sm_{sm}"));
    let (source, path) = (folder.join(format!("{family}.ptx")), folder.join(format!("{family}.cubin")));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    fs::write(&source, as_loaded(text, sm)).with_context(|| format!("cannot write {}", source.display()))?;
    let (works, said) = Cmd::new(ptxas)
        .args(["-v", "--gpu-name"])
        .arg(format!("sm_{sm}"))
        .arg("--output-file")
        .arg(&path)
        .arg(&source)
        .probe();
    if !works {
        bail!("{family} is not accepted for sm_{sm}:\n{}", said.trim());
    }
    Ok(Assembled { path, said })
}

/// The text that a device gets: from 9.0 on, the library's loader makes every entry wait for the previous launch.
fn as_loaded(text: &str, sm: u32) -> String {
    if sm < 90 {
        return text.to_owned();
    }
    let text = text.replacen(".version 7.0\n.target sm_80\n", ".version 7.8\n.target sm_90\n", 1);
    text.replace("\n{\n", "\n{\n\tgriddepcontrol.wait;\n")
}

/// Every file of host/cubin, by path relative to it, from the files of host/ptx; and the manifest's record of them.
pub(super) fn generate(ptx: &BTreeMap<String, String>) -> Result<(Cubins, BTreeMap<String, Vec<u8>>)> {
    let ptxas = python::ptxas().context("no ptxas here")?;
    let assembler = version(&ptxas)?;
    println!("assembler: {assembler}, {}", ptxas.display());
    check_assembler(&assembler)?;
    let (mut recorded, mut files) = (Vec::new(), BTreeMap::new());
    for (sm, family, path) in all() {
        let source = format!("{PTX}/{family}.ptx");
        let text = ptx.get(&source).with_context(|| format!("there is no {source} to assemble"))?;
        let made = assemble(&ptxas, family, text, sm)?.path;
        let code = fs::read(&made).with_context(|| format!("cannot read {}", made.display()))?;
        let ptx_sha256 = sha256(as_loaded(text, sm).as_bytes());
        recorded.push(Cubin { path: path.clone(), ptx_sha256, sha256: sha256(&code) });
        files.insert(path, code);
    }
    Ok((Cubins { assembler, files: recorded }, files))
}

/// Writes these files, and removes all others.
pub(super) fn write(files: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    let folder = folder();
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    super::put(&folder, files)
}

/// The release of the assembler determines which drivers can load the code.
fn check_assembler(assembler: &str) -> Result<()> {
    if assembler.ends_with(&format!("V{PTXAS_VERSION}")) {
        return Ok(());
    }
    bail!(
        "host/cubin has to be made by ptxas {PTXAS_VERSION}, whose code older drivers load too, and not by {assembler:?}"
    )
}

/// A check without an assembler: the files match the manifest's hashes, and so does the PTX in host/ptx that they were made from.
pub(super) fn check(recorded: &Cubins) -> Result<()> {
    check_assembler(&recorded.assembler)?;
    let expected: Vec<String> = all().map(|(.., path)| path).collect();
    let listed: Vec<String> = recorded.files.iter().map(|file| file.path.clone()).collect();
    if listed != expected {
        bail!("the manifest lists the cubins {listed:?} instead of {expected:?}; run `cargo xtask ptx`");
    }
    let existing = existing()?;
    if existing != expected.iter().cloned().collect() {
        bail!("host/cubin should hold {expected:?}, and there is {existing:?}; run `cargo xtask ptx`");
    }
    for ((sm, family, path), recorded) in all().zip(&recorded.files) {
        let source = super::folder().join(PTX).join(format!("{family}.ptx"));
        let text = fs::read_to_string(&source).with_context(|| format!("cannot read {}", source.display()))?;
        if sha256(as_loaded(&text, sm).as_bytes()) != recorded.ptx_sha256 {
            bail!("host/cubin/{path} was made from other PTX than {}; run `cargo xtask ptx`", source.display());
        }
        let code = fs::read(folder().join(&path)).with_context(|| format!("cannot read host/cubin/{path}"))?;
        if sha256(&code) != recorded.sha256 {
            bail!("host/cubin/{path} is not the file that the manifest records; run `cargo xtask ptx`");
        }
    }
    Ok(())
}

/// Compares host/cubin with the output of [`assemble`] for the current PTX; returns a description of the comparison.
pub(crate) fn compare(ptxas: &Path) -> Result<String> {
    let recorded = super::Manifest::read(&super::folder())?.cubins;
    let here = version(ptxas)?;
    if here != recorded.assembler {
        return Ok(format!("cubins NOT COMPARED: they were made by ptxas {PTXAS_VERSION}, and here is {here:?}"));
    }
    let mut differing = Vec::new();
    for Cubin { path, .. } in &recorded.files {
        let read = |path: PathBuf| fs::read(&path).with_context(|| format!("cannot read {}", path.display()));
        if read(folder().join(path))? != read(target("ptxas").join(path))? {
            differing.push(path.as_str());
        }
    }
    if !differing.is_empty() {
        bail!("host/cubin is not what ptxas makes of host/ptx ({}); run `cargo xtask ptx`", differing.join(", "));
    }
    Ok(format!("{} cubins identical", recorded.files.len()))
}

/// The paths, relative to host/cubin, of all files there.
fn existing() -> Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    let Ok(archs) = fs::read_dir(folder()) else { return Ok(found) };
    for arch in archs {
        let arch = arch?;
        for file in fs::read_dir(arch.path()).with_context(|| format!("cannot read {}", arch.path().display()))? {
            found.insert(format!("{}/{}", arch.file_name().to_string_lossy(), file?.file_name().to_string_lossy()));
        }
    }
    Ok(found)
}

/// The line of `ptxas --version` that identifies the release.
fn version(ptxas: &Path) -> Result<String> {
    let (_, text) = Cmd::new(ptxas).arg("--version").probe();
    let line = text.lines().find(|line| line.contains("release"));
    Ok(line.with_context(|| format!("{} does not say its release:\n{text}", ptxas.display()))?.trim().to_owned())
}

fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_assembler_refuses_another_by_name() {
        assert!(check_assembler(&format!("Cuda compilation tools, release 12.9, V{PTXAS_VERSION}")).is_ok());
        let refusal = check_assembler("Cuda compilation tools, release 13.0, V13.0.88").unwrap_err().to_string();
        assert!(refusal.contains("V13.0.88") && refusal.contains(PTXAS_VERSION), "{refusal}");
    }

    #[test]
    fn as_loaded_has_every_entry_wait_first_from_9_0_on() {
        let text =
            ".version 7.0\n.target sm_80\n.visible .entry a(\n)\n{\n\tret;\n}\n.visible .entry b(\n)\n{\n\tret;\n}\n";
        assert_eq!(as_loaded(text, 89), text);
        let wait = "{\n\tgriddepcontrol.wait;\n\tret;\n}\n";
        let expected =
            format!(".version 7.8\n.target sm_90\n.visible .entry a(\n)\n{wait}.visible .entry b(\n)\n{wait}");
        assert_eq!(as_loaded(text, 90), expected);
    }
}
