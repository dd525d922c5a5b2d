//! Clocks, links and driver of a GPU, as `nvidia-smi` tells them; nothing is known where it is missing.

use std::process::Command;

/// The state of a GPU at the time of the query.
#[derive(Debug, PartialEq)]
pub(super) struct GpuState {
    /// The current clock, and the highest clock.
    pub(super) sm_mhz: Option<u32>,
    pub(super) sm_max_mhz: Option<u32>,
    pub(super) memory_mhz: Option<u32>,
    pub(super) driver: Option<String>,
    /// The bandwidth of all NVLinks together, in one direction; `None` without links.
    pub(super) links_gbs: Option<f64>,
}

impl GpuState {
    /// The state of the GPU with that UUID: ordinals are CUDA's own if `CUDA_VISIBLE_DEVICES` is set.
    pub(super) fn of(uuid: [u8; 16]) -> Option<Self> {
        let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let uuid = format!("GPU-{}", [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-"));
        let query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,driver_version";
        let clocks = printed(&["-i", &uuid, query, "--format=csv,noheader,nounits"])?;
        let links = printed(&["nvlink", "--status", "-i", &uuid]).unwrap_or_default();
        Some(Self::read(&clocks, &links))
    }

    fn read(clocks: &str, links: &str) -> Self {
        let mut fields = clocks.trim().split(", ");
        let mut mhz = || fields.next().and_then(|text| text.parse().ok());
        let (sm_mhz, sm_max_mhz, memory_mhz) = (mhz(), mhz(), mhz());
        let driver = fields.next().map(str::to_owned);
        let rate = |line: &str| line.trim().strip_suffix(" GB/s")?.split(' ').next_back()?.parse::<f64>().ok();
        let links_gbs = links.lines().filter_map(rate).reduce(|sum, rate| sum + rate);
        Self { sm_mhz, sm_max_mhz, memory_mhz, driver, links_gbs }
    }
}

/// The standard output of nvidia-smi with these arguments, if it succeeds.
fn printed(arguments: &[&str]) -> Option<String> {
    let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_state_reads_the_output_of_nvidia_smi() {
        let links =
            "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n";
        let state = GpuState::read("1980, 1985, 3201, 580.159.04\n", links);
        assert_eq!((state.sm_mhz, state.sm_max_mhz, state.memory_mhz), (Some(1980), Some(1985), Some(3201)));
        assert_eq!((state.driver.as_deref(), state.links_gbs), (Some("580.159.04"), Some(53.124)));
        let state = GpuState::read("[N/A], 1985, [N/A], 580.159.04", "");
        assert_eq!((state.sm_mhz, state.sm_max_mhz, state.links_gbs), (None, Some(1985), None));
    }
}
