//! Processes that are stopped, continued and interrupted while they join.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use gradsync::bootstrap::{Launch, Rendezvous};
use gradsync_tests::ranks::guarded;

use crate::group::{Way, barrier, on_ranks};
use crate::member_processes::Process;

/// A system call that was waiting with a timeout is interrupted when its process is stopped and continued.
#[test]
fn join_goes_on_after_a_stop() {
    guarded(120, || {
        for stopped in [1, 0, 2] {
            let meeting = Way::Tcp.meeting();
            let process = Process::start("visitor", stopped, 3, meeting.port);
            let others: Vec<usize> = (0..3).filter(|rank| *rank != stopped).collect();
            let join = |rank: usize| meeting.rendezvous.join(rank, 3).unwrap();
            thread::scope(|scope| {
                let early = scope.spawn(|| join(others[0]));
                // The process has time to connect to the others in most runs; the outcome is the same if it does not.
                thread::sleep(Duration::from_millis(500));
                process.stop();
                let late = scope.spawn(|| join(others[1]));
                thread::sleep(Duration::from_millis(300));
                process.signal("CONT");
                let members = [early.join().unwrap(), late.join().unwrap()];
                on_ranks(0..2, |index| (0..2).for_each(|_| barrier(&members[index])));
            });
            process.finish();
        }
    });
}

/// Profilers and runtimes send signals all the time, and no call of the control channel may take a signal for an error.
#[test]
fn join_succeeds_under_a_storm_of_signals() {
    guarded(300, || {
        let port = Way::Tcp.meeting().port;
        let processes = [0, 1, 2].map(|rank| Process::start("is interrupted", rank, 3, port));
        processes.into_iter().for_each(Process::finish);
    });
}

/// Joins one group after another, while all threads of this process are interrupted.
pub(crate) fn join_under_signals(launch: &Launch, rendezvous: &Rendezvous) {
    const GROUPS: u64 = 100;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| interrupt_all_threads(&is_over));
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            for generation in 0..GROUPS {
                let rendezvous = rendezvous.clone().with_generation(generation);
                let member = rendezvous.join(launch.rank, launch.world_size);
                barrier(&member.unwrap_or_else(|error| panic!("rank {}: {error}", launch.rank)));
            }
        }));
        is_over.store(true, Ordering::Relaxed);
        outcome.unwrap_or_else(|panic| resume_unwind(panic));
    });
}

/// Sends a signal to every other thread of this process every 0.3 ms. System calls that it interrupts are not restarted.
fn interrupt_all_threads(is_over: &AtomicBool) {
    extern "C" fn ignore(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = ignore;
    // SAFETY: A `sigaction` of zeros has no flags, `SA_RESTART` among them, and blocks nothing; the handler does nothing.
    let outcome = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut())
    };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: The call has no preconditions.
    let own = unsafe { libc::gettid() };
    while !is_over.load(Ordering::Relaxed) {
        let tasks = std::fs::read_dir("/proc/self/task").expect("the threads of this process");
        let threads = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<libc::pid_t>().ok());
        for thread in threads.filter(|thread| *thread != own) {
            // SAFETY: A signal that this process handles; the thread may have ended by now, which is an error to ignore.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGUSR1) };
        }
        thread::sleep(Duration::from_micros(300));
    }
}
