//! [`Connection`]: frames to and from one other process, through a lane of shared memory if there is one, otherwise through the socket,
//! encrypted if it is a network's. The socket stays open in any case, because its end shows the end of the other process.

use std::io::{self, ErrorKind, Read, Write};
#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;

use super::lane::Lane;
use super::single_copy;
use crate::bootstrap::{NoiseSession, PeerSocket, Socket};

/// The bytes before a payload: its length, the kind, and the group.
const HEADER_BYTES: usize = 16;
/// The longest payload.
const PAYLOAD_BYTES: usize = 32 << 10;
/// The most bytes of messages in flight. Sockets and lanes have room for more, so that records never wait behind them.
const WINDOW_BYTES: usize = 128 << 10;
/// The bytes that are read at a time.
const READ_BYTES: usize = 64 << 10;
/// A buffer frees the memory of removed bytes when there are so many of them, if it does not become empty before.
const REMOVED_BYTES: usize = 64 << 10;

/// The kind of a frame's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum FrameKind {
    Record = 1,
    /// The next bytes of a message.
    Bytes = 2,
    /// The sender has left the group.
    Left = 3,
    /// The number of bytes of messages that the sender of this frame has processed so far.
    Taken = 4,
    /// A message that the receiver may read where it is.
    Offer = 5,
    /// Whether the receiver has read an offered message, or wants its bytes.
    Answer = 6,
}

impl FrameKind {
    fn of(byte: u8) -> Option<Self> {
        [FrameKind::Record, FrameKind::Bytes, FrameKind::Left, FrameKind::Taken, FrameKind::Offer, FrameKind::Answer]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// The two lanes of a connection.
#[derive(Debug)]
pub(super) struct LanePair {
    pub(super) outward: Lane,
    pub(super) inward: Lane,
}

/// The flow control of message bytes.
#[derive(Debug, Default)]
struct FlowControl {
    sent: u64,
    /// The bytes that the other process has reported as processed.
    arrived: u64,
    /// The bytes that this process has processed, and its last report of them.
    taken: u64,
    told: u64,
}

/// Bytes that are appended at the end and removed at the beginning.
#[derive(Debug, Default)]
struct Buffer {
    bytes: Vec<u8>,
    removed: usize,
}

impl Buffer {
    /// The bytes that have not been removed.
    fn rest(&self) -> &[u8] {
        &self.bytes[self.removed..]
    }

    fn is_empty(&self) -> bool {
        self.removed == self.bytes.len()
    }

    fn remove(&mut self, bytes: usize) {
        self.removed += bytes;
    }

    /// The vector to which bytes can be appended.
    fn end(&mut self) -> &mut Vec<u8> {
        if self.is_empty() || self.removed >= REMOVED_BYTES {
            self.bytes.drain(..self.removed);
            self.removed = 0;
        }
        &mut self.bytes
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    socket: Socket,
    session: Option<NoiseSession>,
    /// Whether the other process is on this machine.
    is_here: bool,
    /// The number of the other process, if this process sees it.
    pub(super) process: Option<u32>,
    lanes: Option<LanePair>,
    /// Bytes that wait for room in the lane or socket.
    queue: Buffer,
    /// Received bytes of frames.
    received: Buffer,
    /// Received bytes that are not decrypted yet, and one frame before it is encrypted.
    encrypted: Buffer,
    plain: Vec<u8>,
    /// The bytes of one read from the socket.
    read: Vec<u8>,
    flow: FlowControl,
    has_ended: bool,
}

impl Connection {
    pub(super) fn new(peer: PeerSocket) -> Self {
        let PeerSocket { socket, session, is_here } = peer;
        Connection {
            process: single_copy::process_at(&socket),
            socket,
            session,
            is_here,
            lanes: None,
            queue: Buffer::default(),
            received: Buffer::default(),
            encrypted: Buffer::default(),
            plain: Vec::new(),
            read: Vec::new(),
            flow: FlowControl::default(),
            has_ended: false,
        }
    }

    /// Sends all later frames through lanes; both ends have to do so. Frames in memory are not encrypted.
    pub(super) fn set_lanes(&mut self, lanes: LanePair) {
        self.lanes = Some(lanes);
        self.session = None;
    }

    pub(super) fn lanes(&self) -> Option<&LanePair> {
        self.lanes.as_ref()
    }

    /// Whether the other process is on another machine.
    pub(super) fn leaves_machine(&self) -> bool {
        !self.is_here
    }

    /// Whether the socket is a network's, which loses bytes in flight when it is closed early.
    pub(super) fn is_network(&self) -> bool {
        matches!(self.socket, Socket::Network(_))
    }

    /// Whether the other process has ended, and all its frames have been received.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The number of bytes that wait for room.
    pub(super) fn queued(&self) -> usize {
        self.queue.rest().len()
    }

    /// The most bytes of messages in flight on this connection.
    fn window_bytes(&self) -> usize {
        self.lanes.as_ref().map_or(WINDOW_BYTES, |lanes| WINDOW_BYTES.min(lanes.outward.capacity() / 2))
    }

    /// The number of bytes of a message that can be sent in the next frame.
    pub(super) fn room(&self) -> usize {
        let window = self.window_bytes();
        let left = window.saturating_sub((self.flow.sent - self.flow.arrived) as usize);
        // Small frames are avoided: the next frame waits until a full one fits.
        let most = PAYLOAD_BYTES.min(window / 4);
        if left < most { 0 } else { most - size_of::<u64>() }
    }

    /// Sends bytes of a message, at most [`room`](Self::room). If the other process has ended, they are discarded and count as processed.
    pub(super) fn push_bytes(&mut self, group: u64, message: u64, bytes: &[u8]) {
        self.flow.sent += bytes.len() as u64;
        if self.has_ended {
            self.flow.arrived = self.flow.sent;
        }
        self.push_message(FrameKind::Bytes, group, message, bytes);
    }

    /// Sends a frame about a message.
    pub(super) fn push_message(&mut self, kind: FrameKind, group: u64, message: u64, payload: &[u8]) {
        self.push_parts(kind, group, &[&message.to_le_bytes(), payload]);
    }

    /// Records that message bytes were processed, and reports the number to the other process from time to time.
    pub(super) fn note_taken(&mut self, bytes: usize) {
        self.flow.taken += bytes as u64;
        if self.flow.taken - self.flow.told >= self.window_bytes() as u64 / 4 {
            self.flow.told = self.flow.taken;
            self.push(FrameKind::Taken, 0, &self.flow.taken.to_le_bytes());
        }
    }

    /// Records the number of bytes that the other process has processed.
    pub(super) fn note_arrived(&mut self, bytes: u64) {
        self.flow.arrived = bytes.min(self.flow.sent);
    }

    /// Sends a frame, as soon as there is room.
    pub(super) fn push(&mut self, kind: FrameKind, group: u64, payload: &[u8]) {
        self.push_parts(kind, group, &[payload, &[]]);
    }

    fn push_parts(&mut self, kind: FrameKind, group: u64, payload: &[&[u8]; 2]) {
        let bytes = payload[0].len() + payload[1].len();
        debug_assert!(bytes <= PAYLOAD_BYTES, "{bytes} bytes");
        if self.has_ended {
            return;
        }
        let mut header = [0; HEADER_BYTES];
        header[..4].copy_from_slice(&(bytes as u32).to_le_bytes());
        header[4] = kind as u8;
        header[8..].copy_from_slice(&group.to_le_bytes());
        if let Some(lanes) = self.lanes.as_ref().filter(|_| self.queue.is_empty()) {
            match lanes.outward.write(&[&header, payload[0], payload[1]]) {
                Ok(true) => return,
                Ok(false) => {}
                Err(error) => return self.give_up(&error),
            }
        }
        let frame = if self.session.is_some() { &mut self.plain } else { self.queue.end() };
        [&header[..], payload[0], payload[1]].iter().for_each(|part| frame.extend_from_slice(part));
        if let Some(session) = &self.session {
            session.encrypt(&self.plain, self.queue.end());
            self.plain.clear();
        }
        self.flush();
    }

    /// Sends queued bytes, as far as there is room.
    pub(super) fn flush(&mut self) {
        while !self.queue.is_empty() && !self.has_ended {
            let bytes = self.queue.rest();
            let written = match &self.lanes {
                Some(lanes) => lanes.outward.write_some(bytes),
                None => write(&self.socket, bytes),
            };
            match written {
                Ok(0) => return,
                Ok(written) => self.queue.remove(written),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::InvalidData => return self.give_up(&error),
                Err(_) => {
                    // Bytes that the other process has sent can still be read.
                    self.queue = Buffer::default();
                    return;
                }
            }
        }
    }

    /// Receives the bytes that have arrived. On a connection with lanes, only [`look_for_end`](Self::look_for_end) reads the socket.
    pub(super) fn fill(&mut self) {
        if let Some(lanes) = &self.lanes {
            if let Err(error) = lanes.inward.read(self.received.end()) {
                self.give_up(&error);
            }
            return;
        }
        self.read.resize(READ_BYTES, 0);
        while !self.has_ended {
            let read = read(&self.socket, &mut self.read);
            let into = if self.session.is_some() { self.encrypted.end() } else { self.received.end() };
            into.extend_from_slice(&self.read[..read.as_ref().copied().unwrap_or(0)]);
            match read {
                Ok(READ_BYTES) => {}
                Ok(bytes) => {
                    self.has_ended = bytes == 0;
                    return;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::debug!(%error, "a connection to a rank broke");
                    self.has_ended = true;
                }
            }
        }
    }

    /// Ends the connection, because the other process does what no rank of this version does.
    fn give_up(&mut self, error: &io::Error) {
        if !self.has_ended {
            tracing::warn!(%error, "the connection to a rank is given up");
        }
        self.has_ended = true;
        self.queue = Buffer::default();
    }

    /// Records the end of the other process, if it has ended, and receives its last bytes.
    pub(super) fn look_for_end(&mut self) {
        if self.lanes.is_none() || self.has_ended {
            return;
        }
        match read(&self.socket, &mut [0]) {
            Ok(1..) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Ok(0) | Err(_) => {
                // The order matters: after its end, the other process writes no more bytes.
                self.fill();
                self.has_ended = true;
            }
        }
    }

    /// Returns the next complete frame, with its group and its payload.
    ///
    /// # Errors
    /// Bytes that are not a frame of the other rank; the connection then counts as ended.
    pub(super) fn next(&mut self) -> io::Result<Option<(FrameKind, u64, &[u8])>> {
        let outcome = self.next_header();
        self.has_ended |= outcome.is_err();
        let Some((kind, group, len)) = outcome? else { return Ok(None) };
        let begin = self.received.removed + HEADER_BYTES;
        self.received.remove(HEADER_BYTES + len);
        Ok(Some((kind, group, &self.received.bytes[begin..begin + len])))
    }

    /// The kind, the group and the bytes of the payload of the next frame, if it is complete.
    fn next_header(&mut self) -> io::Result<Option<(FrameKind, u64, usize)>> {
        loop {
            let bytes = self.received.rest();
            if let Some(header) = bytes.get(..HEADER_BYTES) {
                let number = |at: usize, len: usize| {
                    let mut word = [0; 8];
                    word[..len].copy_from_slice(&header[at..at + len]);
                    u64::from_le_bytes(word)
                };
                let (len, group) = (number(0, 4) as usize, number(8, 8));
                let Some(kind) = FrameKind::of(header[4]).filter(|_| len <= PAYLOAD_BYTES) else {
                    let reason = "a frame that no rank of this version sends";
                    return Err(io::Error::new(ErrorKind::InvalidData, reason));
                };
                if bytes.len() >= HEADER_BYTES + len {
                    return Ok(Some((kind, group, len)));
                }
            }
            let Some(session) = &self.session else { return Ok(None) };
            let Some(bytes) = session.decrypt(self.encrypted.rest(), self.received.end())? else { return Ok(None) };
            self.encrypted.remove(bytes);
        }
    }

    /// The number of sent bytes that the other machine has not confirmed, if the system tells it.
    pub(super) fn unconfirmed(&self) -> usize {
        #[cfg(target_os = "linux")]
        if let Socket::Network(socket) = &self.socket {
            let mut bytes: libc::c_int = 0;
            // SAFETY: the system writes one number.
            let code = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
            return usize::try_from(bytes).ok().filter(|_| code == 0).unwrap_or(0);
        }
        0
    }

    /// Tells the other process that no more frames follow.
    pub(super) fn finish(&mut self) {
        let outcome = match &self.socket {
            #[cfg(target_os = "linux")]
            Socket::Local(socket) => socket.shutdown(std::net::Shutdown::Write),
            Socket::Network(socket) => socket.shutdown(std::net::Shutdown::Write),
        };
        if let Err(error) = outcome {
            tracing::trace!(%error, "a connection had ended before");
        }
    }
}

fn read(socket: &Socket, bytes: &mut [u8]) -> io::Result<usize> {
    match socket {
        #[cfg(target_os = "linux")]
        Socket::Local(socket) => (&mut &*socket).read(bytes),
        Socket::Network(socket) => (&mut &*socket).read(bytes),
    }
}

fn write(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    match socket {
        #[cfg(target_os = "linux")]
        Socket::Local(socket) => (&mut &*socket).write(bytes),
        Socket::Network(socket) => (&mut &*socket).write(bytes),
    }
}
