//! A rank for the tests of `gradsync launch`: its arguments select its behaviour. It never ends by itself where it waits for a signal.

use std::io::{Write, stdout};
use std::process::{Command, exit};
use std::thread::sleep;
use std::time::Duration;

use gradsync::bootstrap::{Launch, Member, Rendezvous};
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::process::ProcessCommunicator;
use gradsync::comm::{Call, Collectives, Operation, Ranks, ReduceOp, Split};
use gradsync::internal::{MemberCalls, run_each_with_deadline};
use gradsync::ops::{AdasumOptions, adasum_all_reduce};
use gradsync::{DType, GradientBuffer};

const PLENTY: Duration = Duration::from_secs(20);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if arguments == ["threads"] {
        return threads();
    }
    let launch = Launch::from_env().unwrap();
    let is = |rank: &str| rank.parse() == Ok(launch.rank);
    match arguments[..] {
        ["variables", ref names @ ..] => {
            let value = |name: &&str| std::env::var(name).unwrap_or("-".into());
            println!("{}", names.iter().map(value).collect::<Vec<_>>().join(" "));
        }
        ["lines", count] => lines(count.parse().unwrap()),
        ["exit", rank, code] if is(rank) => {
            eprintln!("this rank ends with {code}");
            exit(code.parse().unwrap());
        }
        ["abort", rank] if is(rank) => std::process::abort(),
        ["join"] => drop(join(&launch)),
        ["join", "by variables"] => match launch.join() {
            Ok(member) => {
                let ranks = member.all_gather(launch.rank.to_string().as_bytes(), PLENTY).unwrap();
                let ranks: Vec<_> = ranks.iter().map(|rank| String::from_utf8_lossy(rank)).collect();
                println!("rank {} of {} has met ranks {}", launch.rank, launch.world_size, ranks.join(", "));
            }
            Err(error) => {
                eprintln!("{error}");
                exit(6);
            }
        },
        ["join", "once more"] => {
            let member = join(&launch);
            if std::env::var("GRADSYNC_GENERATION").as_deref() == Ok("0") && launch.rank == 1 {
                exit(9);
            }
            member.all_gather(b"done", PLENTY).unwrap_or_else(|_| exit(8));
        }
        ["grandchild", seconds] => grandchild(seconds),
        ["processors"] => println!("{}", allowed_processors()),
        ["mismatch", rank] => {
            let member = join(&launch);
            agree(&member, Operation::AllReduce(ReduceOp::Sum), 1000, PLENTY);
            let operation = if is(rank) { Operation::AllGather } else { Operation::AllReduce(ReduceOp::Sum) };
            agree(&member, operation, 500, PLENTY);
        }
        ["hang", rank, deadline] => {
            let member = join(&launch);
            agree(&member, Operation::AllReduce(ReduceOp::Sum), 1000, PLENTY);
            println!("ready");
            if is(rank) {
                wait();
            }
            agree(&member, Operation::AllReduce(ReduceOp::Max), 7, Duration::from_millis(deadline.parse().unwrap()));
        }
        ["communicator", rank] => {
            let comm = ProcessCommunicator::new_within(join(&launch), Duration::from_millis(400)).unwrap();
            let mut data = vec![1.0f32; 100_000];
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert_eq!(data[99], launch.world_size as f32);
            let tensors = [("a", vec![3]), ("b", vec![4])];
            let mut buffer = GradientBuffer::new(DType::F32, launch.world_size, tensors).unwrap();
            if is(rank) {
                wait();
            }
            if let Err(error) = adasum_all_reduce(&comm, &mut buffer, AdasumOptions::default()) {
                eprintln!("{error}");
                drop(comm);
                exit(7);
            }
        }
        ["panics", rank] => {
            let _slow = is(rank).then_some(SlowDrop);
            let member = join(&launch);
            assert!(!is(rank), "a bug of rank {rank}");
            agree(&member, Operation::Barrier, 0, PLENTY);
        }
        ["requeues", rank] => {
            requeue_at_sigusr1();
            let member = join(&launch);
            if is(rank) {
                exit(3);
            }
            agree(&member, Operation::Barrier, 0, PLENTY);
        }
        ["forks and dies", rank] => {
            let member = join(&launch);
            if is(rank) {
                println!("process {}", fork());
                exit(5);
            }
            agree(&member, Operation::Barrier, 0, PLENTY);
        }
        ["is killed", rank] => {
            let member = join(&launch);
            println!("process {}", std::process::id());
            if is(rank) {
                wait();
            }
            agree(&member, Operation::Barrier, 0, PLENTY);
        }
        _ => {
            println!("ready");
            wait();
        }
    }
}

/// Runs ranks as threads, of which the last never calls the second collective.
fn threads() {
    let (done, is_done) = std::sync::mpsc::channel();
    let is_done = std::sync::Mutex::new(is_done);
    let body = |comm: LocalCommunicator| {
        let mut data = [1.0f32; 5];
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        if comm.rank() == 2 {
            // The last rank returns once the others have failed or panicked.
            (0..2).for_each(|_| _ = is_done.lock().unwrap().recv());
            return;
        }
        let sums = comm.split(Some(0), 0);
        println!("{}", sums.unwrap_err());
        let _ = done.send(());
    };
    run_each_with_deadline(3, Duration::from_millis(200), body).unwrap();
}

fn join(launch: &Launch) -> Member {
    let rendezvous = Rendezvous::from_env(launch).unwrap().with_deadline(PLENTY);
    rendezvous.join(launch.rank, launch.world_size).unwrap()
}

/// Compares the ranks' calls as a collective does, but moves no data.
fn agree(member: &Member, operation: Operation, len: usize, deadline: Duration) {
    if let Err(error) = member.agree(&[Call::new(operation, len, DType::F32)], deadline) {
        eprintln!("{error}");
        // If this is rank 0, its departure makes the other ranks' calls fail too.
        member.leave();
        exit(7);
    }
}

/// Takes longer to be dropped than the launcher looks for simultaneous ends.
struct SlowDrop;

impl Drop for SlowDrop {
    fn drop(&mut self) {
        sleep(Duration::from_millis(500));
    }
}

/// Ends this process in good order at SIGUSR1, as programs do that a batch system shall start again.
fn requeue_at_sigusr1() {
    extern "C" fn requeue(_: libc::c_int) {
        let line = b"requeued\n";
        // SAFETY: both calls may be made in a signal handler; the line is valid.
        unsafe {
            libc::write(1, line.as_ptr().cast(), line.len());
            libc::_exit(0);
        }
    }
    // SAFETY: the handler only makes calls that handlers may make.
    unsafe { libc::signal(libc::SIGUSR1, requeue as extern "C" fn(libc::c_int) as libc::sighandler_t) };
}

/// Starts a copy of this process that keeps its sockets open, in a session of its own, and returns the copy's process ID.
fn fork() -> i32 {
    // SAFETY: the copy has one thread, and only makes calls that use neither the heap nor locks.
    unsafe {
        let process = libc::fork();
        if process == 0 {
            libc::setsid();
            loop {
                libc::pause();
            }
        }
        process
    }
}

fn wait() -> ! {
    loop {
        sleep(PLENTY);
    }
}

/// Prints many lines to both streams, each in several pieces.
fn lines(count: usize) {
    for number in 0..count {
        for piece in ["line ", &number.to_string(), " of stdout\n"] {
            stdout().write_all(piece.as_bytes()).unwrap();
            stdout().flush().unwrap();
        }
        eprintln!("line {number} of stderr");
    }
    print!("without an end");
}

/// Starts a process that outlives this one unless it is ended, and prints both process IDs.
fn grandchild(seconds: &str) {
    let mut child = Command::new("sleep").arg(seconds).spawn().unwrap();
    println!("processes {} {}", std::process::id(), child.id());
    let _ = child.wait();
}

fn allowed_processors() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    line.map(str::trim).unwrap_or_default().to_owned()
}
