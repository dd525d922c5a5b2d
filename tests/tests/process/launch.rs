//! Starts ranks as processes of this program, in a role; and is what such a process does.

use std::process::{Child, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use gradsync_tests::programs::started_as_ranks;

/// What a process is to do; without it, [`rank`] does nothing.
const ROLE: &str = "GRADSYNC_TEST_ROLE";
/// For one launch, on a machine that has more to do.
const PLENTY: Duration = Duration::from_secs(240);

/// One launch at a time: many cases are about time, and there may be few cores.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The processes of a launch, which are killed if they are still there at its end.
pub(crate) struct Launched(Vec<Child>);

impl Launched {
    /// Starts `world_size` processes in this role, with these variables of each rank.
    pub(crate) fn start(
        role: &str,
        world_size: usize,
        variables: impl Fn(usize) -> Vec<(&'static str, String)>,
    ) -> Self {
        let ranks = started_as_ranks("launch::rank", world_size).into_iter().enumerate();
        Self(
            ranks
                .map(|(rank, mut command)| command.env(ROLE, role).envs(variables(rank)).spawn().expect("a process"))
                .collect(),
        )
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

    /// Fails unless every process ends well.
    pub(crate) fn finish(self) {
        for (rank, end) in self.ends().into_iter().enumerate() {
            assert!(end.success(), "rank {rank} ended with {end}");
        }
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended long ago.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The body of every process; as a test of its own it does nothing.
#[test]
fn rank() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "cases" => crate::suite::run(),
        "machines" => crate::machines::run(),
        "no descriptor" => crate::set_up::run(),
        other => crate::faults::run(other),
    }
}
