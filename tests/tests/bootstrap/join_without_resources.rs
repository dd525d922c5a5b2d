//! Ranks that lack descriptors or threads: they say so at once, instead of looking for rank 0 until the deadline.

use std::os::fd::AsRawFd as _;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use gradsync::bootstrap::{BootstrapError, Launch, Rendezvous};
use gradsync_tests::programs::Finished;
use gradsync_tests::ranks::guarded;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::AT_ONCE;
use crate::group::{free_port, refused, secret};
use crate::member_processes::Process;

/// The program of a rank without a test's threads.
const RANK: &str = env!("CARGO_BIN_EXE_launched_rank");

/// Lowers the limit so that only `more` descriptors are left.
fn leave_descriptors(more: u64) {
    let next = std::fs::File::open("/dev/null").unwrap().as_raw_fd() as u64;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(next + more), ..limit }).unwrap();
}

/// The body of a rank: rank 0 can listen and accept nobody, and other ranks cannot connect.
pub(crate) fn join_without_descriptors(launch: &Launch, rendezvous: &Rendezvous) {
    let start = Instant::now();
    leave_descriptors(if launch.rank == 0 { 3 } else { 0 });
    let error = refused(rendezvous.join(launch.rank, launch.world_size));
    let BootstrapError::OutOfResources { rank, resource, limit, .. } = &error else { panic!("{error:?}") };
    assert_eq!((*rank, resource.as_str()), (launch.rank, "descriptors"));
    assert!(limit.contains("ulimit -n") && error.to_string().contains("open files"), "{error}");
    assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
}

#[test]
fn join_without_descriptors_fails_at_once() {
    guarded(60, || {
        let port = free_port();
        let rank_0 = Process::start("lacks descriptors", 0, 2, port);
        let rendezvous = Rendezvous::tcp("127.0.0.1", port, secret()).with_deadline(Duration::from_secs(3));
        let waiting = thread::spawn(move || refused(rendezvous.join(1, 2)));
        rank_0.finish();
        waiting.join().unwrap();
        Process::start("lacks descriptors", 1, 2, free_port()).finish();
    });
}

/// A limit of processes counts for ordinary users only, so this test needs another user's number, and says so if it gets none.
#[test]
fn join_without_threads_fails_at_once() {
    let as_user = |user: &str| {
        let mut command = Command::new("setpriv");
        command.args([
            &format!("--reuid={user}"),
            &format!("--regid={user}"),
            "--clear-groups",
            "prlimit",
            "--nproc=1",
        ]);
        command
    };
    let probe = as_user("61011").arg(RANK).arg("--help").stdin(Stdio::null()).output().expect("util-linux");
    if !String::from_utf8_lossy(&probe.stderr).contains("NoLauncher") {
        println!("not run: {}", String::from_utf8_lossy(&probe.stderr));
        return;
    }
    guarded(60, move || {
        for (poor, user) in [(0, "61012"), (1, "61013")] {
            let (port, start) = (free_port(), Instant::now());
            let mut command = as_user(user);
            command.arg(RANK).args(["join", "by variables"]).env("GRADSYNC_SECRET", secret().reveal());
            for (name, value) in [("RANK", poor), ("WORLD_SIZE", 2), ("MASTER_PORT", port)] {
                command.env(name, value.to_string());
            }
            let ranks = thread::spawn(move || Finished::of(command.env("MASTER_ADDR", "127.0.0.1")));
            let other = usize::from(1 - poor);
            let rendezvous = Rendezvous::tcp("127.0.0.1", port, secret()).with_deadline(Duration::from_secs(3));
            let outcome = rendezvous.join(other, 2);
            let poor_rank = ranks.join().unwrap();
            let words = format!("rank {poor} cannot join: it has no threads left");
            assert!(poor_rank.stderr.contains(&words), "{}", poor_rank.stderr);
            assert!(start.elapsed() < AT_ONCE, "{:?}", start.elapsed());
            // Rank 0 learns of the end of the other rank only by its connection, and may have formed the group before.
            assert!(outcome.is_err() || poor == 1, "{outcome:?}");
        }
    });
}
