//! The variables of a rank: torchrun's, the library's own, and the share of the machine's cores.
//!
//! `CUDA_VISIBLE_DEVICES` is unchanged: `LOCAL_RANK` is the index of a rank's GPU, and a rank that saw only its own GPU could not access
//! its peers' memory.

use std::ffi::OsString;
use std::process::Command;

use gradsync::bootstrap::{Launch, Secret};

/// The variables that limit the number of threads of libraries.
const THREADS: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// The position of this machine's ranks in the job.
#[derive(Clone, Debug)]
pub(super) struct NodeRanks {
    /// The number of this machine, and the number of machines.
    pub(super) node: (usize, usize),
    /// The rank of this machine's first process.
    pub(super) first_rank: usize,
    pub(super) local_world_size: usize,
    pub(super) world_size: usize,
    /// The address at which rank 0 listens.
    pub(super) address: String,
    pub(super) port: u16,
    pub(super) secret: Secret,
    /// The number of earlier starts of the job.
    pub(super) generation: u32,
    pub(super) restarts: u32,
    /// The variables of deadlines, in seconds, that the command line sets.
    pub(super) deadlines: [(&'static str, Option<f64>); 2],
    /// The number of this start, which no other start has; the same on all machines.
    pub(super) job: String,
}

impl NodeRanks {
    /// Sets the variables of a rank, and removes other launchers' variables that would contradict them.
    pub(super) fn set(&self, command: &mut Command, local_rank: usize) {
        Launch::variables().for_each(|name| _ = command.env_remove(name));
        let (node, nodes) = self.node;
        let numbers = [
            ("RANK", self.first_rank + local_rank),
            ("WORLD_SIZE", self.world_size),
            ("LOCAL_RANK", local_rank),
            ("LOCAL_WORLD_SIZE", self.local_world_size),
            ("GROUP_RANK", node),
            ("GROUP_WORLD_SIZE", nodes),
            ("ROLE_RANK", self.first_rank + local_rank),
            ("ROLE_WORLD_SIZE", self.world_size),
            ("MASTER_PORT", usize::from(self.port)),
            ("TORCHELASTIC_RESTART_COUNT", self.generation as usize),
            ("TORCHELASTIC_MAX_RESTARTS", self.restarts as usize),
            ("GRADSYNC_GENERATION", self.generation as usize),
        ];
        for (name, value) in numbers {
            command.env(name, value.to_string());
        }
        for (name, seconds) in self.deadlines {
            seconds.iter().for_each(|seconds| _ = command.env(name, seconds.to_string()));
        }
        command.env("MASTER_ADDR", &self.address).env("GRADSYNC_SECRET", self.secret.reveal());
        if THREADS.iter().all(|name| std::env::var_os(name).is_none_or(|value| value == OsString::new())) {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let threads = (cores / self.local_world_size).max(1).to_string();
            THREADS.iter().for_each(|name| _ = command.env(name, &threads));
        }
    }
}
