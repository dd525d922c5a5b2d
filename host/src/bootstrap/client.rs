//! The join of every rank but rank 0 in a group that spans processes: such a rank looks for rank 0 until the deadline, authenticates
//! itself, waits for the other ranks, and keeps the connection.

use std::io::{self, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::connection::{LINGER, Link, Outbox, Threads, drain};
use super::endpoint::Endpoint;
use super::frame::{self, FRAME_LIMIT, Timed};
use super::gathering::Applicant;
use super::handshake::{self, Identity};
use super::hosts::{self, Names};
use super::member::Member;
use super::message::{Event, Network, Request};
use super::seal::{Seal, Session};
use super::secret::Secret;
use crate::error::BootstrapError;

/// The time limit of one attempt to connect, and of one handshake.
const ATTEMPT_TIME: Duration = Duration::from_secs(5);
/// The pause between attempts: the first pause, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));

/// The addresses of rank 0, and the group's secret.
#[derive(Debug)]
pub(super) struct Invitation {
    pub(super) hosts: Vec<String>,
    pub(super) port: u16,
    pub(super) secret: Secret,
}

/// Joins as another rank than 0. The kind of rendezvous determines the invitation that `invite` returns, and which errors end the search.
pub(super) fn join(
    applicant: &Applicant,
    invite: impl Fn() -> Result<Invitation, BootstrapError>,
    is_final: impl Fn(&BootstrapError) -> bool,
) -> Result<Member, BootstrapError> {
    let mut pause = PAUSES.0;
    let mut refusal = None;
    let mut names = Names::default();
    loop {
        let error = match invite().and_then(|invitation| attempt(applicant, &invitation, &mut names)) {
            Ok(member) => return Ok(member),
            Err(error) if is_final(&error) => return Err(error),
            Err(error) => error,
        };
        tracing::debug!(%error, rank = applicant.rank, "looking for rank 0 again");
        thread::sleep(applicant.at_most(pause));
        pause = (pause * 2).min(PAUSES.1);
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
    }
}

/// Tries every address once. If no attempt succeeds, returns the first error of a process that answered wrongly; if no process answered,
/// the reason of each address.
fn attempt(applicant: &Applicant, invitation: &Invitation, names: &mut Names) -> Result<Member, BootstrapError> {
    let (mut wrong, mut silent) = (None, Vec::new());
    for host in hosts::nearest_first(&invitation.hosts) {
        let name = format!("{host}:{}", invitation.port);
        let addresses = names.resolve(host, invitation.port, applicant.at_most(ATTEMPT_TIME)).unwrap_or_else(|error| {
            silent.push((name.clone(), error.to_string()));
            Vec::new()
        });
        for address in addresses {
            // The text names the address, because a host name may have several.
            let name =
                if host.parse::<IpAddr>().is_ok() { address.to_string() } else { format!("{name} ({})", address.ip()) };
            match approach(applicant, &name, address, &invitation.secret) {
                Ok((socket, session)) => return wait(applicant, &name, Arc::new(socket), session, &invitation.secret),
                Err(BootstrapError::Unreachable { reason, .. }) => silent.push((name.clone(), reason)),
                Err(error) => _ = wrong.get_or_insert(error),
            }
        }
    }
    Err(wrong.unwrap_or_else(|| {
        let (address, reason) = match &silent[..] {
            [] => (format!("{}:{}", invitation.hosts.join(", "), invitation.port), "the name has no address".into()),
            [(name, reason)] => (name.clone(), reason.clone()),
            several => {
                let each = several.iter().map(|(name, reason)| format!("{name}: {reason}")).collect::<Vec<_>>();
                (format!("any of {} places", several.len()), each.join("; "))
            }
        };
        BootstrapError::Unreachable { address, deadline: applicant.deadline, reason }
    }))
}

/// Connects to an address and authenticates this rank there.
pub(super) fn approach(
    applicant: &Applicant,
    name: &str,
    address: SocketAddr,
    secret: &Secret,
) -> Result<(TcpStream, Session), BootstrapError> {
    let deadline = applicant.deadline;
    let unreachable = |reason| BootstrapError::Unreachable { address: name.to_owned(), deadline, reason };
    let connect = || -> io::Result<TcpStream> {
        // The system refuses a timeout of zero.
        let time = applicant.at_most(ATTEMPT_TIME).max(Duration::from_millis(1));
        let socket = TcpStream::connect_timeout(&address, time)?;
        socket.set_nodelay(true)?;
        // Where nobody listens, a connection can meet itself, if the system chose the same port for its other end.
        if socket.local_addr()? == socket.peer_addr()? {
            Err(io::ErrorKind::ConnectionRefused.into())
        } else {
            Ok(socket)
        }
    };
    let socket = connect().map_err(|error| unreachable(error.to_string()))?;
    let end = Instant::now().checked_add(applicant.at_most(ATTEMPT_TIME));
    let identity = Identity {
        rank: applicant.rank as u64,
        world_size: applicant.world_size as u64,
        generation: applicant.generation,
    };
    let session = handshake::introduce(&mut Timed { socket: &socket, end }, secret, identity)
        .map_err(|error| error.about(name.to_owned()).unwrap_or_else(unreachable))?;
    Ok((socket, session))
}

/// Waits on an authenticated connection until all ranks have joined.
fn wait(
    applicant: &Applicant,
    name: &str,
    socket: Arc<TcpStream>,
    mut session: Session,
    secret: &Secret,
) -> Result<Member, BootstrapError> {
    let start = |socket: &Arc<TcpStream>| -> io::Result<Result<Member, BootstrapError>> {
        let mut end = applicant.end;
        match (Timed { socket, end }).wait() {
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                // Rank 0's answer names the missing ranks.
                end = Instant::now().checked_add(LINGER);
                let give_up = frame::encode(&Request::GiveUp { deadline: applicant.deadline }, FRAME_LIMIT)?;
                let tag = session.outgoing.tag(&give_up);
                Timed { socket, end }.write_all(&[&give_up[..], &tag].concat())?;
            }
            other => {
                other?;
                end = Instant::now().checked_add(ATTEMPT_TIME);
            }
        }
        match session.incoming.read(&mut Timed { socket, end }, FRAME_LIMIT)? {
            Event::Start(network) => {
                socket.set_read_timeout(None)?;
                socket.set_write_timeout(None)?;
                Ok(Ok(enter(applicant, socket.clone(), session, secret.clone(), network)?))
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
    socket: Arc<TcpStream>,
    session: Session,
    secret: Secret,
    network: Network,
) -> io::Result<Member> {
    let endpoint = applicant.endpoint(true);
    let threads = Arc::new(Threads::default());
    let outbox = Outbox::start(&socket, session.outgoing, &threads)?;
    let (reading, answers, events) = (socket.clone(), outbox.clone(), endpoint.clone());
    let read = move || {
        listen(&reading, session.incoming, &answers, &events);
        // If no member is ever made, nothing else ends the writing thread.
        answers.close();
    };
    if let Err(error) = threads.spawn("gradsync-read", read) {
        outbox.close();
        return Err(error);
    }
    Ok(Member::remote(Link { outbox, socket, secret, threads }, endpoint, network))
}

/// Delivers the events of rank 0 until the connection ends.
fn listen(socket: &TcpStream, mut seal: Seal, answers: &Outbox, endpoint: &Endpoint) {
    let mut socket = BufReader::new(socket);
    loop {
        match seal.read(&mut socket, FRAME_LIMIT) {
            Ok(Event::Probe { inquiry }) => {
                answers.send(&Request::Progress { inquiry, sequence: endpoint.recorder.sequence() });
            }
            Ok(event) => endpoint.deliver(event),
            Err(error) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    tracing::warn!(%error, rank = endpoint.rank(), "the connection to rank 0 is given up");
                }
                return endpoint.disconnected();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Kind, Recorder};

    #[test]
    fn a_silent_name_server_does_not_hold_up_a_rank_beyond_its_deadline() {
        const SILENCE: Duration = Duration::from_secs(20);
        let mut names = Names::with(|_, _| {
            thread::sleep(SILENCE);
            Ok(Vec::new())
        });
        let start = Instant::now();
        let deadline = Duration::from_millis(200);
        let recorder = Recorder::always(Kind::Processes, "test", 1, 2);
        let end = start.checked_add(deadline);
        let applicant = Applicant { rank: 1, world_size: 2, generation: 0, deadline, end, recorder };
        let invitation = Invitation { hosts: vec!["rank-0".into()], port: 7, secret: Secret::from_bytes([1; 32]) };
        let error = attempt(&applicant, &invitation, &mut names).unwrap_err();
        assert!(start.elapsed() < SILENCE / 2, "{:?}", start.elapsed());
        let BootstrapError::Unreachable { address, reason, .. } = error else { panic!("{error:?}") };
        assert_eq!(address, "rank-0:7");
        assert!(reason.contains("no answer to the look-up of the name"), "{reason}");
    }
}
