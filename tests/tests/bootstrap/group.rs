//! Groups for tests: every kind of rendezvous, and a function that runs on each member.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

use gradsync::bootstrap::{BootstrapError, Member, Rendezvous, Secret};
use gradsync::comm::{Call, Operation, ReduceOp};
use gradsync::dtype::DType;
use gradsync::{CommError, Error};
use tempfile::TempDir;

use crate::PLENTY;

/// The kind of rendezvous by which the ranks of a test join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    InProcess,
    Tcp,
    File,
}

impl Way {
    pub(crate) const ALL: [Way; 3] = [Way::InProcess, Way::Tcp, Way::File];
    /// One rendezvous for each kind of channel: a rendezvous by file leads to the same channel as one by address.
    pub(crate) const CHANNELS: [Way; 2] = [Way::InProcess, Way::Tcp];

    /// A fresh rendezvous of this kind.
    pub(crate) fn meeting(self) -> Meeting {
        let folder = TempDir::new().expect("a temporary folder");
        let path = folder.path().join("rendezvous");
        let port = free_port();
        let rendezvous = match self {
            Way::InProcess => Rendezvous::in_process(),
            Way::Tcp => Rendezvous::tcp("127.0.0.1", port, secret()),
            Way::File => Rendezvous::file(&path),
        };
        Meeting { rendezvous: rendezvous.with_deadline(PLENTY), path, port, _folder: folder }
    }
}

/// A rendezvous with its file path and its port.
pub(crate) struct Meeting {
    pub(crate) rendezvous: Rendezvous,
    pub(crate) path: PathBuf,
    pub(crate) port: u16,
    _folder: TempDir,
}

/// The secret that all ranks of this process and its children share.
pub(crate) fn secret() -> Secret {
    static SECRET: LazyLock<Secret> = LazyLock::new(|| Secret::generate().expect("random bytes"));
    SECRET.clone()
}

/// A port of 127.0.0.1 on which nobody listens, different for every test, outside the range from which the system assigns ports to
/// connections.
pub(crate) fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    loop {
        let offset = (std::process::id() as u16).wrapping_mul(101).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = 12_000 + offset % 18_000;
        if std::net::TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
}

/// Joins as each of the ranks, each on a thread of its own, and runs `body` there. Returns the results in rank order; the panic of a rank
/// becomes the panic of the test.
pub(crate) fn on_members<T: Send>(way: Way, world_size: usize, body: impl Fn(Member) -> T + Sync) -> Vec<T> {
    let meeting = way.meeting();
    on_ranks(0..world_size, |rank| {
        let member = meeting.rendezvous.join(rank, world_size).unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        assert_eq!((member.rank(), member.world_size()), (rank, world_size));
        body(member)
    })
}

/// Runs `body` for each of these ranks, each on a thread of its own.
pub(crate) fn on_ranks<T: Send>(ranks: impl IntoIterator<Item = usize>, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// Waits for all ranks over the control channel itself.
pub(crate) fn barrier(member: &Member) {
    member.all_gather(b"barrier", PLENTY).unwrap_or_else(|error| panic!("rank {}: {error}", member.rank()));
}

#[track_caller]
pub(crate) fn refused(outcome: gradsync::Result<Member>) -> BootstrapError {
    match outcome {
        Err(Error::Bootstrap(error)) => error,
        other => panic!("{other:?} is no refusal to join"),
    }
}

pub(crate) fn send(peer: usize, len: usize) -> Call {
    Call::new(Operation::Send { peer }, len, DType::F32)
}

pub(crate) fn recv(peer: usize, len: usize) -> Call {
    Call::new(Operation::Recv { peer }, len, DType::F32)
}

pub(crate) fn send_recv(to: usize, from: usize) -> Call {
    Call::new(Operation::SendRecv { to, from }, 3, DType::F32)
}

pub(crate) fn reduce(len: usize) -> Call {
    Call::new(Operation::AllReduce(ReduceOp::Sum), len, DType::BF16)
}

pub(crate) fn sync() -> Call {
    Call::without_data(Operation::Barrier)
}

pub(crate) fn mismatch(left_rank: usize, left: Call, right_rank: usize, right: Call) -> CommError {
    CommError::Mismatch { left_rank, left: left.into(), right_rank, right: right.into() }
}
