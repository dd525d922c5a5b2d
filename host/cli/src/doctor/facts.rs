//! The identity of a rank, and the facts about its machine.

use std::fs;
use std::net::UdpSocket;
use std::path::Path;

use gradsync::bootstrap::Launch;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use super::memory;
use crate::info::Machine;

/// The facts of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_rank: Option<usize>,
    pub(super) local_world_size: Option<usize>,
    pub(super) host: String,
    /// The machine, by the boot of its kernel, which containers share; the host where that is unknown.
    pub(super) machine: String,
    /// The PID namespace; none where there are no such namespaces.
    pub(super) pid_namespace: Option<String>,
    /// Whether `GRADSYNC_PROCESS_MESSAGES_ONLY`, or `GRADSYNC_MPI_MESSAGES_ONLY` where MPI connects the ranks, keeps them from sharing memory.
    pub(super) uses_messages_only: bool,
    /// The ordinal of the rank's GPU among those that it sees.
    pub(super) device: usize,
    pub(super) pid: u32,
    pub(super) version: String,
    pub(super) features: Vec<String>,
    /// The address by which this rank connects to rank 0, if it is known; none where MPI connects the ranks.
    pub(super) address: Option<String>,
    /// The GPUs that this rank sees, by their numbers or identifiers on the machine.
    pub(super) gpus: Vec<String>,
    /// The identifier of the rank's GPU, if the build has CUDA. Schedulers that give every task a GPU of its own may number each of them 0.
    pub(super) gpu_identifier: Option<String>,
    /// Pairs of device numbers: a GPU of this rank, and a peer on the machine whose memory it cannot access. Empty where this is unknown.
    pub(super) unreachable_gpus: Vec<(u32, u32)>,
    pub(super) nccl: Option<String>,
    pub(super) mpi: Option<String>,
    /// Whether MPI connects the ranks.
    pub(super) uses_mpi: bool,
    /// The flavour of MPI whose launcher has started this rank.
    pub(super) mpi_launcher: Option<String>,
    /// `NCCL_SOCKET_IFNAME`.
    pub(super) interface: Option<String>,
    /// The network interfaces of the machine.
    pub(super) interfaces: Vec<String>,
    pub(super) has_infiniband: bool,
    /// Whether `NCCL_IB_DISABLE` keeps NCCL from using InfiniBand.
    pub(super) is_infiniband_disabled: bool,
    pub(super) cores: usize,
    /// The threads of the CPU backend.
    pub(super) threads: usize,
    /// Limits; none if unlimited.
    pub(super) descriptors: Option<u64>,
    pub(super) locked_bytes: Option<u64>,
    /// Bytes that the ranks of the machine may use together.
    pub(super) memory_bytes: Option<u64>,
    /// Bytes of `/dev/shm`; none if there is none.
    pub(super) shared_memory_bytes: Option<u64>,
}

impl Facts {
    pub(super) fn gather(launch: &Launch, rank: usize, world_size: usize) -> Self {
        let machine = Machine::look();
        let version_of = |found: &crate::info::Found| found.version.clone().or_else(|| found.name.clone());
        let cores = machine.cpu.threads;
        let uses_mpi = launch.is_mpi_job();
        let messages_only = if uses_mpi { "GRADSYNC_MPI_MESSAGES_ONLY" } else { "GRADSYNC_PROCESS_MESSAGES_ONLY" };
        let master = launch.master.as_ref().filter(|_| !uses_mpi);
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        Facts {
            rank,
            world_size,
            local_rank: launch.local_rank,
            local_world_size: launch.local_world_size,
            machine: named_machine().or_else(booted).unwrap_or_else(|| host.clone()),
            host,
            pid_namespace: fs::read_link("/proc/self/ns/pid").ok().map(|link| link.display().to_string()),
            uses_messages_only: std::env::var_os(messages_only).is_some_and(|value| value != "0"),
            device: launch.device() as usize,
            pid: std::process::id(),
            version: machine.version.into(),
            features: machine.features.iter().map(|&feature| feature.to_owned()).collect(),
            address: master.and_then(|(host, port)| own_address(host, *port)),
            gpus: visible_gpus(),
            gpu_identifier: gpu_identifier(launch.device()),
            unreachable_gpus: unreachable_gpus(machine.gpus.len()),
            nccl: version_of(&machine.nccl),
            mpi: version_of(&machine.mpi),
            uses_mpi,
            mpi_launcher: mpi_launcher().map(str::to_owned),
            interface: std::env::var("NCCL_SOCKET_IFNAME").ok(),
            interfaces: names("/sys/class/net"),
            has_infiniband: !names("/sys/class/infiniband").is_empty(),
            is_infiniband_disabled: number("NCCL_IB_DISABLE").is_some_and(|value| value != 0),
            cores,
            threads: number("RAYON_NUM_THREADS").filter(|threads| *threads > 0).unwrap_or(cores),
            descriptors: getrlimit(Resource::Nofile).current,
            locked_bytes: getrlimit(Resource::Memlock).current,
            memory_bytes: memory::limit(),
            shared_memory_bytes: shared_memory_bytes(),
        }
    }

    /// The rank's GPU, if this rank sees that many.
    pub(super) fn gpu(&self) -> Option<&str> {
        self.gpus.get(self.device).map(String::as_str)
    }
}

fn named_machine() -> Option<String> {
    std::env::var("GRADSYNC_HOSTID").ok().filter(|name| !name.is_empty())
}

fn booted() -> Option<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

/// The names in a folder, in order; none if there is no such folder.
fn names(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// The address of this machine in packets to rank 0. Sends nothing.
fn own_address(host: &str, port: u16) -> Option<String> {
    let socket = UdpSocket::bind("[::]:0").or_else(|_| UdpSocket::bind("0.0.0.0:0")).ok()?;
    // A socket of one address family cannot connect to an address of the other.
    let connected = socket.connect((host, port)).map(|()| socket).or_else(|_| {
        let socket = UdpSocket::bind("0.0.0.0:0")?;
        socket.connect((host, port)).map(|()| socket)
    });
    Some(connected.ok()?.local_addr().ok()?.ip().to_canonical().to_string())
}

/// The GPUs that CUDA shows to this process.
fn visible_gpus() -> Vec<String> {
    if let Ok(chosen) = std::env::var("CUDA_VISIBLE_DEVICES") {
        let names = chosen.split(',').map(str::trim).take_while(|name| !name.is_empty() && *name != "-1");
        return names.map(str::to_owned).collect();
    }
    let number = |path: std::path::PathBuf| path.file_name()?.to_str()?.strip_prefix("nvidia")?.parse::<u32>().ok();
    let entries = fs::read_dir("/dev").into_iter().flatten().flatten();
    let mut numbers: Vec<u32> = entries.filter_map(|entry| number(entry.path())).collect();
    numbers.sort_unstable();
    numbers.into_iter().map(|number| number.to_string()).collect()
}

#[cfg(feature = "cuda")]
fn gpu_identifier(device: u32) -> Option<String> {
    let uuid = gradsync::driver::Device::new(device).and_then(|device| device.uuid()).ok()?;
    Some(uuid.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(not(feature = "cuda"))]
fn gpu_identifier(_: u32) -> Option<String> {
    None
}

#[cfg(feature = "cuda")]
fn unreachable_gpus(count: usize) -> Vec<(u32, u32)> {
    let pairs = (0..count as u32).flat_map(|device| (0..count as u32).map(move |peer| (device, peer)));
    let others = pairs.filter(|(device, peer)| device != peer);
    others.filter(|&(device, peer)| gradsync::internal::driver::can_access_peer(device, peer) == Ok(false)).collect()
}

#[cfg(not(feature = "cuda"))]
fn unreachable_gpus(_: usize) -> Vec<(u32, u32)> {
    Vec::new()
}

fn mpi_launcher() -> Option<&'static str> {
    let is_set = |name: &str| std::env::var_os(name).is_some();
    match () {
        () if is_set("OMPI_COMM_WORLD_RANK") => Some("Open MPI"),
        () if is_set("MV2_COMM_WORLD_RANK") => Some("MVAPICH2"),
        () if is_set("MPI_LOCALRANKID") || is_set("PMI_RANK") => Some("MPICH or Intel MPI"),
        () => None,
    }
}

fn shared_memory_bytes() -> Option<u64> {
    let path = Path::new("/dev/shm");
    let stat = rustix::fs::statvfs(path).ok()?;
    Some(stat.f_blocks.saturating_mul(stat.f_frsize))
}
