//! Look-ups of rank 0's name with a deadline, which the system's own look-up does not have: a silent name server may take minutes, and a
//! rank that waits for it would miss its deadline.
//!
//! Each look-up has a thread. One that exceeds its time is left to end when the system gives up; a second query of the name waits for the
//! same look-up.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

type Answer = io::Result<Vec<SocketAddr>>;

#[derive(Debug)]
pub(super) struct Names {
    look_up: fn(&str, u16) -> Answer,
    /// The last query, if it was not answered in time.
    unanswered: Option<(String, Receiver<Answer>)>,
}

impl Default for Names {
    fn default() -> Self {
        Names::with(|host, port| (host, port).to_socket_addrs().map(Iterator::collect))
    }
}

impl Names {
    /// Makes look-ups with `look_up` as the system's look-up.
    pub(super) fn with(look_up: fn(&str, u16) -> Answer) -> Self {
        Names { look_up, unanswered: None }
    }

    /// Returns the addresses of a host, within `time`. A host that is an address already is not looked up.
    pub(super) fn resolve(&mut self, host: &str, port: u16, time: Duration) -> Answer {
        if let Ok(ip) = host.parse() {
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let answer = match self.unanswered.take() {
            Some((name, answer)) if name == host => answer,
            _ => self.ask(host.to_owned(), port)?,
        };
        answer.recv_timeout(time).unwrap_or_else(|error| {
            if error == RecvTimeoutError::Timeout {
                self.unanswered = Some((host.to_owned(), answer));
            }
            let reason = format!("no answer to the look-up of the name within {time:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, reason))
        })
    }

    fn ask(&self, host: String, port: u16) -> io::Result<Receiver<Answer>> {
        let ((sender, answer), look_up) = (channel(), self.look_up);
        // The receiver may be gone.
        let body = move || _ = sender.send(look_up(&host, port));
        let thread = thread::Builder::new().name("gradsync-resolve".into());
        thread.spawn(body).map_err(|error| io::Error::other(NoThread(error)))?;
        Ok(answer)
    }
}

/// The error of a look-up that was not begun.
#[derive(Debug, thiserror::Error)]
#[error("no thread for a look-up: {0}")]
struct NoThread(io::Error);

/// Whether [`Names::resolve`] has failed because the system refused this process a thread.
pub(super) fn is_lack_of_threads(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<NoThread>())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use super::*;

    #[test]
    fn resolve_looks_a_name_without_an_answer_up_once() {
        static LOOKED_UP: AtomicUsize = AtomicUsize::new(0);
        let mut names = Names::with(|_, port| {
            LOOKED_UP.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(600));
            Ok(vec![(Ipv4Addr::LOCALHOST, port).into()])
        });
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 7));
        let start = Instant::now();
        for _ in 0..2 {
            let error = names.resolve("slow", 7, Duration::from_millis(50)).unwrap_err();
            assert!(error.to_string().contains("within 50ms"), "{error}");
        }
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        assert_eq!(names.resolve("127.0.0.1", 7, Duration::ZERO).unwrap(), [address]);
        assert_eq!(names.resolve("slow", 7, Duration::from_secs(60)).unwrap(), [address]);
        assert_eq!(LOOKED_UP.load(Ordering::Relaxed), 1);
    }
}
