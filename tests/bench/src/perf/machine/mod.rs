//! The machine of a run, as its report describes it: versions, and clocks at the time of the run.

#[cfg(feature = "cuda")]
mod smi;

use std::fs;

use serde::Serialize;

use super::limits::Limits;
use super::plan::Place;

/// Properties of the machine that must be measured.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    /// The rate in bytes per second at which a copy with all cores reads and writes.
    pub(crate) copy_rate: Option<f64>,
    /// Known if all processes are on this machine.
    pub(crate) processes: Option<Processes>,
}

/// The memory properties of a job's processes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Processes {
    /// The rate in GB/s at which all processes together read and write while each copies its own memory.
    pub(crate) copy_gbs: f64,
    /// Whether the processes communicate through shared memory, or by messages alone.
    pub(crate) share_memory: bool,
}

/// The properties of the machine that matter for the run.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) version: &'static str,
    pub(crate) cpu: Cpu,
    /// The GPUs that the run may use; empty if it uses none.
    pub(crate) gpus: Vec<Gpu>,
    /// The version of NVIDIA's driver.
    pub(crate) driver: Option<String>,
    pub(crate) nccl: Option<String>,
    pub(crate) mpi: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Cpu {
    name: Option<String>,
    threads: usize,
    /// The current clock of the fastest core; `None` if the system does not report it.
    mhz: Option<f64>,
    /// The rate in GB/s at which a copy with all cores reads and writes.
    copy_gbs: Option<f64>,
    /// The processes of a job on this machine.
    processes: Option<Processes>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Gpu {
    name: String,
    /// The current clock, and the highest clock.
    sm_mhz: Option<u32>,
    sm_max_mhz: Option<u32>,
    memory_mhz: Option<u32>,
    /// The bandwidth, computed from clock and bus width.
    memory_gbs: Option<f64>,
    l2_bytes: Option<usize>,
    /// The bandwidth of all links to other GPUs together, in one direction.
    links_gbs: Option<f64>,
}

impl Machine {
    /// Determines the properties that the places of a run need.
    pub(crate) fn look(places: &[Place], measured: Measured) -> Self {
        let uses_gpus = places.iter().any(|place| place.backend() == "cuda");
        let (gpus, driver) = if uses_gpus { gpus() } else { (Vec::new(), None) };
        let has = |transports: &[&str]| {
            places.iter().filter_map(|place| place.transport()).any(|transport| transports.contains(&transport))
        };
        Self {
            version: env!("CARGO_PKG_VERSION"),
            cpu: Cpu {
                name: cpu_lines("model name").next(),
                threads: std::thread::available_parallelism().map_or(1, usize::from),
                mhz: cpu_lines("cpu MHz").filter_map(|text| text.parse().ok()).reduce(f64::max),
                copy_gbs: measured.copy_rate.map(|rate| rate / 1e9),
                processes: measured.processes,
            },
            gpus,
            driver,
            nccl: if has(&["nccl", "peer"]) { nccl() } else { None },
            mpi: if has(&["mpi"]) { mpi() } else { None },
        }
    }

    /// The limits that follow from the machine's properties.
    pub(crate) fn limits(&self, given: Option<f64>) -> Limits {
        let gpu = self.gpus.first();
        Limits {
            given,
            host_memory: self.cpu.copy_gbs.map(|rate| rate * 1e9),
            processes: self.cpu.processes.map(|processes| processes.copy_gbs * 1e9),
            device_memory: gpu.and_then(|gpu| gpu.memory_gbs).map(|rate| rate * 1e9),
            links: gpu.and_then(|gpu| gpu.links_gbs).map(|rate| rate * 1e9),
        }
    }

    pub(crate) fn lines(&self) -> String {
        let mhz = |clock: Option<f64>| clock.map_or("clock unknown".into(), |mhz| format!("{mhz:.0} MHz"));
        let mut lines = format!("# gradsync {}\n", self.version);
        let (cpu, threads) = (self.cpu.name.as_deref().unwrap_or("unknown"), self.cpu.threads);
        lines += &format!("# CPU: {cpu}, {threads} threads, {} as found", mhz(self.cpu.mhz));
        lines += &self.cpu.copy_gbs.map_or(String::new(), |rate| format!(", copies at {rate:.1} GB/s"));
        if let Some(Processes { copy_gbs, share_memory }) = self.cpu.processes {
            let meet = if share_memory { "in memory of each other" } else { "by messages alone" };
            lines += &format!(", the ranks of the MPI job together at {copy_gbs:.1} GB/s; they meet {meet}");
        }
        lines += "\n";
        for (index, gpu) in self.gpus.iter().enumerate() {
            let clock = |mhz: Option<u32>| mhz.map_or("unknown".into(), |mhz| format!("{mhz} MHz"));
            let (sm, most, memory) = (clock(gpu.sm_mhz), clock(gpu.sm_max_mhz), clock(gpu.memory_mhz));
            lines += &format!("# GPU {index}: {}, SM clock {sm} as found (at most {most}), memory {memory}", gpu.name);
            lines += &gpu.memory_gbs.map_or(String::new(), |rate| format!(", {rate:.0} GB/s by its width"));
            lines += &gpu.links_gbs.map_or(String::new(), |rate| format!(", links {rate:.0} GB/s"));
            lines += "\n";
        }
        let versions = [("driver", &self.driver), ("NCCL", &self.nccl), ("MPI", &self.mpi)];
        for (name, version) in versions {
            if let Some(version) = version {
                lines += &format!("# {name}: {version}\n");
            }
        }
        lines
    }
}

/// The values of a key in /proc/cpuinfo; none on systems other than Linux.
fn cpu_lines(key: &'static str) -> impl Iterator<Item = String> {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let values = text.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| name.trim() == key);
    values.map(|(_, value)| value.trim().to_owned()).collect::<Vec<_>>().into_iter()
}

#[cfg(feature = "cuda")]
fn gpus() -> (Vec<Gpu>, Option<String>) {
    use gradsync::driver::Device;
    use gradsync::internal::driver::{self, DeviceAttribute};
    let Ok(names) = gradsync::internal::driver::devices() else { return (Vec::new(), None) };
    let gpus = names.into_iter().enumerate().map(|(ordinal, name)| {
        let device = Device::new(ordinal as u32).ok();
        let attribute = |attribute: DeviceAttribute| {
            let value = device.and_then(|device| driver::attribute(device, attribute).ok())?;
            usize::try_from(value).ok().filter(|&value| value > 0)
        };
        let state = device.and_then(|device| device.uuid().ok()).and_then(smi::GpuState::of);
        // The clock is in kHz and the width in bits, and there are two transfers per clock.
        let memory = attribute(DeviceAttribute::MemoryClockRate).zip(attribute(DeviceAttribute::GlobalMemoryBusWidth));
        let gpu = Gpu {
            name,
            sm_mhz: state.as_ref().and_then(|state| state.sm_mhz),
            sm_max_mhz: state.as_ref().and_then(|state| state.sm_max_mhz),
            memory_mhz: state.as_ref().and_then(|state| state.memory_mhz),
            memory_gbs: memory.map(|(clock, width)| 2.0 * clock as f64 * 1e3 * width as f64 / 8.0 / 1e9),
            l2_bytes: attribute(DeviceAttribute::L2CacheSize),
            links_gbs: state.as_ref().and_then(|state| state.links_gbs),
        };
        (gpu, state.and_then(|state| state.driver))
    });
    let (gpus, drivers): (Vec<Gpu>, Vec<Option<String>>) = gpus.unzip();
    (gpus, drivers.into_iter().flatten().next())
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> (Vec<Gpu>, Option<String>) {
    (Vec::new(), None)
}

#[cfg(feature = "cuda")]
fn nccl() -> Option<String> {
    let nccl = gradsync::internal::sys::nccl::Nccl::get().ok()?;
    Some(format!("{} ({})", nccl.version(), nccl.library()))
}

#[cfg(not(feature = "cuda"))]
fn nccl() -> Option<String> {
    None
}

#[cfg(feature = "mpi")]
fn mpi() -> Option<String> {
    let version = ::mpi::environment::library_version().ok()?;
    version.lines().next().map(|line| line.trim_end_matches('\0').trim().to_owned())
}

#[cfg(not(feature = "mpi"))]
fn mpi() -> Option<String> {
    None
}
