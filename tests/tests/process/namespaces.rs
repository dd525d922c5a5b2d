//! Ranks in namespaces of their own, as in containers, or that may not read each other's memory: they connect by Unix sockets or by TCP,
//! share memory where each finds the others in `/proc`, and move data of any length in either case.
//!
//! A test whose namespaces this system does not permit says so and ends.

use std::fs::File;
use std::process::Command;

use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{Collectives, Ranks, ReduceOp};
use gradsync_tests::programs::started_as_ranks;
use gradsync_tests::suite::{DEADLINE, Transport};
use rustix::process::{DumpableBehavior, geteuid, set_dumpable_behavior};

use crate::launch::{Launch, turn};
use crate::transport::Launched;

/// The variable that tells a rank whether it shares memory with the others.
const SHARES: &str = "GRADSYNC_TEST_SHARES";
/// More elements than may travel between machines in one call.
const LEN: usize = 3 << 20;

/// The body of each rank.
pub(crate) fn run() {
    let comm = Launched::join().fresh(DEADLINE);
    assert_eq!(comm.shares_memory().to_string(), std::env::var(SHARES).expect("a launcher's variable"));
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut data: Vec<f32> = (0..LEN).map(|index| (index % 1013 + rank) as f32).collect();
    comm.all_reduce(&mut data, ReduceOp::Sum).expect("no limit on one machine");
    let ranks = world_size * (world_size - 1) / 2;
    assert!(data.iter().enumerate().all(|(index, &sum)| sum == (index % 1013 * world_size + ranks) as f32));
    pass_on(&comm);
}

/// Sends a long vector to the next rank.
fn pass_on(comm: &ProcessCommunicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let (next, last) = ((rank + 1) % world_size, (rank + world_size - 1) % world_size);
    let vector = |rank: usize| -> Vec<f32> { (0..LEN).map(|index| (index % 1013 + rank) as f32).collect() };
    let mut received = vec![0.0f32; LEN];
    comm.send_recv(&vector(rank), next, &mut received, last).expect("no limit either");
    assert!(received == vector(last));
}

/// The body of each rank that forbids the others to read its memory, as Yama's `ptrace_scope` does for all processes.
pub(crate) fn run_unreadable() {
    let comm = Launched::join().fresh(DEADLINE);
    assert!(comm.shares_memory());
    let own = u64::from(std::process::id());
    let processes = comm.gather_words(&[own]).expect("all are here");
    let others = processes.iter().filter(|&&process| process != own);
    let memories: Vec<String> = others.map(|process| format!("/proc/{process}/mem")).collect();
    let are_readable = || memories.iter().all(|memory| File::open(memory).is_ok());
    if !are_readable() {
        println!(
            "not run: this machine forbids all processes to read each other's memory, and long messages go through shared memory"
        );
    }
    pass_on(&comm);
    comm.barrier().expect("all are here");
    set_dumpable_behavior(DumpableBehavior::NotDumpable).expect("a process may hide its own memory");
    comm.barrier().expect("all are here");
    assert!(!are_readable(), "this process reads all memory: it has to run without the capability");
    (0..3).for_each(|_| pass_on(&comm));
}

/// Starts three ranks, each behind a command that creates its namespaces.
fn launch(shares: bool, behind: impl Fn(usize) -> Vec<String>) {
    launch_as("namespaces", shares, behind);
}

fn launch_as(role: &str, shares: bool, behind: impl Fn(usize) -> Vec<String>) {
    let wrapped = |rank: usize| {
        let words = behind(rank);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command
    };
    for rank in 0..3 {
        let probe = wrapped(rank).arg("true").output().expect("util-linux");
        if !probe.status.success() {
            println!("not run: {:?}: {}", behind(rank), String::from_utf8_lossy(&probe.stderr));
            return;
        }
    }
    let _turn = turn();
    let ranks = started_as_ranks("launch::rank", 3).into_iter().enumerate().map(|(rank, plain)| {
        let mut command = wrapped(rank);
        command.arg(plain.get_program()).args(plain.get_args());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env(SHARES, shares.to_string());
        command
    });
    Launch::of(role, ranks).finish();
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

#[test]
fn process_communicator_of_pid_namespaces_uses_sockets() {
    launch(false, |_| words("unshare --pid --fork --mount-proc"));
    launch(false, |_| words("unshare --user --map-root-user --pid --fork --mount-proc"));
}

/// With one `/proc`, each rank finds the memory of the others there, although its own number differs.
#[test]
fn process_communicator_of_pid_namespaces_with_one_proc() {
    launch(true, |_| words("unshare --pid --fork"));
}

/// The ranks seem to be the same user, and the system knows that they are not.
#[test]
fn process_communicator_of_user_namespaces_uses_tcp() {
    launch(false, |rank| {
        let user = 61_001 + rank;
        words(&format!("setpriv --reuid={user} --regid={user} --clear-groups unshare --user --map-root-user"))
    });
}

#[test]
fn process_communicator_of_ranks_that_may_not_read_each_other() {
    // The system lets a user with all capabilities read everything.
    let user = "setpriv --reuid=61001 --regid=61001 --clear-groups";
    launch_as("unreadable", true, |_| words(if geteuid().is_root() { user } else { "env" }));
}
