//! Rank 0's side of a group that spans processes: it listens until all have joined, and serves their connections.
//!
//! Anybody may connect. Before a connection has proven itself it costs one thread and a few hundred bytes, for a few
//! seconds, and only so many are served at a time; the thread that accepts never waits for one.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io::{self, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::connection::{LINGER, Outbox, Threads, drain, is_closed};
use super::error::BootstrapError;
use super::frame::{self, FRAME_LIMIT, Timed};
use super::gathering::{Applicant, Gathering};
use super::handshake;
use super::hub::Place;
use super::member::Member;
use super::message::{Event, Request};
use super::seat::Seat;
use super::secret::Secret;

/// How long a connection may take to prove itself.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// How many connections may be about to prove themselves; further ones are closed, and come again.
const PENDING_LIMIT: usize = 64;

/// Listens on `port`, of the loopback address if one is given, else of all interfaces. Port 0 is any free one.
pub(super) fn listen(loopback: Option<IpAddr>, port: u16) -> Result<TcpListener, BootstrapError> {
    // A socket of IPv6 takes connections of IPv4 too, where the system has IPv6.
    let everywhere = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    let candidates = loopback.map_or(everywhere.to_vec(), |address| vec![address]);
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in &candidates {
        outcome = TcpListener::bind((*address, port));
        if !matches!(&outcome, Err(error) if error.kind() != io::ErrorKind::AddrInUse) {
            break;
        }
    }
    outcome.map_err(|error| {
        let address = SocketAddr::new(loopback.unwrap_or(everywhere[1]), port).to_string();
        match error.kind() {
            io::ErrorKind::AddrInUse => BootstrapError::PortBusy { address },
            _ => BootstrapError::CannotListen { address, reason: error.to_string() },
        }
    })
}

/// The port of a listener.
pub(super) fn port(listener: &TcpListener) -> Result<u16, BootstrapError> {
    let error =
        |error: io::Error| BootstrapError::CannotListen { address: "a free port".into(), reason: error.to_string() };
    Ok(listener.local_addr().map_err(error)?.port())
}

/// Joins as rank 0, which the others find at `listener`.
pub(super) fn join(
    listener: TcpListener,
    loopback: Option<IpAddr>,
    secret: Secret,
    applicant: &Applicant,
) -> Result<Member, BootstrapError> {
    let &Applicant { rank, world_size, generation, .. } = applicant;
    let gathering = Gathering::new(world_size, generation, loopback);
    let seat = Arc::new(Seat::new(rank, world_size, false));
    gathering.arrive((rank, world_size, generation), Place::Here(seat.clone()), None)?;
    let server = Arc::new(Server { gathering, secret, connections: Arc::default(), is_over: AtomicBool::new(false) });
    let connections = server.connections.clone();

    let address = listener.local_addr();
    let accepting = Arc::new(Threads::default());
    let acceptor = server.clone();
    let spawned = accepting.spawn("gradsync-accept", move || acceptor.accept(&listener));
    let outcome = match (spawned, address) {
        (Ok(()), Ok(address)) => {
            let outcome = server.gathering.wait(applicant);
            server.stop(address);
            // The port is free again when this returns, for the group that comes after this one.
            accepting.wait(LINGER);
            outcome
        }
        (Err(error), _) | (_, Err(error)) => {
            Err(BootstrapError::CannotListen { address: "its port".into(), reason: error.to_string() })
        }
    };
    match outcome {
        Ok(hub) => Ok(Member::here(hub, seat, Some(connections))),
        Err(error) => {
            connections.finish();
            Err(error)
        }
    }
}

/// What the threads of rank 0's process share.
struct Server {
    gathering: Gathering,
    secret: Secret,
    connections: Arc<Connections>,
    is_over: AtomicBool,
}

impl Server {
    /// Serves whoever comes, each on a thread of its own, until [`stop`](Self::stop).
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for connection in listener.incoming() {
            if self.is_over.load(Ordering::Acquire) {
                return;
            }
            match connection {
                Ok(socket) => self.admit(Arc::new(socket)),
                Err(error) => {
                    // No file descriptors, for example: trying again at once would only burn the processor.
                    tracing::warn!(%error, "a connection was not accepted");
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, socket: Arc<TcpStream>) {
        let Some(id) = self.connections.enter(&socket) else {
            tracing::warn!("too many connections at once are about to prove themselves: one more was closed");
            return;
        };
        let server = self.clone();
        let serve = move || {
            server.serve(id, &socket);
            server.connections.leave(id);
        };
        if let Err(error) = self.connections.threads.spawn("gradsync-serve", serve) {
            tracing::warn!(%error, "no thread for a connection");
            self.connections.leave(id);
        }
    }

    /// Ends the accepting thread, which sleeps until somebody connects, and the connections that have not proven
    /// themselves.
    fn stop(&self, address: SocketAddr) {
        self.is_over.store(true, Ordering::Release);
        let own = match address.ip() {
            ip if !ip.is_unspecified() => vec![ip],
            IpAddr::V4(_) => vec![Ipv4Addr::LOCALHOST.into()],
            IpAddr::V6(_) => vec![Ipv6Addr::LOCALHOST.into(), Ipv4Addr::LOCALHOST.into()],
        };
        let knock = |ip| TcpStream::connect_timeout(&SocketAddr::new(ip, address.port()), LINGER).is_ok();
        if !own.into_iter().any(knock) {
            tracing::warn!(%address, "cannot reach the own port: its listener stays until somebody else connects");
        }
        self.connections.end_pending();
    }

    /// One connection, from its handshake to its end.
    fn serve(&self, id: u64, socket: &Arc<TcpStream>) {
        let origin = socket.peer_addr().map_or_else(|error| error.to_string(), |address| address.to_string());
        let end = Instant::now().checked_add(HANDSHAKE_TIME);
        let proven = socket.set_nodelay(true).map_err(Into::into);
        let proven = proven.and_then(|()| handshake::receive(&mut Timed { socket, end }, &self.secret));
        let identity = match proven {
            Ok(identity) => identity,
            Err(_) if self.is_over.load(Ordering::Acquire) => return,
            Err(error) => return tracing::warn!(%error, origin, "a connection was refused"),
        };
        let (Ok(rank), Ok(world_size)) = (usize::try_from(identity.rank), usize::try_from(identity.world_size)) else {
            return tracing::warn!(?identity, origin, "a rank was refused");
        };
        self.connections.prove(id);
        // If this process was stopped meanwhile, the rank may have given up this connection, and come again by another.
        if is_closed(socket).unwrap_or(true) {
            return tracing::warn!(origin, rank, "a rank has closed its connection before it was admitted");
        }
        let unlimited = socket.set_read_timeout(None).and_then(|()| socket.set_write_timeout(None));
        let outbox = match unlimited.and_then(|()| Outbox::start(socket, &self.connections.threads)) {
            Ok(outbox) => outbox,
            Err(error) => return tracing::warn!(%error, origin, rank, "a rank cannot be served"),
        };
        let place = Place::There(outbox.clone());
        let address = socket.peer_addr().ok().map(|address| address.ip().to_canonical());
        match self.gathering.arrive((rank, world_size, identity.generation), place, address) {
            Ok(()) => self.listen_to(rank, socket),
            Err(error) => {
                tracing::warn!(%error, origin, "a rank was refused");
                outbox.send(&Event::Refused(error));
            }
        }
        outbox.close();
        drain(socket);
    }

    /// Passes on what a rank asks for, until it leaves or its connection ends.
    fn listen_to(&self, rank: usize, socket: &TcpStream) {
        let mut socket = BufReader::new(socket);
        let mut hub = None;
        loop {
            let request = frame::read::<Request>(&mut socket, FRAME_LIMIT);
            hub = hub.or_else(|| self.gathering.hub());
            let is_farewell = matches!(request, Ok(Request::Leave { .. }));
            let outcome = request.map_err(|error| error.to_string()).and_then(|request| {
                let outcome = match &hub {
                    Some(hub) => hub.receive(rank, request),
                    None => self.gathering.receive(&request),
                };
                outcome.map_err(|violation| violation.to_string())
            });
            match (outcome, &hub) {
                (Ok(()), _) if is_farewell => return,
                (Ok(()), _) => {}
                (Err(error), Some(hub)) => {
                    hub.lost(rank, &error);
                    return;
                }
                (Err(error), None) => {
                    tracing::warn!(rank, error, "a rank is gone before all have joined");
                    self.gathering.lost(rank);
                    return;
                }
            }
        }
    }
}

/// The connections of rank 0's process, and the means to end them.
#[derive(Debug, Default)]
pub(super) struct Connections {
    sockets: Mutex<Sockets>,
    threads: Arc<Threads>,
}

#[derive(Debug, Default)]
struct Sockets {
    next: u64,
    pending: HashMap<u64, Arc<TcpStream>>,
    proven: HashMap<u64, Arc<TcpStream>>,
    /// Nobody is admitted any more.
    is_closed: bool,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new connection, or `None` if it is one too many.
    fn enter(&self, socket: &Arc<TcpStream>) -> Option<u64> {
        let mut sockets = self.lock();
        if sockets.is_closed || sockets.pending.len() >= PENDING_LIMIT {
            return None;
        }
        sockets.next += 1;
        let id = sockets.next;
        sockets.pending.insert(id, socket.clone());
        Some(id)
    }

    fn prove(&self, id: u64) {
        let mut sockets = self.lock();
        if let Some(socket) = sockets.pending.remove(&id) {
            sockets.proven.insert(id, socket);
        }
    }

    fn leave(&self, id: u64) {
        let mut sockets = self.lock();
        sockets.pending.remove(&id);
        sockets.proven.remove(&id);
    }

    fn end_pending(&self) {
        let mut sockets = self.lock();
        sockets.is_closed = true;
        sockets.pending.values().for_each(shut);
    }

    /// Ends all connections: in good order within a moment, or by force.
    pub(super) fn finish(&self) {
        self.threads.wait(LINGER);
        let mut sockets = self.lock();
        sockets.is_closed = true;
        sockets.pending.values().chain(sockets.proven.values()).for_each(shut);
        drop(sockets);
        if !self.threads.wait(LINGER) {
            tracing::warn!("a thread of the control channel did not end");
        }
    }
}

/// A socket that is gone already cannot be shut, and need not be.
fn shut(socket: &Arc<TcpStream>) {
    let _ = socket.shutdown(Shutdown::Both);
}
