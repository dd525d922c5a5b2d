//! Strangers who connect to rank 0 while ranks join: they get nothing, and stop nobody.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gradsync_tests::ranks::guarded;

use crate::PLENTY;
use crate::group::{Meeting, Way, barrier, on_ranks};

/// Connects once rank 0 listens.
fn connect(meeting: &Meeting) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", meeting.port)) {
            Ok(connection) => return connection,
            Err(error) => assert!(start.elapsed() < PLENTY, "rank 0 does not listen: {error}"),
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// The beginnings of a conversation, as far as a stranger can guess it.
fn openings() -> Vec<Vec<u8>> {
    let mut opening = 41u32.to_le_bytes().to_vec();
    opening.extend(b"gradsync\x01");
    opening.extend([7; 32]);
    let identity = [3, 0, 0, 0, 1, 3, 0];
    let proof = [&32u32.to_le_bytes()[..], &[9; 32]].concat();
    let unproven = [&opening[..], &identity, &proof].concat();
    let mut other_version = unproven.clone();
    other_version[12] = 2;
    vec![
        b"GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        vec![0; 4096],
        u32::MAX.to_le_bytes().to_vec(),
        257u32.to_le_bytes().to_vec(),
        (0..=255).cycle().take(1 << 16).collect(),
        opening[..20].to_vec(),
        [&opening[..], &[0xff; 64]].concat(),
        [&opening[..], &identity].concat(),
        unproven,
        other_version,
    ]
}

#[test]
fn garbage_is_refused_while_the_others_join() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        thread::scope(|scope| {
            let early = scope.spawn(|| on_ranks([0, 1], |rank| barrier(&meeting.rendezvous.join(rank, 3).unwrap())));
            for opening in openings() {
                let mut connection = connect(&meeting);
                connection.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                // It may be closed before all is written.
                let _ = connection.write_all(&opening);
                let _ = connection.shutdown(std::net::Shutdown::Write);
                let mut answer = Vec::new();
                let outcome = connection.read_to_end(&mut answer);
                assert!(
                    !matches!(&outcome, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock),
                    "still open after {opening:?}"
                );
                assert!(answer.len() < 100, "a stranger was told {answer:?}");
            }
            barrier(&meeting.rendezvous.join(2, 3).unwrap());
            early.join().unwrap();
        });
    });
}

/// Says that the test is over, whichever way it ends.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Strangers who connect and say nothing, or one byte at a time, before, between and after the ranks.
#[test]
fn silence_and_dripping_hold_nobody_up() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            let over = Over(&is_over);
            let rank_0 = scope.spawn(|| meeting.rendezvous.join(0, 3).unwrap());
            let silent: Vec<TcpStream> = (0..8).map(|_| connect(&meeting)).collect();
            let mut dripping = connect(&meeting);
            let is_over = &is_over;
            scope.spawn(move || {
                let mut bytes = openings()[9].clone().into_iter();
                while !is_over.load(Ordering::Relaxed) {
                    let _ = dripping.write_all(&[bytes.next().unwrap_or(0)]);
                    thread::sleep(Duration::from_millis(50));
                }
            });
            let start = Instant::now();
            let others = on_ranks([1, 2], |rank| meeting.rendezvous.join(rank, 3).unwrap());
            let rank_0 = rank_0.join().unwrap();
            assert!(start.elapsed() < Duration::from_secs(4), "strangers held the ranks up for {:?}", start.elapsed());
            // Nobody waits for the strangers' handshakes to end.
            for mut connection in silent {
                connection.set_read_timeout(Some(PLENTY)).unwrap();
                let _ = connection.read(&mut [0]);
            }
            assert!(start.elapsed() < Duration::from_secs(5), "strangers were kept for {:?}", start.elapsed());
            drop(over);
            thread::scope(|scope| {
                for member in others.into_iter().chain([rank_0]) {
                    scope.spawn(move || barrier(&member));
                }
            });
        });
    });
}

/// More silent strangers than are served at once: they are closed after their time, and the ranks come again until
/// then.
#[test]
fn a_crowd_of_strangers_is_outlasted() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        thread::scope(|scope| {
            let rank_0 = scope.spawn(|| barrier(&meeting.rendezvous.join(0, 2).unwrap()));
            let crowd: Vec<TcpStream> = (0..80).map(|_| connect(&meeting)).collect();
            // Those beyond the limit of 64 are closed at once, not after the 5 s that the others have.
            let start = Instant::now();
            crowd.iter().for_each(|connection| connection.set_nonblocking(true).unwrap());
            let is_open = |mut connection: &TcpStream| {
                let outcome = connection.read(&mut [0]);
                outcome.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
            };
            while crowd.iter().filter(|connection| is_open(connection)).count() > 64 {
                assert!(start.elapsed() < Duration::from_secs(4), "too many strangers are listened to");
                thread::sleep(Duration::from_millis(10));
            }
            barrier(&meeting.rendezvous.join(1, 2).unwrap());
            rank_0.join().unwrap();
            drop(crowd);
        });
    });
}
