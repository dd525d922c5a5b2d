//! Rank 0's side of a group that spans processes: it listens until all ranks have joined, and serves their connections.
//!
//! Any process may connect; [`unauthenticated`](super::unauthenticated) handles connections until they are authenticated.

use std::io::{self, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use super::admission::{Admission, Applicant};
use super::control_channel::{Connections, LINGER, Outbox, Threads, drain, is_closed};
use super::coordinator::Route;
use super::frame::{self, FRAME_LIMIT, Timed};
use super::member::Member;
use super::noise::{Identity, NoiseSession};
use super::poll::Alarm;
use super::protocol::{Event, Request};
use super::secret::Secret;
use super::unauthenticated::{Authenticated, Rejected, UnauthenticatedConnections};
use crate::error::BootstrapError;

/// The number of connections that may wait to be accepted. With a short queue, the system would drop connections of ranks among many
/// others, and the ranks would retry only after a second.
#[cfg(unix)]
const BACKLOG: i32 = 4096;

/// Listens on `port` of the loopback address if one is given, else of all interfaces. Port 0 means any free port.
pub(super) fn listen(loopback: Option<IpAddr>, port: u16) -> Result<TcpListener, BootstrapError> {
    // An IPv6 socket accepts IPv4 connections too, if the system has IPv6.
    let everywhere = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    let candidates = loopback.map_or(everywhere.to_vec(), |address| vec![address]);
    let mut outcome = Err(io::ErrorKind::AddrNotAvailable.into());
    for address in &candidates {
        outcome = TcpListener::bind((*address, port)).and_then(prepare);
        if !matches!(&outcome, Err(error) if error.kind() != io::ErrorKind::AddrInUse) {
            break;
        }
    }
    outcome.map_err(|error| {
        let address = SocketAddr::new(loopback.unwrap_or(everywhere[1]), port).to_string();
        match error.kind() {
            io::ErrorKind::AddrInUse => BootstrapError::PortBusy { address },
            _ => unavailable(&error, address),
        }
    })
}

/// Sets a longer queue of waiting connections than the standard library does, and makes the listener non-blocking.
fn prepare(listener: TcpListener) -> io::Result<TcpListener> {
    #[cfg(unix)]
    rustix::net::listen(&listener, BACKLOG)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The port of a listener.
pub(super) fn port(listener: &TcpListener) -> Result<u16, BootstrapError> {
    let error =
        |error: io::Error| BootstrapError::CannotListen { address: "a free port".into(), reason: error.to_string() };
    Ok(listener.local_addr().map_err(error)?.port())
}

/// What rank 0 offers at its listener.
pub(super) struct Service {
    /// The loopback address, if the group is confined to it.
    loopback: Option<IpAddr>,
    secret: Secret,
    /// Where ranks join, in words.
    address: String,
}

impl Service {
    pub(super) fn new(loopback: Option<IpAddr>, secret: Secret, address: String) -> Self {
        Service { loopback, secret, address }
    }
}

/// Joins as rank 0, which accepts the other ranks at `listener`.
pub(super) fn join(listener: TcpListener, service: Service, applicant: &Applicant) -> Result<Member, BootstrapError> {
    let &Applicant { rank, world_size, generation, .. } = applicant;
    let Service { loopback, secret, address } = service;
    let admission = Admission::new(world_size, generation, loopback, address);
    let endpoint = applicant.endpoint(false);
    admission.arrive((rank, world_size, generation), Route::Local(endpoint.clone()), None)?;
    let alarm = Alarm::new().map_err(|error| unavailable(&error, "its port".into()))?;
    let connections = Arc::<Connections>::default();
    let server = Arc::new(Server { admission, secret, connections: connections.clone(), alarm });

    let accepting = Arc::new(Threads::default());
    let acceptor = server.clone();
    let outcome = match accepting.spawn("gradsync-accept", move || acceptor.accept(listener)) {
        Ok(()) => {
            let outcome = server.admission.wait(applicant);
            server.alarm.raise();
            connections.close();
            // Once the thread has ended, the port is free for the group that comes after this one.
            accepting.wait(LINGER);
            outcome
        }
        Err(error) => Err(BootstrapError::out_of_threads(rank, &error)),
    };
    match outcome {
        Ok(coordinator) => Ok(Member::server(coordinator, endpoint, connections)),
        Err(error) => {
            connections.finish();
            Err(error)
        }
    }
}

/// The error of a rank that cannot listen at `address`.
fn unavailable(error: &io::Error, address: String) -> BootstrapError {
    let other = || BootstrapError::CannotListen { address, reason: error.to_string() };
    BootstrapError::out_of_descriptors(0, error).unwrap_or_else(other)
}

/// The state that the threads of rank 0's process share.
struct Server {
    admission: Admission,
    secret: Secret,
    connections: Arc<Connections>,
    alarm: Alarm,
}

impl Server {
    /// Accepts connections until the alarm, and serves each authenticated rank on a thread of its own.
    fn accept(self: &Arc<Self>, listener: TcpListener) {
        let report = |outcome| match outcome {
            Ok(proven) => self.admit(proven),
            Err(Rejected::Starved(error)) => {
                if let Some(error) = BootstrapError::out_of_descriptors(0, &error) {
                    self.admission.fail(error);
                }
            }
            Err(Rejected::Connection { origin, reason }) => {
                let count = self.admission.count_unauthenticated(origin, reason.clone());
                // Many connections must not fill the log.
                if count.is_power_of_two() {
                    tracing::warn!(%origin, reason, count, "connections that proved no secret were closed");
                }
            }
        };
        UnauthenticatedConnections::new(listener, &self.secret, &self.alarm, report).serve();
    }

    fn admit(self: &Arc<Self>, Authenticated { socket, identity, session }: Authenticated) {
        let (socket, session) = (Arc::new(socket), Arc::new(session));
        let Some(id) = self.connections.enter(&socket) else { return };
        let (server, served, encryption) = (self.clone(), socket.clone(), session.clone());
        let serve = move || {
            server.serve(&served, identity, &encryption);
            server.connections.leave(id);
        };
        if let Err(error) = self.connections.threads.spawn("gradsync-serve", serve) {
            self.lack_thread(&socket, &session, &error);
            self.connections.leave(id);
        }
    }

    /// Ends the admission because this process has no thread for a connection, and says so to the rank at its other end.
    fn lack_thread(&self, socket: &TcpStream, session: &NoiseSession, error: &io::Error) {
        let error = BootstrapError::out_of_threads(0, error);
        let refuse = || -> io::Result<()> {
            let mut bytes = Vec::new();
            session.encrypt(&frame::encode(&Event::Refused(error.clone()), FRAME_LIMIT)?, &mut bytes);
            socket.set_nonblocking(false)?;
            Timed { socket, end: Instant::now().checked_add(LINGER) }.write_all(&bytes)
        };
        if let Err(error) = refuse() {
            tracing::debug!(%error, "a rank was not told why it is turned away");
        }
        self.admission.fail(error);
    }

    /// Serves the connection of a rank from the handshake to its end.
    fn serve(&self, socket: &Arc<TcpStream>, identity: Identity, session: &Arc<NoiseSession>) {
        let address = socket.peer_addr().ok().map(|address| address.ip().to_canonical());
        let (Ok(rank), Ok(world_size)) = (usize::try_from(identity.rank), usize::try_from(identity.world_size)) else {
            return tracing::warn!(?identity, ?address, "a rank was refused");
        };
        // If this process was stopped meanwhile, the rank may have closed this connection and made another one.
        if is_closed(socket) {
            return tracing::warn!(?address, rank, "a rank has closed its connection before it was admitted");
        }
        if let Err(error) = socket.set_nonblocking(false) {
            return tracing::warn!(%error, ?address, rank, "a rank cannot be served");
        }
        let outbox = match Outbox::start(socket, session, &self.connections.threads) {
            Ok(outbox) => outbox,
            Err(error) => return self.lack_thread(socket, session, &error),
        };
        let route = Route::Remote(outbox.clone());
        match self.admission.arrive((rank, world_size, identity.generation), route, address) {
            Ok(()) => self.listen_to(rank, socket, session),
            Err(error) => {
                tracing::warn!(%error, ?address, "a rank was refused");
                outbox.send(&Event::Refused(error));
            }
        }
        outbox.close();
        drain(socket);
    }

    /// Forwards the requests of a rank until it leaves or its connection ends.
    fn listen_to(&self, rank: usize, socket: &TcpStream, session: &NoiseSession) {
        let mut socket = BufReader::new(socket);
        let mut coordinator = None;
        loop {
            let request = session.read::<Request>(&mut socket, FRAME_LIMIT);
            coordinator = coordinator.or_else(|| self.admission.coordinator());
            let is_farewell = matches!(request, Ok(Request::Leave { .. }));
            let outcome = request.and_then(|request| {
                let outcome = match &coordinator {
                    Some(coordinator) => coordinator.receive(rank, request),
                    None => self.admission.receive(&request),
                };
                outcome.map_err(|violation| io::Error::new(io::ErrorKind::InvalidData, violation))
            });
            match (outcome, &coordinator) {
                (Ok(()), _) if is_farewell => return,
                (Ok(()), _) => {}
                (Err(error), Some(coordinator)) => {
                    coordinator.lost(rank, &error);
                    return;
                }
                (Err(error), None) => {
                    let reason = match error.kind() {
                        io::ErrorKind::UnexpectedEof => "it has closed its connection".into(),
                        _ => error.to_string(),
                    };
                    tracing::warn!("rank {rank} is gone before all have joined: {reason}");
                    self.admission.lost(rank);
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, Shutdown};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::bootstrap::client::{self, Invitation};
    use crate::bootstrap::frame::{FRAME_LIMIT, encode};
    use crate::bootstrap::noise::{Challenge, introduce};
    use crate::bootstrap::protocol::Network;
    use crate::dtype::DType;
    use crate::error::{Call, CommError, Departure, Operation};
    use crate::trace::{RankKind, Recorder};

    const PLENTY: Duration = Duration::from_secs(60);

    fn applicant(rank: usize, world_size: usize) -> Applicant {
        let end = Instant::now().checked_add(PLENTY);
        let recorder = Recorder::always(RankKind::Processes, "test", rank, world_size);
        Applicant { rank, world_size, generation: 0, deadline: PLENTY, end, recorder }
    }

    fn secret() -> Secret {
        Secret::from_bytes([7; 32])
    }

    fn encrypted(session: &NoiseSession, frames: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = Vec::new();
        frames.iter().for_each(|frame| session.encrypt(frame, &mut bytes));
        bytes
    }

    /// Makes a group of three ranks, in which rank 2 completes the handshake and then sends the bytes that `words` makes with its keys.
    /// Returns the failures on the other ranks.
    fn with_deviant(words: impl FnOnce(&NoiseSession) -> Vec<u8>) -> Vec<CommError> {
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
    fn server_blames_the_rank_that_sends_no_request() {
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
    fn server_refuses_altered_injected_and_repeated_frames() {
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
    fn server_sends_nothing_that_an_eavesdropper_can_read() {
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
    fn join_blames_a_rank_0_that_sends_no_events() {
        let listener = listen(Some(Ipv4Addr::LOCALHOST.into()), 0).unwrap();
        listener.set_nonblocking(false).unwrap();
        let port = port(&listener).unwrap();
        let farewell =
            encode(&Event::Departed { rank: 0, departure: Departure::Left, sequence: 0 }, FRAME_LIMIT).unwrap();
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
}
