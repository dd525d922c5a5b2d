//! The kernels of this crate as functions of a device: selection of the file for a device, extraction of one entry point from it, and an
//! addition for launches that overlap.
//!
//! An entry point is loaded on its own, when it is first needed or a little before. The driver then compiles a few hundred lines of PTX in
//! some ten milliseconds, instead of all kernels at once, and caches the result on disk. The kernels of Adasum over peers' memory have one
//! to three thousand lines, which take up to a quarter of a second to compile, and the kernels of small sums are loaded all at once. So they
//! are included as cubins too, for the architectures whose GPUs have fast links to each other. The PTX that the cubins were assembled from
//! is always included: the driver gets it where no cubin fits, where it refuses the cubin, or where `GRADSYNC_FORCE_PTX=1` asks for it. A
//! cubin holds its whole family; the driver looks up the one entry point.
//!
//! Programs that are built for few GPUs leave out the cubins, and the PTX for 7.5, of other architectures: the build script sets
//! `gradsync_left_out` for these.

use std::env;
use std::ffi::{CString, c_void};
use std::ptr;
use std::time::{Duration, Instant};

use gradsync_device::abi::{self, EntryPoint};

use super::launch::{self, Argument, EarlyLaunch, Grid};
use super::{CudaError, check, check_named};
use crate::sys::cuda::{self, Status};

/// The PTX for one architecture and all later ones, by family of entry points.
type Families = [(&'static str, &'static str)];

macro_rules! families {
    ($arch:literal: $($family:literal)*) => {
        &[$(($family, include_str!(concat!("../../ptx/", $arch, "/", $family, ".ptx")))),*]
    };
}
macro_rules! library {
    ($arch:literal) => {
        families!($arch:
            "accumulate" "accumulate_segments" "adamw" "adamw_deltas" "advance_step" "all_finite" "cast" "cast_segments" "coefficients"
            "combine" "combine_pair" "dots" "empty" "fold_sums" "gram" "gram_cross" "norms" "one_shot" "packet_adasum" "peer_adasum"
            "peer_barrier" "peer_reduce" "scale" "sgd" "sgd_deltas" "squared_norms" "sweep" "tree_combine" "tree_dots" "two_shot" "zero" "zero_segments")
    };
}
static SM_75: &Families = if cfg!(gradsync_left_out = "sm_75") { &[] } else { library!("sm_75") };
static SM_80: &Families = library!("sm_80");

/// Cubins for one architecture and the later ones with the same major number, by family of entry points.
type Cubins = [(&'static str, &'static [u8])];

macro_rules! cubins {
    ($arch:literal) => {
        &[
            ("packet_adasum", include_bytes!(concat!("../../cubin/", $arch, "/packet_adasum.cubin"))),
            ("peer_adasum", include_bytes!(concat!("../../cubin/", $arch, "/peer_adasum.cubin"))),
            ("one_shot", include_bytes!(concat!("../../cubin/", $arch, "/one_shot.cubin"))),
            ("two_shot", include_bytes!(concat!("../../cubin/", $arch, "/two_shot.cubin"))),
        ]
    };
}
static CUBINS_80: &Cubins = if cfg!(gradsync_left_out = "sm_80") { &[] } else { cubins!("sm_80") };
static CUBINS_90: &Cubins = if cfg!(gradsync_left_out = "sm_90") { &[] } else { cubins!("sm_90") };
static CUBINS_100: &Cubins = if cfg!(gradsync_left_out = "sm_100") { &[] } else { cubins!("sm_100") };

/// The lowest compute capability that has kernels, for messages.
pub(super) const LOWEST_CAPABILITY: &str = if cfg!(gradsync_left_out = "sm_75") {
    "8.0, because GRADSYNC_CUDA_ARCHS left out sm_75 when this program was built"
} else {
    "7.5"
};

/// Makes the driver compile all kernels from PTX, to test the path of an architecture without a cubin. NVIDIA's own variable for that would
/// also make it compile NCCL's kernels, as far as NCCL has their PTX.
const FORCE_PTX: &str = "GRADSYNC_FORCE_PTX";

/// The kernels for one device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Library {
    families: &'static Families,
    /// The cubins. Their kernels for 9.0 and later wait for the preceding launch, which takes no time if that one has ended.
    cubins: &'static Cubins,
    /// The launch function for kernels that wait for the preceding launch by themselves.
    early: Option<EarlyLaunch>,
}

impl Library {
    /// The kernels for a compute capability, launched early if the driver and the device (9.0 and later) support that.
    pub(super) fn for_capability(major: i32, minor: i32, early: impl FnOnce() -> Option<EarlyLaunch>) -> Option<Self> {
        let cubins = match major {
            8 => CUBINS_80,
            9 => CUBINS_90,
            10 => CUBINS_100,
            _ => &[],
        };
        match (major, minor) {
            (9.., _) => Some(Self { families: SM_80, cubins, early: early() }),
            (8, _) => Some(Self { families: SM_80, cubins, early: None }),
            (7, 5..) if !SM_75.is_empty() => Some(Self { families: SM_75, cubins, early: None }),
            _ => None,
        }
    }

    /// Drops the cubins if the environment asks for PTX.
    pub(super) fn as_told(self) -> Self {
        let is_ptx_forced = env::var_os(FORCE_PTX).is_some_and(|value| !value.is_empty() && value != "0");
        Self { cubins: if is_ptx_forced { &[] } else { self.cubins }, ..self }
    }

    /// The text of a module with one entry point: the part of its file before the first entry, and the body of this entry.
    fn source(&self, entry: &EntryPoint) -> Option<String> {
        let (_, text) = self.families.iter().find(|(family, _)| *family == entry.family)?;
        const ENTRY: &str = ".visible .entry ";
        let header = &text[..text.find(ENTRY)?];
        let begin = text.find(&format!("{ENTRY}{}(", entry.name))?;
        let end = text[begin + ENTRY.len()..].find(ENTRY).map_or(text.len(), |next| begin + ENTRY.len() + next);
        let text = format!("{header}{}", &text[begin..end]);
        Some(if self.early.is_some() { waiting_first(&text) } else { text })
    }

    /// Loads the module that holds an entry point: from the cubin if there is one that the driver accepts, else from PTX. None if there is
    /// neither.
    fn module(&self, entry: &EntryPoint) -> Option<Result<(Module, KernelSource), CudaError>> {
        if let Some((_, cubin)) = self.cubins.iter().find(|(family, _)| *family == entry.family) {
            match Module::from_cubin(entry.name, cubin) {
                Ok(module) => return Some(Ok((module, KernelSource::Cubin))),
                // A failure with another cause than the cubin recurs with the PTX, and that error is the one to report.
                Err(error) => {
                    tracing::warn!(entry = entry.name, %error, "the driver refuses the code: it compiles PTX")
                }
            }
        }
        let text = CString::new(self.source(entry)?).ok()?;
        // SAFETY: the text ends in a zero.
        let module = unsafe { Module::load(entry.name, text.as_ptr().cast()) };
        Some(module.map(|module| (module, KernelSource::Ptx)))
    }

    /// Loads an entry point onto the current context's device.
    pub(super) fn load(&self, name: &str) -> Result<Kernel, CudaError> {
        let missing = || CudaError {
            call: format!("kernel {name}"),
            code: Status::NOT_FOUND.0,
            text: "there is no such entry point".into(),
        };
        let entry = abi::entries().find(|entry| entry.name == name).ok_or_else(missing)?;
        let start = Instant::now();
        let (module, source) = self.module(entry).ok_or_else(missing)??;
        let function = module.function(name)?;
        let loaded = LoadedKernel { name: entry.name, source, load_time: start.elapsed() };
        tracing::debug!(name, ?source, load_time = ?loaded.load_time, "kernel loaded");
        Ok(Kernel { entry, loaded, function, early: self.early, _module: module })
    }
}

/// Turns PTX for 8.0 into PTX for 9.0 with a wait at the start of every entry: the preceding launch may still write memory that this one
/// reads, and read memory that this one writes.
fn waiting_first(text: &str) -> String {
    let text = text.replacen(".version 7.0\n.target sm_80\n", ".version 7.8\n.target sm_90\n", 1);
    text.replace("\n{\n", "\n{\n\tgriddepcontrol.wait;\n")
}

/// The source that a kernel was loaded from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KernelSource {
    /// A cubin for the device's architecture, assembled when this crate was built.
    Cubin,
    /// PTX, which the driver compiled or found compiled in its cache on disk.
    Ptx,
}

/// A kernel that a queue has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedKernel {
    /// The entry point.
    pub name: &'static str,
    /// The source that the driver accepted.
    pub source: KernelSource,
    /// The time that loading took, including the driver's compiler.
    pub load_time: Duration,
}

/// A module that the driver has loaded. The context must be current where it is loaded, used and dropped.
#[derive(Debug)]
struct Module(cuda::CUmodule);

impl Module {
    fn from_cubin(name: &str, cubin: &[u8]) -> Result<Self, CudaError> {
        // Included bytes can lie at any address, and an ELF file needs a multiple of eight.
        let mut aligned = vec![0u64; cubin.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut aligned)[..cubin.len()].copy_from_slice(cubin);
        // SAFETY: a whole ELF file.
        unsafe { Self::load(name, aligned.as_ptr().cast()) }
    }

    /// # Safety
    /// There is a whole ELF file at `image`, or PTX that ends in a zero.
    unsafe fn load(name: &str, image: *const c_void) -> Result<Self, CudaError> {
        let mut module = ptr::null_mut();
        // Without options the driver compiles PTX for the context's device.
        // SAFETY: writes one handle; the rest is the caller's promise.
        let status = unsafe { cuda::cuModuleLoadDataEx(&mut module, image, 0, ptr::null_mut(), ptr::null_mut()) };
        check_named(|| format!("cuModuleLoadDataEx of {name}"), status)?;
        Ok(Self(module))
    }

    fn function(&self, name: &str) -> Result<cuda::CUfunction, CudaError> {
        let terminated = CString::new(name).expect("entry points have names without zeros");
        let mut function = ptr::null_mut();
        // SAFETY: writes one handle; the module is live.
        let status = unsafe { cuda::cuModuleGetFunction(&mut function, self.0, terminated.as_ptr()) };
        check_named(|| format!("cuModuleGetFunction of {name}"), status)?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, unloaded once.
        if let Err(error) = check("cuModuleUnload", unsafe { cuda::cuModuleUnload(self.0) }) {
            tracing::error!(%error, "a kernel was not unloaded");
        }
    }
}

/// A loaded entry point.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) entry: &'static EntryPoint,
    pub(super) loaded: LoadedKernel,
    function: cuda::CUfunction,
    early: Option<EarlyLaunch>,
    /// Owns `function`.
    _module: Module,
}

impl Kernel {
    /// # Safety
    /// See `Queue::launch`; the kernel's context must be current.
    pub(super) unsafe fn launch(
        &self,
        stream: cuda::CUstream,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), CudaError> {
        // SAFETY: `function` belongs to this entry point, which waits where its launches are early; the rest is the caller's promise.
        unsafe { launch::launch((self.entry, self.function), stream, grid, arguments, self.early) }
    }
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    const NO_CUBINS: &Cubins = &[];

    #[test]
    fn source_cuts_every_entry_point_out_of_its_file() {
        for library in [SM_75, SM_80].map(|families| Library { families, cubins: &[], early: None }) {
            for entry in abi::entries() {
                let source = library.source(entry).unwrap_or_else(|| panic!("no source of {}", entry.name));
                assert!(source.contains(".version") && source.contains(".target"), "no header: {}", entry.name);
                assert_eq!(source.matches(".visible .entry").count(), 1, "{}", entry.name);
                assert!(source.trim_end().ends_with('}'), "{}", entry.name);
                assert!(!source.contains("griddepcontrol"), "{}", entry.name);
            }
        }
    }

    #[test]
    fn library_has_kernels_of_early_launches_wait_first() {
        let plain = Library { families: SM_80, cubins: &[], early: None };
        let early = Library { early: Some(EarlyLaunch::never_called()), ..plain };
        for entry in abi::entries() {
            let (plain, early) = (plain.source(entry).unwrap(), early.source(entry).unwrap());
            assert!(early.contains("\n.version 7.8\n.target sm_90\n"), "{}", entry.name);
            let body = early.split_once(".visible .entry").unwrap().1.split_once('{').unwrap().1;
            assert!(body.starts_with("\n\tgriddepcontrol.wait;\n"), "{}", entry.name);
            // The rest of the text is unchanged.
            let undone = early
                .replacen("\tgriddepcontrol.wait;\n", "", 1)
                .replacen("7.8", "7.0", 1)
                .replacen("sm_90", "sm_80", 1);
            assert_eq!(undone, plain, "{}", entry.name);
        }
    }

    #[test]
    fn for_capability_chooses_the_library() {
        let early = || Some(EarlyLaunch::never_called());
        let library = |major, minor| Library::for_capability(major, minor, early);
        assert!(library(7, 0).is_none());
        for (major, minor, families, cubins, is_early) in [
            (7, 5, SM_75, NO_CUBINS, false),
            (8, 0, SM_80, CUBINS_80, false),
            (8, 9, SM_80, CUBINS_80, false),
            (9, 0, SM_80, CUBINS_90, true),
            (10, 0, SM_80, CUBINS_100, true),
            (10, 3, SM_80, CUBINS_100, true),
            (11, 0, SM_80, NO_CUBINS, true),
            (12, 0, SM_80, NO_CUBINS, true),
        ] {
            let found = library(major, minor).unwrap();
            assert!(std::ptr::eq(found.families, families), "{major}.{minor}");
            assert_eq!(found.cubins, cubins, "{major}.{minor}");
            assert_eq!(found.early.is_some(), is_early, "{major}.{minor}");
        }
        assert!(Library::for_capability(9, 0, || None).unwrap().early.is_none());
    }

    /// The manifest records, for each cubin, its hash and the hash of the PTX that it was assembled from.
    #[test]
    fn cubins_were_made_from_the_ptx_that_would_be_loaded() {
        let manifest = include_str!("../../ptx/manifest.json");
        let hash = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        for (major, arch) in [(8, "sm_80"), (9, "sm_90"), (10, "sm_100")] {
            let library = Library::for_capability(major, 0, || Some(EarlyLaunch::never_called())).unwrap();
            assert!(!library.cubins.is_empty(), "{arch}");
            for (family, cubin) in library.cubins {
                let (_, text) = library.families.iter().find(|(name, _)| name == family).expect("its PTX");
                let text = if library.early.is_some() { waiting_first(text) } else { text.to_string() };
                let (source, code) = (hash(text.as_bytes()), hash(cubin));
                let line = format!(r#""path":"{arch}/{family}.cubin","ptx_sha256":"{source}","sha256":"{code}""#);
                assert!(manifest.contains(&line), "the manifest has no {line}");
            }
        }
    }
}
