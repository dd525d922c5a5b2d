//! Ranks that violate the protocol, and connections on which an attacker changes bytes. Bytes that are not a frame, not the next frame or
//! not a request end only the connection that carried them, and the group fails with an error that names the rank and the violation.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::bootstrap::client::{self, Invitation};
use crate::bootstrap::frame::{FRAME_LIMIT, encode};
use crate::bootstrap::handshake::{Challenge, introduce};
use crate::bootstrap::member::Uplink;
use crate::bootstrap::message::Network;
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

/// Joins frames and their tags.
fn sealed(seal: &mut Seal, frames: &[Vec<u8>]) -> Vec<u8> {
    frames.iter().flat_map(|frame| [frame.clone(), seal.tag(frame).to_vec()].concat()).collect()
}

/// Makes a group of three ranks, in which rank 2 completes the handshake and then sends the bytes that `words` makes with its key.
/// Returns the failures on the other ranks.
fn with_deviant(words: impl FnOnce(&mut Seal) -> Vec<u8>) -> Vec<CommError> {
    let loopback = Some(Ipv4Addr::LOCALHOST.into());
    let listener = listen(loopback, 0).unwrap();
    let port = port(&listener).unwrap();
    thread::scope(|scope| {
        let coordinator = scope.spawn(move || {
            join(listener, Service::new(loopback, secret(), "a test".into()), &applicant(0, 3), &|| Ok(())).unwrap()
        });
        let member = scope.spawn(move || {
            let invite = || Ok(Invitation { hosts: vec!["127.0.0.1".into()], ports: vec![port], secret: secret() });
            client::join(&applicant(1, 3), invite, |_| true).unwrap()
        });
        let mut deviant = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let identity = Identity { rank: 2, world_size: 3, generation: 0 };
        let mut session = introduce(&mut deviant, &secret(), identity).unwrap();
        assert!(matches!(session.incoming.read(&mut deviant, FRAME_LIMIT).unwrap(), Event::Start(_)));
        let members = [coordinator.join().unwrap(), member.join().unwrap()];
        deviant.write_all(&words(&mut session.outgoing)).unwrap();
        let failures = members.each_ref().map(|member| member.wait_failure(PLENTY).unwrap());
        // Rank 2 receives the failure, and then the connection is closed.
        assert!(matches!(session.incoming.read(&mut deviant, FRAME_LIMIT), Ok(Event::Failed(_)) | Err(_)));
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
    let raw = [vec![0xff; 100], (FRAME_LIMIT as u32 + 1).to_le_bytes().to_vec()];
    let frames = [
        vec![[2, 0, 0, 0, 0xee, 0xee].to_vec()],
        vec![post(0, None)],
        vec![post(1, Some(vec![0; (64 << 10) + 1]))],
        vec![post(1, None), post(1, None)],
        vec![stray],
        vec![to_itself],
    ];
    raw.iter().for_each(|bytes| assert_violation(with_deviant(|_| bytes.clone()), bytes));
    frames.iter().for_each(|frames| assert_violation(with_deviant(|seal| sealed(seal, frames)), frames));
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
    assert_violation(with_deviant(|_| [farewell(), vec![0; 16]].concat()), &"an injected farewell");
    assert_violation(with_deviant(|seal| sealed(seal, &[fine()]).repeat(2)), &"a repeated request");
    assert_violation(
        with_deviant(|seal| {
            let [first, second] = [fine(), farewell()].map(|frame| sealed(seal, &[frame]));
            [second, first].concat()
        }),
        &"requests in another order",
    );
    assert_violation(
        with_deviant(|seal| {
            let mut bytes = sealed(seal, &[fine()]);
            // Changes the number of the inquiry to another valid number.
            bytes[5] ^= 1;
            bytes
        }),
        &"an altered request",
    );
}

/// A reader of a group's connections cannot learn the secret of a group that is split off from it.
#[test]
fn a_new_group_has_a_secret_that_nobody_else_hears_of() {
    let loopback = Some(Ipv4Addr::LOCALHOST.into());
    let listener = listen(loopback, 0).unwrap();
    let behind = port(&listener).unwrap();
    let relay = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = relay.local_addr().unwrap().port();
    let (heard, (old, new)) = thread::scope(|scope| {
        let coordinator = scope.spawn(move || {
            let service = Service::new(loopback, secret(), "a test".into());
            let member = join(listener, service, &applicant(0, 2), &|| Ok(())).unwrap();
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
        let invite = || Ok(Invitation { hosts: vec!["127.0.0.1".into()], ports: vec![port], secret: secret() });
        let member = client::join(&applicant(1, 2), invite, |_| true).unwrap();
        let group = member.split(Some(0), 0, PLENTY).unwrap().unwrap();
        let secrets = [&member, &group].map(|member| match &member.uplink {
            Uplink::Remote(link) => *link.secret.bytes(),
            other => panic!("{other:?}"),
        });
        drop((member, group));
        coordinator.join().unwrap();
        (ear.join().unwrap(), secrets.into())
    });
    assert!(heard.len() > 200, "{} bytes", heard.len());
    assert_ne!(old, new);
    assert!(heard.windows(32).all(|window| *window != old && *window != new), "a secret travelled");
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
    for (bytes, is_sealed) in [
        (vec![0xff; 100], false),
        ([1, 0, 0, 0, 0xee].to_vec(), true),
        // A farewell injected by an attacker in between.
        ([farewell, vec![0; 16]].concat(), false),
    ] {
        thread::scope(|scope| {
            let member = scope.spawn(move || {
                let invite = || Ok(Invitation { hosts: vec!["127.0.0.1".into()], ports: vec![port], secret: secret() });
                client::join(&applicant(1, 2), invite, |_| true).unwrap()
            });
            let mut connection = listener.accept().unwrap().0;
            let mut challenge = Challenge::new().unwrap();
            connection.write_all(&challenge.greeting()).unwrap();
            let mut session = challenge.hear(&mut connection, &secret()).unwrap().unwrap().1;
            let start = encode(&Event::Start(Network::default()), FRAME_LIMIT).unwrap();
            connection.write_all(&sealed(&mut session.outgoing, &[start])).unwrap();
            let member = member.join().unwrap();
            assert_eq!(member.failure(), None);
            let bytes = if is_sealed { sealed(&mut session.outgoing, &[bytes]) } else { bytes };
            connection.write_all(&bytes).unwrap();
            let failure = member.wait_failure(PLENTY).expect("a violation");
            let is_named =
                matches!(&failure, CommError::Transport { rank: 0, reason, .. } if reason.contains("protocol"));
            assert!(is_named, "{failure:?}");
        });
    }
}
