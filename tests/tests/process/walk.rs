//! Random walks of eight processes: each rank runs the same random program of collectives and messages, in which up to three ranks exit,
//! panic, leave, are killed, or are stopped beyond the deadline, at random moments. Every other rank ends in time with an error that names
//! such a rank, or one that waits for it; and the results of calls that completed before are right.
//!
//! `GRADSYNC_TEST_WALKS=0..100` runs other walks than the first twenty. The number of a walk is the seed of its program and of its faults, but
//! the system chooses the moments at which processes run.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp, Split};
use gradsync::internal::memory::SharedWindows;
use gradsync::{DType, Error, GradientBuffer, Result, SliceMut};
use gradsync_tests::inputs::Random;
use gradsync_tests::suite::Transport;
use gradsync_tests::suite::processes::Processes;
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::launch::{Launch, turn};
use crate::transport::Launched;

const RANKS: usize = 8;
/// The walks that run by default.
const WALKS: Range<u64> = 0..20;
/// Variables of the launcher, and of the ranks: the number of the walk, and the folder for what ranks tell.
const WALKS_VARIABLE: &str = "GRADSYNC_TEST_WALKS";
const WALK: &str = "GRADSYNC_TEST_WALK";
const FOLDER: &str = "GRADSYNC_TEST_FOLDER";
const DEADLINE: Duration = Duration::from_millis(1500);
/// The least time of a stop, which also lasts until all others have ended.
const STOP: Duration = Duration::from_millis(2000);
/// The most time of a call that waits for a stopped rank, on a machine with other work. After a failure in an epoch, ranks get the deadline
/// again to leave it. If no rank is stopped, all hear of a fault before the deadline.
const LIMIT: Duration = Duration::from_millis(2 * 1500 + 2500);
/// The time limit of a walk.
const PLENTY: Duration = Duration::from_secs(60);
/// More steps than ranks take before they hear of a fault.
const STEPS: u64 = 1000;
/// The last step before which the first rank goes.
const LAST_STEP: u64 = 16;

/// The fault of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Exit,
    Abort,
    Panic,
    /// The rank drops its communicators, and its process ends with success.
    Leave,
    Kill,
    Stop,
}

/// A fault before a step, or in it: signals come after the delay.
#[derive(Clone, Copy, Debug)]
struct Event {
    fault: Fault,
    step: u64,
    delay: Duration,
}

/// The events of a walk by rank, in at most three successive steps.
fn events(walk: u64) -> BTreeMap<usize, Event> {
    let mut random = Random::new(walk ^ 0x77a1_c0de);
    let faults = [Fault::Exit, Fault::Abort, Fault::Panic, Fault::Leave, Fault::Kill, Fault::Stop];
    let first = random.below(LAST_STEP);
    let event = |random: &mut Random| {
        let (rank, fault) = (random.below(RANKS as u64) as usize, faults[random.below(faults.len() as u64) as usize]);
        let delay = Duration::from_micros(random.below(8) * random.below(1000));
        (rank, Event { fault, step: first + random.below(3), delay })
    };
    (0..=random.below(3)).map(|_| event(&mut random)).collect()
}

/// The value that a rank contributes to a step at an index; sums of them are exact.
fn value(step: u64, rank: usize, index: usize) -> f32 {
    ((step as usize * 31 + rank * 7 + index) % 1000) as f32
}

fn vector(step: u64, rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(step, rank, index)).collect()
}

/// Asserts that a call has returned the right numbers.
fn assert_is(got: &[f32], expected: impl Fn(usize) -> f32, what: &str) {
    let wrong = got.iter().enumerate().find(|&(index, number)| *number != expected(index));
    assert!(wrong.is_none(), "{what}: index {:?} instead of {:?}", wrong, wrong.map(|(index, _)| expected(index)));
}

/// The communicators of a rank, and its shared buffer.
struct Member {
    comm: ProcessCommunicator,
    /// The ranks with an equal remainder by two.
    half: ProcessCommunicator,
    buffer: GradientBuffer,
}

/// A failed call: with the numbers of its ranks in the group of all ranks.
struct Failure {
    error: Error,
    in_half: bool,
}

/// A step of the program, the same on all ranks. Asserts that its results are right.
fn take(member: &mut Member, walk: u64, step: u64) -> std::result::Result<(), Failure> {
    let mut random = Random::new(walk << 20 | step);
    let (kind, len) = (random.below(10), [1, 9, 3_000, 40_000][random.below(4) as usize]);
    let (root, other) = (random.below(8) as usize, random.below(7) as usize);
    let rank = member.comm.rank();
    if kind == 9 {
        let mut data = vector(step, rank, len);
        let outcome = member.half.all_reduce(&mut data, ReduceOp::Sum);
        outcome.map_err(|error| Failure { error, in_half: true })?;
        let mine = || (0..RANKS).filter(|peer| peer % 2 == rank % 2);
        assert_is(&data, |index| mine().map(|peer| value(step, peer, index)).sum(), "all_reduce of a half");
        return Ok(());
    }
    collective(member, step, kind, len, root, (root + 1 + other) % RANKS)
        .map_err(|error| Failure { error, in_half: false })
}

/// A call of all ranks, or a message from `root` to `other`.
fn collective(member: &mut Member, step: u64, kind: u64, len: usize, root: usize, other: usize) -> Result<()> {
    let Member { comm, buffer, .. } = member;
    let rank = comm.rank();
    let mut data = vector(step, rank, len);
    let sum = |index: usize| (0..RANKS).map(|peer| value(step, peer, index)).sum::<f32>();
    match kind {
        0 => comm.barrier()?,
        1 => {
            comm.all_reduce(&mut data, ReduceOp::Sum)?;
            assert_is(&data, sum, "all_reduce");
        }
        2 => {
            comm.broadcast(&mut data, root)?;
            assert_is(&data, |index| value(step, root, index), "broadcast");
        }
        3 => {
            let mut all = vec![0.0; len * RANKS];
            comm.all_gather(&data, &mut all)?;
            assert_is(&all, |index| value(step, index / len, index % len), "all_gather");
        }
        4 => {
            let mut all = vec![0.0; len * RANKS];
            comm.all_to_all(&vector(step, rank, len * RANKS), &mut all)?;
            assert_is(&all, |index| value(step, index / len, rank * len + index % len), "all_to_all");
        }
        5 => {
            comm.reduce_scatter(&vector(step, rank, len * RANKS), &mut data, ReduceOp::Sum)?;
            assert_is(&data, |index| sum(rank * len + index), "reduce_scatter");
        }
        6 => {
            let (next, last) = ((rank + 1) % RANKS, (rank + RANKS - 1) % RANKS);
            let sent = data.clone();
            comm.send_recv(&sent, next, &mut data, last)?;
            assert_is(&data, |index| value(step, last, index), "send_recv");
        }
        7 if rank == root => comm.send(&data, other)?,
        7 if rank == other => {
            comm.recv(&mut data, root)?;
            assert_is(&data, |index| value(step, root, index), "recv");
        }
        7 => {}
        _ => {
            let lent = comm.with_windows(buffer.as_mut_slice(), &mut |windows: Vec<SliceMut<'_>>| {
                for window in windows {
                    window.typed::<f32>().expect("f32").fill(value(step, rank, 0));
                }
                Ok(())
            })?;
            let numbers: &[f32] = buffer.as_slice().typed().expect("f32");
            let window = numbers.len() / RANKS;
            if lent {
                assert_is(numbers, |index| value(step, index / window, 0), "windows");
            }
        }
    }
    Ok(())
}

/// The body of each rank.
pub(crate) fn run() {
    let variable = |name: &str| std::env::var(name).expect("a variable of the launcher's");
    let (walk, folder): (u64, PathBuf) = (variable(WALK).parse().expect("a number"), variable(FOLDER).into());
    let comm = Launched::join().fresh(DEADLINE);
    let rank = comm.rank();
    let half = comm.split(Some((rank % 2) as u64), 0).expect("halves").expect("a colour");
    let buffer = GradientBuffer::new_shared(DType::F32, RANKS, [("vector", [RANKS << 10])]).expect("a buffer");
    let mut member = Member { comm, half, buffer };
    let event = events(walk).get(&rank).copied();
    let report = |name: &str, text: String| {
        // The launcher reads whole files only.
        let written = folder.join(format!("{rank}.part"));
        fs::write(&written, text)
            .and_then(|()| fs::rename(written, folder.join(format!("{rank}.{name}"))))
            .expect("a file");
    };
    for step in 0..STEPS {
        if let Some(event) = event.filter(|event| event.step == step) {
            match event.fault {
                Fault::Kill | Fault::Stop => {
                    let signal = if event.fault == Fault::Kill { Signal::KILL } else { Signal::STOP };
                    let folder = folder.clone();
                    spawn(move || {
                        sleep(event.delay);
                        fs::write(folder.join(format!("{rank}.fault")), "").expect("a file");
                        kill_process(getpid(), signal).expect("a signal");
                    });
                }
                fault => {
                    report("fault", String::new());
                    match fault {
                        Fault::Exit => std::process::exit(0),
                        Fault::Abort => std::process::abort(),
                        Fault::Panic => {
                            // The communicator is dropped while the thread panics.
                            let panicking = spawn(move || {
                                let _held = member;
                                std::panic::resume_unwind(Box::new("as it is meant to"));
                            });
                            assert!(panicking.join().is_err());
                            return;
                        }
                        _ => return,
                    }
                }
            }
        }
        let start = Instant::now();
        if let Err(Failure { error, in_half }) = take(&mut member, walk, step) {
            let took = start.elapsed().as_millis();
            let (is_late, named) = match &error {
                Error::Comm(CommError::PeerGone { rank, .. }) => (false, vec![*rank]),
                Error::Comm(CommError::Timeout { missing, .. }) => (true, missing.clone()),
                other => panic!("walk {walk}, step {step}: {other}"),
            };
            let in_all = |&named: &usize| if in_half { 2 * named + rank % 2 } else { named }.to_string();
            let named = named.iter().map(in_all).collect::<Vec<_>>().join(",");
            let after = if in_half { member.half.barrier() } else { member.comm.barrier() };
            assert!(after.is_err(), "a communicator that failed was usable again");
            return report("error", format!("{is_late} {in_half} {took} {named}\nstep {step}: {error}"));
        }
    }
    panic!("walk {walk}: no rank has a fault in {STEPS} steps");
}

/// The error with which a rank has ended.
#[derive(Debug)]
struct Report {
    is_late: bool,
    in_half: bool,
    /// How long the failing call took.
    took: Duration,
    /// The ranks that the error names.
    named: Vec<usize>,
    text: String,
}

impl Report {
    fn read(path: &Path) -> Option<Self> {
        let text = fs::read_to_string(path).ok()?;
        let (words, text) = text.split_once('\n')?;
        let [is_late, in_half, took, named] = words.split(' ').collect::<Vec<_>>().try_into().ok()?;
        Some(Report {
            is_late: is_late.parse().ok()?,
            in_half: in_half.parse().ok()?,
            took: Duration::from_millis(took.parse().ok()?),
            named: named.split(',').filter_map(|rank| rank.parse().ok()).collect(),
            text: text.into(),
        })
    }
}

/// A walk that runs or has run.
struct Walk {
    number: u64,
    events: BTreeMap<usize, Event>,
    folder: tempfile::TempDir,
}

impl Walk {
    /// Whether the fault of this rank has happened: the walk may have ended before.
    fn is_faulty(&self, rank: usize) -> bool {
        self.folder.path().join(format!("{rank}.fault")).exists()
    }

    fn is_stopped(&self, rank: usize) -> bool {
        self.is_faulty(rank) && self.events[&rank].fault == Fault::Stop
    }

    /// Runs all ranks. Returns how their processes have ended.
    fn run(&self) -> Vec<ExitStatus> {
        let variables = |_| {
            let messages_only = u8::from(self.number % 4 == 3).to_string();
            let folder = self.folder.path().display().to_string();
            vec![(Launched::MESSAGES_ONLY, messages_only), (WALK, self.number.to_string()), (FOLDER, folder)]
        };
        let (mut launched, start) = (Launch::start("walk", RANKS, variables), Instant::now());
        let mut stops: BTreeMap<usize, Instant> = BTreeMap::new();
        loop {
            let ends: Vec<_> = (0..RANKS).map(|rank| launched.process(rank).try_wait().expect("a child")).collect();
            if let Some(ends) = ends.iter().copied().collect() {
                return ends;
            }
            for rank in (0..RANKS).filter(|&rank| self.is_stopped(rank)) {
                stops.entry(rank).or_insert_with(Instant::now);
            }
            // The deadlines of the others have passed.
            let others_have_ended = (0..RANKS).all(|rank| ends[rank].is_some() || stops.contains_key(&rank));
            let is_over = |since: &Instant| others_have_ended && since.elapsed() >= STOP;
            for (&rank, _) in stops.iter().filter(|(rank, since)| ends[**rank].is_none() && is_over(since)) {
                kill_process(Pid::from_child(launched.process(rank)), Signal::CONT).expect("a child");
            }
            assert!(start.elapsed() < PLENTY, "walk {}, {:?}: {ends:?}", self.number, self.events);
            sleep(Duration::from_millis(5));
        }
    }

    /// Asserts that all ranks have ended as they should. Returns a line about the walk.
    fn check(&self, ends: &[ExitStatus]) -> String {
        let read = |rank: usize| Some((rank, Report::read(&self.folder.path().join(format!("{rank}.error")))?));
        let reports: BTreeMap<usize, Report> = (0..RANKS).filter_map(read).collect();
        let line = |rank: usize| {
            let event = self.events.get(&rank).map(|event| format!(", {event:?}, happened: {}", self.is_faulty(rank)));
            let report = reports.get(&rank).map(|report| format!(", after {:?}: {}", report.took, report.text));
            format!("  rank {rank}: {}{}{}", ends[rank], event.unwrap_or_default(), report.unwrap_or_default())
        };
        let all = (0..RANKS).map(line).collect::<Vec<_>>().join("\n");
        let check = |is_so: bool, what: &str| assert!(is_so, "walk {}: {what}\n{all}", self.number);

        for rank in (0..RANKS).filter(|&rank| !self.is_faulty(rank) || self.is_stopped(rank)) {
            check(ends[rank].success() && reports.contains_key(&rank), &format!("rank {rank} has another failure"));
        }
        let survivors: Vec<usize> = (0..RANKS).filter(|&rank| !self.is_faulty(rank)).collect();
        let explained = self.explained(&reports, &survivors);
        survivors.iter().for_each(|rank| check(explained.contains(rank), &format!("rank {rank} names no faulty rank")));
        let limit = if (0..RANKS).any(|rank| self.is_stopped(rank)) { LIMIT } else { DEADLINE };
        let slowest = survivors.iter().map(|rank| reports[rank].took).max().unwrap_or_default();
        check(slowest < limit, &format!("a call took {slowest:?}, and may take {limit:?}"));
        let faulty = self.events.iter().filter(|(rank, _)| self.is_faulty(**rank));
        let faulty: Vec<String> = faulty.map(|(rank, event)| format!("{rank} {:?}", event.fault)).collect();
        format!(
            "walk {}: {}; the slowest failing call of another rank took {slowest:?}",
            self.number,
            faulty.join(", ")
        )
    }

    /// The survivors whose error names a faulty rank, or one that has ended because of it: a rank that is late may wait for such a rank, and
    /// a rank whose call has failed in one group leaves the other group. Within a group it passes on the reason instead.
    fn explained(&self, reports: &BTreeMap<usize, Report>, survivors: &[usize]) -> Vec<usize> {
        let mut explained: Vec<usize> = Vec::new();
        loop {
            let is_reason = |own: &Report, named: usize| {
                let may_be = explained.contains(&named) && (own.is_late || own.in_half != reports[&named].in_half);
                self.is_faulty(named) || may_be
            };
            let is_new = |rank: &&usize| {
                let own = &reports[*rank];
                !explained.contains(rank) && own.named.iter().any(|&named| is_reason(own, named))
            };
            let new: Vec<usize> = survivors.iter().filter(is_new).copied().collect();
            if new.is_empty() {
                return explained;
            }
            explained.extend(new);
        }
    }
}

#[test]
fn every_survivor_ends_in_time_and_names_a_faulty_rank() {
    let _turn = turn();
    let walks = std::env::var(WALKS_VARIABLE).map_or(WALKS, |walks| {
        let range = walks.split_once("..").and_then(|(first, end)| Some(first.parse().ok()?..end.parse().ok()?));
        range.unwrap_or_else(|| panic!("{WALKS_VARIABLE}={walks} is not a range like 0..6"))
    });
    for number in walks {
        let walk = Walk { number, events: events(number), folder: tempfile::tempdir().expect("a folder") };
        let start = Instant::now();
        println!("{} ({:.1?})", walk.check(&walk.run()), start.elapsed());
    }
}
