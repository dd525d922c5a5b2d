//! Processes that end at any moment, in any way: all others soon get an error that names them, and nothing is left behind.

use std::fs;
use std::process::exit;
use std::thread::sleep;
use std::time::{Duration, Instant};

use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{Collectives, CommError, Departure, Ranks, ReduceOp};
use gradsync::internal::memory::SharedWindows;
use gradsync::{DType, Error, GradientBuffer, Result};
use gradsync_tests::suite::processes::Processes;
use gradsync_tests::suite::{DEADLINE, Transport};

use crate::launch::{Launch, turn};
use crate::transport::Launched;

/// The time within which all others must know of the end of a process, on a machine with other work.
const SOON: Duration = Duration::from_secs(2);
const RANKS: usize = 3;
const VICTIM: usize = 1;
/// The number of rounds after which a victim ends by itself.
const ROUNDS: usize = 40;
/// The line that tells the launcher that a rank is at work.
const STARTED: &str = "GRADSYNC_TEST_STARTED";

/// One round of work, which varies with its number: short and long calls of all kinds.
fn work(comm: &ProcessCommunicator, buffer: &mut GradientBuffer, round: usize) -> Result<()> {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let len = [7, 3_000, 40_000, 700_000][round % 4];
    let mut data = vec![1.0f32; len];
    match round / 4 % 6 {
        0 => comm.all_reduce(&mut data, ReduceOp::Sum),
        1 => comm.broadcast(&mut data, round % world_size),
        2 => comm.all_gather(&data, &mut vec![0.0f32; len * world_size]),
        3 => comm.all_to_all(&vec![1.0f32; len * world_size], &mut vec![0.0f32; len * world_size]),
        4 => {
            let sent = data.clone();
            comm.send_recv(&sent, (rank + 1) % world_size, &mut data, (rank + world_size - 1) % world_size)
        }
        _ => comm
            .with_windows(buffer.as_mut_slice(), &mut |windows| {
                windows.into_iter().for_each(|window| window.typed::<f32>().expect("f32").fill(1.0));
                Ok(())
            })
            .map(drop),
    }
}

/// The body of each rank.
pub(crate) fn run(role: &str) {
    let comm = Launched::join().fresh(DEADLINE);
    let mut buffer = GradientBuffer::new_shared(DType::F32, RANKS, [("vector", [RANKS << 14])]).expect("a buffer");
    let rank = comm.rank();
    comm.barrier().expect("all are here");
    if let Ok(path) = std::env::var(STARTED) {
        fs::write(path, "").expect("a file of the launcher's");
    }
    let mut rounds = 0..;
    let error = loop {
        let round = rounds.next().expect("there is no end");
        if rank == VICTIM && round == ROUNDS {
            match role {
                "exits" => exit(0),
                "aborts" => std::process::abort(),
                "panics" => {
                    // The communicator is dropped while the thread panics.
                    let panicked = std::thread::spawn(move || {
                        let _held = comm;
                        std::panic::resume_unwind(Box::new("as it is meant to"));
                    });
                    assert!(panicked.join().is_err());
                    return;
                }
                "returns" => return,
                _ => {}
            }
        }
        if let Err(error) = work(&comm, &mut buffer, round) {
            break error;
        }
    };
    let Error::Comm(CommError::PeerGone { rank: gone, departure, .. }) = error else { panic!("{error:?}") };
    let expected = match role {
        "panics" => Departure::Panicked,
        "returns" => Departure::Left,
        _ => Departure::Lost,
    };
    assert_eq!((gone, departure), (VICTIM, expected));
    assert!(comm.barrier().is_err(), "a communicator that failed was usable again");
}

/// Launches ranks of which one ends by itself; the others must end soon after it, and report the reason.
fn ends_by_itself(role: &'static str) {
    let _turn = turn();
    for messages_only in ["0", "1"] {
        let mut launched = Launch::start(role, RANKS, |_| vec![(Launched::MESSAGES_ONLY, messages_only.into())]);
        let victim = launched.process(VICTIM);
        assert_eq!(victim.wait().expect("a child").success(), role != "aborts");
        let ended = Instant::now();
        let ends = launched.ends();
        assert!(ended.elapsed() < SOON, "took {:?}", ended.elapsed());
        let others = ends.iter().enumerate().filter(|(rank, _)| *rank != VICTIM);
        others.for_each(|(rank, end)| assert!(end.success(), "{role}: rank {rank} ended with {end}"));
    }
}

#[test]
fn process_communicator_names_a_process_that_exits() {
    ends_by_itself("exits");
}

#[test]
fn process_communicator_names_a_process_that_aborts() {
    ends_by_itself("aborts");
}

#[test]
fn process_communicator_names_a_rank_that_panics() {
    ends_by_itself("panics");
}

#[test]
fn process_communicator_names_a_rank_that_has_returned() {
    ends_by_itself("returns");
}

/// The lines of a file that hold names of ours.
fn names(path: &str) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().filter(|line| line.contains("gradsync-")).map(str::to_owned).collect()
}

/// The entries of a folder.
fn entries(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut entries: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    entries
}

#[test]
fn process_communicator_survives_a_hundred_kills_at_any_moment() {
    let _turn = turn();
    let folder = tempfile::tempdir().expect("a folder");
    let temporary = folder.path().join("tmp");
    fs::create_dir(&temporary).expect("a folder");
    let shared = std::path::Path::new("/dev/shm");
    let before = entries(shared);
    let mut slowest = Duration::ZERO;
    for kill in 0..100u64 {
        let started = folder.path().join(format!("{kill}"));
        let variables = |rank: usize| {
            let mut variables = vec![("TMPDIR", temporary.display().to_string())];
            variables.push((Launched::MESSAGES_ONLY, u8::from(kill % 4 == 3).to_string()));
            if rank == VICTIM {
                variables.push((STARTED, started.display().to_string()));
            }
            variables
        };
        let mut launched = Launch::start("is killed", RANKS, variables);
        while !started.exists() {
            sleep(Duration::from_millis(1));
        }
        // The process is killed at another moment each time.
        sleep(Duration::from_micros(kill * 7919 % 40_000));
        launched.process(VICTIM).kill().expect("a child");
        let killed = Instant::now();
        let ends = launched.ends();
        slowest = slowest.max(killed.elapsed());
        assert!(killed.elapsed() < SOON, "kill {kill}: took {:?}", killed.elapsed());
        let others = ends.iter().enumerate().filter(|(rank, _)| *rank != VICTIM);
        others.for_each(|(rank, end)| assert!(end.success(), "kill {kill}: rank {rank} ended with {end}"));
    }
    println!("100 kills; the last rank ended at most {slowest:?} later");
    assert_eq!(entries(&temporary), Vec::<std::path::PathBuf>::new());
    let new: Vec<_> = entries(shared).into_iter().filter(|path| !before.contains(path)).collect();
    assert!(new.iter().all(|path| !path.to_string_lossy().contains("gradsync")), "{new:?}");
    assert_eq!(names("/proc/net/unix"), Vec::<String>::new(), "sockets with names");
}
