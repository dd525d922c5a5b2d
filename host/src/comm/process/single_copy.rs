//! The single-copy message: the receiver copies a long message straight from the sender's memory (Linux's `process_vm_readv`), which takes
//! 0.3 to 0.9 of the time of frames.
//!
//! The sender offers the message with its address, and leaves the memory as it is until the receiver answers: it has all bytes, or it wants
//! them in frames because it cannot read them. The system may forbid it (Yama's `ptrace_scope`, a container's filter of system calls), and
//! does not show the process in another PID namespace. The answer is all that the two ends have to agree on. After a refusal, the sender
//! offers no more messages of the group.
//!
//! A sender that cancels an offered message counts this in its lane, before its caller may change the memory. A receiver that finds another
//! count than the offer's after its last byte does not know which message was cancelled, and refuses. Frames of a cancelled message never
//! come.

use std::io;

use super::connection::Connection;
use crate::bootstrap::Socket;

/// The shortest message that is offered: 64 KiB take 13 µs so, and 20 µs in frames (a Xeon of 32 cores).
const LEAST_BYTES: usize = 64 << 10;
/// The bytes that are read at a time, before this rank proceeds with its other messages.
const PIECE_BYTES: usize = 1 << 20;

/// A message that the receiver may read from the sender's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offer {
    /// The sender's number, by its own account: a fork of a process uses the same connections, and other memory.
    process: u64,
    address: u64,
    bytes: u64,
    /// The number of offers that the sender had cancelled before this one.
    cancelled: u64,
    /// The number of bytes that this process has read.
    read: usize,
}

/// How far an offered message has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    Unfinished,
    /// All bytes are there, and are the message's.
    Finished,
    /// The bytes have to come in frames.
    Refused,
}

impl Offer {
    /// Makes the offer of a message, if it is long and the other process is visible to this one: then this one is likely to be visible to
    /// the other.
    pub(super) fn new(start: *const u8, bytes: usize, connection: &Connection) -> Option<Self> {
        connection.process.filter(|_| bytes >= LEAST_BYTES)?;
        let cancelled = connection.lanes()?.outward.cancelled();
        let (process, address) = (std::process::id().into(), start.expose_provenance() as u64);
        Some(Self { process, address, bytes: bytes as u64, cancelled, read: 0 })
    }

    pub(super) fn encode(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        let words = [self.process, self.address, self.bytes, self.cancelled];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        bytes
    }

    /// Decodes the offer of a message that has to have `bytes` bytes.
    ///
    /// # Errors
    /// What the sender has sent instead.
    pub(super) fn decode(payload: &[u8], bytes: usize) -> Result<Self, String> {
        let payload: &[u8; 32] =
            payload.try_into().map_err(|_| format!("an offer with a description of {} bytes", payload.len()))?;
        let word = |index: usize| u64::from_le_bytes(std::array::from_fn(|at| payload[8 * index + at]));
        let offer = Self { process: word(0), address: word(1), bytes: word(2), cancelled: word(3), read: 0 };
        if offer.bytes != bytes as u64 {
            return Err(format!("a message of {} bytes in place of one of {bytes}", offer.bytes));
        }
        Ok(offer)
    }

    /// Copies the next bytes of the message from the memory of the other process.
    ///
    /// # Safety
    /// `to` has room for the message, and nothing else uses it.
    pub(super) unsafe fn read(&mut self, to: *mut u8, connection: &mut Connection) -> Reading {
        let bytes = PIECE_BYTES.min(self.bytes as usize - self.read);
        let address = self.address.wrapping_add(self.read as u64);
        let process = connection.process.filter(|&process| u64::from(process) == self.process);
        let copied = process.ok_or_else(|| io::ErrorKind::NotFound.into()).and_then(|process| {
            // SAFETY: within the room of the message.
            unsafe { copy_from(process, address, to.add(self.read), bytes) }
        });
        match copied {
            Ok(copied @ 1..) => self.read += copied,
            outcome => {
                tracing::info!(
                    ?outcome,
                    "this rank cannot read a message in another's memory, and receives it in frames"
                );
                return Reading::Refused;
            }
        }
        if (self.read as u64) < self.bytes {
            return Reading::Unfinished;
        }
        // A process that has not ended by now has kept its number until now, and all bytes are read before the count.
        connection.look_for_end();
        let cancelled = connection.lanes().map(|lanes| lanes.inward.cancelled_after_reading());
        let is_whole = !connection.has_ended() && cancelled == Some(self.cancelled);
        if is_whole { Reading::Finished } else { Reading::Refused }
    }
}

/// Counts an offered message as cancelled. Its memory may change afterwards.
pub(super) fn cancel(connection: &Connection) {
    if let Some(lanes) = connection.lanes() {
        lanes.outward.cancel();
    }
}

/// The number of the process at the other end of a socket, in this process's PID namespace; `None` if it has none there. The system tells
/// it, so the number cannot be another process's while the connection lives.
#[cfg(target_os = "linux")]
pub(super) fn process_at(socket: &Socket) -> Option<u32> {
    use std::os::fd::AsRawFd;

    let Socket::Local(socket) = socket else { return None };
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
    let to = (&raw mut peer).cast();
    // SAFETY: the system writes at most so many bytes to the structure, all of whose values are valid.
    let code = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, &raw mut bytes) };
    u32::try_from(peer.pid).ok().filter(|&process| code == 0 && process > 0)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn process_at(_: &Socket) -> Option<u32> {
    None
}

/// Copies up to `bytes` bytes at an address of a process. Returns the number of copied bytes.
///
/// # Safety
/// `to` has room for so many bytes, and nothing else uses it.
#[cfg(target_os = "linux")]
unsafe fn copy_from(process: u32, address: u64, to: *mut u8, bytes: usize) -> io::Result<usize> {
    let local = libc::iovec { iov_base: to.cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: bytes };
    // SAFETY: the system writes at most so many bytes to this process's memory, and only reads the other's.
    let copied = unsafe { libc::process_vm_readv(process as libc::pid_t, &local, 1, &remote, 1, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

#[cfg(not(target_os = "linux"))]
unsafe fn copy_from(_: u32, _: u64, _: *mut u8, _: usize) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::super::connection::LanePair;
    use super::super::lane::{Lane, bytes_of};
    use super::super::mesh::{Peer, WORLD};
    use super::*;
    use crate::memory::file::{FileHandle, MemoryFile};

    const CAPACITY: usize = 64 << 10;
    const BYTES: usize = 3 * PIECE_BYTES + 5;

    /// The two ends of a connection of this process with itself.
    fn ends() -> [Peer; 2] {
        let file = MemoryFile::zeroed(2 * bytes_of(CAPACITY)).expect("memory");
        let handle = FileHandle::of(file.bytes()).expect("a file");
        let lane = |number| Lane::new(Arc::new(handle.map(file.bytes().len()).expect("a mapping")), number, CAPACITY);
        let end = |socket: UnixStream, out: usize| {
            socket.set_nonblocking(true).expect("a socket");
            let peer = crate::bootstrap::PeerSocket { socket: Socket::Local(socket), session: None, is_here: true };
            let mut peer = Peer::new(Connection::new(peer));
            peer.connection.set_lanes(LanePair { outward: lane(out), inward: lane(1 - out) });
            peer
        };
        let (one, other) = UnixStream::pair().expect("a pair");
        let ends = [end(one, 0), end(other, 1)];
        file.leave();
        ends
    }

    /// Whether this process can read its own memory in this way: some containers forbid the system call. A test then says so and ends.
    fn is_permitted() -> bool {
        let (from, mut to) = (5u8, 0u8);
        // SAFETY: room for a byte.
        let copied = unsafe { copy_from(std::process::id(), (&raw const from).expose_provenance() as u64, &mut to, 1) };
        if copied.is_err() {
            println!("not run: this machine forbids process_vm_readv: {copied:?}");
        }
        assert!(copied.is_err() || to == 5);
        copied.is_ok()
    }

    fn start_sending(end: &mut Peer, message: *const u8, bytes: usize) -> u64 {
        let (messages, connection) = end.group_and_connection(WORLD);
        messages.start_sending(WORLD, connection, message, bytes)
    }

    fn is_sent(end: &mut Peer, number: u64) -> bool {
        end.progress_of(WORLD);
        let (messages, connection) = end.group_and_connection(WORLD);
        messages.sent(number, connection).expect("no violation")
    }

    /// Whether a message arrives while its sender does nothing.
    fn arrives_alone(end: &mut Peer, number: u64) -> bool {
        (0..100).any(|_| end.progress_of(WORLD).received(number).expect("no violation"))
    }

    /// Sends a message of `bytes` bytes, and asserts that it arrives. Returns whether it has arrived without its sender.
    fn deliver([sender, receiver]: &mut [Peer; 2], bytes: usize) -> bool {
        let message: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
        let mut room = vec![0; bytes];
        let sending = start_sending(sender, message.as_ptr(), bytes);
        let receiving = receiver.group(WORLD).start_receiving(room.as_mut_ptr(), bytes);
        let is_read = arrives_alone(receiver, receiving);
        let (mut is_here, mut is_out) = (is_read, false);
        while !(is_here && is_out) {
            is_here = is_here || receiver.progress_of(WORLD).received(receiving).expect("no violation");
            is_out = is_out || is_sent(sender, sending);
        }
        assert!(room == message);
        is_read
    }

    #[test]
    fn single_copy_reads_a_long_message_in_its_senders_memory() {
        let mut ends = ends();
        assert!(!deliver(&mut ends, LEAST_BYTES - 1));
        if is_permitted() {
            assert!(deliver(&mut ends, LEAST_BYTES) && deliver(&mut ends, BYTES));
        }
    }

    #[test]
    fn single_copy_takes_frames_of_a_message_that_it_cannot_read() {
        let mut child = std::process::Command::new("true").spawn().expect("a process");
        child.wait().expect("its end");
        // SAFETY: nothing is read from a process that has ended.
        unsafe { copy_from(child.id(), 0, &mut 0, 1) }.expect_err("a process that has ended");
        for process in [Some(child.id()), None] {
            let mut ends = ends();
            ends[1].connection.process = process;
            assert!(!deliver(&mut ends, BYTES) && !deliver(&mut ends, BYTES));
        }
    }

    /// The memory of a cancelled message changes while the receiver reads it.
    #[test]
    fn single_copy_never_completes_a_message_without_its_sender() {
        for has_ended in [false, true] {
            let mut ends = ends();
            let (mut message, mut room) = (vec![1u8; BYTES], vec![0; BYTES]);
            let sending = start_sending(&mut ends[0], message.as_ptr(), BYTES);
            let receiving = ends[1].group(WORLD).start_receiving(room.as_mut_ptr(), BYTES);
            assert!(!ends[1].progress_of(WORLD).received(receiving).expect("no violation"));
            let [mut sender, mut receiver] = ends;
            if has_ended {
                drop(sender);
                assert!(!arrives_alone(&mut receiver, receiving));
                continue;
            }
            let (messages, connection) = sender.group_and_connection(WORLD);
            messages.cancel_sending(sending, connection);
            message.fill(2);
            assert!(!arrives_alone(&mut receiver, receiving));
            receiver.group(WORLD).cancel_receiving(receiving);
            sender.progress_of(WORLD);
            assert!(!deliver(&mut [sender, receiver], BYTES), "a refusal is for all messages");
        }
    }
}
