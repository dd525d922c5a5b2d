//! [`Rendezvous`]: the ways in which ranks find each other.
//!
//! This module dispatches between the ways; the rest of a join is common to all of them.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::admission::{Applicant, InProcess};
use super::client::{self, Invitation};
use super::environment::{self, Launch, WORLD_SIZE_LIMIT};
use super::member::Member;
use super::secret::Secret;
use super::server::{self, Service};
use crate::error::BootstrapError;
use crate::error::Result;
use crate::trace::{RankKind, Recorder};

/// The default deadline for waiting for other ranks, in a join and in every call of every transport: 10 minutes.
///
/// `GRADSYNC_JOIN_DEADLINE` and `GRADSYNC_DEADLINE`, in seconds, replace it for joins and for calls.
pub(crate) const DEFAULT_DEADLINE: Duration = Duration::from_secs(600);

/// The deadline of calls where the program sets none: `GRADSYNC_DEADLINE`, or [`DEFAULT_DEADLINE`].
///
/// # Errors
/// [`BootstrapError::InvalidVariable`]. Every join refuses such a variable.
pub(crate) fn call_deadline() -> Result<Duration, BootstrapError> {
    Ok(environment::call_deadline()?.unwrap_or(DEFAULT_DEADLINE))
}

#[derive(Clone, Debug)]
enum MeetingMethod {
    InProcess(InProcess),
    Tcp(Address),
}

/// Where rank 0 listens.
#[derive(Clone, Debug)]
struct Address {
    host: String,
    /// Rank 0 listens on the first of them that is free.
    ports: Vec<u16>,
    secret: Secret,
    /// Whether rank 0 listens on loopback only if `host` is a loopback address.
    may_confine: bool,
}

/// The place where the ranks of a group find each other. Every rank needs an equal one; threads of one process need clones of the same
/// one.
#[derive(Clone, Debug)]
pub struct Rendezvous {
    method: MeetingMethod,
    /// The deadline of a join, if the program sets it.
    deadline: Option<Duration>,
    generation: u64,
}

impl Launch {
    /// Joins the group that the launcher has started, at the [rendezvous of its variables](Rendezvous::from_env), and blocks until all ranks have.
    ///
    /// # Errors
    /// As [`Rendezvous::from_env`] and [`Rendezvous::join`].
    pub fn join(&self) -> Result<Member> {
        Rendezvous::from_env(self)?.join(self.rank, self.world_size)
    }
}

impl Rendezvous {
    fn new(method: MeetingMethod) -> Self {
        Rendezvous { method, deadline: None, generation: 0 }
    }

    /// A rendezvous for ranks that are threads of one process: give each a clone. When a group is complete or has failed, the next group
    /// can use the same rendezvous.
    pub fn in_process() -> Self {
        Rendezvous::new(MeetingMethod::InProcess(InProcess::default()))
    }

    /// A rendezvous by TCP: rank 0 listens on `port`, and the other ranks look for it at `host`. Rank 0 listens on all interfaces, or on
    /// loopback only if `host` is `localhost` or a loopback address.
    ///
    /// The secret keeps other processes out: ranks prove to each other that they know it, and it is never sent. All later messages are
    /// encrypted (see [Strangers](super#strangers)).
    pub fn tcp(host: impl Into<String>, port: u16, secret: Secret) -> Self {
        Rendezvous::new(MeetingMethod::Tcp(Address { host: host.into(), ports: vec![port], secret, may_confine: true }))
    }

    /// A rendezvous by [`tcp`](Self::tcp) at `MASTER_ADDR` and `MASTER_PORT`, with the secret in `GRADSYNC_SECRET` and the generation in
    /// `GRADSYNC_GENERATION`, or 0. `gradsync launch` sets all of them. Unlike with `tcp`, rank 0 listens on loopback only if the launcher
    /// also says that all ranks are on its machine (`LOCAL_WORLD_SIZE` equals `WORLD_SIZE`): `MASTER_ADDR` may be `localhost` for rank 0,
    /// and another name of its machine for the other ranks.
    ///
    /// `GRADSYNC_PORT` takes the place of `MASTER_PORT`. Without it, under torchrun, whose agent listens at `MASTER_PORT` itself, rank 0
    /// listens on the first free one of eight ports between 20000 and 27999, which all ranks derive from `MASTER_PORT` and
    /// `TORCHELASTIC_RUN_ID`, and the other ranks try all eight. Ranks of another job of torchrun are refused, even with the same secret. On
    /// one machine, `TORCHELASTIC_RESTART_COUNT` is the generation if `GRADSYNC_GENERATION` is not set.
    ///
    /// # Errors
    /// [`BootstrapError::MissingVariable`] if one of the first three variables is not set; [`BootstrapError::InvalidVariable`] for a
    /// generation that is not a number; the errors of [`Secret::from_env`].
    pub fn from_env(launch: &Launch) -> Result<Self> {
        let Some(master) = launch.master.clone() else {
            let reason = "it and MASTER_PORT say where rank 0 listens: `gradsync launch` and torchrun set both; ranks that mpirun or srun \
                          starts take both, or join by MPI with the feature `mpi`"
                .into();
            return Err(BootstrapError::MissingVariable { variable: "MASTER_ADDR".into(), reason }.into());
        };
        Ok(Rendezvous::at_master(master, launch, Secret::from_env()?, environment::generation()?))
    }

    /// The rendezvous of a launch at `MASTER_ADDR` and `MASTER_PORT`, with the generation if one is given.
    fn at_master((host, port): (String, u16), launch: &Launch, secret: Secret, generation: Option<u64>) -> Self {
        let torchrun = launch.torchrun.as_ref();
        let address = Address {
            host,
            ports: torchrun.map_or_else(|| vec![port], |job| job.ports(port)),
            secret: torchrun.map_or_else(|| secret.clone(), |job| job.secret(&secret, port)),
            may_confine: launch.is_one_machine(),
        };
        let generation = generation.or(torchrun.and_then(|job| job.restarts)).unwrap_or(0);
        Rendezvous::new(MeetingMethod::Tcp(address)).with_generation(generation)
    }

    /// Sets the deadline of a join; it is `GRADSYNC_JOIN_DEADLINE` (in seconds) or 10 minutes otherwise.
    #[must_use]
    pub fn with_deadline(self, deadline: Duration) -> Self {
        Rendezvous { deadline: Some(deadline), ..self }
    }

    /// Sets the group's `generation`; it is 0 otherwise. Count it up with every restart: a rank of another generation is refused, so that
    /// processes left over from an earlier start cannot join.
    #[must_use]
    pub fn with_generation(self, generation: u64) -> Self {
        Rendezvous { generation, ..self }
    }

    /// Joins as `rank` of `world_size`, and blocks until all ranks have joined. A group of one needs no network. A join that takes longer
    /// than some seconds says now and then for which ranks it waits: as a warning (`tracing`), or on standard error where the program
    /// logs no warnings.
    ///
    /// # Errors
    /// [`Error::Bootstrap`](crate::Error::Bootstrap) with
    /// * [`BootstrapError::Missing`] when the first deadline of a rank passes, on every rank that has reached rank 0, with the missing
    ///   ranks and the unauthenticated connections; [`BootstrapError::Unreachable`] on the other ranks, with the address and the last
    ///   failure;
    /// * [`BootstrapError::WorldSizeMismatch`] on every rank that has arrived, when a rank with another world size arrives;
    /// * [`BootstrapError::DuplicateRank`] on the second process or thread that joins as the same rank;
    ///   [`BootstrapError::GenerationMismatch`], [`BootstrapError::WrongSecret`] and [`BootstrapError::VersionMismatch`] on the rank that
    ///   does not belong to the group, while the other ranks continue to wait. A rank of a later generation continues to look for its own
    ///   group;
    /// * [`BootstrapError::OutOfResources`] at once on a rank that lacks descriptors or threads; if rank 0 does, on every rank that has
    ///   arrived;
    /// * [`BootstrapError::RankOutOfRange`]; [`BootstrapError::WorldSizeOutOfRange`] for more than 65536 ranks;
    ///   [`BootstrapError::InvalidAddress`] for a host that can be neither a name nor an address; [`BootstrapError::InvalidVariable`] for a
    ///   variable of deadlines that is no number of seconds;
    /// * [`BootstrapError::PortBusy`] or [`BootstrapError::CannotListen`] on rank 0.
    pub fn join(&self, rank: usize, world_size: usize) -> Result<Member> {
        if rank >= world_size {
            return Err(BootstrapError::RankOutOfRange { rank, world_size }.into());
        }
        if world_size > WORLD_SIZE_LIMIT {
            return Err(BootstrapError::WorldSizeOutOfRange { world_size, most: WORLD_SIZE_LIMIT }.into());
        }
        let user_deadline = environment::join_deadline()?;
        call_deadline()?;
        let deadline = self.deadline.or(user_deadline).unwrap_or(DEFAULT_DEADLINE);
        let generation = self.generation;
        let kind =
            if matches!(self.method, MeetingMethod::InProcess(_)) { RankKind::Threads } else { RankKind::Processes };
        let recorder = Recorder::always(kind, "channel", rank, world_size);
        if world_size == 1 {
            return Ok(Member::single(recorder));
        }
        let end = Instant::now().checked_add(deadline);
        let applicant = Applicant { rank, world_size, generation, deadline, end, recorder };
        Ok(applicant.joining(|| match &self.method {
            MeetingMethod::InProcess(admissions) => join_in_process(admissions, &applicant),
            MeetingMethod::Tcp(address) => join_at(address, &applicant),
        })?)
    }
}

pub(super) fn join_in_process(admissions: &InProcess, applicant: &Applicant) -> Result<Member, BootstrapError> {
    let endpoint = applicant.endpoint(false);
    let admission = admissions.arrive(applicant, &endpoint)?;
    let coordinator = admission.wait(applicant)?;
    Ok(Member::in_process(coordinator, endpoint, admission.subgroups.clone()))
}

fn join_at(address: &Address, applicant: &Applicant) -> Result<Member, BootstrapError> {
    let Address { ports, secret, .. } = address;
    let host = environment::host(&address.host)
        .map_err(|reason| BootstrapError::InvalidAddress { address: address.host.clone(), reason: reason.into() })?;
    if ports.contains(&0) {
        let address = format!("{host}:0");
        return Err(BootstrapError::CannotListen { address, reason: "other ranks cannot find port 0".into() });
    }
    if applicant.rank == 0 {
        let loopback = loopback(&host).filter(|_| address.may_confine);
        let listener = listen(loopback, ports)?;
        let address = format!("{host}:{}", server::port(&listener)?);
        return server::join(listener, Service::new(loopback, secret.clone(), address), applicant);
    }
    let invitation = Invitation { hosts: vec![host], ports: ports.clone(), secret: secret.clone() };
    client::join(applicant, &invitation, |error| match error {
        BootstrapError::Unreachable { .. } => false,
        // An older group is still joining there; this rank's own group follows.
        BootstrapError::GenerationMismatch { generation, expected, .. } => generation < expected,
        // At one of several ports, any program may listen.
        BootstrapError::WrongSecret { .. } | BootstrapError::VersionMismatch { .. } => ports.len() == 1,
        _ => true,
    })
}

/// Listens on the first free one of these ports.
fn listen(loopback: Option<IpAddr>, ports: &[u16]) -> Result<std::net::TcpListener, BootstrapError> {
    let mut busy = Vec::new();
    for &port in ports {
        match server::listen(loopback, port) {
            Err(BootstrapError::PortBusy { address }) => busy.push(address),
            outcome => return outcome,
        }
    }
    Err(BootstrapError::PortBusy { address: busy.join(", ") })
}

/// The loopback address that `host` denotes, if it does. Other names are not looked up, because only the other ranks use them.
fn loopback(host: &str) -> Option<IpAddr> {
    if host.eq_ignore_ascii_case("localhost") {
        return Some(std::net::Ipv4Addr::LOCALHOST.into());
    }
    host.parse().ok().filter(IpAddr::is_loopback)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::thread;

    use super::*;

    const PLENTY: Duration = Duration::from_secs(60);

    /// The variables that torchrun 2.11 sets, for a rank of one machine.
    fn torchrun(rank: usize, world_size: usize, master_port: u16, run_id: &str) -> Launch {
        let variables = |name: &str| {
            let text = match name {
                "RANK" | "LOCAL_RANK" | "ROLE_RANK" => rank.to_string(),
                "WORLD_SIZE" | "LOCAL_WORLD_SIZE" | "ROLE_WORLD_SIZE" => world_size.to_string(),
                "GROUP_RANK" | "TORCHELASTIC_RESTART_COUNT" => "0".into(),
                "GROUP_WORLD_SIZE" | "OMP_NUM_THREADS" | "TORCH_NCCL_ASYNC_ERROR_HANDLING" => "1".into(),
                "MASTER_ADDR" => "127.0.0.1".into(),
                "MASTER_PORT" => master_port.to_string(),
                "TORCHELASTIC_RUN_ID" => run_id.into(),
                "TORCHELASTIC_USE_AGENT_STORE" => "True".into(),
                _ => return None,
            };
            Some(text)
        };
        Launch::from_variables(variables).unwrap()
    }

    fn secret() -> Secret {
        Secret::from_bytes([7; 32])
    }

    fn of_launch(launch: &Launch) -> Rendezvous {
        Rendezvous::at_master(launch.master.clone().unwrap(), launch, secret(), None).with_deadline(PLENTY)
    }

    fn address(rendezvous: &Rendezvous) -> &Address {
        let MeetingMethod::Tcp(address) = &rendezvous.method else { panic!("{rendezvous:?}") };
        address
    }

    /// Joins as all ranks, each on a thread, and lets them exchange a word.
    fn meet(rendezvous: impl Fn(usize) -> Rendezvous + Sync, world_size: usize, word: &str) {
        thread::scope(|scope| {
            for rank in 0..world_size {
                let rendezvous = rendezvous(rank);
                scope.spawn(move || {
                    let member =
                        rendezvous.join(rank, world_size).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
                    let words = member.all_gather(word.as_bytes(), PLENTY).unwrap();
                    assert!(words.iter().all(|other| other == word.as_bytes()), "{word} met others");
                });
            }
        });
    }

    /// A program that listens at a port of loopback and treats every connection in some way, as long as the test runs.
    fn foreign(port: u16, treat: fn(TcpStream) -> Option<TcpStream>) -> Option<u16> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).ok()?;
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            let mut held = Vec::new();
            listener.incoming().flatten().for_each(|connection| held.extend(treat(connection)));
        });
        Some(port)
    }

    #[test]
    fn rendezvous_meets_beside_torchruns_agent_and_other_programs() {
        let agent = foreign(0, Some).expect("a free port");
        let ports = torchrun(0, 3, agent, "job").torchrun.unwrap().ports(agent);
        // Where the test cannot listen, another program does.
        foreign(ports[0], Some);
        foreign(ports[1], |mut connection| {
            connection.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").ok().map(|()| connection)
        });
        foreign(ports[2], |_| None);
        meet(|rank| of_launch(&torchrun(rank, 3, agent, "job")), 3, "torchrun");
    }

    #[test]
    fn rendezvous_keeps_jobs_of_torchrun_with_one_secret_apart() {
        let jobs = ["first", "second"].map(|run_id| of_launch(&torchrun(0, 2, 29_500, run_id)));
        assert_ne!(address(&jobs[0]).secret.bytes(), address(&jobs[1]).secret.bytes());
        assert_ne!(address(&jobs[0]).ports, address(&jobs[1]).ports);
        let ports = address(&jobs[0]).ports.clone();
        let at_the_same = |job: &Rendezvous| {
            let address = Address { ports: ports.clone(), ..address(job).clone() };
            Rendezvous { method: MeetingMethod::Tcp(address), ..job.clone() }
        };
        thread::scope(|scope| {
            for (job, word) in jobs.iter().zip(["first", "second"]) {
                scope.spawn(move || meet(|_| at_the_same(job), 2, word));
            }
        });
    }

    #[test]
    fn at_master_takes_torchruns_generation_on_one_machine_only() {
        let of = |nodes: &str, restarts: &str| {
            let variables = |name: &str| {
                let text = match name {
                    "RANK" => "0",
                    "WORLD_SIZE" => "2",
                    "MASTER_ADDR" => "node-0",
                    "MASTER_PORT" => "29500",
                    "TORCHELASTIC_RUN_ID" => "none",
                    "TORCHELASTIC_RESTART_COUNT" => restarts,
                    "GROUP_WORLD_SIZE" => nodes,
                    _ => return None,
                };
                Some(text.to_owned())
            };
            Launch::from_variables(variables)
        };
        let generation = |nodes: &str| of_launch(&of(nodes, "3").unwrap()).generation;
        assert_eq!((generation("1"), generation("2")), (3, 0), "agents of several machines count separately");
        let launch = of("1", "3").unwrap();
        let given = Rendezvous::at_master(launch.master.clone().unwrap(), &launch, secret(), Some(5));
        assert_eq!(given.generation, 5);
        let error = of("1", "x").unwrap_err().to_string();
        assert!(error.contains("TORCHELASTIC_RESTART_COUNT"), "{error}");
    }

    #[test]
    fn rendezvous_uses_the_documented_ports_of_torchrun() {
        for (port, run_id) in [(29_500, "none"), (20_000, "job"), (41_234, "")] {
            let ports = torchrun(0, 2, port, run_id).torchrun.unwrap().ports(port);
            assert_eq!(ports, torchrun(1, 2, port, run_id).torchrun.unwrap().ports(port));
            let distinct: std::collections::HashSet<u16> = ports.iter().copied().collect();
            assert_eq!((ports.len(), distinct.len()), (8, 8), "{ports:?}");
            assert!(ports.iter().all(|other| (20_000..28_000).contains(other) && *other != port), "{ports:?}");
        }
    }

    /// Kubeflow gives rank 0 `localhost`, and the other ranks the name of a service.
    #[test]
    fn join_finds_rank_0_of_localhost_by_another_name() {
        let launch = |rank: usize, master: &str, port: u16, local: Option<usize>| {
            let variables = |name: &str| match name {
                "RANK" => Some(rank.to_string()),
                "WORLD_SIZE" => Some("2".into()),
                "LOCAL_WORLD_SIZE" => local.map(|size| size.to_string()),
                "MASTER_ADDR" => Some(master.into()),
                "MASTER_PORT" => Some(port.to_string()),
                _ => None,
            };
            Launch::from_variables(variables).unwrap()
        };
        let free = || TcpListener::bind("0.0.0.0:0").unwrap().local_addr().unwrap().port();
        for local in [None, Some(1)] {
            let port = free();
            meet(|rank| of_launch(&launch(rank, ["localhost", "127.0.0.2"][rank], port, local)), 2, "Kubeflow");
        }
        let rendezvous = of_launch(&launch(0, "localhost", free(), Some(2)));
        assert!(address(&rendezvous).may_confine);
        let port = address(&rendezvous).ports[0];
        let rank_0 = thread::spawn(move || rendezvous.with_deadline(Duration::from_secs(1)).join(0, 2));
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(!rank_0.is_finished(), "nobody listened");
        }
        assert!(TcpStream::connect(("127.0.0.2", port)).is_err(), "others than local ranks can come");
        assert!(rank_0.join().unwrap().is_err());
    }
}
