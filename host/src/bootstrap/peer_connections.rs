//! [`Member::connect_peers`]: a connection between every two ranks of a group, for a transport that sends data over it.
//!
//! Ranks of one machine connect by Unix sockets. Their names are random, in Linux's abstract namespace, and disappear once all ranks have
//! connected, so nothing is left in a file system; the system reports the user at the other end. Other ranks connect by TCP, and so do
//! ranks of one machine between which a Unix socket is refused. Each connection begins with the [handshake](super::noise) of the control
//! channel, with a fresh secret, which rank 0 sends over the control channel. The transport has to encrypt everything that it sends over
//! TCP, by the [`NoiseSession`] that the handshake returns; the system protects Unix sockets.
//!
//! Each rank connects to the ranks below it, and then accepts the ranks above it. Rank 0 accepts at once, so the waits have no cycle.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::admission::Applicant;
use super::client;
use super::local::{self, Host};
use super::member::Member;
use super::noise::{Identity, NoiseSession};
use super::poll::Alarm;
use super::secret::Secret;
use super::server;
use super::unauthenticated::{Authenticated, Rejected, UnauthenticatedConnections};
use crate::call::scope;
use crate::error::{BootstrapError, CommError, Operation, Result};

/// The kinds of exchange that connecting consists of.
const HOSTS: usize = 3;
const OFFERS: usize = 4;
const OUTCOMES: usize = 5;

/// The interval at which a waiting rank checks whether the group has failed.
const PAUSE: Duration = Duration::from_millis(5);

/// A non-blocking connection to another rank.
#[derive(Debug)]
pub(crate) struct PeerSocket {
    pub(crate) socket: Socket,
    /// The encryption, if the connection is a network's.
    pub(crate) session: Option<NoiseSession>,
    /// Whether the other rank is on this machine.
    pub(crate) is_here: bool,
}

/// The kinds of connection.
#[derive(Debug)]
pub(crate) enum Socket {
    /// To a process of this machine and user.
    #[cfg(target_os = "linux")]
    Local(std::os::unix::net::UnixStream),
    /// To a process of another machine, user or network namespace, or one that no Unix socket reaches.
    Network(TcpStream),
}

/// The connections of a rank.
#[derive(Debug)]
pub(crate) struct Peers {
    /// The connections by rank; `None` for this rank.
    pub(crate) connections: Vec<Option<PeerSocket>>,
    /// Whether all ranks are processes of one machine.
    pub(crate) are_on_one_machine: bool,
}

/// The addresses at which a rank accepts connections.
#[derive(Default, Serialize, Deserialize)]
struct Offer {
    local: Option<local::Name>,
    port: Option<u16>,
    /// The secret of all connections, from rank 0.
    secret: Option<[u8; 32]>,
}

/// The sockets at which a rank waits for the ranks above it.
#[derive(Debug, Default)]
struct Listeners {
    local: Option<local::Listener>,
    network: Option<TcpListener>,
}

/// The arguments of connecting.
struct ConnectionPlan<'a> {
    hosts: &'a [Host],
    offers: &'a [Offer],
    secret: Secret,
    applicant: Applicant,
}

impl Member {
    /// Connects every two ranks. All ranks have to call it, once; a rank that cannot connect fails the group.
    ///
    /// # Errors
    /// [`CommError::Transport`], on every rank, with the reason of a rank that cannot connect; else as [`agree`](Self::agree).
    pub(crate) fn connect_peers(&self, deadline: Duration) -> Result<Peers, CommError> {
        let _scope = scope::within(Operation::SetUp);
        let (rank, world_size) = (self.rank(), self.world_size());
        let (end, recorder) = (Instant::now().checked_add(deadline), self.recorder().clone());
        let applicant = Applicant { rank, world_size, generation: 0, deadline, end, recorder };
        let left = || end.map_or(deadline, |end| end.saturating_duration_since(Instant::now()));
        let hosts: Vec<Host> = self.tell(HOSTS, &Host::own(), left())?;
        let opened = self.listeners(&hosts);
        let (listeners, offer) = self.or_fail(opened)?;
        let offers: Vec<Offer> = self.tell(OFFERS, &offer, left())?;
        let secret = offers[0].secret.map(Secret::from_bytes);
        let secret = secret.ok_or_else(|| self.connect_error("rank 0 has sent no secret".into()))?;
        let plan = ConnectionPlan { hosts: &hosts, offers: &offers, secret, applicant: applicant.clone() };
        let connections = self.connect_all(&plan, listeners).inspect_err(|error| self.fail(error.clone()))?;
        self.gather(OUTCOMES, &[], left())?;
        let here = hosts.iter().filter(|host| host.is_same_machine(&hosts[rank])).count();
        tracing::debug!(rank, local = here - 1, "connected to peers");
        Ok(Peers { connections, are_on_one_machine: here == world_size })
    }

    /// Fails the group with an error of this rank.
    fn or_fail<T>(&self, outcome: io::Result<T>) -> Result<T, CommError> {
        outcome.map_err(|error| {
            let failure = self.connect_error(error.to_string());
            self.fail(failure.clone());
            failure
        })
    }

    fn connect_error(&self, reason: String) -> CommError {
        let reason = format!("it cannot connect to other ranks: {reason}");
        CommError::Transport { operation: Operation::SetUp, rank: self.rank(), reason }
    }

    /// Listens for the ranks above. Ranks of this machine may need the network too, if a Unix socket is refused.
    fn listeners(&self, hosts: &[Host]) -> io::Result<(Listeners, Offer)> {
        let rank = self.rank();
        let above = &hosts[rank + 1..];
        let (mut listeners, mut offer) = (Listeners::default(), Offer::default());
        if above.iter().any(|host| host.may_connect(&hosts[rank])) {
            let (listener, name) = local::Listener::open()?;
            (listeners.local, offer.local) = (Some(listener), Some(name));
        }
        if !above.is_empty() {
            let listener = server::listen(self.network.loopback, 0).map_err(io::Error::other)?;
            offer.port = Some(server::port(&listener).map_err(io::Error::other)?);
            listeners.network = Some(listener);
        }
        if rank == 0 {
            offer.secret = Some(*Secret::random().map_err(io::Error::other)?.bytes());
        }
        Ok((listeners, offer))
    }

    fn connect_all(
        &self,
        plan: &ConnectionPlan<'_>,
        listeners: Listeners,
    ) -> Result<Vec<Option<PeerSocket>>, CommError> {
        let Applicant { rank, world_size, .. } = plan.applicant;
        let mut peers: Vec<Option<PeerSocket>> = (0..world_size).map(|_| None).collect();
        let alarm = Alarm::new().map_err(|error| self.connect_error(error.to_string()))?;
        let (sender, arrivals) = channel();
        let Listeners { local, network } = listeners;
        thread::scope(|scope| {
            let outcome = (|| {
                if let Some(listener) = network {
                    let (secret, alarm) = (&plan.secret, &alarm);
                    let report = move |outcome| {
                        let outcome = match outcome {
                            Ok(connection) => Ok(connection),
                            Err(Rejected::Starved(error)) => Err(error),
                            Err(Rejected::Connection { .. }) => return,
                        };
                        // The receiver is gone once all ranks have connected.
                        let _ = sender.send(outcome);
                    };
                    let serve = move || UnauthenticatedConnections::new(listener, secret, alarm, report).serve();
                    let thread = thread::Builder::new().name("gradsync-accept".into());
                    thread.spawn_scoped(scope, serve).map_err(|error| self.connect_error(error.to_string()))?;
                }
                for (below, peer) in peers[..rank].iter_mut().enumerate() {
                    *peer = Some(self.connect_to(below, plan)?);
                }
                while let Some(missing) = missing(&peers, rank) {
                    self.check_wait(plan, &missing)?;
                    let is_local = |peer: &usize| plan.hosts[*peer].may_connect(&plan.hosts[rank]);
                    let local = local.as_ref().filter(|_| missing.iter().any(is_local));
                    if let Some(listener) = local {
                        let came =
                            listener.accept(&plan.secret).map_err(|error| self.connect_error(error.to_string()))?;
                        if let Some((identity, socket)) = came {
                            admit(&mut peers, plan, identity, socket, None);
                            continue;
                        }
                    }
                    // A local connection ends the wait at once, and one of the network soon.
                    let arrival = match local {
                        Some(listener) => {
                            listener.wait(PAUSE);
                            arrivals.try_recv().ok()
                        }
                        None => arrivals.recv_timeout(PAUSE).ok(),
                    };
                    match arrival {
                        Some(Ok(Authenticated { socket, identity, session })) => {
                            admit(&mut peers, plan, identity, Socket::Network(socket), Some(session));
                        }
                        Some(Err(error)) => return Err(self.connect_error(error.to_string())),
                        None => {}
                    }
                }
                Ok(())
            })();
            alarm.raise();
            outcome
        })?;
        for peer in peers.iter_mut().flatten() {
            prepare(&peer.socket).map_err(|error| self.connect_error(error.to_string()))?;
        }
        Ok(peers)
    }

    /// Returns an error if a wait must end: the group has failed, or the deadline has passed.
    fn check_wait(&self, plan: &ConnectionPlan<'_>, missing: &[usize]) -> Result<(), CommError> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        if plan.applicant.left() == Some(Duration::ZERO) {
            let (missing, deadline) = (missing.to_vec(), plan.applicant.deadline);
            return Err(CommError::Timeout { operation: Operation::SetUp, missing, deadline });
        }
        Ok(())
    }

    fn connect_to(&self, peer: usize, plan: &ConnectionPlan<'_>) -> Result<PeerSocket, CommError> {
        let Applicant { rank, world_size, .. } = plan.applicant;
        let offer = &plan.offers[peer];
        let is_here = plan.hosts[peer].is_same_machine(&plan.hosts[rank]);
        let nowhere = || self.connect_error(format!("rank {peer} does not say where it listens"));
        if plan.hosts[peer].may_connect(&plan.hosts[rank]) {
            let name = offer.local.as_ref().ok_or_else(nowhere)?;
            let identity = Identity { rank: rank as u64, world_size: world_size as u64, generation: 0 };
            loop {
                match local::connect(name, &plan.secret, identity, plan.applicant.at_most(local::PROOF_TIME)) {
                    Ok(socket) => return Ok(PeerSocket { socket, session: None, is_here }),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.check_wait(plan, &[peer])?,
                    Err(error) => {
                        if BootstrapError::out_of_descriptors(rank, &error).is_some() {
                            return Err(self.connect_error(format!("rank {peer}: {error}")));
                        }
                        tracing::info!(rank, peer, %error, "a Unix socket was refused, so the ranks connect by TCP");
                        break;
                    }
                }
            }
        }
        let address = SocketAddr::new(self.address_of(peer), offer.port.ok_or_else(nowhere)?);
        loop {
            match client::approach(&plan.applicant, &address.to_string(), address, &plan.secret, client::ATTEMPT_TIME) {
                Ok((socket, session)) => {
                    return Ok(PeerSocket { socket: Socket::Network(socket), session: Some(session), is_here });
                }
                Err(error @ BootstrapError::OutOfResources { .. }) => return Err(self.connect_error(error.to_string())),
                Err(error) => {
                    self.check_wait(plan, &[peer])?;
                    tracing::debug!(rank, peer, %error, "trying again to connect to a rank");
                    thread::sleep(PAUSE);
                }
            }
        }
    }
}

/// The ranks above this one that have not connected, if there are any.
fn missing(peers: &[Option<PeerSocket>], rank: usize) -> Option<Vec<usize>> {
    let missing: Vec<usize> = (rank + 1..peers.len()).filter(|&peer| peers[peer].is_none()).collect();
    (!missing.is_empty()).then_some(missing)
}

/// Keeps the connection of a rank above this one. A rank whose connection broke may connect again.
fn admit(
    peers: &mut [Option<PeerSocket>],
    plan: &ConnectionPlan<'_>,
    identity: Identity,
    socket: Socket,
    session: Option<NoiseSession>,
) {
    let Applicant { rank, world_size, .. } = plan.applicant;
    match usize::try_from(identity.rank) {
        Ok(number) if (rank + 1..world_size).contains(&number) => {
            let is_here = plan.hosts[number].is_same_machine(&plan.hosts[rank]);
            peers[number] = Some(PeerSocket { socket, session, is_here });
        }
        _ => tracing::warn!(?identity, "a rank that does not connect to this one was refused"),
    }
}

/// Makes the socket non-blocking.
fn prepare(socket: &Socket) -> io::Result<()> {
    match socket {
        #[cfg(target_os = "linux")]
        Socket::Local(socket) => {
            socket.set_read_timeout(None)?;
            socket.set_write_timeout(None)?;
            socket.set_nonblocking(true)
        }
        Socket::Network(socket) => {
            socket.set_read_timeout(None)?;
            socket.set_write_timeout(None)?;
            socket.set_nodelay(true)?;
            socket.set_nonblocking(true)
        }
    }
}
