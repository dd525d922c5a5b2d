//! Connections between processes of one machine and one user, for [`peers`](super::peers): Unix sockets in Linux's abstract namespace.
//! Other systems have no such namespace, and their ranks connect by TCP.

#[cfg(target_os = "linux")]
pub(super) use self::linux::{Listener, connect};
#[cfg(not(target_os = "linux"))]
pub(super) use self::other::{Listener, connect};

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The random name of a socket.
pub(super) type Name = [u8; 16];

/// How long the other side of a connection may take to authenticate itself, before this rank checks whether the group has failed.
pub(super) const PROOF_TIME: Duration = Duration::from_secs(1);

/// The variable that overrides the identity of the machine: ranks with different values behave as if on different machines.
const HOST_VARIABLE: &str = "GRADSYNC_HOSTID";

/// Where a process runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Host {
    /// The machine: the boot of its kernel, or the value of [`HOST_VARIABLE`].
    machine: String,
    /// What processes must share to connect by Unix sockets: the kernel, a network namespace and a user.
    sockets: String,
}

impl Host {
    pub(super) fn own() -> Self {
        let read = || -> std::io::Result<(String, String)> {
            let booted = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned();
            let network = std::fs::read_link("/proc/self/ns/net")?;
            let user = rustix::process::geteuid().as_raw();
            let sockets = format!("{booted} {} {user}", network.display());
            Ok((booted, sockets))
        };
        // A process whose machine cannot be identified counts as alone on it.
        let (machine, sockets) = read().unwrap_or_else(|_| {
            let alone = format!("{} {}", gethostname::gethostname().to_string_lossy(), std::process::id());
            (alone.clone(), alone)
        });
        let named = std::env::var(HOST_VARIABLE).ok().filter(|name| !name.is_empty());
        Host { machine: named.unwrap_or(machine), sockets }
    }

    /// Whether a process there is on the same machine.
    pub(super) fn is_same_machine(&self, other: &Host) -> bool {
        self.machine == other.machine
    }

    /// Whether a process there may be reached by a Unix socket. The system may refuse the connection nevertheless, as between containers with
    /// users of their own or under a security module.
    pub(super) fn may_connect(&self, other: &Host) -> bool {
        self == other
    }
}

#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::geteuid;

    use super::super::noise::{self, Challenge, Identity};
    use super::super::peer_connections::Socket;
    use super::super::secret::Secret;
    use super::{Name, PROOF_TIME};

    /// The number of connections that may wait to be accepted.
    const BACKLOG: i32 = 4096;

    /// A socket to which other processes of this user connect. Its name disappears with it.
    #[derive(Debug)]
    pub(in super::super) struct Listener(UnixListener);

    fn address(name: &Name) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name([&b"gradsync-"[..], name].concat())
    }

    impl Listener {
        pub(in super::super) fn open() -> io::Result<(Self, Name)> {
            let mut name = Name::default();
            getrandom::fill(&mut name).map_err(|error| io::Error::other(error.to_string()))?;
            let listener = UnixListener::bind_addr(&address(&name)?)?;
            rustix::net::listen(&listener, BACKLOG)?;
            listener.set_nonblocking(true)?;
            Ok((Self(listener), name))
        }

        /// Accepts and authenticates the next connection, if there is one. Returns `None` also for a connection that was rejected.
        ///
        /// # Errors
        /// The system's error, for example that this process has no descriptor left.
        pub(in super::super) fn accept(&self, secret: &Secret) -> io::Result<Option<(Identity, Socket)>> {
            let socket = match self.0.accept() {
                Ok((socket, _)) => socket,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    return Ok(None);
                }
                Err(error) => return Err(error),
            };
            match hear(&socket, secret) {
                Ok(identity) => Ok(Some((identity, Socket::Local(socket)))),
                Err(error) => {
                    tracing::warn!(%error, "a connection from a process of this machine was refused");
                    Ok(None)
                }
            }
        }

        /// Waits at most `time` for a connection.
        pub(in super::super) fn wait(&self, time: Duration) {
            let time = Timespec::try_from(time).ok();
            // An error does not matter, because the caller checks again in any case.
            let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], time.as_ref());
        }
    }

    fn hear(mut socket: &UnixStream, secret: &Secret) -> io::Result<Identity> {
        let other_user = || io::Error::new(io::ErrorKind::PermissionDenied, "another user's process");
        if user_of_peer(socket)? != geteuid().as_raw() {
            return Err(other_user());
        }
        limit(socket, PROOF_TIME)?;
        let mut challenge = Challenge::new().map_err(io::Error::other)?;
        io::Write::write_all(&mut socket, challenge.greeting())?;
        let proven = challenge.hear(&mut socket, secret).map_err(io::Error::other)?;
        proven.map(|(identity, _)| identity).ok_or_else(|| io::ErrorKind::TimedOut.into())
    }

    /// The user of the process at the other end, as its number in the user namespace of this process. The system tells the process's number
    /// too, which is 0 in another PID namespace, so this reads plain integers.
    fn user_of_peer(socket: &UnixStream) -> io::Result<u32> {
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut bytes = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the system writes at most so many bytes to the structure, all of whose values are valid.
        let code = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut peer).cast(),
                &raw mut bytes,
            )
        };
        if code == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
    }

    /// Connects to a process and authenticates this rank there.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the process has not answered within `time`; [`io::ErrorKind::PermissionDenied`] if the handshake
    /// fails; else the system's error.
    pub(in super::super) fn connect(
        name: &Name,
        secret: &Secret,
        identity: Identity,
        time: Duration,
    ) -> io::Result<Socket> {
        let socket = UnixStream::connect_addr(&address(name)?)?;
        limit(&socket, time.max(Duration::from_millis(1)))?;
        let mut stream = &socket;
        match noise::introduce(&mut stream, secret, identity) {
            Ok(_) => Ok(Socket::Local(socket)),
            Err(noise::HandshakeError::Connection(error)) => Err(error),
            Err(error) => Err(io::Error::new(io::ErrorKind::PermissionDenied, error)),
        }
    }

    fn limit(socket: &UnixStream, time: Duration) -> io::Result<()> {
        socket.set_read_timeout(Some(time))?;
        socket.set_write_timeout(Some(time))
    }
}

#[cfg(not(target_os = "linux"))]
mod other {
    use std::io;
    use std::time::Duration;

    use super::super::noise::Identity;
    use super::super::peer_connections::Socket;
    use super::super::secret::Secret;
    use super::Name;

    #[derive(Debug)]
    pub(in super::super) struct Listener;

    impl Listener {
        pub(in super::super) fn open() -> io::Result<(Self, Name)> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(in super::super) fn accept(&self, _: &Secret) -> io::Result<Option<(Identity, Socket)>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        pub(in super::super) fn wait(&self, _: Duration) {}
    }

    pub(in super::super) fn connect(_: &Name, _: &Secret, _: Identity, _: Duration) -> io::Result<Socket> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
