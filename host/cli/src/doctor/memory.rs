//! How much memory the ranks of a machine may use together: as much as it has, or as the control group of this process may.

use std::fs;
use std::path::Path;

const CONTROL_GROUPS: &str = "/sys/fs/cgroup";

/// Bytes; none where Linux does not tell.
pub(super) fn limit() -> Option<u64> {
    let group = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let limits = control_group_files(&group).into_iter().filter_map(|path| bytes(&fs::read_to_string(path).ok()?));
    total(&fs::read_to_string("/proc/meminfo").ok()?).into_iter().chain(limits).min()
}

fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1 << 10)
}

/// The files that may limit a process whose `/proc/self/cgroup` this is: of its control group, and of all around that one. In a container the
/// names of outer groups may not be there, and the limit is the root's.
fn control_group_files(group: &str) -> Vec<String> {
    let (mut files, versions) =
        (Vec::new(), [("0::", "", "memory.max"), (":memory:", "/memory", "memory.limit_in_bytes")]);
    for (mark, folder, file) in versions {
        let own = group.lines().find_map(|line| line.split_once(mark)).map_or("/", |(_, path)| path);
        let around = Path::new(own).ancestors().map(|path| path.display().to_string());
        files.extend(around.map(|path| format!("{CONTROL_GROUPS}{folder}{}/{file}", path.trim_end_matches('/'))));
    }
    files
}

/// The number in such a file; none for `max`.
fn bytes(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_is_of_every_control_group_around_the_process() {
        assert_eq!(total("MemTotal:       16 kB\nMemFree: 1 kB\n"), Some(16384));
        let version2 = control_group_files("0::/job/step\n");
        assert_eq!(version2[0], "/sys/fs/cgroup/job/step/memory.max");
        assert_eq!(version2[1..3], ["/sys/fs/cgroup/job/memory.max", "/sys/fs/cgroup/memory.max"]);
        let version1 = control_group_files("4:memory:/docker\n1:cpu:/docker\n");
        assert!(version1.contains(&"/sys/fs/cgroup/memory/docker/memory.limit_in_bytes".to_owned()), "{version1:?}");
        assert_eq!((bytes("max\n"), bytes("1048576\n")), (None, Some(1 << 20)));
        assert!(limit().is_some_and(|limit| limit > 1 << 20));
    }
}
