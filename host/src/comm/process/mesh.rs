//! [`Mesh`]: the connections of this process to all others, and the messages of every group that use them.
//!
//! Groups share the connections, and any group may receive frames of another: every peer has a queue for the messages of each group. A
//! frame may arrive before this process has made its end of the group.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::connection::{Connection, FrameKind};
use super::message::Messages;
use crate::bootstrap::Member;

/// The interval at which a rank with lanes checks the sockets for the end of other processes.
const ENDS_AFTER: Duration = Duration::from_millis(1);
/// The longest time for which a leaving rank waits until another process takes more of the last frames, or leaves too.
const LINGER: Duration = Duration::from_secs(1);
/// The group of all ranks.
pub(super) const WORLD: u64 = 1;

/// The connections of a process.
#[derive(Debug)]
pub(super) struct Mesh {
    member: Member,
    /// The peers by rank; `None` for this rank.
    peers: Vec<Option<Mutex<Peer>>>,
    /// The lowest group number that this process has not used; it is or was in groups with lower numbers.
    free_group: AtomicU64,
    start: Instant,
    /// When the sockets were last checked, in nanoseconds since the start.
    asked: AtomicU64,
}

/// The state of another process.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) connection: Connection,
    /// The first violation of the protocol by the other process; its connection counts as ended.
    pub(super) violation: Option<String>,
    groups: HashMap<u64, Messages>,
}

impl Peer {
    pub(super) fn new(connection: Connection) -> Self {
        Self { connection, violation: None, groups: HashMap::new() }
    }

    /// The messages of a group.
    pub(super) fn group(&mut self, group: u64) -> &mut Messages {
        self.groups.entry(group).or_default()
    }

    /// The messages of a group, and the connection.
    pub(super) fn group_and_connection(&mut self, group: u64) -> (&mut Messages, &mut Connection) {
        (self.groups.entry(group).or_default(), &mut self.connection)
    }

    /// Receives the frames that have arrived, and advances the messages of all groups.
    pub(super) fn progress(&mut self) {
        self.connection.flush();
        self.connection.fill();
        self.take_frames();
        for (&number, group) in &mut self.groups {
            group.advance(number, &mut self.connection);
        }
    }

    /// Like [`progress`](Self::progress), but advances only the messages of one group, and returns them.
    pub(super) fn progress_of(&mut self, number: u64) -> &mut Messages {
        self.connection.flush();
        self.connection.fill();
        self.take_frames();
        let group = self.groups.entry(number).or_default();
        group.advance(number, &mut self.connection);
        group
    }

    fn take_frames(&mut self) {
        loop {
            match self.connection.next() {
                Ok(None) => break,
                Ok(Some((FrameKind::Taken, _, payload))) => {
                    let bytes = payload.try_into().map_or(0, u64::from_le_bytes);
                    self.connection.note_arrived(bytes);
                }
                Ok(Some((kind, number, payload))) => {
                    let bytes =
                        if kind == FrameKind::Bytes { payload.len().saturating_sub(size_of::<u64>()) } else { 0 };
                    let group = self.groups.entry(number).or_default();
                    group.take(kind, payload);
                    if group.is_over() {
                        self.groups.remove(&number);
                    }
                    // The sender continues while this process decrypts the next frames.
                    self.connection.note_taken(bytes);
                }
                Err(error) => {
                    tracing::warn!(%error, "the connection to a rank is given up");
                    self.violation.get_or_insert(error.to_string());
                    break;
                }
            }
        }
    }

    /// Ends this process's part in a group.
    pub(super) fn leave(&mut self, number: u64) {
        self.connection.push(FrameKind::Left, number, &[]);
        let group = self.groups.entry(number).or_default();
        group.close(&self.connection);
        if group.is_over() {
            self.groups.remove(&number);
        }
    }
}

impl Mesh {
    pub(super) fn new(member: Member, peers: Vec<Option<Peer>>) -> Self {
        let peers = peers.into_iter().map(|peer| peer.map(Mutex::new)).collect();
        let (free_group, asked) = (AtomicU64::new(WORLD + 1), AtomicU64::new(0));
        Mesh { member, peers, free_group, start: Instant::now(), asked }
    }

    pub(super) fn member(&self) -> &Member {
        &self.member
    }

    pub(super) fn rank(&self) -> usize {
        self.member.rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.peers.len()
    }

    /// No user code runs under the lock, so a poisoned one still guards consistent state.
    pub(super) fn peer(&self, peer: usize) -> MutexGuard<'_, Peer> {
        let peer = self.peers[peer].as_ref().expect("another rank");
        peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks which processes have ended, at the interval [`ENDS_AFTER`].
    pub(super) fn look_for_ends(&self) {
        let now = self.start.elapsed().as_nanos() as u64;
        let asked = self.asked.load(Ordering::Relaxed);
        let is_time = now.saturating_sub(asked) >= ENDS_AFTER.as_nanos() as u64;
        if is_time && self.asked.compare_exchange(asked, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            for peer in self.peers.iter().flatten() {
                peer.lock().unwrap_or_else(PoisonError::into_inner).connection.look_for_end();
            }
        }
    }

    /// The lowest group number that this process has not used yet.
    pub(super) fn free_group(&self) -> u64 {
        self.free_group.load(Ordering::Relaxed)
    }

    /// Reserves a group number; returns false if this process has used it, or a higher one, before.
    pub(super) fn take_group(&self, number: u64) -> bool {
        self.free_group.fetch_max(number + 1, Ordering::Relaxed) <= number
    }
}

impl Drop for Mesh {
    /// Sends the last frames of this rank, which other ranks may still have to receive.
    fn drop(&mut self) {
        let peers = self.peers.iter_mut().flatten();
        let mut peers: Vec<&mut Peer> =
            peers.map(|peer| peer.get_mut().unwrap_or_else(PoisonError::into_inner)).collect();
        linger(peers.iter_mut().collect(), |peer| peer.connection.queued());
        peers.iter_mut().for_each(|peer| peer.connection.finish());
        // A socket that is closed with unread bytes resets the connection, and bytes in flight to the other end are lost.
        peers.retain(|peer| peer.connection.is_network());
        linger(peers.iter_mut().collect(), |peer| peer.connection.unconfirmed() + 1);
    }
}

/// Waits for each peer until nothing is `left` to do, the other process has ended, or it has made no progress for [`LINGER`].
fn linger(peers: Vec<&mut &mut Peer>, left: impl Fn(&Peer) -> usize) {
    let mut waits: Vec<_> = peers.into_iter().map(|peer| (peer, usize::MAX, Instant::now())).collect();
    loop {
        waits.retain_mut(|(peer, before, since)| {
            // A full connection drains only if the frames of its other end are read too.
            peer.progress();
            peer.connection.look_for_end();
            let left = left(peer);
            if left != *before {
                (*before, *since) = (left, Instant::now());
            }
            left > 0 && !peer.connection.has_ended() && since.elapsed() < LINGER
        });
        if waits.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{Read, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;
    use crate::bootstrap::{NoiseSession, Socket, sessions};

    const WORDS: [&[u8]; 3] = [b"the first record", b"the second record", b"the third record"];

    fn network(session: Option<NoiseSession>) -> (Peer, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let own = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        own.set_nonblocking(true).unwrap();
        let socket = Socket::Network(own);
        let peer = crate::bootstrap::PeerSocket { socket, session, is_here: false };
        (Peer::new(Connection::new(peer)), listener.accept().unwrap().0)
    }

    fn local() -> (Peer, UnixStream) {
        let (own, other) = UnixStream::pair().expect("a pair");
        own.set_nonblocking(true).expect("a socket");
        let peer = crate::bootstrap::PeerSocket { socket: Socket::Local(own), session: None, is_here: true };
        (Peer::new(Connection::new(peer)), other)
    }

    /// The bytes of records on their way over a network, one element for each.
    fn sent(session: NoiseSession) -> [Vec<u8>; 3] {
        let (mut sender, mut wire) = network(Some(session));
        WORDS.map(|word| {
            sender.connection.push(FrameKind::Record, WORLD, word);
            let mut length = [0; 2];
            wire.read_exact(&mut length).unwrap();
            let mut message = vec![0; u16::from_le_bytes(length).into()];
            wire.read_exact(&mut message).unwrap();
            [&length[..], &message].concat()
        })
    }

    /// The number of records that arrive by these bytes, and the violation that ends their connection.
    fn arrived(session: NoiseSession, bytes: &[u8]) -> (usize, Option<String>) {
        let (mut receiver, mut wire) = network(Some(session));
        wire.write_all(bytes).unwrap();
        drop(wire);
        while !receiver.connection.has_ended() {
            receiver.progress();
        }
        receiver.take_frames();
        let records = &receiver.group(WORLD).records;
        assert!(records.iter().zip(WORDS).all(|(record, word)| **record == *word));
        (records.len(), receiver.violation)
    }

    #[test]
    fn mesh_hides_data_from_an_attacker_and_finds_changes() {
        let attack = |arrange: &dyn Fn([Vec<u8>; 3]) -> Vec<u8>| {
            let [from, to] = sessions();
            arrived(to, &arrange(sent(from)))
        };
        let is_violated = |outcome: (usize, Option<String>), records: usize| {
            let (arrived, violation) = outcome;
            arrived == records && violation.is_some_and(|reason| reason.contains("altered, injected, repeated"))
        };
        assert_eq!(attack(&|records| records.concat()), (3, None));
        assert!(is_violated(attack(&|[one, ..]| one.repeat(2)), 1), "a record that is repeated");
        assert!(is_violated(attack(&|[one, _, three]| [one, three].concat()), 1), "a record that is dropped");
        assert!(is_violated(attack(&|[one, two, _]| [two, one].concat()), 0), "records in another order");
        assert!(is_violated(attack(&|[one, ..]| [&one[..], &[40, 0], &[0; 40]].concat()), 1), "an injected message");
        assert!(is_violated(attack(&|[one, ..]| [&one[..], &[15, 0]].concat()), 1), "a message without a tag");
        assert_eq!(attack(&|[one, two, _]| [&one[..], &two[..two.len() - 1]].concat()), (1, None), "a message is cut");
        let [[from, _], [_, to]] = [(); 2].map(|()| sessions());
        let records = sent(from);
        assert!(is_violated(arrived(to, &records.concat()), 0), "records of another connection");
        let (mut sender, mut wire) = network(sessions().into_iter().next());
        sender.connection.push(FrameKind::Record, WORLD, WORDS[0]);
        let mut message = vec![0; records[0].len()];
        wire.read_exact(&mut message).unwrap();
        wire.write_all(&message).unwrap();
        while !sender.connection.has_ended() {
            sender.progress();
        }
        assert!(sender.violation.is_some() && sender.group(WORLD).records.is_empty(), "a record that is reflected");
        for index in 0..records[0].len() {
            let outcome = attack(&|[mut one, two, three]| {
                one[index] ^= 1;
                [one, two, three, vec![0; 1 << 16]].concat()
            });
            assert!(is_violated(outcome, 0), "byte {index} is altered");
        }
        assert!(records.concat().windows(6).all(|window| window != b"record"), "a record can be read on its way");
    }

    #[test]
    fn mesh_takes_bytes_that_are_no_frame_as_a_violation() {
        let (mut peer, mut other) = local();
        other.write_all(&[0xff; 64]).expect("room for a few bytes");
        peer.progress();
        assert!(peer.connection.has_ended());
        assert!(peer.violation.is_some_and(|violation| violation.contains("no rank of this version sends")));
        let (mut peer, other) = local();
        drop(other);
        peer.progress();
        assert!(peer.connection.has_ended() && peer.violation.is_none());
    }

    /// Twice as many bytes as a reader takes in a second that reads [`BIT`] bytes each [`PAUSE`], in the frames of records.
    const FRAMES: usize = 2 * (1000 / PAUSE.as_millis() as usize) * BIT / (HEADER + PAYLOAD);
    const PAUSE: Duration = Duration::from_millis(50);
    const BIT: usize = 256 << 10;
    const HEADER: usize = 16;
    const PAYLOAD: usize = 32 << 10;

    /// A rank that leaves while its last frames are on their way to this peer.
    fn leave(mut peer: Peer) -> thread::JoinHandle<Duration> {
        (0..FRAMES).for_each(|_| peer.connection.push(FrameKind::Record, WORLD, &[7; PAYLOAD]));
        let member = crate::bootstrap::Rendezvous::in_process().join(0, 1).expect("one rank");
        let mesh = Mesh::new(member, vec![None, Some(peer)]);
        thread::spawn(move || {
            let start = Instant::now();
            drop(mesh);
            start.elapsed()
        })
    }

    #[test]
    fn leave_sends_all_frames_to_a_slow_reader() {
        let read_slowly = |leaving: thread::JoinHandle<Duration>, wire: &mut dyn Read, answer: &mut dyn FnMut()| {
            let (mut bytes, mut bit, mut read) = (0, vec![0; BIT], 1);
            while read > 0 {
                thread::sleep(PAUSE);
                // A socket that was closed would answer with a reset, and drop what is on its way.
                answer();
                let mut room = &mut bit[..];
                while read > 0 && !room.is_empty() {
                    read = wire.read(room).expect("no reset");
                    room = &mut room[read..];
                    bytes += read;
                }
            }
            assert_eq!(bytes, FRAMES * (HEADER + PAYLOAD));
            leaving
        };
        let (peer, mut wire) = local();
        let time = read_slowly(leave(peer), &mut wire, &mut || ()).join().expect("no panic");
        assert!(time > LINGER, "the reader was not slow");
        let (peer, mut wire) = network(None);
        let mut other = wire.try_clone().expect("another handle");
        let frame = [&[0; 4][..], &[FrameKind::Taken as u8], &[0; 11]].concat();
        // It may fail once everything has arrived.
        let answer = &mut || _ = other.write_all(&frame);
        let leaving = read_slowly(leave(peer), &mut wire, answer);
        drop((other, wire));
        assert!(leaving.join().expect("no panic") > LINGER, "the reader was not slow");
    }

    #[test]
    fn leave_does_not_wait_for_a_stopped_reader() {
        let (peer, wire) = local();
        let (other, network_wire) = network(None);
        for leaving in [leave(peer), leave(other)] {
            let time = leaving.join().expect("no panic");
            assert!(time >= LINGER && time < 20 * LINGER, "{time:?}");
        }
        drop((wire, network_wire));
    }
}
