//! The division of the cores that this process may use among the ranks.

use std::{fs, io};

use rustix::thread::{CpuSet, sched_getaffinity};

/// The logical processors of each rank: ranks get whole blocks of neighbours, so that processors of one core, and cores of one socket, go
/// to the same rank. If there are fewer processors than ranks, ranks share them.
pub(super) fn shares(ranks: usize) -> io::Result<Vec<Vec<usize>>> {
    let allowed = sched_getaffinity(None)?;
    let mut processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&processor| allowed.is_set(processor)).collect();
    processors.sort_by_key(|&processor| {
        (topology(processor, "physical_package_id"), topology(processor, "core_id"), processor)
    });
    Ok(divide(&processors, ranks))
}

fn divide(processors: &[usize], ranks: usize) -> Vec<Vec<usize>> {
    let (count, each) = (processors.len(), processors.len() / ranks);
    let share = |rank: usize| match each {
        0 => vec![processors[rank % count]],
        _ => processors[rank * count / ranks..(rank + 1) * count / ranks].to_vec(),
    };
    (0..ranks).map(share).collect()
}

/// A topology number of a processor; the same for all where the system does not report it.
fn topology(processor: usize, name: &str) -> i64 {
    let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/{name}");
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(-1)
}

/// The processors in the format of the system call.
pub(super) fn set(processors: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    processors.iter().for_each(|&processor| set.set(processor));
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divide_gives_blocks_and_shares_where_there_are_too_few() {
        assert_eq!(divide(&[4, 5, 6, 7, 9], 2), [vec![4, 5], vec![6, 7, 9]]);
        assert_eq!(divide(&[4, 5], 3), [vec![4], vec![5], vec![4]]);
    }
}
