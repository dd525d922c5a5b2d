//! The handshake: two ranks prove to each other that they know the secret, before either acts on the other's messages.
//!
//! 1. Rank 0 greets every connection with a nonce.
//! 2. The joining rank answers in one message of fixed size: its own nonce, its identity, and its proof.
//! 3. Rank 0 answers with its own proof, or with zeros if the joining rank's proof was wrong.
//!
//! Both sides derive two keys from the secret by HKDF-SHA256 (RFC 5869): the salt is both nonces, the joining rank's first, and the
//! context is the protocol, its version, and the side that uses the key. A proof is the tag of a side's first frame under its key (see
//! [`seal`](super::seal)), so that no proof can be reflected, replayed, or used in another connection; all later frames are tagged under
//! the same keys. An impostor in rank 0's place receives a proof, and can test guesses of the secret on it: that is why a [`Secret`]
//! cannot be one that a person chose.

use std::io::{self, ErrorKind, Read, Write};

use hkdf::Hkdf;
use sha2::Sha256;

use super::seal::{Seal, Session, TAG};
use super::secret::{Secret, random};
use crate::error::BootstrapError;

/// The first bytes of every greeting and answer.
const MAGIC: [u8; 8] = *b"gradsync";
/// The version of the protocol; ranks of different versions refuse each other. It goes up with every change of the messages, and so also
/// with every change of the encoding of a [`Call`](crate::Call), an operation or an error.
pub(super) const VERSION: u32 = 5;

/// The length of a greeting: the magic, the version and a nonce.
const GREETING: usize = 44;
/// The offset of the nonce in a greeting.
const NONCE_AT: usize = 12;
/// The length of an encoded [`Identity`].
const IDENTITY: usize = 24;
/// The length of a joining rank's answer.
const ANSWER: usize = GREETING + IDENTITY + TAG;

type Nonce = [u8; 32];

/// The identity that a rank claims; it is used only after the proof was checked.
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

/// Rank 0's side of a handshake, with the bytes of the answer that have arrived.
#[derive(Debug)]
pub(super) struct Challenge {
    nonce: Nonce,
    answer: [u8; ANSWER],
    len: usize,
}

impl Challenge {
    pub(super) fn new() -> Result<Self, BootstrapError> {
        Ok(Challenge { nonce: random()?, answer: [0; ANSWER], len: 0 })
    }

    /// The first message, which rank 0 sends.
    pub(super) fn greeting(&self) -> [u8; GREETING] {
        greeting(self.nonce)
    }

    /// Reads the bytes that have arrived, but none beyond the answer. When the answer is complete and its proof right, sends rank 0's
    /// proof and returns the identity of the joining rank; returns `None` if the answer is incomplete and the connection does not block.
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
        let (greeting, proven) = self.answer.split_at(GREETING);
        let (identity, proof) = proven.split_at(IDENTITY);
        let mut session = session(secret, Side::Coordinator, (nonce(greeting), self.nonce));
        if !session.incoming.fits(identity, &fixed(proof)) {
            connection.write_all(&[0; TAG])?;
            return Err(HandshakeError::Secret);
        }
        connection.write_all(&session.outgoing.tag(&[]))?;
        Ok(Some((Identity::from_bytes(identity), session)))
    }
}

/// Runs the joining rank's side of the handshake.
pub(super) fn introduce(
    connection: &mut (impl Read + Write),
    secret: &Secret,
    identity: Identity,
) -> Result<Session, HandshakeError> {
    let theirs: [u8; GREETING] = read(connection)?;
    check(&theirs)?;
    let own: Nonce = random()?;
    let mut session = session(secret, Side::Joining, (own, nonce(&theirs)));
    let identity = identity.to_bytes();
    let proof = session.outgoing.tag(&identity);
    connection.write_all(&[&greeting(own)[..], &identity, &proof].concat())?;
    if session.incoming.fits(&[], &read(connection)?) { Ok(session) } else { Err(HandshakeError::Secret) }
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

impl Identity {
    fn to_bytes(self) -> [u8; IDENTITY] {
        fixed(&[self.rank, self.world_size, self.generation].map(u64::to_le_bytes).concat())
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let number = |index: usize| u64::from_le_bytes(fixed(&bytes[8 * index..8 * index + 8]));
        Identity { rank: number(0), world_size: number(1), generation: number(2) }
    }
}

/// The two sides of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Joining,
    Coordinator,
}

/// Derives the keys of a connection, as `side` uses them.
fn session(secret: &Secret, side: Side, (joining, coordinator): (Nonce, Nonce)) -> Session {
    let keys = Hkdf::<Sha256>::new(Some(&[joining, coordinator].concat()), secret.bytes());
    let seal = |name: &[u8]| {
        let mut key = [0; 32];
        let context: [&[u8]; 3] = [&MAGIC, &VERSION.to_le_bytes(), name];
        keys.expand_multi_info(&context, &mut key).expect("HKDF makes keys of 32 bytes");
        Seal::new(&key)
    };
    let (joining, coordinator) = (seal(b"joining rank"), seal(b"rank 0"));
    match side {
        Side::Joining => Session { outgoing: joining, incoming: coordinator },
        Side::Coordinator => Session { outgoing: coordinator, incoming: joining },
    }
}

fn greeting(nonce: Nonce) -> [u8; GREETING] {
    fixed(&[&MAGIC[..], &VERSION.to_le_bytes(), &nonce].concat())
}

fn nonce(greeting: &[u8]) -> Nonce {
    fixed(&greeting[NONCE_AT..GREETING])
}

/// Refuses bytes that do not begin like a greeting of this version, as soon as the first difference has arrived.
fn check(bytes: &[u8]) -> Result<(), HandshakeError> {
    if bytes.iter().zip(&MAGIC).any(|(theirs, ours)| theirs != ours) {
        return Err(HandshakeError::ForeignProtocol);
    }
    match bytes.get(MAGIC.len()..NONCE_AT).map(|version| u32::from_le_bytes(fixed(version))) {
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

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;

    const IDENTITY: Identity = Identity { rank: 3, world_size: 4, generation: 5 };

    fn secret(byte: u8) -> Secret {
        Secret::from_bytes([byte; 32])
    }

    /// Runs rank 0's side of a handshake, and `joining` as the other side of the connection.
    fn with_coordinator<T>(
        joining: impl FnOnce(&mut TcpStream) -> T,
    ) -> (Result<Option<(Identity, Session)>, HandshakeError>, T) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let coordinator = scope.spawn(move || {
                let mut connection = listener.accept().unwrap().0;
                let mut challenge = Challenge::new().unwrap();
                connection.write_all(&challenge.greeting()).unwrap();
                challenge.hear(&mut connection, &secret(1))
            });
            let joining = joining(&mut TcpStream::connect(address).unwrap());
            (coordinator.join().unwrap(), joining)
        })
    }

    #[test]
    fn both_sides_are_convinced_by_the_same_secret_only() {
        let (coordinator, joining) = with_coordinator(|connection| introduce(connection, &secret(1), IDENTITY));
        let ((identity, mut coordinator), mut joining) = (coordinator.unwrap().unwrap(), joining.unwrap());
        assert_eq!(identity, IDENTITY);
        assert!(coordinator.incoming.fits(b"to rank 0", &joining.outgoing.tag(b"to rank 0")));
        assert!(joining.incoming.fits(b"from rank 0", &coordinator.outgoing.tag(b"from rank 0")));
        let (coordinator, joining) = with_coordinator(|connection| introduce(connection, &secret(2), IDENTITY));
        assert!(matches!(coordinator, Err(HandshakeError::Secret)) && matches!(joining, Err(HandshakeError::Secret)));
    }

    /// An answer that was altered on the way to rank 0, or that belongs to another greeting, is no proof.
    #[test]
    fn every_byte_of_an_answer_is_proven() {
        struct Recorder<'a>(&'a mut TcpStream, Vec<u8>);
        impl Read for Recorder<'_> {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                self.0.read(bytes)
            }
        }
        impl Write for Recorder<'_> {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1.extend_from_slice(bytes);
                self.0.write(bytes)
            }
            fn flush(&mut self) -> io::Result<()> {
                self.0.flush()
            }
        }
        let (_, answer) = with_coordinator(|connection| {
            let mut recorder = Recorder(connection, Vec::new());
            introduce(&mut recorder, &secret(1), IDENTITY).unwrap();
            recorder.1
        });
        assert_eq!(answer.len(), ANSWER);
        let (coordinator, refusal) = with_coordinator(|connection| {
            connection.write_all(&answer).unwrap();
            let _: [u8; GREETING] = read(connection).unwrap();
            read::<TAG>(connection).unwrap()
        });
        assert!(matches!(coordinator, Err(HandshakeError::Secret)), "an answer was taken a second time");
        assert_eq!(refusal, [0; TAG], "a stranger was given something to guess the secret from");
        for index in NONCE_AT..ANSWER {
            let mut challenge = Challenge::new().unwrap();
            let mut joining = session(&secret(1), Side::Joining, ([9; 32], challenge.nonce));
            let identity = IDENTITY.to_bytes();
            let proof = joining.outgoing.tag(&identity);
            let mut answer = [&greeting([9; 32])[..], &identity, &proof].concat();
            answer[index] ^= 1;
            let mut connection = io::Cursor::new(answer);
            assert!(matches!(challenge.hear(&mut connection, &secret(1)), Err(HandshakeError::Secret)), "byte {index}");
        }
    }

    /// A listener without the secret cannot pass for rank 0 by sending a rank's own proof back to it.
    #[test]
    fn a_proof_cannot_be_sent_back() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let outcome = thread::scope(|scope| {
            scope.spawn(|| {
                let mut connection = listener.accept().unwrap().0;
                connection.write_all(&greeting([9; 32])).unwrap();
                let answer: [u8; ANSWER] = read(&mut connection).unwrap();
                connection.write_all(&answer[ANSWER - TAG..]).unwrap();
            });
            introduce(&mut TcpStream::connect(address).unwrap(), &secret(1), IDENTITY)
        });
        assert!(matches!(outcome, Err(HandshakeError::Secret)));
    }

    #[test]
    fn other_versions_and_other_protocols_are_told_apart_early() {
        let mut greeting = greeting([9; 32]);
        greeting[8] = 1;
        assert!(check(&greeting[..11]).is_ok());
        assert!(matches!(check(&greeting[..12]), Err(HandshakeError::Version(1))));
        assert!(matches!(check(b"graft"), Err(HandshakeError::ForeignProtocol)));
    }
}
