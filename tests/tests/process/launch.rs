//! Starts ranks as processes of this program with a role, and holds the body of these processes.

use std::process::{Child, Command, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use gradsync_tests::programs::started_as_ranks;

/// The variable with the role of a process; without it, [`rank`] does nothing.
const ROLE: &str = "GRADSYNC_TEST_ROLE";
/// The time limit of one launch, on a machine with other work.
const PLENTY: Duration = Duration::from_secs(240);

/// Runs one launch at a time: many cases measure time, and there may be few cores.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The processes of a launch, which are killed when it is dropped.
pub(crate) struct Launch(Vec<Child>);

impl Launch {
    /// Starts `world_size` processes in this role, with these variables of each rank.
    pub(crate) fn start(
        role: &str,
        world_size: usize,
        variables: impl Fn(usize) -> Vec<(&'static str, String)>,
    ) -> Self {
        let ranks = started_as_ranks("launch::rank", world_size).into_iter().enumerate();
        let with_variables = |(rank, mut command): (usize, Command)| {
            command.envs(variables(rank));
            command
        };
        Self::of(role, ranks.map(with_variables))
    }

    /// Starts processes in this role by these commands.
    pub(crate) fn of(role: &str, ranks: impl Iterator<Item = Command>) -> Self {
        Self(ranks.map(|mut command| command.env(ROLE, role).spawn().expect("a process")).collect())
    }

    pub(crate) fn process(&mut self, rank: usize) -> &mut Child {
        &mut self.0[rank]
    }

    /// Waits for the end of every process.
    pub(crate) fn ends(mut self) -> Vec<ExitStatus> {
        let start = Instant::now();
        loop {
            let ends: Vec<_> = self.0.iter_mut().map(|child| child.try_wait().expect("a child")).collect();
            if let Some(ends) = ends.iter().copied().collect() {
                return ends;
            }
            assert!(start.elapsed() < PLENTY, "ranks that do not end: {ends:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asserts that every process ends with success.
    pub(crate) fn finish(self) {
        for (rank, end) in self.ends().into_iter().enumerate() {
            assert!(end.success(), "rank {rank} ended with {end}");
        }
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // The process may have ended long ago.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The body of every process; it does nothing when it runs as a test.
#[test]
fn rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "cases" => crate::suite::run(),
        "machines" => crate::machines::run(),
        #[cfg(target_os = "linux")]
        "namespaces" => crate::namespaces::run(),
        #[cfg(target_os = "linux")]
        "unreadable" => crate::namespaces::run_unreadable(),
        "no descriptor" => crate::set_up::run(),
        #[cfg(target_os = "linux")]
        "walk" => crate::walk::run(),
        "join" => gradsync_tests::suite::processes::join(),
        other => crate::faults::run(other),
    }
}
