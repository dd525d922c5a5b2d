//! Unauthenticated connections to rank 0. One thread serves all of them and never blocks on one: a stranger costs a socket
//! and a few hundred bytes, for less than a second.
//!
//! Any process may connect, as often as it likes. When all slots are taken, a new connection evicts the oldest one from the
//! address with the most connections, once that one has had [`GRACE`]: more than an honest rank needs, which answers the greeting at once. So strangers
//! can keep out neither ranks of other addresses by their number, nor ranks of their own address by waiting.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::handshake::{Challenge, HandshakeError, Identity};
use super::poll::Alarm;
use super::seal::Session;
use super::secret::Secret;

/// How long a connection may take to prove itself.
const PROOF_TIME: Duration = Duration::from_millis(900);
/// How long a connection keeps its slot in any case: the first duration for each slot that there is, and at least the second duration. A queue of 1000
/// strangers is served in less than a second, or with few slots in a few seconds.
const GRACE: (Duration, Duration) = (Duration::from_micros(400), Duration::from_millis(50));
/// How long no connection is accepted after the system had no room for one more.
const PAUSE: Duration = Duration::from_millis(20);
/// The least and the most slots; between these bounds, a quarter of the descriptors that this process may have. Fewer
/// once there are no descriptors left.
const SLOTS: (usize, usize) = (16, 512);

/// A connection that has proven itself.
pub(super) struct Proven {
    pub(super) socket: TcpStream,
    pub(super) identity: Identity,
    pub(super) session: Session,
}

/// A connection that was closed because it has not proven itself.
pub(super) struct Stranger {
    pub(super) origin: SocketAddr,
    pub(super) reason: String,
}

struct Candidate {
    socket: TcpStream,
    origin: SocketAddr,
    neighbourhood: IpAddr,
    since: Instant,
    challenge: Challenge,
}

/// Rank 0's listener, and its unauthenticated connections, oldest first.
pub(super) struct Unproven<'a, F> {
    listener: TcpListener,
    secret: &'a Secret,
    alarm: &'a Alarm,
    report: F,
    candidates: VecDeque<Candidate>,
    /// The number of connections from each neighbourhood.
    crowds: HashMap<IpAddr, usize>,
    slots: usize,
    /// No connection is accepted before this time.
    pause_end: Option<Instant>,
}

impl<'a, F: FnMut(Result<Proven, Stranger>)> Unproven<'a, F> {
    /// Calls `report` with every connection that proves itself or is closed. The listener must not block.
    pub(super) fn new(listener: TcpListener, secret: &'a Secret, alarm: &'a Alarm, report: F) -> Self {
        let (candidates, crowds, slots) = (VecDeque::new(), HashMap::new(), slots());
        Unproven { listener, secret, alarm, report, candidates, crowds, slots, pause_end: None }
    }

    /// Serves all connections, until the alarm.
    pub(super) fn serve(mut self) {
        while !self.alarm.is_raised() {
            let can_accept = self.pause_end.is_none() && self.slot().is_some();
            let listener = can_accept.then_some(&self.listener);
            let sockets = self.candidates.iter().map(|candidate| &candidate.socket);
            let ready = match self.alarm.wait(listener, sockets, self.time_to_change(can_accept)) {
                Ok(ready) => ready,
                Err(error) => {
                    // No memory, for example: trying again at once would only burn the processor.
                    tracing::warn!(%error, "cannot wait for connections");
                    thread::sleep(PAUSE);
                    continue;
                }
            };
            // From the last: removing a candidate moves only later ones.
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
        // Rounded up: a wait that ends a moment too early is repeated at once.
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
        let largest = self.crowds.values().max()?;
        let index = self.candidates.iter().position(|candidate| self.crowds[&candidate.neighbourhood] == *largest)?;
        Some((index, self.candidates[index].since + self.grace()))
    }

    fn grace(&self) -> Duration {
        GRACE.1.max(GRACE.0 * self.slots as u32)
    }

    /// A slot for one more connection, if there is one, with the connection to evict from it.
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
                    if let Some(index) = taken_from {
                        self.evict(index, "it proved nothing before its place was needed");
                    }
                    match greet(socket, origin) {
                        Ok(candidate) => self.enter(candidate),
                        Err(error) => self.report_stranger(origin, error.to_string()),
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
                Err(error) => {
                    // No descriptors, for example: the rest of the process gets some of these back.
                    self.slots = (self.candidates.len() / 4 * 3).max(1);
                    tracing::warn!(%error, slots = self.slots, "a connection was not accepted");
                    self.pause_end = Instant::now().checked_add(PAUSE);
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
                (self.report)(Ok(Proven { socket, identity, session }));
            }
            Err(error) => self.refuse(index, error.to_string()),
        }
    }

    /// Closes a connection whose time is over, unless its proof has come by now: this process may have been busy, or stopped.
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
        self.report_stranger(origin, reason);
    }

    fn enter(&mut self, candidate: Candidate) {
        *self.crowds.entry(candidate.neighbourhood).or_default() += 1;
        self.candidates.push_back(candidate);
    }

    fn leave(&mut self, index: usize) -> Candidate {
        let candidate = self.candidates.remove(index).expect("an index of a candidate");
        if let Entry::Occupied(mut crowd) = self.crowds.entry(candidate.neighbourhood) {
            *crowd.get_mut() -= 1;
            if *crowd.get() == 0 {
                crowd.remove();
            }
        }
        candidate
    }

    fn report_stranger(&mut self, origin: SocketAddr, reason: String) {
        let origin = SocketAddr::new(origin.ip().to_canonical(), origin.port());
        (self.report)(Err(Stranger { origin, reason }));
    }
}

fn greet(mut socket: TcpStream, origin: SocketAddr) -> Result<Candidate, HandshakeError> {
    let challenge = Challenge::new()?;
    socket.set_nonblocking(true)?;
    socket.set_nodelay(true)?;
    // A connection that nothing was written to has room for this.
    socket.write_all(&challenge.greeting())?;
    Ok(Candidate { socket, origin, neighbourhood: neighbourhood(origin.ip()), since: Instant::now(), challenge })
}

/// Maps all addresses that one party easily has to one: with IPv6, all of a network of 64 bits.
fn neighbourhood(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address => address,
    }
}

/// Strangers must not take the descriptors that the rest of the process needs.
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
    fn neighbours_share_what_one_party_easily_has() {
        let of = |text: &str| neighbourhood(text.parse().unwrap());
        assert_eq!(of("::ffff:10.0.0.7"), of("10.0.0.7"));
        assert_ne!(of("10.0.0.7"), of("10.0.0.8"));
        assert_eq!(of("2001:db8::1:2:3:4"), of("2001:db8::5"));
        assert_ne!(of("2001:db8::5"), of("2001:db8:0:1::5"));
    }

    /// Strangers of one address, however many, do not take the slot of a single connection from another.
    #[test]
    fn places_are_taken_from_the_largest_crowd() {
        let secret = Secret::from_bytes([1; 32]);
        let alarm = Alarm::new().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut unproven = Unproven::new(listener, &secret, &alarm, |_| {});
        let origins = ["10.0.0.1:1", "10.0.0.2:1", "10.0.0.2:2", "10.0.0.3:1", "10.0.0.2:3"];
        for origin in origins {
            unproven.enter(greet(TcpStream::connect(address).unwrap(), origin.parse().unwrap()).unwrap());
        }
        assert_eq!(unproven.victim(), Some((1, unproven.candidates[1].since + unproven.grace())));
        assert_eq!(unproven.slot(), Some(None));
        unproven.slots = origins.len();
        assert_eq!(unproven.slot(), None, "nobody has had the time that everybody has");
        let grace = unproven.grace();
        unproven.candidates.iter_mut().for_each(|candidate| candidate.since -= grace);
        assert_eq!(unproven.slot(), Some(Some(1)));
        // Then nobody holds more than another.
        (0..2).for_each(|_| unproven.refuse(1, String::new()));
        assert_eq!(unproven.slot(), Some(None));
        assert_eq!(unproven.victim().map(|(index, _)| index), Some(0));
    }
}
