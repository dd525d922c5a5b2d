//! Waiting for many sockets at once, on one thread.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ends another thread's [`wait`](Alarm::wait), that in progress and all later ones.
#[derive(Debug)]
pub(super) struct Alarm {
    is_raised: AtomicBool,
    /// Once the near end is shut down, the far end is ready for ever.
    #[cfg(unix)]
    ends: (std::os::unix::net::UnixStream, std::os::unix::net::UnixStream),
}

/// What can be read or accepted from without waiting; sockets in the order in which they were asked about.
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
        // The pair belongs to this process alone: neither end is gone while this is there.
        #[cfg(unix)]
        let _ = self.ends.0.shutdown(std::net::Shutdown::Both);
    }

    pub(super) fn is_raised(&self) -> bool {
        self.is_raised.load(Ordering::Acquire)
    }

    /// Waits for a listener, where one is given, and for sockets, at most for `time`, if there is one. It may return earlier, with nothing
    /// ready: after a signal, for example.
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
            // Interrupted, it leaves all entries as they were: nothing is ready.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Also a socket that has failed is ready: to read from it says how.
        let mut ready = entries.iter().skip(1).map(|entry| !entry.revents().is_empty());
        Ok(Ready { listener: listener.is_some() && ready.next() == Some(true), sockets: ready.collect() })
    }

    /// As on Unix, by looking again and again.
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
