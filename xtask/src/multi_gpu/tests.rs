//! `test-multi-gpu --prebuilt`, from the command line to the report, with a shell script as the rank program.

use clap::Parser;
use tempfile::TempDir;

use super::*;
use crate::flags::{Command as Subcommand, TestMultiGpu, Xtask};
use crate::process::write_program;

const PROGRAM: &str = r##"#!/bin/sh
pass() { echo "@{\"case\":\"$1\",\"outcome\":\"passed\",\"seconds\":0.1,\"note\":\"\"}"; }
[ "$1" = list ] && exec cat <<'LIST'
{"suite":"sums","ranks":[1,2,3],"mode":"processes","victims":[],"seconds":60,"sanitizer":true}
{"suite":"faults","ranks":[1,2],"mode":"processes","victims":[1],"seconds":60,"sanitizer":false}
{"suite":"shared","ranks":[2],"mode":"threads","victims":[],"seconds":60,"sanitizer":true}
{"suite":"wrong","ranks":[2],"mode":"processes","victims":[],"seconds":60,"sanitizer":true}
{"suite":"hangs","ranks":[1],"mode":"processes","victims":[],"seconds":60,"sanitizer":true}
{"suite":"crowd","ranks":[2,3,4,8],"mode":"processes","victims":[],"seconds":60,"sanitizer":true}
{"suite":"crowd-threads","ranks":[4],"mode":"threads","victims":[],"seconds":60,"sanitizer":true}
{"suite":"crowd-job","ranks":[4],"mode":"mpirun","victims":[],"seconds":60,"sanitizer":true}
{"suite":"crowd-kill","ranks":[2],"mode":"processes","victims":[1],"seconds":60,"sanitizer":true}
{"suite":"times","ranks":[2],"mode":"processes","seconds":60,"sanitizer":true,"needs_own_gpus":"it measures times"}
{"suite":"job","ranks":[2],"mode":"mpirun","victims":[],"seconds":60,"sanitizer":true}
{"suite":"job-fails","ranks":[2],"mode":"mpirun","victims":[],"seconds":60,"sanitizer":true}
LIST
if [ "$1" = probe ]; then
    [ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] || exit 9
    echo probe >>"$(dirname "$0")/mps.log"
    [ ! -e "$(dirname "$0")/busy" ]
    exit
fi
case $2 in
crowd*)
    echo "$2 $WORLD_SIZE: ${RANK-?} is ${LOCAL_RANK-?} of ${LOCAL_WORLD_SIZE-?} on ${GROUP_RANK-?} ${NCCL_HOSTID-?}," \
        "$GRADSYNC_TEST_RANKS_PER_GPU $GRADSYNC_TEST_NODES ${NCCL_MULTI_RANK_GPU_ENABLE-?} ${NCCL_MAX_NCHANNELS-?}" \
        "${NCCL_SOCKET_IFNAME-?}, MPS ${CUDA_MPS_PIPE_DIRECTORY+yes}"
    if [ "$2 $RANK" = 'crowd-kill 1' ]; then kill -KILL $$; fi
    if [ "${JOB_RANK-0}" = 0 ]; then pass f32; fi
    ;;
sums)
    [ "$RANK" = "$LOCAL_RANK" ] && [ "$WORLD_SIZE" = "$LOCAL_WORLD_SIZE" ] || exit 9
    echo "meet at $MASTER_ADDR:$MASTER_PORT with $GRADSYNC_SECRET"
    pass f32
    echo '@{"case":"f8","outcome":"not-run","seconds":0,"note":"no f8 here"}'
    ;;
faults)
    if [ "$RANK" = 1 ]; then kill -STOP $$; fi
    pass 'a rank stops'
    ;;
shared)
    [ -z "${RANK+set}${LOCAL_RANK+set}" ] && [ "$WORLD_SIZE" = 2 ] || exit 9
    pass f32
    ;;
wrong)
    pass first
    if [ "$RANK" = 1 ]; then
        echo '@{"case":"second","outcome":"failed","seconds":0.1,"note":"off by 3"}'
        exit 1
    fi
    echo 'thread panicked' >&2
    exit 101
    ;;
hangs)
    pass first
    sleep 60
    ;;
job)
    [ -z "${RANK+set}${WORLD_SIZE+set}${LOCAL_RANK+set}" ] || exit 9
    if [ "$JOB_RANK" = 0 ]; then
        echo "$JOB_SIZE ranks for $MPIEXEC_TIMEOUT s"
        pass f32
    fi
    ;;
job-fails)
    if [ "$JOB_RANK" = 1 ]; then
        echo '@{"case":"first","outcome":"failed","seconds":0.1,"note":"off by 3"}'
        exit 1
    fi
    ;;
esac
"##;

/// A launcher like Open MPI's, with the required options: it starts the ranks one after the other.
const MPIRUN: &str = r##"#!/bin/sh
if [ "$1" = --version ]; then
    echo 'mpirun (Open MPI) 4.1.4'
    exit
fi
[ "$1 $2 $3" = '--oversubscribe --allow-run-as-root -n' ] || exit 8
JOB_SIZE=$4
shift 4
export JOB_SIZE JOB_RANK
JOB_RANK=0
while [ $JOB_RANK -lt $JOB_SIZE ]; do
    "$@" || exit
    JOB_RANK=$((JOB_RANK + 1))
done
"##;

/// The needed part of a bundle's folder, with a launcher and a daemon.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("multi-gpu", PROGRAM), ("mpirun", MPIRUN), ("mps", mps::tests::DAEMON)] {
        write_program(&folder.path().join(name), text);
    }
    folder
}

fn mpirun(folder: &TempDir) -> Mpirun {
    Mpirun::named(folder.path().join("mpirun").display().to_string()).unwrap()
}

/// A machine without `mpirun`.
fn machine(gpus: Result<usize, String>) -> Machine {
    Machine { gpus, mpirun: Mpirun::named("./no-such-mpirun".to_owned()), mps: Err("no MPS here".to_owned()) }
}

fn flags(folder: &Path, arguments: &[&str]) -> TestMultiGpu {
    let prebuilt = ["cargo xtask", "test-multi-gpu", "--prebuilt", folder.to_str().unwrap()];
    match Xtask::try_parse_from(prebuilt.iter().chain(arguments)).unwrap().command {
        Subcommand::TestMultiGpu(flags) => flags,
        other => panic!("{other:?}"),
    }
}

/// The exit code and the output with `gpus` GPUs.
fn test(gpus: Result<usize, String>, arguments: &[&str]) -> Result<(i32, String)> {
    let folder = folder();
    let mut out = Vec::new();
    let machine = Machine { gpus, mpirun: Ok(mpirun(&folder)), mps: Err("no MPS here".to_owned()) };
    let tested = flags(folder.path(), arguments).test(machine, Duration::from_secs(2), &mut out)?;
    Ok((tested.exit_code(), String::from_utf8(out).unwrap()))
}

/// The report at the end, with its times replaced by a constant, because they differ between runs.
fn report(out: &str) -> String {
    let report = &out[out.find("\nsuite ").expect(out)..];
    let lines = report.split('\n').map(|line| {
        let time = |word: &&str| word.contains('.') && word.parse::<f64>().is_ok();
        match line.split("  ").map(str::trim).find(time) {
            Some(word) if !line.contains(" ms ") => line.replace(word, &"?".repeat(word.len())),
            _ => line.to_owned(),
        }
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn multi_gpu_reports_what_passes_and_what_is_not_run() {
    let (code, out) = test(Ok(2), &["--suite", "sums", "--suite", "faults", "--suite", "shared"]).unwrap();
    let expected = "
suite   ranks  passed  failed  not run  seconds  result
sums        1       1       0        1      ???  passed
sums        2       1       0        1      ???  passed
sums        3       -       -        -        -  not run
faults      2       1       0        0      ???  passed
shared      2       1       0        0      ???  passed

not run:
  sums, 1 rank: f8: no f8 here
  sums, 2 ranks: f8: no f8 here
  sums, 3 ranks: it needs 3 GPUs, and here are 2

4 passed, 0 failed, 3 not run
";
    assert_eq!(report(&out), expected);
    assert_eq!(code, 0);

    // Ranks of a launch connect to one port with one secret; another launch has another port and secret.
    let meetings: Vec<&str> = out.lines().filter(|line| line.contains("meet at 127.0.0.1:")).collect();
    let secret = |line: &str| line.rsplit(' ').next().unwrap().to_owned();
    assert_eq!(meetings.len(), 3, "{out}");
    let (one, two) = (meetings[0], &meetings[1..]);
    assert!(one.starts_with("[0] meet") && two.iter().any(|line| line.starts_with("[1] meet")), "{out}");
    assert_eq!(two[0][3..], two[1][3..]);
    assert_ne!(secret(one), secret(two[0]));
    // A secret has 256 bits, and 32 bits of checksum; the library's tests use the same example.
    assert!(secret(one).strip_prefix("gradsync-secret-").is_some_and(|digits| digits.len() == 72));
    let known = secret_of(&std::array::from_fn(|index| [0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef][index % 8]));
    assert_eq!(known, format!("gradsync-secret-{}4b9a891d", "0123456789abcdef".repeat(4)));
}

#[test]
fn multi_gpu_reports_failures_with_exit_code_1() {
    let (code, out) = test(Ok(4), &["--suite", "wrong", "--suite", "hangs", "--deadline", "3"]).unwrap();
    let expected = "
suite  ranks  passed  failed  not run  seconds  result
wrong      2       1       2        0      ???  FAILED
hangs      1       1       1        0      ???  FAILED

failed:
  wrong, 2 ranks: second
    rank 0 did not report it
    rank 1 failed: off by 3
  wrong, 2 ranks: the launch itself
    rank 0 exited with code 101; the last case that it reported is first
  hangs, 1 rank: the launch itself
    rank 0 still ran at the deadline, and was killed; the last case that it reported is first

2 passed, 3 failed, 0 not run
";
    assert_eq!(report(&out), expected);
    assert_eq!(code, 1);
    assert!(out.contains("\n[1] FAILED second: off by 3\n"), "{out}");
    assert!(out.contains("\n[0] thread panicked\n"), "{out}");
}

#[test]
fn multi_gpu_starts_a_job_as_one_process_of_the_launcher() {
    let (code, out) = test(Ok(2), &["--suite", "job", "--suite", "job-fails", "--deadline", "7"]).unwrap();
    let expected = "
suite      ranks  passed  failed  not run  seconds  result
job            2       1       0        0      ???  passed
job-fails      2       0       1        0      ???  FAILED

failed:
  job-fails, 2 ranks: first
    the process of all ranks failed: off by 3

1 passed, 1 failed, 0 not run
";
    assert_eq!(report(&out), expected);
    assert_eq!(code, 1);
    assert!(out.contains("\n[all] FAILED first: off by 3\n"), "{out}");
    assert!(out.contains("\n[all] 2 ranks for 7 s\n"), "{out}");
}

#[test]
fn multi_gpu_runs_no_job_without_mpirun() {
    let (folder, mut out) = (folder(), Vec::new());
    let tested = flags(folder.path(), &["--suite", "job"]).test(machine(Ok(2)), GRACE, &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert_eq!(tested.exit_code(), 0);
    let reason = "job, 2 ranks: it needs mpirun, and there is none here: `./no-such-mpirun --version` does not work";
    assert!(out.contains(reason) && out.ends_with("\n0 passed, 0 failed, 1 not run\n"), "{out}");
}

#[test]
fn multi_gpu_runs_nothing_without_a_gpu() {
    let (code, out) = test(Err("`nvidia-smi -L` lists none".to_owned()), &[]).unwrap();
    assert_eq!(code, 2);
    assert!(out.contains("not run: no NVIDIA GPU here: `nvidia-smi -L` lists none"), "{out}");
    assert!(out.ends_with("\n0 passed, 0 failed, 1 not run\n"), "{out}");
}

/// The lines of the ranks of the suites "crowd", in order, and the report's first line, on this machine.
fn crowd(folder: &TempDir, mps: Result<PathBuf, String>, arguments: &[&str]) -> (Vec<String>, String, String) {
    let mut out = Vec::new();
    let machine = Machine { gpus: Ok(1), mpirun: Ok(mpirun(folder)), mps };
    let tested = flags(folder.path(), arguments).test(machine, Duration::from_secs(2), &mut out).unwrap();
    let out = String::from_utf8(out).unwrap();
    assert_eq!(tested.exit_code(), 0, "{out}");
    let mut said: Vec<String> =
        out.lines().filter_map(|line| Some(line.split_once("] crowd")?.1.trim().to_owned())).collect();
    said.sort();
    let report = &out[..out.find("\nsuite ").expect(&out)];
    (said, report.trim_end().lines().last().unwrap().to_owned(), out)
}

#[test]
fn multi_gpu_shares_a_gpu_by_a_daemon_that_ends_with_the_run() {
    let folder = folder();
    let control = folder.path().join("mps");
    let suites = ["crowd", "crowd-threads", "crowd-job", "crowd-kill", "times"].map(|suite| ["--suite", suite]);
    let arguments = [&["--ranks-per-gpu", "4"][..], suites.as_flattened()].concat();
    let (said, headline, out) = crowd(&folder, Ok(control.clone()), &arguments);
    let expected = [
        "-job : ? is ? of ? on ? ?, 4 1 1 4 ?, MPS yes",
        "-job : ? is ? of ? on ? ?, 4 1 1 4 ?, MPS yes",
        "-job : ? is ? of ? on ? ?, 4 1 1 4 ?, MPS yes",
        "-job : ? is ? of ? on ? ?, 4 1 1 4 ?, MPS yes",
        "-kill 2: 0 is 0 of 2 on ? ?, 4 1 1 4 ?, MPS yes",
        "-kill 2: 1 is 1 of 2 on ? ?, 4 1 1 4 ?, MPS yes",
        "-threads 4: ? is ? of 4 on ? ?, 4 1 1 4 ?, MPS yes",
        "2: 0 is 0 of 2 on ? ?, 4 1 1 4 ?, MPS yes",
        "2: 1 is 1 of 2 on ? ?, 4 1 1 4 ?, MPS yes",
        "3: 0 is 0 of 3 on ? ?, 4 1 1 4 ?, MPS yes",
        "3: 1 is 1 of 3 on ? ?, 4 1 1 4 ?, MPS yes",
        "3: 2 is 2 of 3 on ? ?, 4 1 1 4 ?, MPS yes",
        "4: 0 is 0 of 4 on ? ?, 4 1 1 4 ?, MPS yes",
        "4: 1 is 1 of 4 on ? ?, 4 1 1 4 ?, MPS yes",
        "4: 2 is 2 of 4 on ? ?, 4 1 1 4 ?, MPS yes",
        "4: 3 is 3 of 4 on ? ?, 4 1 1 4 ?, MPS yes",
    ];
    assert_eq!(said, expected, "{out}");
    assert_eq!(headline, format!("1 GPU, up to 4 ranks on each, at once, by CUDA MPS ({})", control.display()));
    assert!(out.starts_with(&headline), "{out}");
    assert!(out.contains("\n  times, 2 ranks: it measures times\n"), "{out}");
    assert!(out.contains("\n  crowd, 8 ranks: it needs 8 GPUs, and here is 1, for 4 each\n"), "{out}");
    // There is a probe before the first launch, and one after a launch with a rank that is killed.
    let log = fs::read_to_string(folder.path().join("mps.log")).unwrap();
    let log: Vec<&str> = log.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(log, ["started", "probe", "probe", "quit"]);
}

#[test]
fn multi_gpu_says_why_ranks_take_turns_without_the_daemon() {
    let folder = folder();
    let arguments = ["--ranks-per-gpu", "8", "--ranks", "2", "--suite", "crowd"];
    let (said, headline, _) = crowd(&folder, Err("there is no daemon".to_owned()), &arguments);
    assert_eq!(said[1], "2: 1 is 1 of 2 on ? ?, 8 1 1 4 ?, MPS");
    let by_turns = "1 GPU, up to 8 ranks on each, by turns, in time slices, without CUDA MPS: ";
    assert_eq!(headline, format!("{by_turns}there is no daemon"));
    let not_wanted = [&arguments[..], &["--no-mps"]].concat();
    let (_, headline, _) = crowd(&folder, Ok(folder.path().join("mps")), &not_wanted);
    assert_eq!(headline, format!("{by_turns}--no-mps"));
    assert!(!folder.path().join("mps.log").exists(), "it was started");
}

#[test]
fn multi_gpu_groups_ranks_into_nodes() {
    let folder = folder();
    let suites = ["--suite", "crowd", "--suite", "crowd-threads", "--suite", "crowd-job"];
    let arguments = [&["--ranks-per-gpu", "8", "--nodes", "2"][..], &suites].concat();
    let (said, headline, out) = crowd(&folder, Err("none".to_owned()), &arguments);
    let expected = [
        "2: 0 is 0 of 1 on 0 gradsync-node-0, 8 2 1 4 lo, MPS",
        "2: 1 is 0 of 1 on 1 gradsync-node-1, 8 2 1 4 lo, MPS",
        "4: 0 is 0 of 2 on 0 gradsync-node-0, 8 2 1 4 lo, MPS",
        "4: 1 is 1 of 2 on 0 gradsync-node-0, 8 2 1 4 lo, MPS",
        "4: 2 is 0 of 2 on 1 gradsync-node-1, 8 2 1 4 lo, MPS",
        "4: 3 is 1 of 2 on 1 gradsync-node-1, 8 2 1 4 lo, MPS",
    ];
    assert_eq!(said[..6], expected, "{out}");
    assert_eq!(said[13], "8: 7 is 3 of 4 on 1 gradsync-node-1, 8 2 1 2 lo, MPS");
    assert!(headline.ends_with("; 2 nodes, made up by NCCL_HOSTID"), "{headline}");
    for reason in [
        "crowd, 3 ranks: 3 ranks are not as many on each of 2 nodes",
        "crowd-threads, 4 ranks: its ranks are one process, which is on one node",
        "crowd-job, 4 ranks: MPI finds nodes by itself, and takes this machine for one",
    ] {
        assert!(out.contains(&format!("\n  {reason}\n")), "{out}");
    }
}

#[test]
fn multi_gpu_refuses_wishes_that_cannot_be_met() {
    let refusal = |arguments: &[&str]| format!("{:#}", test(Ok(2), arguments).unwrap_err());
    assert_eq!(refusal(&["--ranks", "3"]), "--ranks 3 needs as many GPUs, and there are 2 here");
    let crowded = refusal(&["--ranks", "7", "--ranks-per-gpu", "3"]);
    assert_eq!(crowded, "--ranks 7 is more than 2 GPUs take with 3 on each");
    let uneven = refusal(&["--ranks", "2", "--nodes", "3"]);
    assert_eq!(uneven, "--ranks 2 are not as many on each of 3 nodes");
    assert!(refusal(&["--suite", "som"]).contains("there is no suite som"));
    let empty = tempfile::tempdir().unwrap();
    let error = flags(empty.path(), &[]).test(machine(Ok(1)), GRACE, &mut Vec::new()).unwrap_err();
    assert!(format!("{error:#}").contains("multi-gpu: No such file"), "{error:#}");
    let bundled = ["cargo xtask", "test-multi-gpu", "--bundle", "x", "--ranks", "1"];
    assert!(Xtask::try_parse_from(bundled).is_err());
}

#[test]
fn multi_gpu_prefixes_are_of_one_width() {
    let suites =
        suites::parse(r#"{"suite":"a","ranks":[12],"mode":"processes","seconds":1,"sanitizer":true}"#).unwrap();
    let (suite, layout) = (&suites[0], Layout::PLAIN);
    let start = Start { program: Path::new("x"), wrapper: None, mpirun: None, suite, world: 12, layout, mps: None };
    assert_eq!([Who::Rank(3), Who::Rank(11)].map(|who| start.prefix(who)), ["[ 3]", "[11]"]);
    let wrapper = ["compute-sanitizer", "--tool", "memcheck"].map(str::to_owned);
    let start = Start { wrapper: Some(&wrapper), ..start };
    let commands = start.commands(&[(Who::Rank(0), false)], GRACE).unwrap();
    let shown = format!("{:?}", commands[0].command);
    assert!(shown.ends_with(r#""compute-sanitizer" "--tool" "memcheck" "x" "run" "a""#), "{shown}");

    let (folder, suites) =
        (folder(), suites::parse(r#"{"suite":"j","ranks":[2],"mode":"mpirun","seconds":1,"sanitizer":true}"#).unwrap());
    let mpirun = mpirun(&folder);
    let start = Start { mpirun: Some(&mpirun), suite: &suites[0], world: 2, ..start };
    let shown = format!("{:?}", start.commands(&[(Who::AllRanks, false)], GRACE).unwrap()[0].command);
    let expected = r#"mpirun" "--oversubscribe" "--allow-run-as-root" "-n" "2" "compute-sanitizer" "--tool" "memcheck" "x" "run" "j""#;
    assert!(shown.ends_with(expected) && shown.contains("MPIEXEC_TIMEOUT=\"5\""), "{shown}");
}

#[test]
fn visible_devices_end_at_the_first_that_cannot_be_one() {
    assert_eq!(["0,1,3", "", "-1", "2,-1,0", "GPU-8932f937, GPU-1"].map(visible), [3, 0, 0, 1, 2]);
}
