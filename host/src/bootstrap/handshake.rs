//! How two ranks prove to each other that they know the secret, before either believes anything.
//!
//! The joining rank says who it is and gives a nonce, rank 0 answers with a nonce of its own, and each sends the
//! HMAC-SHA256 of the whole conversation under the secret, the joining rank first: rank 0 gives strangers nothing to
//! guess the secret from. All frames are short, whoever sends them. Nothing after the handshake is encrypted or
//! authenticated.

use std::io::{self, Read, Write};

use hmac::{Hmac, Mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::error::BootstrapError;
use super::frame::{self, HANDSHAKE_LIMIT};
use super::secret::{Secret, random};

/// What every conversation begins with.
const MAGIC: [u8; 8] = *b"gradsync";
/// Ranks of different versions do not understand each other, nor try.
const VERSION: u32 = 1;

type Nonce = [u8; 32];
type Tag = [u8; 32];

/// What a rank says about itself; believed once it is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) rank: u64,
    pub(super) world_size: u64,
    pub(super) generation: u64,
}

#[derive(Serialize, Deserialize)]
struct Opening {
    magic: [u8; 8],
    version: u32,
    nonce: Nonce,
}

#[derive(Serialize, Deserialize)]
enum Verdict {
    /// Rank 0's own proof.
    Proven(Tag),
    /// The joining rank's proof was wrong.
    Refused,
}

/// Which side makes a proof: else one could be sent back as the other.
#[derive(Clone, Copy)]
enum Role {
    Joining = 1,
    Hub = 2,
}

/// Why a handshake ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Connection(#[from] io::Error),
    #[error("the other side does not speak this protocol")]
    Stranger,
    #[error("the other side speaks version {0} of the protocol")]
    Version(u32),
    #[error("the other side does not have the same secret")]
    Secret,
    #[error(transparent)]
    Randomness(#[from] BootstrapError),
}

/// Rank 0's side: who has come, proven.
pub(super) fn receive(connection: &mut (impl Read + Write), secret: &Secret) -> Result<Identity, HandshakeError> {
    let theirs: Opening = read(connection)?;
    let identity: Identity =
        if theirs.magic == MAGIC { read(connection)? } else { return Err(HandshakeError::Stranger) };
    let own = Opening { magic: MAGIC, version: VERSION, nonce: random()? };
    frame::write(connection, &own, HANDSHAKE_LIMIT)?;
    check_version(&theirs)?;
    let proof: Tag = read(connection)?;
    let nonces = (theirs.nonce, own.nonce);
    if tag(secret, Role::Joining, nonces, identity).verify_slice(&proof).is_err() {
        frame::write(connection, &Verdict::Refused, HANDSHAKE_LIMIT)?;
        return Err(HandshakeError::Secret);
    }
    let proof = tag(secret, Role::Hub, nonces, identity).finalize().into_bytes();
    frame::write(connection, &Verdict::Proven(proof.into()), HANDSHAKE_LIMIT)?;
    Ok(identity)
}

/// The joining rank's side.
pub(super) fn introduce(
    connection: &mut (impl Read + Write),
    secret: &Secret,
    identity: Identity,
) -> Result<(), HandshakeError> {
    let own = Opening { magic: MAGIC, version: VERSION, nonce: random()? };
    frame::write(connection, &own, HANDSHAKE_LIMIT)?;
    frame::write(connection, &identity, HANDSHAKE_LIMIT)?;
    let theirs: Opening = read(connection)?;
    if theirs.magic != MAGIC {
        return Err(HandshakeError::Stranger);
    }
    check_version(&theirs)?;
    let nonces = (own.nonce, theirs.nonce);
    let proof: Tag = tag(secret, Role::Joining, nonces, identity).finalize().into_bytes().into();
    frame::write(connection, &proof, HANDSHAKE_LIMIT)?;
    match read(connection)? {
        Verdict::Proven(proof) if tag(secret, Role::Hub, nonces, identity).verify_slice(&proof).is_ok() => Ok(()),
        _ => Err(HandshakeError::Secret),
    }
}

impl HandshakeError {
    /// The same, as a joining rank reports it about `address`; otherwise what to say about the attempt.
    pub(super) fn about(self, address: String) -> Result<BootstrapError, String> {
        match self {
            HandshakeError::Secret => Ok(BootstrapError::WrongSecret { address }),
            HandshakeError::Version(theirs) => Ok(BootstrapError::VersionMismatch { address, theirs, ours: VERSION }),
            HandshakeError::Randomness(error) => Ok(error),
            other => Err(other.to_string()),
        }
    }
}

/// Bytes that are no frame of a handshake come from a stranger.
fn read<T: DeserializeOwned>(connection: &mut impl Read) -> Result<T, HandshakeError> {
    frame::read(connection, HANDSHAKE_LIMIT).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => HandshakeError::Stranger,
        _ => HandshakeError::Connection(error),
    })
}

fn check_version(theirs: &Opening) -> Result<(), HandshakeError> {
    if theirs.version == VERSION { Ok(()) } else { Err(HandshakeError::Version(theirs.version)) }
}

/// The proof of one side. Every part has a fixed length, so that no two conversations hash the same bytes.
fn tag(secret: &Secret, role: Role, nonces: (Nonce, Nonce), identity: Identity) -> Hmac<Sha256> {
    let mut mac = secret.mac();
    mac.update(&MAGIC);
    mac.update(&VERSION.to_le_bytes());
    mac.update(&[role as u8]);
    mac.update(&nonces.0);
    mac.update(&nonces.1);
    for number in [identity.rank, identity.world_size, identity.generation] {
        mac.update(&number.to_le_bytes());
    }
    mac
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;

    const IDENTITY: Identity = Identity { rank: 3, world_size: 4, generation: 5 };

    fn secret(bytes: &str) -> Secret {
        Secret::new(bytes).unwrap()
    }

    /// Runs both sides over a connection.
    fn shake(ours: &str, theirs: &str) -> (Result<Identity, HandshakeError>, Result<(), HandshakeError>) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let hub = scope.spawn(|| receive(&mut listener.accept().unwrap().0, &secret(ours)));
            let joining = introduce(&mut TcpStream::connect(address).unwrap(), &secret(theirs), IDENTITY);
            (hub.join().unwrap(), joining)
        })
    }

    #[test]
    fn both_sides_are_convinced_by_the_same_secret_only() {
        let (hub, joining) = shake("the same", "the same");
        assert_eq!(hub.unwrap(), IDENTITY);
        joining.unwrap();
        let (hub, joining) = shake("the same", "another one");
        assert!(matches!(hub, Err(HandshakeError::Secret)) && matches!(joining, Err(HandshakeError::Secret)));
    }

    #[test]
    fn every_part_of_the_conversation_is_proven() {
        let of = |role, nonces, identity| tag(&secret("the same"), role, nonces, identity).finalize().into_bytes();
        let one = of(Role::Joining, ([1; 32], [2; 32]), IDENTITY);
        assert_ne!(one, of(Role::Hub, ([1; 32], [2; 32]), IDENTITY));
        assert_ne!(one, of(Role::Joining, ([2; 32], [1; 32]), IDENTITY));
        for changed in [
            Identity { rank: 2, ..IDENTITY },
            Identity { world_size: 5, ..IDENTITY },
            Identity { generation: 4, ..IDENTITY },
        ] {
            assert_ne!(one, of(Role::Joining, ([1; 32], [2; 32]), changed));
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
                let opening: Opening = read(&mut connection).unwrap();
                let _: Identity = read(&mut connection).unwrap();
                frame::write(&mut connection, &opening, HANDSHAKE_LIMIT).unwrap();
                let proof: Tag = read(&mut connection).unwrap();
                frame::write(&mut connection, &Verdict::Proven(proof), HANDSHAKE_LIMIT).unwrap();
            });
            introduce(&mut TcpStream::connect(address).unwrap(), &secret("the same"), IDENTITY)
        });
        assert!(matches!(outcome, Err(HandshakeError::Secret)));
    }
}
