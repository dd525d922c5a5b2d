//! An MPI for building and running, with the libclang by which rsmpi's build reads its headers.

use std::{env, fs, path::Path};

use crate::process::Cmd;

/// Debian's Open MPI. rsmpi builds with other MPIs too, and an installed MPI is used.
pub(super) const PACKAGES: [&str; 3] = ["libopenmpi-dev", "openmpi-bin", LIBCLANG];
pub(super) const LIBCLANG: &str = "libclang-dev";

/// Whether this machine can build with MPI and start ranks.
pub(crate) fn is_here() -> bool {
    Cmd::new("mpicc").arg("--version").probe().0 && Cmd::new("mpirun").arg("--version").probe().0 && has_libclang()
}

/// Whether there is a libclang where bindgen searches for it.
pub(super) fn has_libclang() -> bool {
    if super::variable("LIBCLANG_PATH").is_some() || Cmd::new("llvm-config").arg("--version").probe().0 {
        return true;
    }
    let multiarch = format!("/usr/lib/{}-linux-gnu", env::consts::ARCH);
    let mut folders: Vec<_> = ["/usr/lib", "/usr/lib64", "/usr/local/lib", &multiarch].map(Into::into).into();
    if let Ok(entries) = fs::read_dir("/usr/lib") {
        let names = entries.flatten().map(|entry| entry.path());
        folders.extend(names.filter(|path| file_name(path).starts_with("llvm-")).map(|path| path.join("lib")));
    }
    let libraries = folders.iter().filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    libraries.map(|entry| file_name(&entry.path())).any(|name| is_libclang(&name))
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Accepts `libclang.so`, `libclang.so.1` or `libclang-14.so.1`, but not `libclang-cpp.so`.
fn is_libclang(name: &str) -> bool {
    let versioned = |rest: &str| rest.starts_with(|character: char| character.is_ascii_digit()) && rest.contains(".so");
    name.starts_with("libclang.so") || name.strip_prefix("libclang-").is_some_and(versioned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_libclang_tells_it_from_its_neighbours() {
        assert!(
            ["libclang.so", "libclang.so.1", "libclang-14.so.1", "libclang-14.so"].iter().all(|name| is_libclang(name))
        );
        assert!(
            !["libclang-cpp.so.14", "libclang_rt.so", "libclang-14.a", "libclang"].iter().any(|name| is_libclang(name))
        );
    }
}
