//! Unauthenticated connections to rank 0 while ranks join: they learn nothing and delay no rank.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gradsync::bootstrap::{BootstrapError, Rendezvous, Secret};
use gradsync_tests::ranks::guarded;

use crate::group::{Meeting, Way, barrier, on_ranks, refused};
use crate::{AT_ONCE, PLENTY};

/// The version of the protocol, so that connections are not refused for another version.
const VERSION: u32 = 6;

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

/// Opening messages of a peer that does not know the secret.
fn openings() -> Vec<Vec<u8>> {
    let greeting = |version: u32| [&b"gradsync"[..], &version.to_le_bytes(), &[7; 32]].concat();
    // A key of X25519, and an identity with its tag.
    let answer = [greeting(VERSION), vec![9; 40]].concat();
    vec![
        b"GET / HTTP/1.1\r\nHost: rank-0\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        vec![0; 4096],
        (0..=255).cycle().take(1 << 16).collect(),
        answer[..5].to_vec(),
        answer[..20].to_vec(),
        answer[..answer.len() - 1].to_vec(),
        answer.clone(),
        [&answer[..], &[0xff; 64]].concat(),
        [greeting(VERSION), vec![0; 40]].concat(),
        greeting(VERSION - 1),
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
                // The connection may be closed before all bytes are written.
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

/// Sets the flag when it is dropped, whether the test succeeds or fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Connections that send nothing, or one byte at a time, before, between and after the ranks.
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
                let mut bytes = openings()[7].clone().into_iter();
                while !is_over.load(Ordering::Relaxed) {
                    let _ = dripping.write_all(&[bytes.next().unwrap_or(0)]);
                    thread::sleep(Duration::from_millis(50));
                }
            });
            let start = Instant::now();
            let others = on_ranks([1, 2], |rank| meeting.rendezvous.join(rank, 3).unwrap());
            let rank_0 = rank_0.join().unwrap();
            assert!(start.elapsed() < Duration::from_secs(4), "strangers held the ranks up for {:?}", start.elapsed());
            // No rank waits for the handshakes of these connections to end.
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

/// A connection that sends nothing, or not enough, is closed within a second; on every rank, the error of a failed join counts such
/// connections.
#[test]
fn unauthenticated_connections_are_closed_soon_and_counted() {
    guarded(60, || {
        let meeting = Way::Tcp.meeting();
        let deadline = Duration::from_secs(5);
        let rendezvous = meeting.rendezvous.clone().with_deadline(deadline);
        thread::scope(|scope| {
            let ranks = scope.spawn(|| on_ranks([0, 1], |rank| refused(rendezvous.join(rank, 3))));
            let mut silent = connect(&meeting);
            let start = Instant::now();
            silent.set_read_timeout(Some(PLENTY)).unwrap();
            let mut greeting = Vec::new();
            assert_eq!(silent.read_to_end(&mut greeting).unwrap(), 44, "a greeting, and then the end");
            assert_eq!(greeting[8..12], VERSION.to_le_bytes());
            assert!(start.elapsed() < Duration::from_secs(3), "a silent stranger was kept for {:?}", start.elapsed());
            let other = Rendezvous::tcp("127.0.0.1", meeting.port, Secret::generate().unwrap());
            assert!(matches!(refused(other.join(2, 3)), BootstrapError::WrongSecret { .. }));
            let mut last = connect(&meeting);
            let own = last.local_addr().unwrap().to_string();
            last.write_all(&openings()[0]).unwrap();
            for error in ranks.join().unwrap() {
                let BootstrapError::Missing { missing, strangers, .. } = &error else { panic!("{error:?}") };
                assert_eq!((&missing[..], strangers.connections, &strangers.last), (&[2][..], 3, &own));
                let expected = format!(
                    "ranks [2] did not join within 5s; 3 connections proved no secret, the last from {own}: the other \
                     side does not speak this protocol"
                );
                assert_eq!(error.to_string(), expected);
            }
        });
    });
}

/// The variable with the port that a child process connects to, and the kind of messages it sends: see [`crowd`].
const CROWD: &str = "GRADSYNC_TEST_CROWD";
/// The number of connections of a crowd.
const CONNECTIONS: usize = 1000;

/// The body of a child process, because its file descriptors are many: connections that are opened again when they are closed, until the
/// process is killed. Run as a test of its own, it does nothing.
#[test]
fn crowd() {
    let Ok(place) = std::env::var(CROWD) else { return };
    let (kind, port) = place.rsplit_once(' ').unwrap();
    let address = format!("127.0.0.1:{port}").parse().unwrap();
    let is_silent = kind == "silent";
    thread::scope(|scope| {
        let first_rounds: Vec<_> = (0..8usize).map(|_| std::sync::mpsc::channel()).collect();
        for (index, (done, _)) in first_rounds.iter().enumerate() {
            let done = done.clone();
            scope.spawn(move || {
                let mut connections: Vec<Option<TcpStream>> = (0..CONNECTIONS / 8).map(|_| None).collect();
                let end = Instant::now() + PLENTY;
                while Instant::now() < end {
                    for (number, connection) in connections.iter_mut().enumerate() {
                        let words = if is_silent {
                            Vec::new()
                        } else {
                            openings().swap_remove((index + number) % openings().len())
                        };
                        if !connection.as_mut().is_some_and(is_open) {
                            *connection = TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
                            let Some(connection) = connection else { continue };
                            connection.set_nonblocking(true).unwrap();
                            // The connection may be closed again by now.
                            let _ = connection.write_all(&words);
                        }
                    }
                    let _ = done.send(());
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        first_rounds.iter().for_each(|(_, round)| round.recv().unwrap());
        println!("\nthe crowd is there");
    });
}

/// Whether rank 0 has left the connection open; bytes that it has sent are read and discarded.
fn is_open(connection: &mut TcpStream) -> bool {
    let outcome = connection.read(&mut [0; 64]);
    matches!(outcome, Ok(1..)) || outcome.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

/// A child process that crowds rank 0's port with connections, until it is dropped.
struct Crowd(Child);

impl Crowd {
    fn come(kind: &str, meeting: &Meeting) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command
            .args(["unauthenticated_connections::crowd", "--exact", "--nocapture"])
            .env(CROWD, format!("{kind} {}", meeting.port));
        let mut crowd = Crowd(command.stdout(Stdio::piped()).spawn().expect("a child process"));
        let lines = BufReader::new(crowd.0.stdout.take().expect("piped")).lines();
        assert!(lines.map_while(Result::ok).any(|line| line == "the crowd is there"), "the crowd did not come");
        crowd
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ranks join at once among many more unauthenticated connections than are served at a time, which have the ranks' own address and are
/// opened again whenever they are closed.
#[test]
fn a_crowd_that_comes_again_holds_nobody_up() {
    guarded(120, || {
        for (kind, world_size) in [("silent", 4), ("of all kinds", 4), ("silent", 64)] {
            let meeting = Way::Tcp.meeting();
            thread::scope(|scope| {
                let rank_0 = scope.spawn(|| meeting.rendezvous.join(0, world_size).unwrap());
                drop(connect(&meeting));
                let crowd = Crowd::come(kind, &meeting);
                let start = Instant::now();
                let others = on_ranks(1..world_size, |rank| meeting.rendezvous.join(rank, world_size).unwrap());
                let rank_0 = rank_0.join().unwrap();
                let took = start.elapsed();
                println!("{world_size} ranks joined in {took:?} among strangers who are {kind}");
                assert!(took < AT_ONCE, "{kind}: {world_size} ranks were held up for {took:?}");
                drop(crowd);
                thread::scope(|scope| {
                    for member in others.into_iter().chain([rank_0]) {
                        scope.spawn(move || barrier(&member));
                    }
                });
            });
        }
    });
}
