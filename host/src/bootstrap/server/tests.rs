//! Ranks that violate the protocol, and connections on which an attacker changes bytes. Bytes that are not a frame, not the next frame or
//! not a request end only the connection that carried them, and the group fails with an error that names the rank and the violation.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::bootstrap::client::{self, Invitation};
use crate::bootstrap::frame::{FRAME_LIMIT, encode};
use crate::bootstrap::message::Network;
use crate::bootstrap::noise::{Challenge, introduce};
use crate::dtype::DType;
use crate::error::{Call, CommError, Departure, Operation};
use crate::trace::{Kind, Recorder};

const PLENTY: Duration = Duration::from_secs(60);

fn applicant(rank: usize, world_size: usize) -> Applicant {
    let end = Instant::now().checked_add(PLENTY);
    let recorder = Recorder::always(Kind::Processes, "test", rank, world_size);
    Applicant { rank, world_size, generation: 0, deadline: PLENTY, end, recorder }
}

fn secret() -> Secret {
    Secret::from_bytes([7; 32])
}

fn encrypted(session: &Session, frames: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| session.encrypt(frame, &mut bytes));
    bytes
}

/// Makes a group of three ranks, in which rank 2 completes the handshake and then sends the bytes that `words` makes with its keys.
/// Returns the failures on the other ranks.
fn with_deviant(words: impl FnOnce(&Session) -> Vec<u8>) -> Vec<CommError> {
    let loopback = Some(Ipv4Addr::LOCALHOST.into());
    let listener = listen(loopback, 0).unwrap();
    let port = port(&listener).unwrap();
    thread::scope(|scope| {
        let coordinator = scope.spawn(move || {
            join(listener, Service::new(loopback, secret(), "a test".into()), &applicant(0, 3)).unwrap()
        });
        let member = scope.spawn(move || client::join(&applicant(1, 3), &invitation(port), |_| true).unwrap());
        let mut deviant = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let identity = Identity { rank: 2, world_size: 3, generation: 0 };
        let session = introduce(&mut deviant, &secret(), identity).unwrap();
        assert!(matches!(session.read(&mut deviant, FRAME_LIMIT).unwrap(), Event::Start(_)));
        let members = [coordinator.join().unwrap(), member.join().unwrap()];
        deviant.write_all(&words(&session)).unwrap();
        let failures = members.each_ref().map(|member| member.wait_failure(PLENTY).unwrap());
        // Rank 2 receives the failure, and then the connection is closed.
        assert!(matches!(session.read(&mut deviant, FRAME_LIMIT), Ok(Event::Failed(_)) | Err(_)));
        // The connection stays open until rank 2 has closed its side.
        drop(deviant);
        drop(members);
        failures.into()
    })
}

#[test]
fn what_is_no_request_is_a_violation_by_its_rank() {
    let post = |calls: usize, contribution| {
        let calls = vec![Call::without_data(Operation::Barrier); calls];
        encode(&Request::Post { calls, contribution }, FRAME_LIMIT).unwrap()
    };
    let send_to = |peer| Call::new(Operation::Send { peer }, 1, DType::F32);
    let stray = encode(&Request::Post { calls: vec![send_to(3)], contribution: None }, FRAME_LIMIT).unwrap();
    let to_itself = encode(&Request::Post { calls: vec![send_to(2)], contribution: None }, FRAME_LIMIT).unwrap();
    // Noise has no message that is longer than the first of these, or shorter than a tag.
    let raw = [vec![0xff; 1 << 17], vec![0; 4]];
    let frames = [
        vec![[0xee, 0xee].to_vec()],
        vec![vec![0; FRAME_LIMIT + 1]],
        vec![post(0, None)],
        vec![post(1, Some(vec![0; (64 << 10) + 1]))],
        vec![post(1, None), post(1, None)],
        vec![stray],
        vec![to_itself],
    ];
    raw.iter().for_each(|bytes| assert_violation(with_deviant(|_| bytes.clone()), bytes));
    frames.iter().for_each(|frames| assert_violation(with_deviant(|session| encrypted(session, frames)), frames));
}

#[track_caller]
fn assert_violation(failures: Vec<CommError>, after: &dyn std::fmt::Debug) {
    for failure in failures {
        let CommError::Transport { operation: Operation::Exchange, rank: 2, reason } = &failure else {
            panic!("{failure:?} after {after:.60?}");
        };
        assert!(reason.contains("its messages violate the protocol"), "{failure} after {after:.60?}");
    }
}

/// The requests are valid only if the rank itself sends them, once each and in this order: an attacker in between can neither make nor
/// repeat them.
#[test]
fn what_was_altered_injected_or_repeated_is_a_violation() {
    let request = |request: Request| encode(&request, FRAME_LIMIT).unwrap();
    let farewell = || request(Request::Leave { departure: Departure::Left, sequence: 0 });
    let fine = || request(Request::Progress { inquiry: 9, sequence: 0 });
    assert_violation(with_deviant(|_| injected(&farewell())), &"an injected farewell");
    assert_violation(with_deviant(|session| encrypted(session, &[fine()]).repeat(2)), &"a repeated request");
    assert_violation(
        with_deviant(|session| {
            let [first, second] = [fine(), farewell()].map(|frame| encrypted(session, &[frame]));
            [second, first].concat()
        }),
        &"requests in another order",
    );
    assert_violation(
        with_deviant(|session| {
            let mut bytes = encrypted(session, &[fine()]);
            // Changes the number of the inquiry, which a stream cipher alone would let pass.
            bytes[3] ^= 1;
            bytes
        }),
        &"an altered request",
    );
    assert_violation(
        with_deviant(|session| {
            let [_, second] = [fine(), farewell()].map(|frame| encrypted(session, &[frame]));
            second
        }),
        &"a request whose predecessor was dropped",
    );
}

/// The bytes of a message with this content and without a valid tag.
fn injected(content: &[u8]) -> Vec<u8> {
    [&(content.len() as u16 + 16).to_le_bytes()[..], content, &[0; 16]].concat()
}

fn invitation(port: u16) -> Invitation {
    Invitation { hosts: vec!["127.0.0.1".into()], ports: vec![port], secret: secret() }
}

/// A reader of a group's connections learns neither the contributions of ranks, among which is the secret of a group that is split off, nor
/// the group's own secret.
#[test]
fn an_eavesdropper_reads_nothing() {
    let loopback = Some(Ipv4Addr::LOCALHOST.into());
    let listener = listen(loopback, 0).unwrap();
    let behind = port(&listener).unwrap();
    let relay = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = relay.local_addr().unwrap().port();
    let words: [[u8; 32]; 2] = [*b"the contribution of rank 0, here", *b"the contribution of rank 1, here"];
    let heard = thread::scope(|scope| {
        let coordinator = scope.spawn(move || {
            let service = Service::new(loopback, secret(), "a test".into());
            let member = join(listener, service, &applicant(0, 2)).unwrap();
            assert_eq!(member.all_gather(&words[0], PLENTY).unwrap(), words);
            drop(member.split(Some(0), 0, PLENTY).unwrap());
        });
        let ear = scope.spawn(move || {
            let near = relay.accept().unwrap().0;
            let far = TcpStream::connect(("127.0.0.1", behind)).unwrap();
            thread::scope(|scope| {
                let there = scope.spawn(|| overhear(&near, &far));
                let back = overhear(&far, &near);
                [there.join().unwrap(), back].concat()
            })
        });
        let member = client::join(&applicant(1, 2), &invitation(port), |_| true).unwrap();
        assert_eq!(member.all_gather(&words[1], PLENTY).unwrap(), words);
        drop(member.split(Some(0), 0, PLENTY).unwrap());
        drop(member);
        coordinator.join().unwrap();
        ear.join().unwrap()
    });
    assert!(heard.len() > 400, "{} bytes", heard.len());
    let secret = *secret().bytes();
    for word in [secret, words[0], words[1]] {
        assert!(heard.windows(8).all(|window| !word.windows(8).any(|part| part == window)), "{word:?} can be read");
    }
}

/// Forwards the bytes of one side until its connection ends, and returns them.
fn overhear(mut from: &TcpStream, mut to: &TcpStream) -> Vec<u8> {
    let (mut all, mut bytes) = (Vec::new(), [0; 4096]);
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        all.extend_from_slice(&bytes[..len]);
        to.write_all(&bytes[..len]).unwrap();
    }
    // The other side may be gone already.
    let _ = to.shutdown(Shutdown::Write);
    all
}

/// A rank 0 that sends bytes which are no event violates the protocol.
#[test]
fn a_rank_0_that_sends_no_events_is_a_violation() {
    let listener = listen(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
    listener.set_nonblocking(false).unwrap();
    let port = port(&listener).unwrap();
    let farewell = encode(&Event::Departed { rank: 0, departure: Departure::Left, sequence: 0 }, FRAME_LIMIT).unwrap();
    for (bytes, is_encrypted) in [
        (vec![0xff; 1 << 17], false),
        ([0xee].to_vec(), true),
        // A farewell injected by an attacker in between.
        (injected(&farewell), false),
    ] {
        thread::scope(|scope| {
            let member = scope.spawn(move || client::join(&applicant(1, 2), &invitation(port), |_| true).unwrap());
            let mut connection = listener.accept().unwrap().0;
            let mut challenge = Challenge::new().unwrap();
            connection.write_all(challenge.greeting()).unwrap();
            let session = challenge.hear(&mut connection, &secret()).unwrap().unwrap().1;
            let start = encode(&Event::Start(Network::default()), FRAME_LIMIT).unwrap();
            connection.write_all(&encrypted(&session, &[start])).unwrap();
            let member = member.join().unwrap();
            assert_eq!(member.failure(), None);
            let bytes = if is_encrypted { encrypted(&session, &[bytes]) } else { bytes };
            connection.write_all(&bytes).unwrap();
            let failure = member.wait_failure(PLENTY).expect("a violation");
            let is_named =
                matches!(&failure, CommError::Transport { rank: 0, reason, .. } if reason.contains("protocol"));
            assert!(is_named, "{failure:?}");
        });
    }
}
