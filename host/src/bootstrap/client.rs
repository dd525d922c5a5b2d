//! The join of every rank but rank 0 in a group that spans processes: such a rank looks for rank 0 until the deadline, authenticates
//! itself, waits for the other ranks, and keeps the connection.

use std::io::{self, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::admission::Applicant;
use super::control_channel::{ChannelLink, LINGER, Outbox, Threads, drain};
use super::endpoint::Endpoint;
use super::frame::{self, FRAME_LIMIT, Timed};
use super::member::Member;
use super::names::{self, Names};
use super::noise::{self, Identity, NoiseSession};
use super::notice::{self, Notices};
use super::protocol::{Event, Network, Request, violation};
use super::secret::Secret;
use crate::error::BootstrapError;

/// The time limit of one attempt to connect, and of one handshake.
pub(super) const ATTEMPT_TIME: Duration = Duration::from_secs(5);
/// The same where rank 0 listens at one of several ports, in the first round of attempts; it doubles with every round.
const FIRST_ATTEMPT_TIME: Duration = Duration::from_secs(1);
/// The pause between attempts: the first pause, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// The addresses of rank 0, and the group's secret.
#[derive(Debug)]
pub(super) struct Invitation {
    /// The names and addresses of rank 0's machine, in the order in which they are tried.
    pub(super) hosts: Vec<String>,
    /// Rank 0 listens on one of them.
    pub(super) ports: Vec<u16>,
    pub(super) secret: Secret,
}

/// Joins as another rank than 0. The kind of rendezvous determines which errors end the search.
pub(super) fn join(
    applicant: &Applicant,
    invitation: &Invitation,
    is_final: impl Fn(&BootstrapError) -> bool,
) -> Result<Member, BootstrapError> {
    let mut pause = PAUSES.0;
    let mut attempt_time = FIRST_ATTEMPT_TIME;
    let mut refusal = None;
    let mut names = Names::default();
    let mut notices = Notices::new();
    loop {
        let time = if invitation.ports.len() > 1 { attempt_time } else { ATTEMPT_TIME };
        let error = match attempt(applicant, invitation, &mut names, time) {
            Ok(member) => return Ok(member),
            Err(error) if is_final(&error) => return Err(error),
            Err(error) => error,
        };
        tracing::debug!(%error, rank = applicant.rank, "looking for rank 0 again");
        thread::sleep(applicant.at_most(pause));
        pause = (pause * 2).min(PAUSES.1);
        attempt_time = (attempt_time * 2).min(ATTEMPT_TIME);
        if !matches!(error, BootstrapError::Unreachable { .. }) {
            if refusal.as_ref() != Some(&error) {
                tracing::warn!(%error, rank = applicant.rank, "refused; still looking for rank 0");
            }
            refusal = Some(error.clone());
        }
        if applicant.left() == Some(Duration::ZERO) {
            // A refusal by rank 0 says more than a later failure to reach it.
            return Err(refusal.unwrap_or(error));
        }
        if notices.is_due() {
            let (rank, seconds, deadline) = (applicant.rank, notices.elapsed().as_secs(), applicant.deadline);
            let reason = match &error {
                BootstrapError::Unreachable { address, reason, .. } => format!("{address}: {reason}"),
                other => other.to_string(),
            };
            notice::say(&format!("rank {rank} is looking for rank 0, for {seconds} s of {deadline:?}: {reason}"));
        }
    }
}

/// Tries every address once, each for at most `time`. If no attempt succeeds, returns the first error of a process that answered wrongly;
/// if no process answered, the reason of each address.
fn attempt(
    applicant: &Applicant,
    invitation: &Invitation,
    names: &mut Names,
    time: Duration,
) -> Result<Member, BootstrapError> {
    let Invitation { hosts, ports, secret } = invitation;
    let (mut wrong, mut silent) = (None, Vec::new());
    for host in hosts {
        let addresses = match names.resolve(host, ports[0], applicant.at_most(ATTEMPT_TIME)) {
            Ok(addresses) => addresses,
            Err(error) => {
                if let Some(error) = out_of_resources(applicant, &error) {
                    return Err(error);
                }
                silent.push((format!("{host}:{}", ports[0]), error.to_string()));
                continue;
            }
        };
        for (mut address, &port) in addresses.iter().flat_map(|address| ports.iter().map(move |port| (*address, port)))
        {
            address.set_port(port);
            // The text names the address, because a host name may have several.
            let name = match host.parse::<IpAddr>() {
                Ok(_) => address.to_string(),
                Err(_) => format!("{host}:{port} ({})", address.ip()),
            };
            match approach(applicant, &name, address, secret, time) {
                Ok((socket, session)) => match wait(applicant, &name, socket, session) {
                    // Rank 0 of another start may listen at one of the ports, and rank 0 of this start at another one.
                    Err(error @ BootstrapError::GenerationMismatch { .. }) if ports.len() > 1 => {
                        _ = wrong.get_or_insert(error);
                    }
                    outcome => return outcome,
                },
                Err(BootstrapError::Unreachable { reason, .. }) => silent.push((name, reason)),
                Err(error @ BootstrapError::OutOfResources { .. }) => return Err(error),
                Err(error) => _ = wrong.get_or_insert(error),
            }
        }
    }
    Err(wrong.unwrap_or_else(|| {
        let (address, reason) = match &silent[..] {
            [] => (format!("{}:{}", hosts.join(", "), ports[0]), "the name has no address".into()),
            [(name, reason)] => (name.clone(), reason.clone()),
            several => {
                let each = several.iter().map(|(name, reason)| format!("{name}: {reason}")).collect::<Vec<_>>();
                (format!("any of {} places", several.len()), each.join("; "))
            }
        };
        BootstrapError::Unreachable { address, deadline: applicant.deadline, reason }
    }))
}

/// The error of this rank if it lacks descriptors, or a thread for a look-up.
fn out_of_resources(applicant: &Applicant, error: &io::Error) -> Option<BootstrapError> {
    let thread = || names::is_lack_of_threads(error).then(|| BootstrapError::out_of_threads(applicant.rank, error));
    BootstrapError::out_of_descriptors(applicant.rank, error).or_else(thread)
}

/// Connects to an address and authenticates this rank there. Either step takes at most `time`.
pub(super) fn approach(
    applicant: &Applicant,
    name: &str,
    address: SocketAddr,
    secret: &Secret,
    time: Duration,
) -> Result<(TcpStream, NoiseSession), BootstrapError> {
    let deadline = applicant.deadline;
    let unreachable = |reason| BootstrapError::Unreachable { address: name.to_owned(), deadline, reason };
    let connect = || -> io::Result<TcpStream> {
        // The system refuses a timeout of zero.
        let time = applicant.at_most(time).max(Duration::from_millis(1));
        let socket = TcpStream::connect_timeout(&address, time)?;
        socket.set_nodelay(true)?;
        // Where nobody listens, a connection can meet itself, if the system chose the same port for its other end.
        if socket.local_addr()? == socket.peer_addr()? {
            Err(io::ErrorKind::ConnectionRefused.into())
        } else {
            Ok(socket)
        }
    };
    let socket = connect().map_err(|error| {
        BootstrapError::out_of_descriptors(applicant.rank, &error).unwrap_or_else(|| unreachable(error.to_string()))
    })?;
    let end = Instant::now().checked_add(applicant.at_most(time));
    let identity = Identity {
        rank: applicant.rank as u64,
        world_size: applicant.world_size as u64,
        generation: applicant.generation,
    };
    let session = noise::introduce(&mut Timed { socket: &socket, end }, secret, identity)
        .map_err(|error| error.about(name.to_owned()).unwrap_or_else(unreachable))?;
    Ok((socket, session))
}

/// Waits on an authenticated connection until all ranks have joined.
fn wait(applicant: &Applicant, name: &str, socket: TcpStream, session: NoiseSession) -> Result<Member, BootstrapError> {
    let (socket, session) = (Arc::new(socket), Arc::new(session));
    let start = |socket: &Arc<TcpStream>| -> io::Result<Result<Member, BootstrapError>> {
        let mut end = applicant.end;
        match (Timed { socket, end }).wait() {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                // Rank 0's answer names the missing ranks.
                end = Instant::now().checked_add(LINGER);
                let give_up = frame::encode(&Request::GiveUp { deadline: applicant.deadline }, FRAME_LIMIT)?;
                let mut bytes = Vec::new();
                session.encrypt(&give_up, &mut bytes);
                Timed { socket, end }.write_all(&bytes)?;
            }
            other => {
                other?;
                end = Instant::now().checked_add(ATTEMPT_TIME);
            }
        }
        match session.read(&mut Timed { socket, end }, FRAME_LIMIT)? {
            Event::Start(network) => {
                socket.set_read_timeout(None)?;
                socket.set_write_timeout(None)?;
                let member = enter(applicant, socket, &session, network);
                Ok(member.map_err(|error| BootstrapError::out_of_threads(applicant.rank, &error)))
            }
            Event::Refused(error) => {
                drain(socket);
                Ok(Err(error))
            }
            event => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{event:?} before the group began"))),
        }
    };
    start(&socket).unwrap_or_else(|error| {
        let (address, deadline) = (name.to_owned(), applicant.deadline);
        let reason = format!("the connection failed while waiting for other ranks: {error}");
        Err(BootstrapError::Unreachable { address, deadline, reason })
    })
}

/// Starts the threads of the connection, after all ranks have joined.
fn enter(
    applicant: &Applicant,
    socket: &Arc<TcpStream>,
    session: &Arc<NoiseSession>,
    network: Network,
) -> io::Result<Member> {
    let endpoint = applicant.endpoint(true);
    let threads = Arc::new(Threads::default());
    let outbox = Outbox::start(socket, session, &threads)?;
    let (reading, session) = (socket.clone(), session.clone());
    let (answers, events) = (outbox.clone(), endpoint.clone());
    let read = move || {
        listen(&reading, &session, &answers, &events);
        // If no member is ever made, nothing else ends the writing thread.
        answers.close();
    };
    if let Err(error) = threads.spawn("gradsync-read", read) {
        outbox.close();
        return Err(error);
    }
    Ok(Member::remote(ChannelLink { outbox, socket: socket.clone(), threads }, endpoint, network))
}

/// Delivers the events of rank 0 until the connection ends.
fn listen(socket: &TcpStream, session: &NoiseSession, answers: &Outbox, endpoint: &Endpoint) {
    let mut socket = BufReader::new(socket);
    loop {
        match session.read(&mut socket, FRAME_LIMIT) {
            Ok(Event::Probe { inquiry }) => {
                answers.send(&Request::Progress { inquiry, sequence: endpoint.recorder.sequence() });
            }
            Ok(event) => endpoint.deliver(event),
            Err(error) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    tracing::warn!(%error, rank = endpoint.rank(), "the connection to rank 0 is given up");
                    endpoint.fail(violation(0, &error));
                }
                return endpoint.disconnected();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{RankKind, Recorder};

    #[test]
    fn attempt_ends_at_its_deadline_under_a_silent_name_server() {
        const SILENCE: Duration = Duration::from_secs(20);
        let mut names = Names::with(|_, _| {
            thread::sleep(SILENCE);
            Ok(Vec::new())
        });
        let start = Instant::now();
        let deadline = Duration::from_millis(200);
        let recorder = Recorder::always(RankKind::Processes, "test", 1, 2);
        let end = start.checked_add(deadline);
        let applicant = Applicant { rank: 1, world_size: 2, generation: 0, deadline, end, recorder };
        let invitation =
            Invitation { hosts: vec!["rank-0".into()], ports: vec![7], secret: Secret::from_bytes([1; 32]) };
        let error = attempt(&applicant, &invitation, &mut names, ATTEMPT_TIME).unwrap_err();
        assert!(start.elapsed() < SILENCE / 2, "{:?}", start.elapsed());
        let BootstrapError::Unreachable { address, reason, .. } = error else { panic!("{error:?}") };
        assert_eq!(address, "rank-0:7");
        assert!(reason.contains("no answer to the look-up of the name"), "{reason}");
    }
}
