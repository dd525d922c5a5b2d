//! Frames on a connection: four bytes of length, then one message in postcard's format.
//!
//! A length beyond the limit is refused before memory is allocated. This module does not interpret messages; the tags that follow frames
//! are made in [`seal`](super::seal).

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest frame of the control channel.
pub(super) const FRAME_LIMIT: usize = 1 << 20;
/// The number of bytes of a frame's length field.
pub(super) const LENGTH: usize = 4;

/// Encodes a message as a frame.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if it would be longer than `limit`.
pub(super) fn encode(message: &impl Serialize, limit: usize) -> io::Result<Vec<u8>> {
    let body = postcard::to_stdvec(message).map_err(invalid)?;
    if body.len() > limit {
        return Err(invalid(format!("a message of {} bytes is beyond the limit of {limit}", body.len())));
    }
    let length = u32::try_from(body.len()).map_err(invalid)?;
    let mut frame = Vec::with_capacity(LENGTH + body.len());
    frame.extend_from_slice(&length.to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// Decodes the message in `bytes`, which must hold nothing else.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(bytes).map_err(invalid)? {
        (message, []) => Ok(message),
        (_, rest) => Err(invalid(format!("{} bytes too many in a frame", rest.len()))),
    }
}

/// Reads one frame, with its length.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] if the frame is longer than `limit`; else the errors of the connection.
pub(super) fn read(connection: &mut impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut length = [0; LENGTH];
    connection.read_exact(&mut length)?;
    let body = u32::from_le_bytes(length) as usize;
    if body > limit {
        return Err(invalid(format!("a frame of {body} bytes is beyond the limit of {limit}")));
    }
    let mut frame = vec![0; LENGTH + body];
    frame[..LENGTH].copy_from_slice(&length);
    connection.read_exact(&mut frame[LENGTH..])?;
    Ok(frame)
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
    fn bytes_that_have_come_by_the_end_are_read_after_it() {
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
    fn frames_come_back_as_they_went() {
        let bytes = [encode(&(7u8, vec![1u64, 300]), 64).unwrap(), encode(&"next", 64).unwrap()].concat();
        let mut bytes = &bytes[..];
        let mut next = || read(&mut bytes, 64);
        assert_eq!(decode::<(u8, Vec<u64>)>(&next().unwrap()[LENGTH..]).unwrap(), (7, vec![1, 300]));
        assert_eq!(decode::<String>(&next().unwrap()[LENGTH..]).unwrap(), "next");
        assert_eq!(next().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn lengths_are_checked_before_anything_else() {
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[65, 0, 0, 0]] {
            let error = read(&mut &bytes[..], 64).unwrap_err();
            assert!(error.to_string().contains("beyond the limit of 64"), "{error}");
        }
        assert!(encode(&vec![0u8; 65], 64).is_err());
    }

    #[test]
    fn a_frame_holds_one_message_and_nothing_else() {
        let error = decode::<u8>(&[1, 1]).unwrap_err();
        assert!(error.to_string().contains("1 bytes too many"), "{error}");
        assert!(decode::<Vec<u64>>(&[0xff, 0xff, 0x7f]).is_err(), "a list longer than its frame");
    }
}
