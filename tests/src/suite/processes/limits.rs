//! Ranks without space for shared memory, or without a free descriptor for it: all ranks fall back to messages or get an error, and no
//! signal ends them. Created files disappear again, and no other user can reach them.

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use gradsync::comm::{Collectives, Communicator, Ranks, ReduceOp, Split};
use gradsync::{DType, Error, GradientBuffer, Result};
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

use super::Processes;
use crate::suite::{DEADLINE, Suite};

/// The user id of `nobody`, which has the fewest rights on almost every system.
const NOBODY: u32 = 65534;

/// Runs `body` under a limit of this process.
pub(super) fn under<T>(resource: Resource, limit: Option<u64>, body: impl FnOnce() -> T) -> T {
    let before = getrlimit(resource);
    if limit.is_some() {
        setrlimit(resource, Rlimit { current: limit, ..before }).expect("a lower limit");
    }
    let outcome = body();
    setrlimit(resource, before).expect("the limit from before");
    outcome
}

fn shared() -> Result<GradientBuffer> {
    GradientBuffer::new_shared(DType::F32, 2, [("vector", [1 << 16])])
}

/// The number of descriptors at which this process has none left. The limit is no lower than necessary: `poll`, which MPIs call, counts
/// too.
fn descriptors_in_use() -> u64 {
    let next = std::io::stdout().as_fd().try_clone_to_owned().expect("a descriptor");
    next.as_raw_fd() as u64
}

/// Rank 1 creates its communicator under a limit; where a limit on descriptors would already prevent the connection, it creates a group of
/// an earlier one. No rank uses shared memory, messages work as well, and a buffer that other ranks could map is an error.
fn limited<T: Processes>(transport: &T, rank: usize, resource: Resource, limit: u64) {
    let limit = (rank == 1).then_some(limit);
    let fresh = || transport.fresh(DEADLINE);
    let in_time = (T::NEEDS_DESCRIPTORS && resource == Resource::Nofile).then(fresh);
    let (comm, group, buffer) = under(resource, limit, || {
        let late = in_time.is_none().then(fresh);
        let group = in_time.as_ref().or(late.as_ref()).expect("one of them").split(Some(0), 0).expect("a group of all");
        (late, group.expect("this rank's group"), shared())
    });
    for comm in comm.iter().chain([&group]) {
        assert!(comm.sharing().is_none(), "one of the ranks has none");
        let mut data = vec![1.0f32; 1 << 16];
        comm.all_reduce(&mut data, ReduceOp::Sum).expect("messages");
        assert!(data.iter().all(|&sum| sum == comm.world_size() as f32));
    }
    match buffer {
        Ok(buffer) => assert!(limit.is_none() && buffer.is_shared()),
        Err(error) => assert!(limit.is_some() && matches!(error, Error::MemoryFile { .. }), "{error}"),
    }
}

/// The number of descriptors of this process, and of our files that it has mapped.
fn held() -> (usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the maps");
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("the descriptors").count();
    (descriptors, maps.lines().filter(|line| line.contains("/memfd:gradsync")).count())
}

fn groups_come_and_go(comm: &(impl Communicator + Split)) {
    let split = || {
        let group = comm.split(Some(comm.rank() as u64 % 2), 0).expect("a group").expect("this rank's group");
        group.barrier().expect("all are here");
    };
    split();
    let before = held();
    (0..100).for_each(|_| split());
    assert_eq!(held(), before, "descriptors, and files that are mapped");
}

/// Whether this process may start others as another user: only root may, and only as a user whom its user namespace knows.
fn becomes_another_user() -> bool {
    geteuid().is_root() && Command::new("true").uid(NOBODY).gid(NOBODY).status().is_ok()
}

/// No other user can open the memory: it has no name in any folder, and its descriptors belong to this user.
fn is_out_of_reach_of_others(others: bool) {
    let buffer = shared().expect("a buffer");
    let own = std::process::id();
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("the descriptors").flatten().filter(|entry| {
        std::fs::read_link(entry.path()).is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:gradsync"))
    });
    let path = |entry: std::fs::DirEntry| format!("/proc/{own}/fd/{}", entry.file_name().to_string_lossy());
    let paths: Vec<String> = descriptors.map(path).collect();
    assert!(!paths.is_empty(), "the buffer's");
    for path in paths {
        let open = |user: Option<u32>| {
            let mut command = Command::new("sh");
            command.args(["-c", "exec 3<\"$0\"", &path]).stderr(Stdio::null());
            if let Some(user) = user {
                command.uid(user).gid(user);
            }
            command.status().expect("a shell").success()
        };
        assert!(open(None), "{path}: its user can");
        assert!(!others || !open(Some(NOBODY)), "{path}: another user can");
    }
    drop(buffer);
}

/// All suite.
pub fn run<T: Processes>(suite: &mut Suite<T>) {
    let rank = suite.rank();
    suite.check_with("a rank has no descriptor left", |suite| {
        limited(&suite.transport, rank, Resource::Nofile, descriptors_in_use());
    });
    suite.check_with("a rank may have no file of this length", |suite| {
        limited(&suite.transport, rank, Resource::Fsize, 4096);
    });
    suite.check("groups come and go", groups_come_and_go);
    let others = becomes_another_user();
    suite.check("memory is out of reach of other users", |_| is_out_of_reach_of_others(others));
    if !others && rank == 0 {
        println!(
            "  NOT TRIED: whether another user opens the memory. Only root becomes another user, and only one of its namespace"
        );
    }
    suite.done("limits");
}
