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
    ) -> Result<Option<(Identity, NoiseSession)>, HandshakeError> {
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
        Ok(Some((Identity::from_bytes(identity), NoiseSession::new(noise))))
    }
}

/// Runs the joining rank's side of the handshake.
pub(super) fn introduce(
    connection: &mut (impl Read + Write),
    secret: &Secret,
    identity: Identity,
) -> Result<NoiseSession, HandshakeError> {
    let greeting: [u8; GREETING] = read(connection)?;
    check(&greeting)?;
    let mut noise = builder(secret, &greeting).build_initiator()?;
    let mut message = [0; ANSWER - HEADER];
    noise.write_message(&identity.to_bytes(), &mut message)?;
    connection.write_all(&[&header()[..], &message].concat())?;
    let reply: [u8; REPLY] = read(connection)?;
    noise.read_message(&reply, &mut [])?;
    Ok(NoiseSession::new(noise))
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
pub(crate) struct NoiseSession {
    noise: StatelessTransportState,
    /// The numbers of the next messages. No number is used twice, and no connection lives for 2⁶⁴ messages.
    sent: AtomicU64,
    received: AtomicU64,
}

impl NoiseSession {
    fn new(noise: HandshakeState) -> Self {
        let noise = noise.into_stateless_transport_mode().expect("a handshake that is finished");
        NoiseSession { noise, sent: AtomicU64::new(0), received: AtomicU64::new(0) }
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
impl fmt::Debug for NoiseSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = (&self.sent, &self.received);
        f.debug_struct("NoiseSession").field("messages", &numbers).finish_non_exhaustive()
    }
}

/// Two ends of a connection, for tests.
#[cfg(test)]
pub(crate) fn sessions() -> [NoiseSession; 2] {
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
    [joining, coordinator].map(NoiseSession::new)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;
    use crate::bootstrap::frame::encode;

    const WHO: Identity = Identity { rank: 3, world_size: 4, generation: 5 };

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; 32])
    }

    /// Runs rank 0's side of a handshake, and `joining` as the other side of the connection.
    fn with_coordinator<T>(
        joining: impl FnOnce(&mut TcpStream) -> T,
    ) -> (Result<Option<(Identity, NoiseSession)>, HandshakeError>, T) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let coordinator = scope.spawn(move || {
                let mut connection = listener.accept().unwrap().0;
                let mut challenge = Challenge::new().unwrap();
                connection.write_all(challenge.greeting()).unwrap();
                challenge.hear(&mut connection, &secret(1))
            });
            let joining = joining(&mut TcpStream::connect(address).unwrap());
            (coordinator.join().unwrap(), joining)
        })
    }

    /// A connection whose other side has sent certain bytes, and which keeps the bytes that are sent.
    struct Recorded<'a>(&'a [u8], Vec<u8>);

    impl Read for Recorded<'_> {
        fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
            self.0.read(bytes)
        }
    }

    impl Write for Recorded<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A joining rank's answer to `greeting`.
    fn answer(greeting: &[u8]) -> Vec<u8> {
        let mut connection = Recorded(greeting, Vec::new());
        assert!(matches!(introduce(&mut connection, &secret(1), WHO), Err(HandshakeError::Closed)));
        assert_eq!(connection.1.len(), ANSWER);
        connection.1
    }

    /// The outcome of a challenge.
    type Proven = Result<Option<(Identity, NoiseSession)>, HandshakeError>;

    /// Rank 0's reply to `answer`, and the outcome.
    fn reply(mut challenge: Challenge, answer: &[u8]) -> (Vec<u8>, Proven) {
        let mut connection = Recorded(answer, Vec::new());
        let outcome = challenge.hear(&mut connection, &secret(1));
        (connection.1, outcome)
    }

    #[test]
    fn introduce_takes_the_same_secret_only() {
        let (coordinator, joining) = with_coordinator(|connection| introduce(connection, &secret(1), WHO));
        let ((identity, coordinator), joining) = (coordinator.unwrap().unwrap(), joining.unwrap());
        assert_eq!(identity, WHO);
        for (from, to) in [(&joining, &coordinator), (&coordinator, &joining)] {
            let (mut message, mut content) = (Vec::new(), Vec::new());
            from.encrypt(b"a word", &mut message);
            assert_eq!(to.decrypt(&message, &mut content).unwrap(), Some(message.len()));
            assert_eq!(content, b"a word");
        }
        let (coordinator, joining) = with_coordinator(|connection| introduce(connection, &secret(2), WHO));
        assert!(matches!(coordinator, Err(HandshakeError::Secret)) && matches!(joining, Err(HandshakeError::Secret)));
    }

    /// An answer that was altered on the way to rank 0, or that belongs to another greeting, is refused, and so is an altered greeting.
    #[test]
    fn challenge_authenticates_every_byte_of_the_join() {
        let challenge = Challenge::new().unwrap();
        let (greeting, right) = (challenge.greeting().to_vec(), answer(challenge.greeting()));
        let (refusal, outcome) = reply(Challenge::new().unwrap(), &right);
        assert!(matches!(outcome, Err(HandshakeError::Secret)), "an answer was taken a second time");
        assert_eq!(refusal, [0; REPLY], "a stranger was told something");
        let again = || Challenge { greeting: challenge.greeting, answer: [0; ANSWER], len: 0 };
        for index in HEADER..ANSWER {
            let mut answer = right.clone();
            answer[index] ^= 1;
            assert!(matches!(reply(again(), &answer).1, Err(HandshakeError::Secret)), "byte {index} of the answer");
        }
        for index in HEADER..GREETING {
            let mut greeting = greeting.clone();
            greeting[index] ^= 1;
            let answer = answer(&greeting);
            assert!(matches!(reply(again(), &answer).1, Err(HandshakeError::Secret)), "byte {index} of the greeting");
        }
        assert_eq!(reply(challenge, &right).1.unwrap().unwrap().0, WHO);
        // Neither an observer nor an impostor in rank 0's place learns who joins.
        assert!(right.windows(8).all(|window| window != WHO.world_size.to_le_bytes()));
    }

    /// A listener without the secret cannot pass for rank 0: not by a joining rank's own message, by zeros, by an altered or an old reply.
    #[test]
    fn introduce_accepts_no_reply_but_rank_0s_own() {
        let old = {
            let challenge = Challenge::new().unwrap();
            let answer = answer(challenge.greeting());
            reply(challenge, &answer).0
        };
        type Forge<'a> = &'a (dyn Fn(&[u8], Vec<u8>) -> Vec<u8> + Sync);
        let forgeries: [Forge<'_>; 4] = [
            &|answer, _| answer[HEADER..][..REPLY].to_vec(),
            &|_, _| vec![0; REPLY],
            &|_, mut right| {
                right[REPLY - 1] ^= 1;
                right
            },
            &|_, _| old.clone(),
        ];
        for (number, forge) in forgeries.iter().enumerate() {
            let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            let address = listener.local_addr().unwrap();
            let outcome = thread::scope(|scope| {
                scope.spawn(|| {
                    let mut connection = listener.accept().unwrap().0;
                    let challenge = Challenge::new().unwrap();
                    connection.write_all(challenge.greeting()).unwrap();
                    let answer: [u8; ANSWER] = read(&mut connection).unwrap();
                    let right = reply(challenge, &answer).0;
                    connection.write_all(&forge(&answer, right)).unwrap();
                });
                introduce(&mut TcpStream::connect(address).unwrap(), &secret(1), WHO)
            });
            assert!(matches!(outcome, Err(HandshakeError::Secret)), "forgery {number}");
        }
    }

    #[test]
    fn check_tells_other_versions_from_other_protocols() {
        let mut header = header();
        header[8] = 1;
        assert!(check(&header[..11]).is_ok());
        assert!(matches!(check(&header), Err(HandshakeError::Version(1))));
        assert!(matches!(check(b"graft"), Err(HandshakeError::ForeignProtocol)));
    }

    /// The frames that a receiver reads from these bytes, up to the first that it refuses.
    fn received(session: &NoiseSession, mut bytes: &[u8]) -> Vec<String> {
        std::iter::from_fn(|| session.read(&mut bytes, 1 << 20).ok()).collect()
    }

    #[test]
    fn decrypt_takes_frames_unaltered_and_in_order() {
        let frames = |sender: &NoiseSession| {
            ["one", "two", "three"].map(|text| {
                let mut bytes = Vec::new();
                sender.encrypt(&encode(&text, 64).unwrap(), &mut bytes);
                bytes
            })
        };
        let try_with = |arrange: &dyn Fn([Vec<u8>; 3]) -> Vec<u8>| {
            let [sender, receiver] = sessions();
            received(&receiver, &arrange(frames(&sender)))
        };
        assert_eq!(try_with(&|frames| frames.concat()), ["one", "two", "three"]);
        assert_eq!(try_with(&|[one, ..]| one.repeat(2)), ["one"], "a frame that is repeated");
        assert_eq!(try_with(&|[one, _, three]| [one, three].concat()), ["one"], "a frame that is left out");
        assert_eq!(try_with(&|[one, two, _]| [two, one].concat()), [""; 0], "frames in another order");
        assert_eq!(try_with(&|[one, ..]| one[..one.len() - 1].to_vec()), [""; 0], "a frame that is cut");
        let [sender, _] = sessions();
        assert_eq!(received(&sender, &frames(&sender).concat()), [""; 0], "frames that are reflected");
        let [_, receiver] = sessions();
        assert_eq!(received(&receiver, &frames(&sender).concat()), [""; 0], "frames of another connection");
        let length = frames(&sessions()[0])[0].len();
        for index in 0..length {
            let altered = try_with(&|[mut one, ..]| {
                one[index] ^= 1;
                // If the length was altered to a larger one, the reader needs more bytes.
                one.extend([0; 1 << 16]);
                one
            });
            assert_eq!(altered, [""; 0], "byte {index} is altered");
        }
    }

    /// Frames around the most bytes of one message, and of two.
    #[test]
    fn encrypt_divides_long_frames_into_messages() {
        let [sender, receiver] = sessions();
        let mut bytes = Vec::new();
        let lengths = [CONTENT - 4, CONTENT - 3, CONTENT - 2, 2 * CONTENT - 3, 2 * CONTENT + 9, 1];
        let texts = lengths.map(|len| "x".repeat(len));
        for text in &texts {
            sender.encrypt(&encode(text, 1 << 20).unwrap(), &mut bytes);
        }
        assert_eq!(received(&receiver, &bytes), texts);
        assert!(bytes.windows(8).all(|window| window != [b'x'; 8]), "a frame can be read on the way");
    }

    #[test]
    fn read_refuses_a_frame_beyond_the_limit_before_its_end() {
        let [sender, receiver] = sessions();
        let mut bytes = Vec::new();
        sender.encrypt(&vec![1; 5 * CONTENT], &mut bytes);
        let mut rest = &bytes[..];
        let error = receiver.read::<Vec<u8>>(&mut rest, CONTENT).unwrap_err();
        assert!(error.to_string().contains(&format!("more than {CONTENT} bytes")), "{error}");
        assert!(rest.len() > 3 * CONTENT);
        for length in [0u16, 1, TAG as u16 - 1] {
            let error = receiver.read::<u8>(&mut &length.to_le_bytes().repeat(20)[..], 64).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
        }
    }
}
