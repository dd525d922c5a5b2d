//! `gradsync doctor`: healthy ranks, and planted problems.

use std::process::Command;

use gradsync::bootstrap::Secret;
use gradsync_tests::programs::Finished;
use serde_json::Value;

use crate::job::gradsync;
use crate::program::binary;

/// The command of a doctor's rank with these variables.
fn rank(variables: &[(&str, &str)], options: &[&str]) -> Command {
    let mut command = gradsync(&["doctor"]);
    command.args(options).envs(variables.iter().copied());
    command
}

pub(crate) fn free_port() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

#[test]
fn ranks_that_are_well_are_a_table_and_exit_code_0() {
    let doctor = Finished::of(gradsync(&["doctor", "-n", "3"]).env("CUDA_VISIBLE_DEVICES", ""));
    let doctor = doctor.succeeded("three ranks");
    let lines: Vec<&str> = doctor.stdout.lines().collect();
    assert!(lines[1].starts_with("on all ranks: exchange memory, "), "the ranks share memory: {}", doctor.stdout);
    let [headings, _, _, last, end] = lines[lines.len() - 5..] else { panic!("{}", doctor.stdout) };
    assert!(headings.starts_with("rank  host") && last.starts_with("2 "), "{}", doctor.stdout);
    assert!(last.contains("127.0.0.1") && last.contains("2 of 3"), "{}", doctor.stdout);
    assert_eq!(end, "all ranks joined, and no problem was found");
    assert!(lines.iter().all(|line| line.chars().count() <= 100), "{}", doctor.stdout);
}

#[test]
fn a_log_that_is_no_terminal_has_no_colours() {
    let doctor =
        Finished::of(gradsync(&["doctor", "-n", "1"]).env("CUDA_VISIBLE_DEVICES", "").env("GRADSYNC_LOG", "debug"));
    let doctor = doctor.succeeded("one rank");
    assert!(doctor.stderr.contains("DEBUG") && !doctor.stderr.contains('\x1b'), "{:?}", doctor.stderr);
}

#[test]
fn json_has_the_facts_of_every_rank() {
    let doctor = Finished::of(gradsync(&["doctor", "-n", "2", "--json"]).env("CUDA_VISIBLE_DEVICES", ""));
    let json: Value = serde_json::from_str(&doctor.succeeded("two ranks").stdout).unwrap();
    assert_eq!((&json["ranks"][1]["rank"], json["problems"].as_array().map(Vec::len)), (&1.into(), Some(0)));
    // All ranks on one machine have the same clock.
    let clock = &json["clocks"][1];
    let (seconds, uncertainty) = (clock["seconds"].as_f64().unwrap(), clock["uncertainty"].as_f64().unwrap());
    assert!(seconds.abs() <= uncertainty, "{seconds} ± {uncertainty}");
}

#[test]
fn ranks_on_one_gpu_are_a_problem_with_a_remedy() {
    let doctor = Finished::of(gradsync(&["doctor", "-n", "2"]).env("CUDA_VISIBLE_DEVICES", "5,5"));
    assert_eq!(doctor.code, Some(1), "{}", doctor.stderr);
    assert!(doctor.stdout.contains("remedy: give each rank a GPU of its own"), "{}", doctor.stdout);
    let problems: Vec<&str> = doctor.stdout.lines().filter(|line| line.starts_with("problem: ")).collect();
    assert!(problems[0].starts_with("problem: ranks 0, 1 share GPU 5 of "), "{}", doctor.stdout);
    // A program with CUDA also says that a machine has no NCCL.
    let found = match problems[1..] {
        [] => "1 problem was found",
        ["problem: ranks 0, 1 find no NCCL"] => "2 problems were found",
        _ => panic!("other problems: {}", doctor.stdout),
    };
    assert!(doctor.stdout.contains(found), "{found}: {}", doctor.stdout);
}

#[test]
fn too_many_threads_and_few_descriptors_are_problems() {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 200; exec \"$0\" doctor -n 2"]).arg(binary());
    command.env("RAYON_NUM_THREADS", "1000").env("CUDA_VISIBLE_DEVICES", "").env_remove("GRADSYNC_TRACE_DIR");
    let doctor = Finished::of(&mut command);
    assert_eq!(doctor.code, Some(1), "{}", doctor.stderr);
    for words in ["use 2000 threads on", "ranks 0, 1 of ", "have 200 descriptors, less than 1024", "`ulimit -n`"] {
        assert!(doctor.stdout.contains(words), "{words}: {}", doctor.stdout);
    }
}

#[test]
fn without_a_launcher_the_doctor_says_how_to_start_it() {
    Finished::of(&mut rank(&[], &[])).refused("no launcher", &["RANK", "remedy: start the ranks by a launcher"]);
    let alone = [("RANK", "0"), ("WORLD_SIZE", "2")];
    Finished::of(&mut rank(&alone, &[]))
        .refused("no address", &["MASTER_ADDR", "remedy: export MASTER_ADDR and MASTER_PORT"]);
    let no_secret = [&alone[..], &[("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")]].concat();
    Finished::of(&mut rank(&no_secret, &[]))
        .refused("no secret", &["GRADSYNC_SECRET", "remedy: export GRADSYNC_SECRET="]);
}

#[test]
fn ranks_that_cannot_join_get_a_remedy_each() {
    let (port, secrets) = (free_port(), [0, 1].map(|_| Secret::generate().unwrap().reveal()));
    let variables = |number, secret| {
        [
            ("RANK", number),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port.as_str()),
            ("GRADSYNC_SECRET", secret),
        ]
    };
    let options = ["--deadline", "0.5"];
    let nobody = Finished::of(&mut rank(&variables("1", &secrets[0]), &options));
    nobody.refused("nobody listens", &["127.0.0.1", "remedy: MASTER_ADDR must be the machine of rank 0", "firewall"]);
    let start = |number, secret| {
        let mut command = rank(&variables(number, secret), &options);
        std::thread::spawn(move || Finished::of(&mut command))
    };
    let ranks = [start("0", &secrets[0]), start("1", &secrets[1])];
    let [first, second] = ranks.map(|rank| rank.join().unwrap());
    first.refused("a rank with another secret", &["remedy: look at the output of the missing ranks"]);
    second.refused("another secret", &["remedy: give all ranks the same GRADSYNC_SECRET"]);
}

/// torchrun's agent listens at MASTER_PORT: the variables of version 2.11, and a listener that says nothing.
#[test]
fn ranks_of_torchrun_join_beside_its_agent() {
    let agent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = agent.local_addr().unwrap().port().to_string();
    let secret = Secret::generate().unwrap().reveal();
    let start = |number: &'static str| {
        let variables = [
            ("LOCAL_RANK", number),
            ("RANK", number),
            ("GROUP_RANK", "0"),
            ("ROLE_RANK", number),
            ("ROLE_NAME", "default"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("WORLD_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", port.as_str()),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RUN_ID", "none"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_ERROR_FILE", "/tmp/torchelastic/error.json"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("RAYON_NUM_THREADS", "1"),
            ("CUDA_VISIBLE_DEVICES", ""),
            ("GRADSYNC_SECRET", secret.as_str()),
        ];
        let mut command = rank(&variables, &["--deadline", "30"]);
        std::thread::spawn(move || Finished::of(&mut command))
    };
    let [first, second] = ["0", "1"].map(start).map(|rank| rank.join().unwrap());
    let first = first.succeeded("rank 0 beside the agent");
    assert!(first.stdout.contains("gradsync ") && first.stdout.contains("2 ranks"), "{}", first.stdout);
    second.succeeded("rank 1");
}

/// The doctor finds a wrong variable at once, whatever its value, and its remedy is for that variable.
#[test]
fn a_wrong_variable_gets_a_remedy_of_its_own() {
    let secret = Secret::generate().unwrap().reveal();
    for (variable, value, words) in [
        ("WORLD_SIZE", "99999999999", "remedy: leave it to the launcher"),
        ("WORLD_SIZE", "18446744073709551615", "remedy: leave it to the launcher"),
        ("WORLD_SIZE", "100000000", "remedy: leave it to the launcher"),
        ("LOCAL_RANK", "4294967296", "remedy: leave it to the launcher"),
        ("MASTER_ADDR", "tcp://127.0.0.1", "remedy: set MASTER_ADDR to the name or the address"),
        ("MASTER_ADDR", "127.0.0.1:29500", "remedy: set MASTER_ADDR to the name or the address"),
        ("MASTER_PORT", "http", "remedy: set it to a free port"),
        ("GRADSYNC_PORT", "99999", "remedy: set it to a free port"),
        ("GRADSYNC_GENERATION", "first", "remedy: leave it to the launcher, which counts"),
        ("GRADSYNC_DEADLINE", "10m", "remedy: set it to a number of seconds"),
        ("GRADSYNC_JOIN_DEADLINE", "-1", "remedy: set it to a number of seconds"),
    ] {
        let well = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
        let mut command = rank(&well, &[]);
        command.env("GRADSYNC_SECRET", &secret).env(variable, value);
        let start = std::time::Instant::now();
        Finished::of(&mut command).refused(value, &[variable, value, words]);
        assert!(start.elapsed() < std::time::Duration::from_secs(5), "{variable}: {:?}", start.elapsed());
    }
    let half = Finished::of(&mut rank(&[("RANK", "0")], &[]));
    half.refused("half a pair", &["WORLD_SIZE", "remedy: a launcher sets a rank and a world size together"]);
}
