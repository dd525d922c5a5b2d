//! The division of the cores that this process may use among the ranks.

use std::{fs, io, mem};

/// The logical processors of each rank: ranks get whole blocks of neighbours, so that processors of one core, and cores of one socket, go
/// to the same rank. If there are fewer processors than ranks, ranks share them.
pub(super) fn shares(ranks: usize) -> io::Result<Vec<Vec<usize>>> {
    let mut processors = allowed()?;
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

/// The logical processors that this process may run on.
fn allowed() -> io::Result<Vec<usize>> {
    // SAFETY: a set of bits, for which 0 is a valid value; the call writes at most its size.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        if libc::sched_getaffinity(0, mem::size_of_val(&set), &mut set) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((0..libc::CPU_SETSIZE as usize).filter(|&processor| libc::CPU_ISSET(processor, &set)).collect())
    }
}

/// A topology number of a processor; the same for all where the system does not report it.
fn topology(processor: usize, name: &str) -> i64 {
    let path = format!("/sys/devices/system/cpu/cpu{processor}/topology/{name}");
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(-1)
}

/// The processors in the format of the system call.
pub(super) fn set(processors: &[usize]) -> libc::cpu_set_t {
    // SAFETY: a set of bits, for which 0 is a valid value; the numbers are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        processors.iter().for_each(|&processor| libc::CPU_SET(processor, &mut set));
        set
    }
}

/// Binds this process to the processors. Makes one system call, so that it may be called between fork and exec.
pub(super) fn bind(processors: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: reads at most the size of the set.
    let status = unsafe { libc::sched_setaffinity(0, mem::size_of_val(processors), processors) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_divided_into_blocks_and_shared_where_there_are_too_few() {
        assert_eq!(divide(&[4, 5, 6, 7, 9], 2), [vec![4, 5], vec![6, 7, 9]]);
        assert_eq!(divide(&[4, 5], 3), [vec![4], vec![5], vec![4]]);
    }
}
