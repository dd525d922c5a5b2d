//! Rank 0's side of a group that spans processes: it listens until all ranks have joined, and serves their connections.
//!
//! Any process may connect; [`unauthenticated`](super::unauthenticated) handles connections until they are authenticated.

#[cfg(test)]
mod tests;

use std::io::{self, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::connection::{Connections, LINGER, Outbox, Threads, drain, is_closed};
use super::coordinator::Route;
use super::frame::{self, FRAME_LIMIT, Timed};
use super::gathering::{Applicant, Gathering};
use super::member::Member;
use super::message::{Event, Request};
use super::noise::{Identity, Session};
use super::poll::Alarm;
use super::secret::Secret;
use super::unauthenticated::{Authenticated, Rejected, UnauthenticatedConnections};
use crate::error::BootstrapError;

/// The number of connections that may wait to be accepted. With a short queue, the system would drop connections of ranks among many
/// others, and the ranks would retry only after a second.
#[cfg(unix)]
const BACKLOG: i32 = 4096;

/// Listens on `port` of the loopback address if one is given, else of all interfaces. Port 0 means any free port.
pub(super) fn listen(loopback: Option<IpAddr>, port: u16) -> Result<TcpListener, BootstrapError> {
    // An IPv6 socket accepts IPv4 connections too, if the system has IPv6.
    let everywhere = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    let candidates = loopback.map_or(everywhere.to_vec(), |address| vec![address]);
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in &candidates {
        outcome = TcpListener::bind((*address, port)).and_then(prepare);
        if !matches!(&outcome, Err(error) if error.kind() != io::ErrorKind::AddrInUse) {
            break;
        }
    }
    outcome.map_err(|error| {
        let address = SocketAddr::new(loopback.unwrap_or(everywhere[1]), port).to_string();
        match error.kind() {
            io::ErrorKind::AddrInUse => BootstrapError::PortBusy { address },
            _ => unavailable(&error, address),
        }
    })
}

/// Sets a longer queue of waiting connections than the standard library does, and makes the listener non-blocking.
fn prepare(listener: TcpListener) -> io::Result<TcpListener> {
    #[cfg(unix)]
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The port of a listener.
pub(super) fn port(listener: &TcpListener) -> Result<u16, BootstrapError> {
    let error =
        |error: io::Error| BootstrapError::CannotListen { address: "a free port".into(), reason: error.to_string() };
    Ok(listener.local_addr().map_err(error)?.port())
}

/// What rank 0 offers at its listener.
pub(super) struct Service {
    /// The loopback address, if the group is confined to it.
    loopback: Option<IpAddr>,
    secret: Secret,
    /// Where ranks join, in words.
    place: String,
}

impl Service {
    pub(super) fn new(loopback: Option<IpAddr>, secret: Secret, place: String) -> Self {
        Service { loopback, secret, place }
    }
}

/// Joins as rank 0, which accepts the other ranks at `listener`.
pub(super) fn join(listener: TcpListener, service: Service, applicant: &Applicant) -> Result<Member, BootstrapError> {
    let &Applicant { rank, world_size, generation, .. } = applicant;
    let Service { loopback, secret, place } = service;
    let gathering = Gathering::new(world_size, generation, loopback, place);
    let endpoint = applicant.endpoint(false);
    gathering.arrive((rank, world_size, generation), Route::Local(endpoint.clone()), None)?;
    let alarm = Alarm::new().map_err(|error| unavailable(&error, "its port".into()))?;
    let connections = Arc::<Connections>::default();
    let server = Arc::new(Server { gathering, secret, connections: connections.clone(), alarm });

    let accepting = Arc::new(Threads::default());
    let acceptor = server.clone();
    let outcome = match accepting.spawn("gradsync-accept", move || acceptor.accept(listener)) {
        Ok(()) => {
            let outcome = server.gathering.wait(applicant);
            server.alarm.raise();
            connections.close();
            // Once the thread has ended, the port is free for the group that comes after this one.
            accepting.wait(LINGER);
            outcome
        }
        Err(error) => Err(BootstrapError::out_of_threads(rank, &error)),
    };
    match outcome {
        Ok(coordinator) => Ok(Member::server(coordinator, endpoint, connections)),
        Err(error) => {
            connections.finish();
            Err(error)
        }
    }
}

/// The error of a rank that cannot listen at `address`.
fn unavailable(error: &io::Error, address: String) -> BootstrapError {
    let other = || BootstrapError::CannotListen { address, reason: error.to_string() };
    BootstrapError::out_of_descriptors(0, error).unwrap_or_else(other)
}

/// The state that the threads of rank 0's process share.
struct Server {
    gathering: Gathering,
    secret: Secret,
    connections: Arc<Connections>,
    alarm: Alarm,
}

impl Server {
    /// Accepts connections until the alarm, and serves each authenticated rank on a thread of its own.
    fn accept(self: &Arc<Self>, listener: TcpListener) {
        let report = |outcome| match outcome {
            Ok(proven) => self.admit(proven),
            Err(Rejected::Starved(error)) => {
                if let Some(error) = BootstrapError::out_of_descriptors(0, &error) {
                    self.gathering.fail(error);
                }
            }
            Err(Rejected::Connection { origin, reason }) => {
                let count = self.gathering.count_unauthenticated(origin, reason.clone());
                // Many connections must not fill the log.
                if count.is_power_of_two() {
                    tracing::warn!(%origin, reason, count, "connections that proved no secret were closed");
                }
            }
        };
        UnauthenticatedConnections::new(listener, &self.secret, &self.alarm, report).serve();
    }

    fn admit(self: &Arc<Self>, Authenticated { socket, identity, session }: Authenticated) {
        let (socket, session) = (Arc::new(socket), Arc::new(session));
        let Some(id) = self.connections.enter(&socket) else { return };
        let (server, served, encryption) = (self.clone(), socket.clone(), session.clone());
        let serve = move || {
            server.serve(&served, identity, &encryption);
            server.connections.leave(id);
        };
        if let Err(error) = self.connections.threads.spawn("gradsync-serve", serve) {
            self.lack_thread(&socket, &session, &error);
            self.connections.leave(id);
        }
    }

    /// Ends the gathering because this process has no thread for a connection, and says so to the rank at its other end.
    fn lack_thread(&self, socket: &TcpStream, session: &Session, error: &io::Error) {
        let error = BootstrapError::out_of_threads(0, error);
        let refuse = || -> io::Result<()> {
            let mut bytes = Vec::new();
            session.encrypt(&frame::encode(&Event::Refused(error.clone()), FRAME_LIMIT)?, &mut bytes);
            socket.set_nonblocking(false)?;
            Timed { socket, end: Instant::now().checked_add(LINGER) }.write_all(&bytes)
        };
        if let Err(error) = refuse() {
            tracing::debug!(%error, "a rank was not told why it is turned away");
        }
        self.gathering.fail(error);
    }

    /// Serves the connection of a rank from the handshake to its end.
    fn serve(&self, socket: &Arc<TcpStream>, identity: Identity, session: &Arc<Session>) {
        let address = socket.peer_addr().ok().map(|address| address.ip().to_canonical());
        let (Ok(rank), Ok(world_size)) = (usize::try_from(identity.rank), usize::try_from(identity.world_size)) else {
            return tracing::warn!(?identity, ?address, "a rank was refused");
        };
        // If this process was stopped meanwhile, the rank may have closed this connection and made another one.
        if is_closed(socket) {
            return tracing::warn!(?address, rank, "a rank has closed its connection before it was admitted");
        }
        if let Err(error) = socket.set_nonblocking(false) {
            return tracing::warn!(%error, ?address, rank, "a rank cannot be served");
        }
        let outbox = match Outbox::start(socket, session, &self.connections.threads) {
            Ok(outbox) => outbox,
            Err(error) => return self.lack_thread(socket, session, &error),
        };
        let place = Route::Remote(outbox.clone());
        match self.gathering.arrive((rank, world_size, identity.generation), place, address) {
            Ok(()) => self.listen_to(rank, socket, session),
            Err(error) => {
                tracing::warn!(%error, ?address, "a rank was refused");
                outbox.send(&Event::Refused(error));
            }
        }
        outbox.close();
        drain(socket);
    }

    /// Forwards the requests of a rank until it leaves or its connection ends.
    fn listen_to(&self, rank: usize, socket: &TcpStream, session: &Session) {
        let mut socket = BufReader::new(socket);
        let mut coordinator = None;
        loop {
            let request = session.read::<Request>(&mut socket, FRAME_LIMIT);
            coordinator = coordinator.or_else(|| self.gathering.coordinator());
            let is_farewell = matches!(request, Ok(Request::Leave { .. }));
            let outcome = request.and_then(|request| {
                let outcome = match &coordinator {
                    Some(coordinator) => coordinator.receive(rank, request),
                    None => self.gathering.receive(&request),
                };
                outcome.map_err(|violation| io::Error::new(io::ErrorKind::InvalidData, violation))
            });
            match (outcome, &coordinator) {
                (Ok(()), _) if is_farewell => return,
                (Ok(()), _) => {}
                (Err(error), Some(coordinator)) => {
                    coordinator.lost(rank, &error);
                    return;
                }
                (Err(error), None) => {
                    let reason = match error.kind() {
                        io::ErrorKind::UnexpectedEof => "it has closed its connection".into(),
                        _ => error.to_string(),
                    };
                    tracing::warn!("rank {rank} is gone before all have joined: {reason}");
                    self.gathering.lost(rank);
                    return;
                }
            }
        }
    }
}
