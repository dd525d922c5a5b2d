//! What a rank of a suite is given: its number, its GPU, and communicators with the others.

use std::process::ExitCode;
use std::time::Duration;

use gradsync::Result;
use gradsync::bootstrap::{Launch, Member, Rendezvous};
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::driver::Queue;

use crate::Suite;
use crate::report::Report;

/// One rank.
pub(crate) struct Context {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// A queue on this rank's GPU.
    pub(crate) queue: Queue,
    rendezvous: Rendezvous,
}

/// Long enough for the slowest case, short enough to end a suite that hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);

impl Context {
    /// What communicators of these tests are made with: calls are checked.
    pub(crate) fn options(&self) -> NcclOptions {
        NcclOptions { deadline: DEADLINE, checks: true, ..NcclOptions::default() }
    }

    /// A communicator of all ranks. `generation` tells the groups of one launch apart.
    pub(crate) fn communicator(&self, generation: u64, options: &NcclOptions) -> NcclCommunicator {
        self.communicator_of(self.rank, self.world_size, generation, options)
    }

    /// A communicator of some ranks, where this one has another number.
    pub(crate) fn communicator_of(
        &self,
        rank: usize,
        world_size: usize,
        generation: u64,
        options: &NcclOptions,
    ) -> NcclCommunicator {
        let member = self
            .join(rank, world_size, generation, DEADLINE)
            .unwrap_or_else(|error| panic!("join of generation {generation}: {error}"));
        NcclCommunicator::new(member, &self.queue, options).unwrap_or_else(|error| panic!("communicator: {error}"))
    }

    /// The control channel of some ranks, without a communicator.
    pub(crate) fn join(&self, rank: usize, world_size: usize, generation: u64, deadline: Duration) -> Result<Member> {
        self.rendezvous.clone().with_generation(generation).with_deadline(deadline).join(rank, world_size)
    }
}

/// Runs this process's rank, or all ranks as threads.
pub(crate) fn run(suite: &Suite) -> ExitCode {
    let has_failed = if suite.in_threads { run_threads(suite) } else { run_process(suite) };
    if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run_process(suite: &Suite) -> bool {
    let launch = Launch::from_env().unwrap_or_else(|error| panic!("{error}"));
    let rendezvous = Rendezvous::from_env(&launch).unwrap_or_else(|error| panic!("{error}"));
    let device = launch.local_rank.unwrap_or(launch.rank);
    run_rank(suite, launch.rank, launch.world_size, device, rendezvous, true)
}

fn run_threads(suite: &Suite) -> bool {
    let world_size = std::env::var("WORLD_SIZE").ok().and_then(|text| text.parse().ok()).expect("WORLD_SIZE, a number");
    let rendezvous = Rendezvous::in_process();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let rendezvous = rendezvous.clone();
                scope.spawn(move || run_rank(suite, rank, world_size, rank, rendezvous, rank == 0))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or(true)).fold(false, |any, failed| any | failed)
    })
}

fn run_rank(
    suite: &Suite,
    rank: usize,
    world_size: usize,
    device: usize,
    rendezvous: Rendezvous,
    is_speaker: bool,
) -> bool {
    let queue = Queue::new(device as u32).unwrap_or_else(|error| panic!("device {device}: {error}"));
    let context = Context { rank, world_size, queue, rendezvous };
    let mut report = Report::new(is_speaker);
    (suite.run)(&context, &mut report);
    report.has_failed
}
