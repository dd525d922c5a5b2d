//! Files from PyPI by pip: NVIDIA's assembler and `nccl.h`, MPICH, packages that read gradsync's output, training data, and Horovod's sources.
//!
//! Every version is fixed, and all files stay under target/; no Python environment of the user is changed.

use std::path::{Path, PathBuf};

use super::variable;
use crate::process::{Cmd, target};

/// The variable that names another ptxas.
const PTXAS_VARIABLE: &str = "GRADSYNC_PTXAS";
/// CUDA 12.9 knows sm_75 to sm_120, and every driver since 525 loads its code; code by CUDA 13 needs driver 580.
pub(crate) const PTXAS_VERSION: &str = "12.9.86";
/// The variable that names a folder with another `nccl.h`; the tests read the same variable.
pub(crate) const NCCL_VARIABLE: &str = "GRADSYNC_NCCL_INCLUDE";
/// The first release series with every function that `host/src/sys` declares, in its version with the smallest wheel.
pub(super) const NCCL_VERSION: &str = "2.27.7";
/// The version for bundles: it supports several ranks on one GPU, as NCCL does from 2.30 on.
pub(super) const NCCL_LIBRARY_VERSION: &str = "2.32.3";
/// The first release series of MPICH with MPI's standard ABI is 5.0.
pub(super) const MPICH_VERSION: &str = "5.0.2";
/// Its file of digits is the UCI "Optical Recognition of Handwritten Digits" test set (CC BY 4.0), which has not changed for years.
pub(super) const SCIKIT_LEARN_VERSION: &str = "1.7.2";
pub(super) const DIGITS_SHA256: &str = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22";
/// The last release; its Adasum is the current one.
pub(crate) const HOROVOD_VERSION: &str = "0.28.1";
pub(super) const HOROVOD_SHA256: &str = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0";
/// numpy's newest version does not support the Python of older distributions.
const PACKAGES: [&str; 4] = [
    "numpy==2.2.6; python_version < '3.11'",
    "numpy==2.4.6; python_version >= '3.11'",
    "ml_dtypes==0.5.4",
    "safetensors==0.8.0",
];
/// Extracts files from the wheel that matches a pattern, because wheel names contain the platform, and deletes the wheel, which holds up to
/// 200 megabytes more. The arguments are the pattern, then each file's name and destination.
const EXTRACT: &str = "import glob, os, sys, zipfile; wheel = glob.glob(sys.argv[1])[0]; \
                       [open(to, 'wb').write(zipfile.ZipFile(wheel).read(name)) \
                       for name, to in zip(sys.argv[2::2], sys.argv[3::2])]; os.remove(wheel)";

/// Unpacks the wheel that matches the first argument into the second.
const UNPACK: &str = "import glob, sys, zipfile; zipfile.ZipFile(glob.glob(sys.argv[1])[0]).extractall(sys.argv[2])";

/// The assembler, if it is present.
pub(crate) fn ptxas() -> Option<PathBuf> {
    let path = variable(PTXAS_VARIABLE).map_or_else(fetched_ptxas, PathBuf::from);
    Cmd::new(&path).arg("--version").probe().0.then_some(path)
}

fn fetched_ptxas() -> PathBuf {
    target("tools").join(format!("ptxas-{PTXAS_VERSION}/ptxas"))
}

pub(super) fn fetch_ptxas() -> Vec<Cmd> {
    let path = fetched_ptxas();
    let folder = path.with_file_name("");
    vec![
        pip_download(&folder).arg(format!("nvidia-cuda-nvcc-cu12=={PTXAS_VERSION}")),
        Cmd::new("python3")
            .args(["-c", EXTRACT])
            .arg(folder.join("nvidia_cuda_nvcc_cu12-*.whl"))
            .arg("nvidia/cuda_nvcc/bin/ptxas")
            .arg(&path),
        Cmd::new("chmod").arg("+x").arg(path),
    ]
}

/// The folder of NVIDIA's `nccl.h`, whether it has been downloaded or not.
pub(crate) fn nccl_include() -> PathBuf {
    variable(NCCL_VARIABLE).map_or_else(fetched_nccl_include, PathBuf::from)
}

fn fetched_nccl_include() -> PathBuf {
    target("tools").join(format!("nccl-{NCCL_VERSION}"))
}

pub(super) fn fetch_nccl_header() -> Vec<Cmd> {
    let folder = fetched_nccl_include();
    vec![
        // One wheel serves every platform: the header is identical in all of them. Without this option, pip would keep a copy of the wheel
        // in its cache.
        pip_download(&folder)
            .args(["--no-cache-dir", "--python-version", "3.12", "--platform", "manylinux2014_x86_64"])
            .arg(format!("nvidia-nccl-cu13=={NCCL_VERSION}")),
        Cmd::new("python3")
            .args(["-c", EXTRACT])
            .arg(folder.join("nvidia_nccl_cu13-*.whl"))
            .arg("nvidia/nccl/include/nccl.h")
            .arg(folder.join("nccl.h")),
    ]
}

/// The NCCL library, with code for every GPU.
pub(crate) fn nccl_library() -> PathBuf {
    target("tools").join(format!("nccl-library-{NCCL_LIBRARY_VERSION}/libnccl.so.2"))
}

/// The licence text that must accompany the library.
pub(crate) fn nccl_license() -> PathBuf {
    nccl_library().with_file_name("License.txt")
}

pub(super) fn fetch_nccl_library() -> Vec<Cmd> {
    let (library, license) = (nccl_library(), nccl_license());
    let folder = library.with_file_name("");
    vec![
        pip_download(&folder)
            .args(["--no-cache-dir", "--python-version", "3.12", "--platform", "manylinux_2_27_x86_64"])
            .arg(format!("nvidia-nccl-cu13=={NCCL_LIBRARY_VERSION}")),
        Cmd::new("python3")
            .args(["-c", EXTRACT])
            .arg(folder.join("nvidia_nccl_cu13-*.whl"))
            .arg(format!("nvidia_nccl_cu13-{NCCL_LIBRARY_VERSION}.dist-info/licenses/License.txt"))
            .arg(license)
            .arg("nvidia/nccl/lib/libnccl.so.2")
            .arg(library),
    ]
}

/// The folder that tests add to PYTHONPATH.
pub(crate) fn packages_folder() -> PathBuf {
    target("tools").join("python")
}

pub(super) fn packages_work() -> bool {
    Cmd::new("python3")
        .args(["-c", "import numpy, ml_dtypes, safetensors.numpy"])
        .env("PYTHONPATH", packages_folder())
        .probe()
        .0
}

pub(super) fn fetch_packages() -> Cmd {
    Cmd::new("python3")
        // When run as root, pip warns about the system's packages, which --target does not change.
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--only-binary=:all:", "--no-deps", "--target"])
        .arg(packages_folder())
        .args(PACKAGES)
}

/// The folder of MPICH, with its subfolders `bin` and `lib`, whether it has been downloaded or not.
pub(crate) fn mpich() -> PathBuf {
    target("tools").join(format!("mpich-{MPICH_VERSION}"))
}

/// The compiler of MPICH for MPI's standard ABI.
pub(crate) fn mpicc_abi() -> PathBuf {
    mpich().join("bin/mpicc_abi")
}

pub(super) fn fetch_mpich() -> Vec<Cmd> {
    // pip's own --target leaves out the wheel's folder `lib`.
    let folder = target("tools").join("mpich-wheel");
    let data = folder.join(format!("mpich-{MPICH_VERSION}.data/data"));
    vec![
        pip_download(&folder).arg(format!("mpich=={MPICH_VERSION}")),
        Cmd::new("python3").args(["-c", UNPACK]).arg(folder.join("mpich-*.whl")).arg(&folder),
        Cmd::new("chmod").args(["-R", "+x"]).arg(data.join("bin")),
        // The folder is moved when it is complete, so that an existing folder is always usable.
        Cmd::new("mv").arg(&data).arg(mpich()),
        Cmd::new("rm").arg("-r").arg(folder),
    ]
}

/// The demo's data.
pub(crate) fn digits() -> PathBuf {
    target("demo").join("data/digits.csv.gz")
}

pub(super) fn fetch_digits() -> Vec<Cmd> {
    let path = digits();
    let folder = target("tools").join(format!("scikit-learn-{SCIKIT_LEARN_VERSION}"));
    vec![
        // One wheel serves every platform: the data are identical in all of them, and none of its code is run.
        pip_download(&folder)
            .args(["--python-version", "3.12", "--platform", "manylinux2014_x86_64"])
            .arg(format!("scikit-learn=={SCIKIT_LEARN_VERSION}")),
        Cmd::new("mkdir").arg("-p").arg(path.with_file_name("")),
        Cmd::new("python3")
            .args(["-c", EXTRACT])
            .arg(folder.join("scikit_learn-*.whl"))
            .arg("sklearn/datasets/data/digits.csv.gz")
            .arg(path),
    ]
}

/// The folder of Horovod's sources, whether they have been downloaded or not.
pub(crate) fn horovod() -> PathBuf {
    horovod_folder().join(format!("horovod-{HOROVOD_VERSION}"))
}

/// The archive of Horovod's sources.
pub(super) fn horovod_archive() -> PathBuf {
    horovod_folder().join(format!("horovod-{HOROVOD_VERSION}.tar.gz"))
}

fn horovod_folder() -> PathBuf {
    target("tools").join("horovod")
}

pub(super) fn fetch_horovod() -> Vec<Cmd> {
    let unpacked = horovod_folder().join("unpacked");
    vec![
        // There is no wheel; pip asks the sources for their name and version, and compiles nothing.
        Cmd::new("python3")
            .args(["-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "horovod", "--dest"])
            .arg(horovod_folder())
            .arg(format!("horovod=={HOROVOD_VERSION}")),
        Cmd::new("python3").args(["-m", "tarfile", "--extract"]).arg(horovod_archive()).arg(&unpacked),
        // The folder is moved when it is complete, so that an existing folder is always usable.
        Cmd::new("mv").arg(unpacked.join(format!("horovod-{HOROVOD_VERSION}"))).arg(horovod()),
    ]
}

fn pip_download(folder: &Path) -> Cmd {
    Cmd::new("python3")
        .args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"])
        .arg(folder)
}
