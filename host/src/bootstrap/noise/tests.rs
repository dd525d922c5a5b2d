//! Attacks on the handshake, and on the messages after it.

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
) -> (Result<Option<(Identity, Session)>, HandshakeError>, T) {
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
type Proven = Result<Option<(Identity, Session)>, HandshakeError>;

/// Rank 0's reply to `answer`, and the outcome.
fn reply(mut challenge: Challenge, answer: &[u8]) -> (Vec<u8>, Proven) {
    let mut connection = Recorded(answer, Vec::new());
    let outcome = challenge.hear(&mut connection, &secret(1));
    (connection.1, outcome)
}

#[test]
fn both_sides_are_convinced_by_the_same_secret_only() {
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
fn every_byte_of_the_join_is_authenticated() {
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
fn no_reply_but_rank_0s_own_is_accepted() {
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
fn other_versions_and_other_protocols_are_told_apart_early() {
    let mut header = header();
    header[8] = 1;
    assert!(check(&header[..11]).is_ok());
    assert!(matches!(check(&header), Err(HandshakeError::Version(1))));
    assert!(matches!(check(b"graft"), Err(HandshakeError::ForeignProtocol)));
}

/// The frames that a receiver reads from these bytes, up to the first that it refuses.
fn received(session: &Session, mut bytes: &[u8]) -> Vec<String> {
    std::iter::from_fn(|| session.read(&mut bytes, 1 << 20).ok()).collect()
}

#[test]
fn frames_arrive_as_they_were_sent_and_in_no_other_way() {
    let frames = |sender: &Session| {
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
fn long_frames_take_several_messages() {
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
fn a_frame_beyond_the_limit_is_refused_before_all_of_it_is_read() {
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
