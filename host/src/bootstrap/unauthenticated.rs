//! Unauthenticated connections to rank 0. One thread serves all of them and never blocks on one: such a connection costs a socket and a
//! few hundred bytes, for less than a second.
//!
//! Any process may connect, as often as it likes. When all slots are taken, a new connection evicts the oldest one from the source with
//! the most connections, once that one has had [`GRACE`], which is more than a rank needs, since ranks answer the greeting at once. So
//! unauthenticated connections can keep out neither ranks of other addresses by their number, nor ranks of their own address by waiting.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::noise::{Challenge, HandshakeError, Identity, NoiseSession};
use super::poll::Alarm;
use super::secret::Secret;

/// How long a connection may take to authenticate itself.
const PROOF_TIME: Duration = Duration::from_millis(900);
/// The grace period, for which a connection keeps its slot in any case: the first duration times the number of slots, and at least the
/// second duration. A queue of 1000 connections is served in less than a second, or with few slots in a few seconds.
const GRACE: (Duration, Duration) = (Duration::from_micros(400), Duration::from_millis(50));
/// How long no connection is accepted after the system lacked the resources for one.
const PAUSE: Duration = Duration::from_millis(20);
/// For how long the system may lack the resources for a single connection.
const STARVED: Duration = Duration::from_secs(1);
/// The least and the most slots; between these bounds, the number is a quarter of the process's descriptor limit. It shrinks when the
/// system has no descriptors left.
const SLOTS: (usize, usize) = (16, 512);

/// A connection that has been authenticated.
pub(super) struct Authenticated {
    pub(super) socket: TcpStream,
    pub(super) identity: Identity,
    pub(super) session: NoiseSession,
}

/// Why a connection was not taken.
pub(super) enum Rejected {
    /// It was closed because it was not authenticated.
    Connection { origin: SocketAddr, reason: String },
    /// The system has refused a connection for [`STARVED`], although no unauthenticated connection holds anything.
    Starved(io::Error),
}

struct Candidate {
    socket: TcpStream,
    origin: SocketAddr,
    source: IpAddr,
    since: Instant,
    challenge: Challenge,
}

/// Rank 0's listener, and its unauthenticated connections, oldest first.
pub(super) struct UnauthenticatedConnections<'a, F> {
    listener: TcpListener,
    secret: &'a Secret,
    alarm: &'a Alarm,
    report: F,
    candidates: VecDeque<Candidate>,
    /// The number of connections by source.
    per_source: HashMap<IpAddr, usize>,
    slots: usize,
    /// No connection is accepted before this time.
    pause_end: Option<Instant>,
    /// Since when the system has refused connections although there is no candidate.
    starved: Option<Instant>,
}

impl<'a, F: FnMut(Result<Authenticated, Rejected>)> UnauthenticatedConnections<'a, F> {
    /// Calls `report` with every connection that is authenticated or closed. The listener must not block.
    pub(super) fn new(listener: TcpListener, secret: &'a Secret, alarm: &'a Alarm, report: F) -> Self {
        let (candidates, per_source, slots) = (VecDeque::new(), HashMap::new(), slots());
        let (pause_end, starved) = (None, None);
        UnauthenticatedConnections {
            listener,
            secret,
            alarm,
            report,
            candidates,
            per_source,
            slots,
            pause_end,
            starved,
        }
    }

    /// Serves all connections until the alarm.
    pub(super) fn serve(mut self) {
        while !self.alarm.is_raised() {
            let can_accept = self.pause_end.is_none() && self.slot().is_some();
            let listener = can_accept.then_some(&self.listener);
            let sockets = self.candidates.iter().map(|candidate| &candidate.socket);
            let ready = match self.alarm.wait(listener, sockets, self.time_to_change(can_accept)) {
                Ok(ready) => ready,
                Err(error) => {
                    // The cause may be a lack of memory: an immediate retry would only use processor time.
                    tracing::warn!(%error, "cannot wait for connections");
                    thread::sleep(PAUSE);
                    continue;
                }
            };
            // The order is from the last to the first, because removing a candidate moves only later ones.
            for index in (0..self.candidates.len()).rev().filter(|&index| ready.sockets[index]) {
                self.hear(index);
            }
            self.expire();
            if ready.listener {
                self.accept();
            }
        }
    }

    /// The time until the next timeout.
    fn time_to_change(&self, can_accept: bool) -> Option<Duration> {
        let oldest = self.candidates.front().map(|candidate| candidate.since + PROOF_TIME);
        let next = if can_accept { None } else { self.pause_end.or(self.victim().map(|(_, free)| free)) };
        let end = oldest.into_iter().chain(next).min()?;
        // The time is rounded up, because a wait that ends a moment too early is repeated at once.
        Some(end.saturating_duration_since(Instant::now()) + Duration::from_millis(1))
    }

    fn expire(&mut self) {
        while self.candidates.front().is_some_and(|candidate| candidate.since.elapsed() >= PROOF_TIME) {
            self.evict(0, &format!("it proved nothing within {PROOF_TIME:?}"));
        }
        while self.candidates.len() > self.slots {
            let Some(index) = self.victim_now() else { break };
            self.evict(index, "it proved nothing before its descriptor was needed");
        }
        self.pause_end = self.pause_end.filter(|end| *end > Instant::now());
    }

    /// The connection to evict if a slot is needed, and the end of its grace period.
    fn victim(&self) -> Option<(usize, Instant)> {
        let largest = self.per_source.values().max()?;
        let index = self.candidates.iter().position(|candidate| self.per_source[&candidate.source] == *largest)?;
        Some((index, self.candidates[index].since + self.grace()))
    }

    fn grace(&self) -> Duration {
        GRACE.1.max(GRACE.0 * self.slots as u32)
    }

    /// Whether one more connection has a slot; if so, the connection to evict from it, if any.
    fn slot(&self) -> Option<Option<usize>> {
        if self.candidates.len() < self.slots {
            return Some(None);
        }
        self.victim_now().map(Some)
    }

    /// The connection to evict if a slot is needed now.
    fn victim_now(&self) -> Option<usize> {
        self.victim().filter(|(_, free)| *free <= Instant::now()).map(|(index, _)| index)
    }

    fn accept(&mut self) {
        while let Some(taken_from) = self.slot() {
            match self.listener.accept() {
                Ok((socket, origin)) => {
                    self.starved = None;
                    if let Some(index) = taken_from {
                        self.evict(index, "it proved nothing before its place was needed");
                    }
                    match greet(socket, origin) {
                        Ok(candidate) => self.enter(candidate),
                        Err(error) => self.report_rejected(origin, error.to_string()),
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // The cause may be a lack of descriptors: the rest of the process gets some of them back.
                    self.slots = (self.candidates.len() / 4 * 3).max(1);
                    tracing::warn!(%error, slots = self.slots, "a connection was not accepted");
                    self.pause_end = Instant::now().checked_add(PAUSE);
                    let since = *self.starved.get_or_insert_with(Instant::now);
                    if !self.candidates.is_empty() {
                        self.starved = None;
                    } else if since.elapsed() >= STARVED {
                        (self.report)(Err(Rejected::Starved(error)));
                    }
                    return;
                }
            }
        }
    }

    /// Reads the bytes that have arrived from a candidate.
    fn hear(&mut self, index: usize) {
        let candidate = &mut self.candidates[index];
        match candidate.challenge.hear(&mut candidate.socket, self.secret) {
            Ok(None) => {}
            Ok(Some((identity, session))) => {
                let socket = self.leave(index).socket;
                (self.report)(Ok(Authenticated { socket, identity, session }));
            }
            Err(error) => self.refuse(index, error.to_string()),
        }
    }

    /// Closes a connection whose time is over, unless its proof has arrived by now: this process may have been busy or stopped.
    fn evict(&mut self, index: usize, reason: &str) {
        let count = self.candidates.len();
        self.hear(index);
        if self.candidates.len() == count {
            self.refuse(index, reason.into());
        }
    }

    /// Closes a connection.
    fn refuse(&mut self, index: usize, reason: String) {
        let origin = self.leave(index).origin;
        self.report_rejected(origin, reason);
    }

    fn enter(&mut self, candidate: Candidate) {
        *self.per_source.entry(candidate.source).or_default() += 1;
        self.candidates.push_back(candidate);
    }

    fn leave(&mut self, index: usize) -> Candidate {
        let candidate = self.candidates.remove(index).expect("an index of a candidate");
        if let Entry::Occupied(mut count) = self.per_source.entry(candidate.source) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        candidate
    }

    fn report_rejected(&mut self, origin: SocketAddr, reason: String) {
        let origin = SocketAddr::new(origin.ip().to_canonical(), origin.port());
        (self.report)(Err(Rejected::Connection { origin, reason }));
    }
}

fn greet(mut socket: TcpStream, origin: SocketAddr) -> Result<Candidate, HandshakeError> {
    let challenge = Challenge::new()?;
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    // The send buffer of a new connection has room for the greeting.
    socket.write_all(challenge.greeting())?;
    Ok(Candidate { socket, origin, source: source(origin.ip()), since: Instant::now(), challenge })
}

/// Maps an address to its source: one source stands for all addresses that one party easily obtains, which is a /64 network with IPv6.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

/// The number of slots, which leaves enough descriptors to the rest of the process.
fn slots() -> usize {
    #[cfg(unix)]
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    #[cfg(not(unix))]
    let limit: Option<u64> = None;
    let quarter = limit.map_or(SLOTS.1, |limit| usize::try_from(limit / 4).unwrap_or(SLOTS.1));
    quarter.clamp(SLOTS.0, SLOTS.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_is_one_for_the_addresses_of_one_party() {
        let of = |text: &str| source(text.parse().unwrap());
        assert_eq!(of("::ffff:10.0.0.7"), of("10.0.0.7"));
        assert_ne!(of("10.0.0.7"), of("10.0.0.8"));
        assert_eq!(of("2001:db8::1:2:3:4"), of("2001:db8::5"));
        assert_ne!(of("2001:db8::5"), of("2001:db8:0:1::5"));
    }

    /// Connections from one address, however many, do not take the slot of a single connection from another address.
    #[test]
    fn victim_is_of_the_source_with_the_most_connections() {
        let secret = Secret::from_bytes([1; 32]);
        let alarm = Alarm::new().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut connections = UnauthenticatedConnections::new(listener, &secret, &alarm, |_| {});
        let origins = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1", "10.0.0.2:3"];
        for origin in origins {
            connections.enter(greet(TcpStream::connect(address).unwrap(), origin.parse().unwrap()).unwrap());
        }
        assert_eq!(connections.victim(), Some((1, connections.candidates[1].since + connections.grace())));
        assert_eq!(connections.slot(), Some(None));
        connections.slots = origins.len();
        assert_eq!(connections.slot(), None, "nobody has had the time that everybody has");
        let grace = connections.grace();
        connections.candidates.iter_mut().for_each(|candidate| candidate.since -= grace);
        assert_eq!(connections.slot(), Some(Some(1)));
        // Now every source has one connection.
        (0..2).for_each(|_| connections.refuse(1, String::new()));
        assert_eq!(connections.slot(), Some(None));
        assert_eq!(connections.victim().map(|(index, _)| index), Some(0));
    }
}
