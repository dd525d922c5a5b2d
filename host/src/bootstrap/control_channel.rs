//! The connections of the control channel and their threads: [`ChannelLink`] is a member's side, [`Connections`] is rank 0's side. Threads are
//! counted, so that the end of a group can wait for them.
//!
//! Each connection has a reading and a writing thread, so that no call ever waits for a peer that has stopped reading. This module does
//! not interpret messages.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::frame::{FRAME_LIMIT, Timed, encode};
use super::noise::NoiseSession;

/// The longest time for which a closing connection waits until the other side has read more of the last messages.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// Queued frames are joined to writes of about this many bytes.
const TOGETHER: usize = 8 << 10;
/// The bytes of a write after which a long frame counts as moving.
const PIECE: usize = 64 << 10;

/// A counter of running threads.
#[derive(Debug, Default)]
pub(super) struct Threads {
    running: Mutex<usize>,
    changed: Condvar,
    /// The number of writes to all connections.
    writes: AtomicU64,
}

impl Threads {
    /// Runs `body` on a new thread with the name `name`.
    pub(super) fn spawn(self: &Arc<Self>, name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let guard = Running::new(self.clone());
        let body = move || {
            body();
            drop(guard);
        };
        thread::Builder::new().name(name.to_owned()).spawn(body).map(|_| ())
    }

    /// Waits until no thread is running, but at most `time`. Returns whether no thread is running.
    pub(super) fn wait(&self, time: Duration) -> bool {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(running, time, |running| *running > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }

    /// Waits until no thread is running, or no connection has taken any bytes for [`LINGER`]. Returns whether no thread is running.
    fn wait_while_writing(&self) -> bool {
        loop {
            let before = self.writes.load(Ordering::Relaxed);
            if self.wait(LINGER) {
                return true;
            }
            if self.writes.load(Ordering::Relaxed) == before {
                return false;
            }
        }
    }
}

/// Counts one running thread until it is dropped.
struct Running(Arc<Threads>);

impl Running {
    fn new(threads: Arc<Threads>) -> Self {
        *threads.running.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Running(threads)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        *self.0.running.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_all();
    }
}

/// The sending side of a connection: a queue, and a thread that empties it into the socket.
///
/// The queue stays short: a member waits in one call at a time, and a group fails only once.
#[derive(Clone, Debug)]
pub(super) struct Outbox(Sender<Option<Arc<[u8]>>>);

impl Outbox {
    /// Starts the writing thread.
    pub(super) fn start(
        socket: &Arc<TcpStream>,
        session: &Arc<NoiseSession>,
        threads: &Arc<Threads>,
    ) -> io::Result<Self> {
        let (sender, queue) = channel();
        let (socket, session) = (socket.clone(), session.clone());
        let writer = threads.clone();
        threads.spawn("gradsync-write", move || empty(&queue, &socket, &session, &writer.writes))?;
        Ok(Outbox(sender))
    }

    pub(super) fn send(&self, message: &impl Serialize) {
        match encode(message, FRAME_LIMIT) {
            Ok(frame) => self.send_frame(frame.into()),
            Err(error) => tracing::error!(%error, "a message of the control channel was not sent"),
        }
    }

    /// Sends a frame that [`encode`] made. If the connection is broken, nothing is sent; the connection's reader reports that.
    pub(super) fn send_frame(&self, frame: Arc<[u8]>) {
        let _ = self.0.send(Some(frame));
    }

    /// Ends the sending side once all earlier frames are written.
    pub(super) fn close(&self) {
        let _ = self.0.send(None);
    }
}

fn empty(queue: &Receiver<Option<Arc<[u8]>>>, mut socket: &TcpStream, session: &NoiseSession, writes: &AtomicU64) {
    let mut bytes = Vec::new();
    let mut is_open = true;
    while is_open {
        let Ok(Some(frame)) = queue.recv() else { break };
        bytes.clear();
        session.encrypt(&frame, &mut bytes);
        // Frames that are queued already go into one write.
        while bytes.len() < TOGETHER {
            match queue.try_recv() {
                Ok(Some(frame)) => session.encrypt(&frame, &mut bytes),
                Ok(None) => {
                    is_open = false;
                    break;
                }
                Err(_) => break,
            }
        }
        let mut pieces = bytes.chunks(PIECE);
        let written = pieces.try_for_each(|piece| {
            writes.fetch_add(1, Ordering::Relaxed);
            socket.write_all(piece)
        });
        if written.is_err() {
            // The shutdown makes the connection's reader notice. An error means that the socket is closed already.
            let _ = socket.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = socket.shutdown(Shutdown::Write);
}

/// Reads until the other side has closed, for at most [`LINGER`]: a socket that is dropped with unread bytes resets its connection, and
/// the other side may lose the last messages.
pub(super) fn drain(socket: &TcpStream) {
    let end = Instant::now() + LINGER;
    let mut rest = [0; 4096];
    let mut timed = Timed { socket, end: Some(end) };
    while Instant::now() < end && matches!(timed.read(&mut rest), Ok(1..)) {}
}

/// Whether a non-blocking connection is broken, or closed by the other side with no bytes left to read.
pub(super) fn is_closed(socket: &TcpStream) -> bool {
    match socket.peek(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(error) => !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
    }
}

/// A member's connection to the coordinator.
#[derive(Debug)]
pub(super) struct ChannelLink {
    pub(super) outbox: Outbox,
    pub(super) socket: Arc<TcpStream>,
    pub(super) threads: Arc<Threads>,
}

impl ChannelLink {
    /// Ends the connection: in good order if the peer goes on reading and then answers within [`LINGER`], else by force.
    pub(super) fn finish(&self) {
        self.outbox.close();
        self.threads.wait_while_writing();
        // An error means that the socket is closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
        if !self.threads.wait(LINGER) {
            tracing::warn!("a thread of the control channel did not end");
        }
    }
}

/// The authenticated connections of rank 0's process.
#[derive(Debug, Default)]
pub(super) struct Connections {
    sockets: Mutex<Sockets>,
    pub(super) threads: Arc<Threads>,
}

#[derive(Debug, Default)]
struct Sockets {
    next: u64,
    open: HashMap<u64, Arc<TcpStream>>,
    /// No further connection is admitted.
    is_closed: bool,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a connection and returns its number, or `None` after [`close`](Self::close).
    pub(super) fn enter(&self, socket: &Arc<TcpStream>) -> Option<u64> {
        let mut sockets = self.lock();
        if sockets.is_closed {
            return None;
        }
        sockets.next += 1;
        let id = sockets.next;
        sockets.open.insert(id, socket.clone());
        Some(id)
    }

    pub(super) fn leave(&self, id: u64) {
        self.lock().open.remove(&id);
    }

    /// Admits no further connection.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
    }

    /// Ends all connections: in good order if the peers go on reading and then answer within [`LINGER`], else by force.
    pub(super) fn finish(&self) {
        self.threads.wait_while_writing();
        let mut sockets = self.lock();
        sockets.is_closed = true;
        // An error means that the socket is closed already.
        sockets.open.values().for_each(|socket| _ = socket.shutdown(Shutdown::Both));
        drop(sockets);
        if !self.threads.wait(LINGER) {
            tracing::warn!("a thread of the control channel did not end");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn is_closed_once_everything_is_read() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        let is_closed = || {
            socket.set_nonblocking(true).unwrap();
            let outcome = is_closed(&socket);
            socket.set_nonblocking(false).unwrap();
            outcome
        };
        assert!(!is_closed());
        other.write_all(b"word").unwrap();
        drop(other);
        let mut word = [0; 4];
        (&socket).read_exact(&mut word).unwrap();
        assert_eq!(&word, b"word", "nothing is taken");
        Timed { socket: &socket, end: None }.wait().unwrap();
        assert!(is_closed());
    }
}
