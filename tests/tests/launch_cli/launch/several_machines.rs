//! Several machines, simulated by several launchers on this machine.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use gradsync::bootstrap::Secret;
use gradsync_tests::programs::Finished;
use tempfile::TempDir;

use crate::job::{Running, gradsync, launch};

/// A secret in a file, and the address of rank 0.
struct Meeting {
    folder: TempDir,
    master: String,
}

impl Meeting {
    fn new() -> Self {
        let folder = TempDir::new().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let meeting = Meeting { folder, master: format!("127.0.0.1:{port}") };
        fs::write(meeting.file(), Secret::generate().unwrap().reveal()).unwrap();
        meeting.set_mode(0o600);
        meeting
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("secret")
    }

    fn set_mode(&self, mode: u32) {
        fs::set_permissions(self.file(), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// Starts the launcher of one of two machines.
    fn machine(&self, number: usize, ranks: usize, restarts: usize, arguments: &[&str]) -> Running {
        let (ranks, number, restarts) = (ranks.to_string(), number.to_string(), restarts.to_string());
        let file = self.file();
        let options = [
            ["-n", &ranks],
            ["--nodes", "2"],
            ["--node-rank", &number],
            ["--master", &self.master],
            ["--restarts", &restarts],
            ["--secret-file", file.to_str().unwrap()],
        ];
        Running::start(launch(&options.concat(), arguments))
    }
}

/// Waits for the end of a launcher that has nothing to say.
fn ended_well(machine: Running) {
    assert_eq!(machine.end().succeeded("a machine").stderr, "");
}

#[test]
fn ranks_of_two_machines_are_numbered_in_a_row_and_join() {
    let meeting = Meeting::new();
    let names = ["variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"];
    let mut machines = [meeting.machine(0, 1, 0, &names), meeting.machine(1, 2, 0, &names)];
    assert_eq!(machines[0].lines(1), ["[0] 0 3 0 1 0 2"]);
    let mut of_second = machines[1].lines(2);
    of_second.sort_unstable();
    assert_eq!(of_second, ["[1] 1 3 0 2 1 2", "[2] 2 3 1 2 1 2"]);
    machines.into_iter().for_each(ended_well);
    let machines = [meeting.machine(0, 2, 0, &["join"]), meeting.machine(1, 2, 0, &["join"])];
    machines.into_iter().for_each(ended_well);
}

#[test]
fn a_failure_ends_the_ranks_of_all_machines() {
    let meeting = Meeting::new();
    let arguments = ["exit", "2", "5"];
    let [first, second] = [0, 1].map(|number| meeting.machine(number, 2, 0, &arguments));
    second.end().ended(5, &["rank 2 ended with exit code 5, first on this machine"]);
    first.end().ended(5, &["machine 1: rank 2 ended with exit code 5"]);
}

/// Every launcher explains the calls of the ranks of all machines.
#[test]
fn a_rank_that_hangs_is_named_on_all_machines() {
    let meeting = Meeting::new();
    let machines = [0, 1].map(|number| meeting.machine(number, 2, 0, &["hang", "2", "300"]));
    for machine in machines {
        let words = [
            "the last calls of 4 ranks",
            "Rank 2 holds up others: it is in no call: the last one, call 2 of channel 0, all_reduce(sum) of 1000 × f32",
            "Ranks 0, 1, 3 waited in vain for rank 2",
        ];
        machine.end().ended(7, &words);
    }
}

/// The signalled launcher takes part in the comparison before it ends.
#[test]
fn a_signal_to_one_launcher_ends_the_ranks_of_all_machines() {
    let meeting = Meeting::new();
    let [mut first, mut second] = [0, 1].map(|number| meeting.machine(number, 1, 0, &["hang", "1", "60000"]));
    first.lines(1);
    second.lines(1);
    first.signal(rustix::process::Signal::TERM);
    first.end().ended(128 + 15, &[]);
    let job = second.end();
    job.ended(1, &["machine 0: SIGTERM to its launcher"]);
    assert!(!job.stderr.contains("this machine's ranks only"), "{}", job.stderr);
}

#[test]
fn all_machines_restart_together() {
    let meeting = Meeting::new();
    let machines = [0, 1].map(|number| meeting.machine(number, 1, 1, &["join", "once more"]));
    for machine in machines {
        machine.end().ended(0, &["restart 1 of 1"]);
    }
}

#[test]
fn machines_need_a_secret_that_others_cannot_read() {
    let refused =
        |command: &mut std::process::Command, words: &[&str]| Finished::of(command).refused("no secret", words);
    let base = ["launch", "-n", "1", "--nodes", "2", "--master", "127.0.0.1:9"];
    refused(gradsync(&base).args(["--", "true"]), &["gradsync secret", "--secret-file"]);
    let meeting = Meeting::new();
    meeting.set_mode(0o644);
    refused(gradsync(&base).arg("--secret-file").arg(meeting.file()).args(["--", "true"]), &["mode 0644", "chmod 600"]);
    let pipe = gradsync_tests::programs::fifo(meeting.folder.path());
    refused(gradsync(&base).arg("--secret-file").arg(pipe).args(["--", "true"]), &["pipe: it is no regular file"]);
    refused(gradsync(&base).env("GRADSYNC_SECRET", "guess").args(["--", "true"]), &["gradsync-secret-"]);
    let beyond = ["launch", "-n", "1", "--node-rank", "1", "--", "true"];
    refused(&mut gradsync(&beyond), &["--node-rank 1 must be less than --nodes 1"]);
}
