//! `gradsync info`: the properties of this build and of this machine; for every missing library, the names that were tried.

use clap::Args;
use gradsync::internal::reason;
use libloading::Library;
use serde::Serialize;

use gradsync_cli::messages::Listener;
use gradsync_cli::text::{self, wrapped};

/// The longest line, but for long words.
const WIDTH: usize = 100;

/// The arguments of `gradsync info`.
#[derive(Args)]
pub(crate) struct Info {
    /// Print one JSON object instead of lines.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
pub(crate) struct Machine {
    pub(crate) version: &'static str,
    pub(crate) features: Vec<&'static str>,
    pub(crate) cpu: Cpu,
    /// The CUDA driver's library.
    driver: Found,
    /// GPUs by name, as the driver lists them; empty where there is no driver.
    pub(crate) gpus: Vec<String>,
    /// The reason why GPUs cannot be listed, if so.
    gpus_missing: Option<String>,
    pub(crate) nccl: Found,
    pub(crate) mpi: Found,
}

#[derive(Serialize)]
pub(crate) struct Cpu {
    pub(crate) threads: usize,
    /// Instruction sets with their own kernel code, or that would be relevant to kernels.
    features: Vec<&'static str>,
}

/// A library: its name and version, or the names that were tried.
#[derive(Serialize)]
pub(crate) struct Found {
    found: bool,
    pub(crate) name: Option<String>,
    pub(crate) version: Option<String>,
    /// Each name that was tried, with the loader's error if it failed.
    tried: Vec<String>,
}

impl Info {
    pub(crate) fn run(self) -> std::io::Result<()> {
        let machine = Machine::look();
        let json = || -> std::io::Result<String> {
            Ok(text::printable_json(&serde_json::to_string(&machine)?).into_owned() + "\n")
        };
        Listener::Stdout.print(&if self.json { json()? } else { machine.lines() })
    }
}

impl Machine {
    pub(crate) fn look() -> Self {
        let (gpus, gpus_missing) = match gpus() {
            Ok(gpus) => (gpus, None),
            Err(reason) => (Vec::new(), Some(reason)),
        };
        let features =
            [("cuda", cfg!(feature = "cuda")), ("mpi", cfg!(feature = "mpi")), ("nvtx", cfg!(feature = "nvtx"))];
        Self {
            version: env!("CARGO_PKG_VERSION"),
            features: features.into_iter().filter(|(_, is_on)| *is_on).map(|(name, _)| name).collect(),
            cpu: Cpu { threads: std::thread::available_parallelism().map_or(1, usize::from), features: cpu_features() },
            driver: Found::library(
                &["libcuda.so.1"],
                c_version(c"cuDriverGetVersion", |v| (v / 1000, v % 1000 / 10, None)),
            ),
            gpus,
            gpus_missing,
            nccl: Found::library(
                &nccl_names(),
                c_version(c"ncclGetVersion", |v| (v / 10_000, v / 100 % 100, Some(v % 100))),
            ),
            mpi: linked_mpi().unwrap_or_else(|| {
                Found::library(&["libmpi.so.40", "libmpi_abi.so.1", "libmpi.so.12", "libmpi.so"], mpi_version)
            }),
        }
    }

    fn lines(&self) -> String {
        let features = if self.features.is_empty() { "none".to_owned() } else { self.features.join(", ") };
        let mut lines = vec![
            format!("gradsync {} (features: {features})", self.version),
            format!("CPU: {} threads; {}", self.cpu.threads, self.cpu.features.join(" ")),
            self.driver.line("CUDA driver"),
        ];
        match &self.gpus_missing {
            Some(reason) => lines.push(format!("GPUs: none: {reason}")),
            None => lines.extend(self.gpus.iter().enumerate().map(|(index, name)| format!("GPU {index}: {name}"))),
        }
        lines.extend([self.nccl.line("NCCL"), self.mpi.line("MPI")]);
        lines.iter().map(|line| wrapped(line, WIDTH) + "\n").collect()
    }
}

impl Found {
    /// Loads the first of `names` that can be loaded and asks it for its version.
    fn library(names: &[impl AsRef<str>], version: impl Fn(&Library) -> Option<String>) -> Self {
        let mut tried = Vec::new();
        for name in names.iter().map(AsRef::as_ref) {
            // SAFETY: these libraries' initialisers only set the libraries up, as in every program that links them.
            match unsafe { Library::new(name) } {
                Ok(library) => {
                    let version = version(&library);
                    tried.push(name.to_owned());
                    // Such libraries do not expect to be unloaded, so this one stays until the end of the process.
                    std::mem::forget(library);
                    return Self { found: true, name: Some(name.to_owned()), version, tried };
                }
                Err(error) => tried.push(with_name(name, &reason(&error))),
            }
        }
        Self { found: false, name: None, version: None, tried }
    }

    fn line(&self, library: &str) -> String {
        match &self.name {
            Some(name) => format!("{library}: {name}, version {}", self.version.as_deref().unwrap_or("unknown")),
            None => format!("{library}: not found; tried {}", self.tried.join("; ")),
        }
    }
}

/// The loader's error, which often begins with the name already.
fn with_name(name: &str, error: &str) -> String {
    if error.starts_with(&format!("{name}: ")) { error.to_owned() } else { format!("{name}: {error}") }
}

/// The names that the library would try: the user's choice, or else the usual names.
fn nccl_names() -> Vec<String> {
    let chosen = std::env::var("GRADSYNC_LIBNCCL").ok().filter(|name| !name.is_empty());
    chosen.map_or_else(|| vec!["libnccl.so.2".into(), "libnccl.so".into()], |name| vec![name])
}

/// Queries a library through a function `int f(int *version)`, and splits the number.
fn c_version(
    symbol: &'static std::ffi::CStr,
    split: impl Fn(i32) -> (i32, i32, Option<i32>),
) -> impl Fn(&Library) -> Option<String> {
    move |library| {
        let mut version = 0i32;
        // SAFETY: both functions that are called this way take one `int *`, return 0 for success and need no initialisation.
        let status = unsafe {
            let function = library.get::<unsafe extern "C" fn(*mut i32) -> i32>(symbol.to_bytes_with_nul()).ok()?;
            function(&mut version)
        };
        let (major, minor, patch) = split(version);
        let patch = patch.map(|patch| format!(".{patch}")).unwrap_or_default();
        (status == 0).then(|| format!("{major}.{minor}{patch}"))
    }
}

/// The MPI library that this program has been linked with, if it has the feature `mpi`: others of the machine do not matter then.
fn linked_mpi() -> Option<Found> {
    let version = mpi_version(&libloading::os::unix::Library::this().into())?;
    Some(Found { found: true, name: Some("linked".into()), version: Some(version), tried: Vec::new() })
}

/// `MPI_Get_library_version`, which may be called before `MPI_Init` (MPI-4.1, 9.1.1).
fn mpi_version(library: &Library) -> Option<String> {
    // MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI and 8192 in MPICH and the standard ABI.
    let mut text = vec![0u8; 8192];
    let mut len = 0i32;
    // SAFETY: the buffer has the largest length of any implementation.
    let status = unsafe {
        let symbol =
            library.get::<unsafe extern "C" fn(*mut u8, *mut i32) -> i32>(b"MPI_Get_library_version\0").ok()?;
        symbol(text.as_mut_ptr(), &mut len)
    };
    let text = text.get(..usize::try_from(len).ok()?)?;
    let text = String::from_utf8_lossy(text).trim_end_matches('\0').lines().next()?.to_owned();
    (status == 0).then_some(text)
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    macro_rules! detected {
        ($($name:tt)*) => { [$(($name, std::arch::is_x86_feature_detected!($name))),*] };
    }
    let found = detected!("sse4.2" "avx" "f16c" "fma" "avx2" "avx512f" "avx512bw" "avx512vl");
    found.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}

#[cfg(feature = "cuda")]
fn gpus() -> Result<Vec<String>, String> {
    gradsync::internal::driver::devices().map_err(|error| error.to_string())
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Result<Vec<String>, String> {
    Err("this program was built without the feature `cuda`".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_that_is_missing_is_named_once() {
        let found = Found::library(&["libnowhere.so.7"], |_| None);
        let line = found.line("Nowhere");
        assert!(line.starts_with("Nowhere: not found; tried libnowhere.so.7: "), "{line}");
        assert_eq!(line.matches("libnowhere.so.7").count(), 1, "{line}");
        assert_eq!(with_name("libx.so", "wrong ELF class"), "libx.so: wrong ELF class");
    }
}
