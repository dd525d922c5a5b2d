//! Members of other minds: what is no frame, or no request, ends only the connection that it came by, as a lost rank.

use std::io::Write;
use std::net::Ipv4Addr;
use std::thread;

use super::*;
use crate::bootstrap::client::{self, Invitation};
use crate::bootstrap::frame::{FRAME_LIMIT, encode, read};
use crate::bootstrap::handshake::{Identity, introduce};
use crate::bootstrap::message::Network;
use crate::dtype::DataType;
use crate::error::{Call, CommError, Departure, Operation};

const PLENTY: Duration = Duration::from_secs(60);

fn applicant(rank: usize, world_size: usize) -> Applicant {
    let end = Instant::now().checked_add(PLENTY);
    Applicant { rank, world_size, generation: 0, deadline: PLENTY, end }
}

fn secret() -> Secret {
    Secret::new("of the test").unwrap()
}

/// A group of three, whose rank 2 has proven itself and then says `bytes`; what the others hear of it.
fn with_deviant(bytes: &[u8]) -> Vec<CommError> {
    let loopback = Some(Ipv4Addr::LOCALHOST.into());
    let listener = listen(loopback, 0).unwrap();
    let port = port(&listener).unwrap();
    thread::scope(|scope| {
        let hub = scope.spawn(move || join(listener, loopback, secret(), &applicant(0, 3)).unwrap());
        let member = scope.spawn(move || {
            let invite = || Ok(Invitation { hosts: vec!["127.0.0.1".into()], port, secret: secret() });
            client::join(&applicant(1, 3), invite, |_| true).unwrap()
        });
        let mut deviant = TcpStream::connect(("127.0.0.1", port)).unwrap();
        introduce(&mut deviant, &secret(), Identity { rank: 2, world_size: 3, generation: 0 }).unwrap();
        assert!(matches!(read(&mut deviant, FRAME_LIMIT).unwrap(), Event::Start(_)));
        let members = [hub.join().unwrap(), member.join().unwrap()];
        deviant.write_all(bytes).unwrap();
        let failures = members.each_ref().map(|member| member.wait_failure(PLENTY).unwrap());
        // It is told of its own loss, and then cut off.
        assert!(matches!(read(&mut deviant, FRAME_LIMIT), Ok(Event::Failed(_)) | Err(_)));
        // Its connection lingers until it has closed its side.
        drop(deviant);
        drop(members);
        failures.into()
    })
}

#[test]
fn what_is_no_request_loses_its_rank() {
    let post = |calls: usize, contribution| {
        let calls = vec![Call::without_data(Operation::Barrier); calls];
        encode(&Request::Post { calls, contribution }, FRAME_LIMIT).unwrap()
    };
    let send_to = |peer| Call::new(Operation::Send { peer }, 1, DataType::F32);
    let stray = encode(&Request::Post { calls: vec![send_to(3)], contribution: None }, FRAME_LIMIT).unwrap();
    let to_itself = encode(&Request::Post { calls: vec![send_to(2)], contribution: None }, FRAME_LIMIT).unwrap();
    for bytes in [
        vec![0xff; 100],
        (FRAME_LIMIT as u32 + 1).to_le_bytes().to_vec(),
        [2, 0, 0, 0, 0xee, 0xee].to_vec(),
        post(0, None),
        post(1, Some(vec![0; (64 << 10) + 1])),
        [post(1, None), post(1, None)].concat(),
        stray,
        to_itself,
    ] {
        let (operation, departure) = (Operation::Exchange, Departure::Lost);
        let expected = CommError::PeerGone { operation, rank: 2, departure };
        assert_eq!(with_deviant(&bytes), vec![expected; 2], "after {:?}", &bytes[..bytes.len().min(20)]);
    }
}

/// Rank 0 that says what is no event is lost to the others.
#[test]
fn a_hub_that_talks_rubbish_is_lost() {
    let listener = listen(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
    let port = port(&listener).unwrap();
    for bytes in [vec![0xff; 100], [1, 0, 0, 0, 0xee].to_vec()] {
        thread::scope(|scope| {
            let member = scope.spawn(move || {
                let invite = || Ok(Invitation { hosts: vec!["127.0.0.1".into()], port, secret: secret() });
                client::join(&applicant(1, 2), invite, |_| true).unwrap()
            });
            let mut connection = listener.accept().unwrap().0;
            handshake::receive(&mut connection, &secret()).unwrap();
            let network = Network::default();
            connection.write_all(&encode(&Event::Start(network), FRAME_LIMIT).unwrap()).unwrap();
            let member = member.join().unwrap();
            assert_eq!(member.failure(), None);
            connection.write_all(&bytes).unwrap();
            let (operation, departure) = (Operation::Exchange, Departure::Lost);
            assert_eq!(member.wait_failure(PLENTY), Some(CommError::PeerGone { operation, rank: 0, departure }));
        });
    }
}
