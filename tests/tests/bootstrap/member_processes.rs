//! Ranks as processes: launched through variables, exiting, killed and stopped. This program starts itself again for them, as the test
//! [`child`] with a role in a variable.

use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use gradsync::CommError;
use gradsync::bootstrap::{Launch, Member, Rendezvous};
use gradsync::comm::{Departure, Operation};
use gradsync::internal::MemberCalls;
use gradsync_tests::ranks::guarded;

use crate::PLENTY;
use crate::group::{Meeting, Way, barrier, mismatch, on_ranks, reduce, refused, secret, sync};
#[cfg(target_os = "linux")]
use crate::join_under_signals::join_under_signals;

/// The variable with the role of a child; without it, [`child`] does nothing.
const ROLE: &str = "GRADSYNC_TEST_ROLE";
/// The time within which all ranks must know of the end of a process, on a machine with nothing else to do.
const SOON: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(1);
/// The number of calls that processes announce without ever waiting for each other.
const FLOOD: usize = 100_000;

/// A process that is killed when the test ends, whatever the outcome.
pub(crate) struct Process(Child);

impl Process {
    /// Starts a rank in this role; the group joins by `port`.
    pub(crate) fn start(role: &str, rank: usize, world_size: usize, port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["member_processes::child", "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        for (name, value) in [("RANK", rank), ("WORLD_SIZE", world_size), ("MASTER_PORT", usize::from(port))] {
            command.env(name, value.to_string());
        }
        command.env("MASTER_ADDR", "127.0.0.1").env("GRADSYNC_SECRET", secret().reveal());
        for other in ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"] {
            command.env_remove(other);
        }
        command.env_remove("SLURM_PROCID").env_remove("SLURM_NTASKS");
        if role == "knows no secret" {
            command.env_remove("GRADSYNC_SECRET");
        }
        Process(command.stdout(Stdio::null()).spawn().expect("a child process"))
    }

    /// Waits until the process ends by itself; panics if it ends with an error.
    pub(crate) fn finish(mut self) {
        let status = self.0.wait().expect("a child process");
        assert!(status.success(), "a child ended with {status}");
    }

    pub(crate) fn signal(&self, name: &str) {
        let kill = format!("kill -{name} {}", self.0.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().expect("a shell").success(), "{kill}");
    }

    /// Stops the process, and waits until all of its threads are stopped.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
        let tasks = format!("/proc/{}/task", self.0.id());
        let is_stopped = |task: std::fs::DirEntry| {
            // The state follows the name, which is in parentheses.
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        };
        let start = Instant::now();
        while !std::fs::read_dir(&tasks).is_ok_and(|tasks| tasks.flatten().all(is_stopped)) {
            assert!(start.elapsed() < PLENTY, "it does not stop");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended long ago.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The body of every child; it does nothing when it runs as a test.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let launch = Launch::from_env().unwrap();
    if role == "knows no secret" {
        let error = Rendezvous::from_env(&launch).expect_err("not set").to_string();
        return assert!(error.contains("GRADSYNC_SECRET") && error.contains("`gradsync secret` makes"), "{error}");
    }
    let rendezvous = Rendezvous::from_env(&launch).unwrap().with_deadline(PLENTY);
    if role == "threads" {
        return threads_end(&rendezvous);
    }
    let join = || rendezvous.join(launch.rank, launch.world_size);
    if role == "lonely" {
        refused(join());
        return;
    }
    #[cfg(target_os = "linux")]
    if role == "lacks descriptors" {
        return crate::join_without_resources::join_without_descriptors(&launch, &rendezvous);
    }
    #[cfg(target_os = "linux")]
    if role == "is interrupted" {
        return join_under_signals(&launch, &rendezvous);
    }
    let member = join().unwrap();
    if role == "hears" {
        // The killed rank may be rank 0, before it has let this rank through the barrier.
        let _ = member.all_gather(b"barrier", PLENTY);
        member.wait_failure(PLENTY).expect("somebody is killed");
        return;
    }
    if role == "posts" {
        member.posted(sync());
    }
    barrier(&member);
    match role.as_str() {
        "visitor" => barrier(&member),
        "exits" => std::process::exit(0),
        "aborts" => std::process::abort(),
        "announces in another order" => {
            // The mismatch may be known before all calls are announced.
            let announced = [sync(), reduce(1)].iter().try_for_each(|call| member.announce(&[*call], PLENTY));
            let error = announced.and_then(|()| member.confirm(PLENTY)).unwrap_err();
            // Of the ranks that call the other operation, the one that is compared first is named.
            assert!(matches!(error, CommError::Mismatch { left_rank: 0 | 1, right_rank: 2, .. }), "{error}");
        }
        "announces a flood" => {
            for number in 0..FLOOD {
                member.announce(&[reduce(number)], PLENTY).unwrap();
            }
            member.confirm(PLENTY).unwrap();
            barrier(&member);
        }
        "announces" => {
            (0..9).for_each(|_| member.announce(&[sync()], PLENTY).unwrap());
            thread::sleep(PLENTY);
        }
        "sleeps" | "posts" => thread::sleep(PLENTY),
        other => panic!("no role {other}"),
    }
}

/// Starts the children with their ranks, and the other ranks as threads of this process. Runs `body` on these threads once all ranks have
/// joined and passed a barrier.
fn with_children<T: Send>(
    world_size: usize,
    children: &[(usize, &str)],
    body: impl Fn(&Member, &[Process]) -> T + Sync,
) -> (Vec<T>, Vec<Process>) {
    let meeting: Meeting = Way::Tcp.meeting();
    let processes: Vec<Process> =
        children.iter().map(|(rank, role)| Process::start(role, *rank, world_size, meeting.port)).collect();
    let here: Vec<usize> = (0..world_size).filter(|rank| children.iter().all(|(child, _)| child != rank)).collect();
    // One rank may be through the barrier, and have killed rank 0, before rank 0 has let the others through.
    let all_through = Barrier::new(here.len());
    let outcomes = on_ranks(here, |rank| {
        let member = meeting.rendezvous.join(rank, world_size).unwrap();
        barrier(&member);
        all_through.wait();
        body(&member, &processes)
    });
    (outcomes, processes)
}

/// Waits for the failure of the group; returns it with the time at which this rank learned of it.
fn failure(member: &Member) -> (CommError, Instant) {
    (member.wait_failure(PLENTY).expect("a rank is gone"), Instant::now())
}

fn lost(rank: usize) -> CommError {
    CommError::PeerGone { operation: Operation::Exchange, rank, departure: Departure::Lost }
}

#[test]
fn member_of_launched_processes_finds_the_others() {
    guarded(120, || {
        let (_, processes) = with_children(4, &[(0, "visitor"), (2, "visitor"), (3, "visitor")], |member, _| {
            barrier(member);
            assert_eq!(member.failure(), None);
        });
        processes.into_iter().for_each(Process::finish);
    });
}

#[test]
fn from_env_asks_for_a_secret_that_is_not_set() {
    guarded(120, || Process::start("knows no secret", 0, 2, 29_500).finish());
}

/// The process ends without notice, as after an `exit` deep inside some library, or by a crash.
#[test]
fn failure_names_a_process_that_ends() {
    guarded(120, || {
        for role in ["exits", "aborts"] {
            let (errors, _) = with_children(3, &[(1, role)], |member, _| failure(member).0);
            assert_eq!(errors, [lost(1), lost(1)], "{role}");
        }
    });
}

#[test]
fn failure_names_a_killed_process_soon() {
    guarded(120, || {
        let (times, mut processes) = with_children(4, &[(2, "sleeps"), (3, "hears")], |member, processes| {
            let start = Instant::now();
            if member.rank() == 0 {
                processes[0].signal("KILL");
            }
            let (error, known) = failure(member);
            assert_eq!(error, lost(2));
            assert_eq!(
                member.agree(&[sync()], PLENTY),
                Err(CommError::PeerGone { operation: sync().operation, rank: 2, departure: Departure::Lost })
            );
            known - start
        });
        assert!(times.iter().all(|time| *time < SOON), "{times:?}");
        // The other child hears of it as well.
        processes.remove(1).finish();
    });
}

/// Ranks that wait in a call for the killed process hear of it too.
#[test]
fn agree_ends_when_the_awaited_process_is_killed() {
    guarded(120, || {
        let (errors, _) = with_children(3, &[(1, "sleeps")], |member, processes| {
            thread::scope(|scope| {
                if member.rank() == 0 {
                    scope.spawn(|| {
                        thread::sleep(Duration::from_millis(200));
                        processes[0].signal("KILL");
                    });
                }
                member.agree(&[sync()], PLENTY).unwrap_err()
            })
        });
        let expected = CommError::PeerGone { operation: sync().operation, rank: 1, departure: Departure::Lost };
        assert_eq!(errors, vec![expected; 2]);
    });
}

/// The coordinator ends with rank 0, so every rank detects the loss by itself.
#[test]
fn failure_names_a_killed_rank_0_soon() {
    guarded(120, || {
        let (times, mut processes) = with_children(4, &[(0, "sleeps"), (3, "hears")], |member, processes| {
            let start = Instant::now();
            if member.rank() == 1 {
                processes[0].signal("KILL");
            }
            let (error, known) = failure(member);
            assert_eq!(error, lost(0));
            known - start
        });
        assert!(times.iter().all(|time| *time < SOON), "{times:?}");
        processes.remove(1).finish();
    });
}

/// A stopped process keeps its connections, so only missing answers reveal it.
#[test]
fn wait_failure_names_a_stopped_process() {
    guarded(120, || {
        // The barrier is for the ranks in this process: they must not use the control channel, which is about to fail.
        let step = Barrier::new(3);
        let (errors, _) = with_children(4, &[(1, "sleeps")], |member, processes| {
            if member.rank() == 0 {
                processes[0].stop();
            }
            step.wait();
            member.all_gather(b"", DEADLINE).expect_err("one is stopped")
        });
        let operation = Operation::Exchange;
        assert_eq!(errors, vec![CommError::Timeout { operation, missing: vec![1], deadline: DEADLINE }; 3]);

        let step = Barrier::new(2);
        let (errors, processes) = with_children(4, &[(1, "posts"), (3, "hears")], |member, processes| {
            let sequence = member.posted(sync());
            if member.rank() == 0 {
                processes[0].stop();
                step.wait();
                return member.late(sequence, sync().operation, DEADLINE);
            }
            step.wait();
            failure(member).0
        });
        // Rank 1 has made the collective but cannot answer; the other child answers that it has not made it.
        assert_eq!(errors, vec![timeout(&[1, 3]); 2]);
        drop(processes);
    });
}

fn timeout(missing: &[usize]) -> CommError {
    CommError::Timeout { operation: sync().operation, missing: missing.to_vec(), deadline: DEADLINE }
}

/// Rank 1 has announced 9 of 14 calls, and the others find it behind when they confirm their own calls.
#[test]
fn confirm_names_a_stopped_process() {
    guarded(120, || {
        let step = Barrier::new(3);
        let (errors, _) = with_children(4, &[(1, "announces")], |member, processes| {
            (0..9).for_each(|_| member.announce(&[sync()], PLENTY).unwrap());
            member.confirm(PLENTY).unwrap();
            step.wait();
            if member.rank() == 0 {
                processes[0].stop();
            }
            step.wait();
            (9..14).for_each(|_| member.announce(&[sync()], PLENTY).unwrap());
            member.confirm(DEADLINE).expect_err("one is stopped")
        });
        assert_eq!(errors, vec![timeout(&[1]); 3]);
    });
}

#[test]
fn announce_names_processes_of_another_order() {
    guarded(120, || {
        let (errors, processes) = with_children(3, &[(2, "announces in another order")], |member, _| {
            let calls = [reduce(1), sync()];
            let outcome = calls.iter().try_for_each(|call| member.announce(&[*call], PLENTY));
            outcome.and_then(|()| member.confirm(PLENTY)).expect_err("the order differs")
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        let expected = [0, 1].map(|rank| mismatch(rank, reduce(1), 2, sync()));
        assert!(expected.contains(&errors[0]), "{errors:?}");
        processes.into_iter().for_each(Process::finish);
    });
}

#[test]
fn confirm_takes_a_flood_of_announced_calls() {
    guarded(120, || {
        let (_, processes) = with_children(3, &[(0, "announces a flood"), (2, "announces a flood")], |member, _| {
            for number in 0..FLOOD {
                member.announce(&[reduce(number)], PLENTY).unwrap();
            }
            member.confirm(PLENTY).unwrap();
            barrier(member);
        });
        processes.into_iter().for_each(Process::finish);
    });
}

/// The coordinator stops with rank 0: every other rank reports rank 0 by itself, and does not wait much longer than its deadline.
#[test]
fn wait_failure_names_a_stopped_rank_0() {
    guarded(120, || {
        for asks in [false, true] {
            let step = Barrier::new(2);
            let (outcomes, _) = with_children(3, &[(0, "sleeps")], |member, processes| {
                let sequence = member.posted(sync());
                if member.rank() == 1 {
                    processes[0].stop();
                }
                step.wait();
                let start = Instant::now();
                let error = match asks {
                    true => member.late(sequence, sync().operation, DEADLINE),
                    false => member.agree(&[sync()], DEADLINE).unwrap_err(),
                };
                assert_eq!(member.failure(), Some(error.clone()), "it sticks");
                (error, start.elapsed())
            });
            for (error, took) in outcomes {
                assert_eq!(error, timeout(&[0]));
                assert!(took < DEADLINE + 3 * SOON, "{took:?}");
            }
        }
    });
}

/// While ranks join, a rank that was killed may be started again.
#[test]
fn join_takes_a_rank_again_that_was_killed_while_joining() {
    guarded(120, || {
        let meeting = Way::Tcp.meeting();
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| barrier(&meeting.rendezvous.join(0, 3).unwrap()));
            let first = Process::start("sleeps", 1, 3, meeting.port);
            // The process has time to connect to the others in most runs; the outcome is the same if it does not.
            thread::sleep(Duration::from_millis(500));
            drop(first);
            thread::sleep(Duration::from_millis(100));
            on_ranks([1, 2], |rank| barrier(&meeting.rendezvous.join(rank, 3).unwrap()));
            rank_0.join().unwrap();
        });
    });
}

/// Rank 0 is killed while ranks join, and they look for it again.
#[test]
fn join_takes_rank_0_again_that_was_killed_while_joining() {
    guarded(120, || {
        let meeting = Way::Tcp.meeting();
        thread::scope(|scope| {
            let first = Process::start("lonely", 0, 3, meeting.port);
            let rank_1 = scope.spawn(|| barrier(&meeting.rendezvous.join(1, 3).unwrap()));
            thread::sleep(Duration::from_millis(500));
            drop(first);
            on_ranks([0, 2], |rank| barrier(&meeting.rendezvous.join(rank, 3).unwrap()));
            rank_1.join().unwrap();
        });
    });
}

/// The threads of a group end with it; a group inside one process has no threads.
#[test]
fn member_ends_its_threads() {
    guarded(120, || Process::start("threads", 0, 2, Way::Tcp.meeting().port).finish());
}

/// Runs in a process where nothing else runs, as it counts all threads.
fn threads_end(rendezvous: &Rendezvous) {
    let count = || std::fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
    let before = count();
    let settled = |what: &str| {
        let start = Instant::now();
        while count() > before {
            assert!(start.elapsed() < Duration::from_secs(5), "{} threads are left after {what}", count() - before);
            thread::sleep(Duration::from_millis(5));
        }
    };
    let groups = [("in process", Rendezvous::in_process()), ("over connections", rendezvous.clone())];
    for (what, rendezvous) in groups {
        let members = on_ranks(0..2, |rank| rendezvous.join(rank, 2).unwrap());
        if what == "in process" {
            settled("a join in one process");
        }
        let children = thread::scope(|scope| {
            let splits: Vec<_> =
                members.iter().map(|member| scope.spawn(|| member.split(Some(1), 0, PLENTY))).collect();
            splits.into_iter().map(|split| split.join().unwrap().unwrap()).collect::<Vec<_>>()
        });
        drop(members);
        drop(children);
        settled(what);
    }
    let silent = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let elsewhere = silent.local_addr().unwrap().port();
    let wrong = Rendezvous::tcp("127.0.0.1", elsewhere, secret()).with_deadline(Duration::from_millis(100));
    refused(wrong.join(1, 2));
    refused(rendezvous.clone().with_deadline(Duration::from_millis(100)).join(0, 2));
    settled("joins that failed");
}
