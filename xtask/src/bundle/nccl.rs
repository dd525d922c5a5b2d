//! The NCCL of a bundle: the library of NVIDIA's wheel with the code for the wanted GPUs, and its licence text.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use super::{compress, fatbin};
use crate::{
    process::{Cmd, target},
    toolchain::python,
};

/// The file name that the loader searches for.
pub(super) const LIBRARY: &str = "libnccl.so.2";
pub(super) const ARCHIVE: &str = "nccl.tar.xz";
pub(super) const LICENSE: &str = "nccl-license.txt";

/// Puts the library and its licence into the folder. The archive for a set of architectures is made only once.
pub(super) fn pack(folder: &Path, architectures: &[u32]) -> Result<()> {
    let fetched = python::nccl_library();
    let mut name = "reduced".to_owned();
    for architecture in architectures {
        name.push_str(&format!("-{architecture}"));
    }
    let made = fetched.with_file_name(name);
    let archive = made.join(ARCHIVE);
    if !archive.exists() {
        fs::create_dir_all(&made).with_context(|| format!("cannot make {}", made.display()))?;
        let mut library = fs::read(&fetched).with_context(|| format!("cannot read {}", fetched.display()))?;
        fatbin::keep(&mut library, architectures).with_context(|| format!("in {}", fetched.display()))?;
        let reduced = made.join(LIBRARY);
        fs::write(&reduced, &library).with_context(|| format!("cannot write {}", reduced.display()))?;
        Cmd::new("strip").arg(&reduced).run()?;
        // The archive has another name until it is complete.
        let part = target("tmp").join(ARCHIVE);
        fs::create_dir_all(target("tmp")).context("cannot make target/tmp")?;
        compress(&part, &made, &[LIBRARY])?;
        fs::rename(&part, &archive).with_context(|| format!("cannot write {}", archive.display()))?;
        fs::remove_file(&reduced).with_context(|| format!("cannot remove {}", reduced.display()))?;
    }
    for (from, name) in [(archive, ARCHIVE), (python::nccl_license(), LICENSE)] {
        let to = folder.join(name);
        fs::copy(&from, &to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}
