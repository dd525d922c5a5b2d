//! Polling: waiting for many sockets at once, on one thread.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// An event that ends another thread's [`wait`](Alarm::wait): the wait in progress and all later ones.
#[derive(Debug)]
pub(super) struct Alarm {
    is_raised: AtomicBool,
    /// A socket pair: once the first end is shut down, the second is ready for ever.
    #[cfg(unix)]
    ends: (std::os::unix::net::UnixStream, std::os::unix::net::UnixStream),
}

/// The sockets that can be read, in the order of the query, and whether a connection can be accepted.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) listener: bool,
    pub(super) sockets: Vec<bool>,
}

impl Alarm {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Alarm {
            is_raised: AtomicBool::new(false),
            #[cfg(unix)]
            ends: std::os::unix::net::UnixStream::pair()?,
        })
    }

    pub(super) fn raise(&self) {
        self.is_raised.store(true, Ordering::Release);
        // The pair belongs to this process alone, and both ends live as long as this value, so the shutdown cannot fail.
        #[cfg(unix)]
        let _ = self.ends.0.shutdown(std::net::Shutdown::Both);
    }

    pub(super) fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }

    /// Waits until the listener, if given, or a socket is ready, for at most `time`, if given. It may return earlier with nothing ready,
    /// for example after a signal.
    #[cfg(unix)]
    pub(super) fn wait<'a>(
        &self,
        listener: Option<&TcpListener>,
        sockets: impl Iterator<Item = &'a TcpStream>,
        time: Option<Duration>,
    ) -> io::Result<Ready> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};

        let mut entries = vec![PollFd::new(&self.ends.1, PollFlags::IN)];
        entries.extend(listener.map(|listener| PollFd::new(listener, PollFlags::IN)));
        entries.extend(sockets.map(|socket| PollFd::new(socket, PollFlags::IN)));
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        match poll(&mut entries, time.as_ref()) {
            // An interrupted poll leaves all entries unchanged: nothing is ready.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // A socket that has failed is ready too: reading from it returns the error.
        let mut ready = entries.iter().skip(1).map(|entry| !entry.revents().is_empty());
        Ok(Ready { listener: listener.is_some() && ready.next() == Some(true), sockets: ready.collect() })
    }

    /// Like the method on Unix, but by polling at an interval.
    #[cfg(not(unix))]
    pub(super) fn wait<'a>(
        &self,
        listener: Option<&TcpListener>,
        sockets: impl Iterator<Item = &'a TcpStream>,
        time: Option<Duration>,
    ) -> io::Result<Ready> {
        const PAUSE: Duration = Duration::from_millis(5);
        std::thread::sleep(time.map_or(PAUSE, |time| time.min(PAUSE)));
        Ok(Ready { listener: listener.is_some(), sockets: sockets.map(|_| true).collect() })
    }
}
