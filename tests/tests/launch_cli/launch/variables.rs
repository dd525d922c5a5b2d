//! The variables of ranks, and each rank's share of the machine's cores.

use std::collections::HashSet;
use std::path::Path;
use std::process::Command;

use gradsync::bootstrap::Secret;
use gradsync_tests::programs::Finished;

use crate::doctor::free_port;
use crate::job::{RANK, launch, run, sorted};
use crate::program::binary;

#[test]
fn ranks_get_the_variables_of_torchrun_and_a_secret() {
    let names = ["variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"];
    let job = run(&["-n", "3"], &names).succeeded("three ranks");
    let expected = ["[0] 0 3 0 3 0 127.0.0.1", "[1] 1 3 1 3 0 127.0.0.1", "[2] 2 3 2 3 0 127.0.0.1"];
    assert_eq!(sorted(&job.stdout), expected);
    let secrets = || {
        let job = run(&["-n", "2"], &["variables", "GRADSYNC_SECRET", "MASTER_PORT"]).succeeded("two ranks");
        let of: HashSet<String> = job.stdout.lines().map(|line| line[4..].to_owned()).collect();
        assert_eq!(of.len(), 1, "all ranks have the same: {}", job.stdout);
        of.into_iter().next().unwrap()
    };
    assert_ne!(secrets(), secrets(), "each start has a secret of its own");
}

/// The launch runs inside a job of another launcher, which has set its own variables.
#[test]
fn variables_of_other_launchers_are_removed() {
    let names = ["variables", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "RANK"];
    let mut command = launch(&["-n", "2"], &names);
    command.env("SLURM_PROCID", "0").env("SLURM_NTASKS", "1").env("OMPI_COMM_WORLD_RANK", "5").env("RANK", "7");
    command.env("TORCHELASTIC_RUN_ID", "none").env("TORCHELASTIC_USE_AGENT_STORE", "True");
    let job = Finished::of(&mut command).succeeded("inside another job");
    assert_eq!(sorted(&job.stdout), ["[0] - - - 0", "[1] - - - 1"]);
}

#[test]
fn cores_are_divided_unless_the_user_sets_the_threads() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let names = ["variables", "RAYON_NUM_THREADS", "OMP_NUM_THREADS"];
    let share = (cores / 2).max(1);
    let job = run(&["-n", "2"], &names).succeeded("two ranks");
    assert_eq!(sorted(&job.stdout), [format!("[0] {share} {share}"), format!("[1] {share} {share}")]);
    let mut command = launch(&["-n", "1"], &names);
    let job = Finished::of(command.env("OMP_NUM_THREADS", "5")).succeeded("a choice of the user");
    assert_eq!(job.stdout, "[0] - 5\n");
}

#[test]
fn affinity_binds_each_rank_to_processors_of_its_own() {
    let cores = std::thread::available_parallelism().unwrap().get();
    let ranks = cores.min(2);
    let job = run(&["-n", &ranks.to_string(), "--affinity"], &["processors"]).succeeded("bound ranks");
    let bound: HashSet<&str> = job.stdout.lines().map(|line| &line[4..]).collect();
    assert_eq!(bound.len(), ranks, "{}", job.stdout);
}

#[test]
fn ranks_join_by_their_variables() {
    run(&["-n", "4"], &["join"]).succeeded("a group of four");
}

#[test]
fn the_flags_of_deadlines_are_variables_of_the_ranks() {
    let names = ["variables", "GRADSYNC_JOIN_DEADLINE", "GRADSYNC_DEADLINE"];
    let job = run(&["-n", "1", "--join-deadline", "7.5", "--deadline", "1800"], &names).succeeded("two deadlines");
    assert_eq!(job.stdout, "[0] 7.5 1800\n");
    let mut command = launch(&["-n", "1"], &names);
    let job = Finished::of(command.env("GRADSYNC_DEADLINE", "60")).succeeded("a choice of the user");
    assert_eq!(job.stdout, "[0] - 60\n");
    for option in ["--deadline", "--join-deadline"] {
        for no_time in ["0", "-1", "nan", "1e300"] {
            run(&["-n", "1", option, no_time], &names).refused(no_time, &[option, "above 0 seconds, and at most 1e9"]);
        }
    }
    run(&["-n", "1", "--grace", "-3"], &names).refused("no time", &["--grace", "from 0 to 1e9 seconds"]);
    run(&["-n", "65537"], &names).refused("too many ranks", &["65537", "65536"]);
}

/// A rank that does not come is named after some seconds, by a program without a log too, with the ranks that were turned away.
#[test]
fn while_ranks_are_missing_rank_0_says_so() {
    let (port, secrets) = (free_port(), [0, 1].map(|_| Secret::generate().unwrap().reveal()));
    let start = |rank: &str, secret: &str| {
        let mut command = Command::new(RANK);
        command.args(["join", "by variables"]).env("RANK", rank).env("WORLD_SIZE", "4").env("GRADSYNC_SECRET", secret);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port).env("GRADSYNC_JOIN_DEADLINE", "6.5");
        std::thread::spawn(move || Finished::of(&mut command))
    };
    let ranks = [start("0", &secrets[0]), start("2", &secrets[0]), start("1", &secrets[1])];
    let [first, second, stranger] = ranks.map(|rank| rank.join().unwrap());
    let line = first.stderr.lines().find(|line| line.starts_with("gradsync: waiting")).unwrap_or_default();
    assert!(line.contains(&format!("waiting for ranks 1, 3 of 4 at 127.0.0.1:{port}")), "{}", first.stderr);
    assert!(line.contains("1 connection proved no secret") && line.contains("of 6.5s"), "{line}");
    assert_eq!(first.code, Some(6));
    assert!(first.stderr.contains("ranks [1, 3] did not join within 6.5s"), "{}", first.stderr);
    assert!(!second.stderr.contains("waiting"), "one rank speaks: {}", second.stderr);
    assert!(stranger.stderr.contains("same secret"), "{}", stranger.stderr);
    let lonely = start("3", &secrets[0]).join().unwrap();
    let line = lonely.stderr.lines().find(|line| line.starts_with("gradsync: rank 3 is looking")).unwrap_or_default();
    assert!(line.contains(&format!("127.0.0.1:{port}")) && line.contains("refused"), "{}", lonely.stderr);
}

/// In a network namespace of its own, the loopback device has the address of IPv6 alone.
#[test]
fn ranks_join_where_loopback_has_ipv6_alone() {
    let inside = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--net", "sh", "-c", script]).args([binary(), Path::new(RANK)]);
        command.env_remove("GRADSYNC_TRACE_DIR");
        Finished::of(&mut command)
    };
    let set_up = "ip link set lo up && ip address del 127.0.0.1/8 dev lo && ip address show dev lo | grep -q ::1";
    if inside(set_up).code != Some(0) {
        eprintln!(
            "not tested: this machine permits no network namespace (`unshare --net`), lacks `ip`, or has no IPv6"
        );
        return;
    }
    let job = inside(&format!("{set_up} && exec \"$0\" launch -n 2 -- \"$1\" join")).succeeded("two ranks");
    assert_eq!(job.stderr, "");
    let job = inside(&format!("{set_up} && exec \"$0\" launch -n 2 -- \"$1\" variables MASTER_ADDR"));
    assert_eq!(sorted(&job.stdout), ["[0] ::1", "[1] ::1"], "{}", job.stderr);
}
