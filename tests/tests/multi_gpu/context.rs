//! The context of a rank in a suite: its rank, its GPU, and communicators with the others.

use std::net::{Ipv4Addr, TcpListener};
use std::process::ExitCode;
use std::time::Duration;

use gradsync::Result;
use gradsync::bootstrap::{Launch, Member, Rendezvous, Secret};
use gradsync::comm::mpi::MpiCommunicator;
use gradsync::comm::mpi::device::{MpiDeviceCommunicator, MpiDeviceOptions};
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::comm::{Collectives, Ranks};
use gradsync::driver::Queue;

use crate::Suite;
use crate::layout::Layout;
use crate::report::Report;

/// One rank.
pub(crate) struct Context {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    /// The placement of ranks on GPUs and nodes.
    pub(crate) layout: Layout,
    /// A queue on this rank's GPU.
    pub(crate) queue: Queue,
    rendezvous: Rendezvous,
    job: Option<MpiCommunicator>,
    /// Whether all ranks are threads of this process.
    pub(crate) in_threads: bool,
}

/// Long enough for the slowest case, which is the first use of NCCL under compute-sanitizer; short enough to end a suite that hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(90);

impl Context {
    /// The options of most communicators in these tests: calls are checked.
    pub(crate) fn options(&self) -> NcclOptions {
        NcclOptions::default().with_deadline(DEADLINE).with_shared_gpu(self.layout.shares_gpus())
    }

    /// The communicator of a suite, the creation of which is its first case; `None` after a failure.
    pub(crate) fn first(&self, report: &mut Report) -> Option<NcclCommunicator> {
        let mut comm = None;
        report.case("communicator", || comm = Some(self.communicator(0, &self.options())));
        comm
    }

    /// A communicator of all ranks. `generation` distinguishes the groups of one launch.
    pub(crate) fn communicator(&self, generation: u64, options: &NcclOptions) -> NcclCommunicator {
        self.communicator_of(self.rank, self.world_size, generation, options)
    }

    /// A communicator of some ranks, where this rank may have another number.
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

    /// The host communicator of all ranks of the MPI job, for suites that run in one.
    pub(crate) fn job(&self) -> &MpiCommunicator {
        self.job.as_ref().expect("a suite whose ranks are an MPI job")
    }

    /// Another host communicator of all ranks of the MPI job. All ranks have to call it.
    pub(crate) fn world(&self) -> MpiCommunicator {
        MpiCommunicator::world().unwrap_or_else(|error| panic!("world: {error}")).with_deadline(DEADLINE)
    }

    /// A device communicator of all ranks of the MPI job. All ranks have to call it.
    pub(crate) fn mpi_communicator(&self, options: MpiDeviceOptions) -> MpiDeviceCommunicator {
        let comm = MpiDeviceCommunicator::new(self.world(), &self.queue, options);
        comm.unwrap_or_else(|error| panic!("communicator over MPI: {error}"))
    }

    /// Joins the control channel of some ranks, without a communicator.
    pub(crate) fn join(&self, rank: usize, world_size: usize, generation: u64, deadline: Duration) -> Result<Member> {
        self.rendezvous.clone().with_generation(generation).with_deadline(deadline).join(rank, world_size)
    }
}

/// Tests whether a new process can use the first GPU: a server of CUDA MPS needs some seconds after a client was killed.
pub(crate) fn probe() -> ExitCode {
    match Queue::new(0).map_err(gradsync::Error::from).and_then(|queue| Ok(queue.synchronize()?)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs this process's rank, or all ranks as threads.
pub(crate) fn run(suite: &Suite) -> ExitCode {
    let has_failed = match suite {
        Suite { in_threads: true, .. } => run_threads(suite),
        Suite { in_job: true, .. } => run_job(suite),
        _ => run_process(suite),
    };
    if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn run_process(suite: &Suite) -> bool {
    let launch = Launch::from_env().unwrap_or_else(|error| panic!("{error}"));
    let rendezvous = Rendezvous::from_env(&launch).unwrap_or_else(|error| panic!("{error}"));
    let layout = Layout::from_env(launch.world_size);
    assert_eq!(launch.local_world_size, Some(layout.ranks_per_node), "ranks of a node");
    let queue = queue(layout.device(launch.rank));
    let (rank, world_size) = (launch.rank, launch.world_size);
    let context = Context { rank, world_size, layout, queue, rendezvous, job: None, in_threads: false };
    run_rank(suite, &context, true)
}

/// Runs a rank of the MPI job that `mpirun` has started. Rank 0 prints for all.
fn run_job(suite: &Suite) -> bool {
    let job = MpiCommunicator::world().unwrap_or_else(|error| panic!("{error}")).with_deadline(DEADLINE);
    let launch = Launch::from_env().unwrap_or_else(|error| panic!("{error}"));
    let (rank, world_size) = (job.rank(), job.world_size());
    assert_eq!((launch.rank, launch.world_size), (rank, world_size), "what the launcher says, and what MPI says");
    let rendezvous = rendezvous(&job);
    let layout = Layout::from_env(world_size);
    let queue = queue(layout.device(rank));
    let context = Context { rank, world_size, layout, queue, rendezvous, job: Some(job), in_threads: false };
    run_rank(suite, &context, rank == 0)
}

/// The rendezvous of the ranks of an MPI job, which are on one machine: rank 0 chooses a free port and a secret.
fn rendezvous(job: &MpiCommunicator) -> Rendezvous {
    // The words hold the text of a secret, which has a fixed length, and the port.
    let mut words = [0.0; 12];
    if job.rank() == 0 {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
        let port = port.unwrap_or_else(|error| panic!("a free port: {error}")).port();
        let secret = Secret::generate().unwrap_or_else(|error| panic!("{error}")).reveal();
        let text = secret.as_bytes().chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight")));
        words
            .iter_mut()
            .zip([port.into()].into_iter().chain(text))
            .for_each(|(word, bits)| *word = f64::from_bits(bits));
    }
    job.broadcast(&mut words, 0).unwrap_or_else(|error| panic!("a word of rank 0's: {error}"));
    let [port, text @ ..] = words.map(f64::to_bits);
    let text = String::from_utf8(text.map(u64::to_le_bytes).concat()).unwrap_or_else(|error| panic!("{error}"));
    let secret: Secret = text.parse().unwrap_or_else(|error| panic!("{error}"));
    Rendezvous::tcp("127.0.0.1", port as u16, secret)
}

fn run_threads(suite: &Suite) -> bool {
    let world_size = std::env::var("WORLD_SIZE").ok().and_then(|text| text.parse().ok()).expect("WORLD_SIZE, a number");
    let rendezvous = Rendezvous::in_process();
    let layout = Layout::from_env(world_size);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let rendezvous = rendezvous.clone();
                scope.spawn(move || {
                    let queue = queue(layout.device(rank));
                    let context = Context { rank, world_size, layout, queue, rendezvous, job: None, in_threads: true };
                    run_rank(suite, &context, rank == 0)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or(true)).fold(false, |any, failed| any | failed)
    })
}

fn queue(device: usize) -> Queue {
    Queue::new(device as u32).unwrap_or_else(|error| panic!("device {device}: {error}"))
}

fn run_rank(suite: &Suite, context: &Context, is_speaker: bool) -> bool {
    let mut report = Report::new(is_speaker);
    (suite.run)(context, &mut report);
    report.has_failed
}
