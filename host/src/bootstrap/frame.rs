//! Frames of the control channel: each is one message in postcard's format, which [`noise`](super::noise) encrypts. And connections with a
//! deadline. This module does not interpret messages.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest frame of the control channel.
pub(super) const FRAME_LIMIT: usize = 1 << 20;

/// Encodes a message as a frame.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if it would be longer than `limit`.
pub(super) fn encode(message: &impl Serialize, limit: usize) -> io::Result<Vec<u8>> {
    let frame = postcard::to_stdvec(message).map_err(invalid)?;
    if frame.len() > limit {
        return Err(invalid(format!("a message of {} bytes is beyond the limit of {limit}", frame.len())));
    }
    Ok(frame)
}

/// Decodes the message in `bytes`, which must hold nothing else.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(bytes).map_err(invalid)? {
        (message, []) => Ok(message),
        (_, rest) => Err(invalid(format!("{} bytes too many in a frame", rest.len()))),
    }
}

fn invalid(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// The shortest timeout of a call: zero means no timeout, and some systems reject shorter ones.
const LEAST_WAIT: Duration = Duration::from_millis(1);

/// A connection with a deadline: after it, reading and writing fail with [`io::ErrorKind::TimedOut`], however slowly bytes arrive.
/// Interruptions by signals are retried. Bytes that have arrived already can be read after the deadline too, because this process may
/// have been stopped while they arrived.
pub(super) struct Timed<'a> {
    pub(super) socket: &'a TcpStream,
    /// The deadline; `None` if the clock cannot represent it.
    pub(super) end: Option<Instant>,
}

impl Timed<'_> {
    /// Waits until bytes, or the end of the connection, can be read. Consumes no bytes.
    pub(super) fn wait(&self) -> io::Result<()> {
        self.until_end(TcpStream::set_read_timeout, |socket| socket.peek(&mut [0])).map(|_| ())
    }

    /// Calls `call` until it is not interrupted, each time after setting the remaining time by `limit`.
    fn until_end(
        &self,
        limit: impl Fn(&TcpStream, Option<Duration>) -> io::Result<()>,
        mut call: impl FnMut(&TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            let left = self.end.map(|end| end.saturating_duration_since(Instant::now()));
            limit(self.socket, left.map(|left| left.max(LEAST_WAIT)))?;
            let outcome = call(self.socket);
            let Err(error) = &outcome else { return outcome };
            match error.kind() {
                io::ErrorKind::Interrupted if left != Some(Duration::ZERO) => {}
                // Systems disagree on the error code of a timeout. An interrupted call has found nothing either.
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => return Err(io::ErrorKind::TimedOut.into()),
                _ => return outcome,
            }
        }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.until_end(TcpStream::set_read_timeout, |mut socket| socket.read(bytes))
    }
}

impl Write for Timed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.until_end(TcpStream::set_write_timeout, |mut socket| socket.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut socket = self.socket;
        socket.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A process that was stopped continues after its deadline, and the answer has arrived in the meantime.
    #[test]
    fn read_takes_bytes_that_arrived_before_the_deadline() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = listener.accept().unwrap().0;
        let mut late = Timed { socket: &socket, end: Some(Instant::now()) };
        assert_eq!(late.wait().unwrap_err().kind(), io::ErrorKind::TimedOut);
        sender.write_all(b"seven").unwrap();
        Timed { socket: &socket, end: None }.wait().unwrap();
        late.wait().unwrap();
        let mut word = [0; 5];
        late.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"seven");
        assert_eq!(late.read(&mut word).unwrap_err().kind(), io::ErrorKind::TimedOut);
        late.write_all(b"eight").unwrap();
        sender.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"eight");
    }

    #[test]
    fn decode_takes_one_message_within_its_limit() {
        let frame = encode(&(7u8, vec![1u64, 300]), 64).unwrap();
        assert_eq!(decode::<(u8, Vec<u64>)>(&frame).unwrap(), (7, vec![1, 300]));
        assert!(encode(&vec![0u8; 64], 64).unwrap_err().to_string().contains("beyond the limit of 64"));
        let error = decode::<u8>(&[1, 1]).unwrap_err();
        assert!(error.to_string().contains("1 bytes too many"), "{error}");
        assert!(decode::<Vec<u64>>(&[0xff, 0xff, 0x7f]).is_err(), "a list longer than its frame");
    }
}
