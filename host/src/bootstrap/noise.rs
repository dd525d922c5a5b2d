//! Noise: two ranks prove to each other that they know the secret before either acts on the other's messages, and encrypt everything that
//! they send afterwards.
//!
//! The protocol is `Noise_NNpsk0_25519_AESGCM_SHA256` (the Noise Protocol Framework, revision 34), by the crate `snow`. The group's
//! [`Secret`] is its pre-shared key. The joining rank is the initiator:
//!
//! 1. Rank 0 greets every connection with the magic, the version and a nonce. The greeting is the prologue of the handshake.
//! 2. The joining rank answers with the magic, the version and the first message of the handshake, whose payload is its [`Identity`].
//! 3. Rank 0 answers with the second message, or with zeros if the first one was wrong.
//!
//! The first message of NNpsk0 alone could be replayed. By the nonce in the prologue it is valid on its own connection only, so rank 0 can
//! act on the identity at once. The second message depends on fresh keys of both sides, so it can be neither replayed nor reflected, and a
//! secret that becomes known later does not reveal what was sent.
//!
//! # After the handshake
//!
//! All bytes of a connection are Noise messages, each after its length in two bytes. A message is at most 65535 bytes long; longer frames
//! take several. Each direction has its own key and counts its messages, so that the receiver notices if somebody in between alters,
//! injects, repeats, drops or reorders them.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::de::DeserializeOwned;
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::frame;
use super::primitives::{KEY, Primitives, TAG};
use super::secret::{Secret, random};
use crate::error::BootstrapError;

/// The first bytes of every greeting and answer.
const MAGIC: [u8; 8] = *b"gradsync";
/// The version of the protocol; ranks of different versions refuse each other. It goes up with every change of the messages, and so also
/// with every change of the encoding of a [`Call`](crate::Call), an operation or an error.
pub(super) const VERSION: u32 = 6;
const PROTOCOL: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// The length of the magic and the version.
const HEADER: usize = 12;
/// The length of a greeting: the header and a nonce.
const GREETING: usize = HEADER + 32;
/// The length of an encoded [`Identity`].
const IDENTITY: usize = 24;
/// The length of a joining rank's answer: the header, and the first message of the handshake.
const ANSWER: usize = HEADER + KEY + IDENTITY + TAG;
/// The length of the second message of the handshake.
const REPLY: usize = KEY + TAG;
/// The number of bytes of a message's length.
const LENGTH: usize = 2;
/// The most bytes of content in one message.
const CONTENT: usize = u16::MAX as usize - TAG;

/// The identity that a rank claims; it is known only after the message that has it was authenticated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) rank: u64,
    pub(super) world_size: u64,
    pub(super) generation: u64,
}

/// Why a handshake ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Connection(#[from] io::Error),
    #[error("the other side closed the connection during the handshake")]
    Closed,
    #[error("the other side does not speak this protocol")]
    ForeignProtocol,
    #[error("the other side speaks version {0} of the protocol")]
    Version(u32),
    #[error("the other side does not have the same secret")]
    Secret,
    #[error(transparent)]
    Randomness(#[from] BootstrapError),
}

impl From<snow::Error> for HandshakeError {
    fn from(error: snow::Error) -> Self {
        match error {
            snow::Error::Rng => BootstrapError::NoRandomness { reason: error.to_string() }.into(),
            // The only other failures of messages of fixed lengths, in a fixed order.
            _ => HandshakeError::Secret,
        }
    }
}

impl HandshakeError {
    /// Converts the error to the joining rank's error about `address`; `Err` has the text of an error for which the address counts as
    /// unreachable.
    pub(super) fn about(self, address: String) -> Result<BootstrapError, String> {
        match self {
            HandshakeError::Secret => Ok(BootstrapError::WrongSecret { address }),
            HandshakeError::Version(theirs) => Ok(BootstrapError::VersionMismatch { address, theirs, ours: VERSION }),
            HandshakeError::Randomness(error) => Ok(error),
            other => Err(other.to_string()),
        }
    }
}

/// Rank 0's side of a handshake, with the bytes of the answer that have arrived.
#[derive(Debug)]
pub(super) struct Challenge {
    greeting: [u8; GREETING],
    answer: [u8; ANSWER],
    len: usize,
}

impl Challenge {
    pub(super) fn new() -> Result<Self, BootstrapError> {
        Ok(Challenge { greeting: fixed(&[&header()[..], &random()?].concat()), answer: [0; ANSWER], len: 0 })
    }

    /// The first message, which rank 0 sends.
    pub(super) fn greeting(&self) -> &[u8] {
        &self.greeting
    }

    /// Reads the bytes that have arrived, but none beyond the answer. When the answer is complete and authentic, sends rank 0's reply and
    /// returns the identity of the joining rank; returns `None` if the answer is incomplete and the connection does not block.
    pub(super) fn hear(
        &mut self,
        connection: &mut (impl Read + Write),
        secret: &Secret,
    ) -> Result<Option<(Identity, Session)>, HandshakeError> {
        while self.len < ANSWER {
            match connection.read(&mut self.answer[self.len..]) {
                Ok(0) => return Err(HandshakeError::Closed),
                Ok(len) => self.len += len,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error.into()),
            }
            check(&self.answer[..self.len])?;
        }
        let mut noise = builder(secret, &self.greeting).build_responder()?;
        let mut identity = [0; IDENTITY];
        if let Err(error) = noise.read_message(&self.answer[HEADER..], &mut identity) {
            connection.write_all(&[0; REPLY])?;
            return Err(error.into());
        }
        let mut reply = [0; REPLY];
        noise.write_message(&[], &mut reply)?;
        connection.write_all(&reply)?;
        Ok(Some((Identity::from_bytes(identity), Session::new(noise))))
    }
}

/// Runs the joining rank's side of the handshake.
pub(super) fn introduce(
    connection: &mut (impl Read + Write),
    secret: &Secret,
    identity: Identity,
) -> Result<Session, HandshakeError> {
    let greeting: [u8; GREETING] = read(connection)?;
    check(&greeting)?;
    let mut noise = builder(secret, &greeting).build_initiator()?;
    let mut message = [0; ANSWER - HEADER];
    noise.write_message(&identity.to_bytes(), &mut message)?;
    connection.write_all(&[&header()[..], &message].concat())?;
    let reply: [u8; REPLY] = read(connection)?;
    noise.read_message(&reply, &mut [])?;
    Ok(Session::new(noise))
}

fn builder<'a>(secret: &'a Secret, prologue: &'a [u8]) -> Builder<'a> {
    let parameters = PROTOCOL.parse().expect("a protocol of Noise");
    let keyed = Builder::with_resolver(parameters, Box::new(Primitives)).psk(0, secret.bytes());
    keyed.and_then(|keyed| keyed.prologue(prologue)).expect("the first key and the first prologue of this builder")
}

impl Identity {
    fn to_bytes(self) -> [u8; IDENTITY] {
        fixed(&[self.rank, self.world_size, self.generation].map(u64::to_le_bytes).concat())
    }

    fn from_bytes(bytes: [u8; IDENTITY]) -> Self {
        let number = |index: usize| u64::from_le_bytes(fixed(&bytes[8 * index..8 * index + 8]));
        Identity { rank: number(0), world_size: number(1), generation: number(2) }
    }
}

fn header() -> [u8; HEADER] {
    fixed(&[&MAGIC[..], &VERSION.to_le_bytes()].concat())
}

/// Refuses bytes that do not begin like those of this version, as soon as the first difference has arrived.
fn check(bytes: &[u8]) -> Result<(), HandshakeError> {
    if bytes.iter().zip(&MAGIC).any(|(theirs, ours)| theirs != ours) {
        return Err(HandshakeError::ForeignProtocol);
    }
    match bytes.get(MAGIC.len()..HEADER).map(|version| u32::from_le_bytes(fixed(version))) {
        Some(version) if version != VERSION => Err(HandshakeError::Version(version)),
        _ => Ok(()),
    }
}

fn read<const LEN: usize>(connection: &mut impl Read) -> Result<[u8; LEN], HandshakeError> {
    let mut bytes = [0; LEN];
    match connection.read_exact(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(HandshakeError::Closed),
        Err(error) => Err(error.into()),
    }
}

fn fixed<const LEN: usize>(bytes: &[u8]) -> [u8; LEN] {
    bytes.try_into().expect("as many bytes as its place has")
}

/// The encryption of one side of a connection. Threads may share it; in each direction, messages must be sent in the order in which they
/// were encrypted, and decrypted in the order in which they arrive.
pub(crate) struct Session {
    noise: StatelessTransportState,
    /// The numbers of the next messages. No number is used twice, and no connection lives for 2⁶⁴ messages.
    sent: AtomicU64,
    received: AtomicU64,
}

impl Session {
    fn new(noise: HandshakeState) -> Self {
        let noise = noise.into_stateless_transport_mode().expect("a handshake that is finished");
        Session { noise, sent: AtomicU64::new(0), received: AtomicU64::new(0) }
    }

    /// Encrypts `bytes` and appends the messages to `into`. All but the last are full, so that a reader knows where a frame ends.
    pub(crate) fn encrypt(&self, mut bytes: &[u8], into: &mut Vec<u8>) {
        loop {
            let (content, rest) = bytes.split_at(bytes.len().min(CONTENT));
            let begin = into.len() + LENGTH;
            into.extend_from_slice(&((content.len() + TAG) as u16).to_le_bytes());
            into.resize(begin + content.len() + TAG, 0);
            let number = self.sent.fetch_add(1, Ordering::Relaxed);
            self.noise.write_message(number, content, &mut into[begin..]).expect("fewer than 2⁶⁴ messages");
            if content.len() < CONTENT {
                return;
            }
            bytes = rest;
        }
    }

    /// Decrypts the first message of `bytes`, if it is complete, and appends its content to `into`. Returns the number of bytes of the
    /// message.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if the message is not the one that the other side has sent next.
    pub(crate) fn decrypt(&self, bytes: &[u8], into: &mut Vec<u8>) -> io::Result<Option<usize>> {
        let Some((length, rest)) = bytes.split_first_chunk() else { return Ok(None) };
        let length = usize::from(u16::from_le_bytes(*length));
        if length < TAG {
            return Err(altered());
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let begin = into.len();
        into.resize(begin + length - TAG, 0);
        let number = self.received.fetch_add(1, Ordering::Relaxed);
        self.noise.read_message(number, message, &mut into[begin..]).map_err(|_| altered())?;
        Ok(Some(LENGTH + length))
    }

    /// Reads the next frame.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] if the frame is longer than `limit`, is not the one that was sent next, or does not parse; else the
    /// errors of the connection.
    pub(super) fn read<T: DeserializeOwned>(&self, connection: &mut impl Read, limit: usize) -> io::Result<T> {
        let (mut frame, mut message) = (Vec::new(), Vec::new());
        loop {
            let mut length = [0; LENGTH];
            connection.read_exact(&mut length)?;
            message.clear();
            message.extend_from_slice(&length);
            message.resize(LENGTH + usize::from(u16::from_le_bytes(length)), 0);
            connection.read_exact(&mut message[LENGTH..])?;
            self.decrypt(&message, &mut frame)?;
            if frame.len() > limit {
                let reason = format!("a frame of more than {limit} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, reason));
            }
            if message.len() < LENGTH + CONTENT + TAG {
                return frame::decode(&frame);
            }
        }
    }
}

fn altered() -> io::Error {
    let reason =
        "a message is not the one that was sent next: it was altered, injected, repeated, dropped or reordered";
    io::Error::new(ErrorKind::InvalidData, reason)
}

/// Keys are never printed.
impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = (&self.sent, &self.received);
        f.debug_struct("Session").field("messages", &numbers).finish_non_exhaustive()
    }
}

/// Two ends of a connection, for tests.
#[cfg(test)]
pub(crate) fn sessions() -> [Session; 2] {
    let secret = Secret::from_bytes([7; 32]);
    let [mut joining, mut coordinator] = [true, false].map(|is_initiator| {
        let builder = builder(&secret, b"a test");
        if is_initiator { builder.build_initiator() } else { builder.build_responder() }.unwrap()
    });
    let mut message = [0; REPLY];
    joining.write_message(&[], &mut message).unwrap();
    coordinator.read_message(&message, &mut []).unwrap();
    coordinator.write_message(&[], &mut message).unwrap();
    joining.read_message(&message, &mut []).unwrap();
    [joining, coordinator].map(Session::new)
}

#[cfg(test)]
mod tests;
