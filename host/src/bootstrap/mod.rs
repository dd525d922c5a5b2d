//! Bootstrap: how ranks find each other, and the control channel that stays up afterwards.
//!
//! [`Launch`] says which rank this process is, a [`Rendezvous`] connects the ranks, and the [`Member`] that each
//! gets is its end of the control channel. Over it ranks compare the calls that they are about to make, learn of
//! failures, and name missing ranks. A transport like NCCL cannot do this by itself: it neither detects calls that do
//! not match nor tells a rank that its peer is gone.
//!
//! ```
//! use std::time::Duration;
//!
//! use gradsync::bootstrap::Rendezvous;
//!
//! let rendezvous = Rendezvous::in_process();
//! let ranks = [0, 1, 2].map(|rank| {
//!     let rendezvous = rendezvous.clone();
//!     std::thread::spawn(move || -> gradsync::Result<_> {
//!         let member = rendezvous.join(rank, 3)?;
//!         Ok(member.all_gather(format!("rank {rank}").as_bytes(), Duration::from_secs(10))?)
//!     })
//! });
//! for rank in ranks {
//!     let names = rank.join().expect("no rank panicked")?;
//!     assert_eq!(names, [b"rank 0", b"rank 1", b"rank 2"]);
//! }
//! # Ok::<(), gradsync::Error>(())
//! ```
//!
//! # How it works
//!
//! The channel is a star. Its coordinator is a state machine in rank 0's process; members in that process call it, and each
//! other member has a TCP connection to it. Every connection has a thread that reads and one that writes, on both sides, and
//! these threads end with the member. Members in one process need no thread.
//!
//! # Detected failures
//!
//! * Calls that do not match: before any rank makes them; or, where ranks announce them without waiting, soon after they are made.
//! * A process that ends without leaving the group: at once, because its connection breaks.
//! * A process that hangs or is stopped, or a machine that is cut off: when the deadline of a rank passes, by a query to all
//!   ranks. There is no heartbeat.
//!
//! # Strangers
//!
//! Ranks prove to each other that they know the group's [`Secret`] before they act on any message; the secret is never sent, and
//! unauthenticated connections cost little. Everything later is encrypted and authenticated: an attacker between two ranks can end their
//! connection, but can neither read it, nor impersonate a rank, nor alter, repeat or reorder messages. The protocol is
//! `Noise_NNpsk0_25519_AESGCM_SHA256` of the [Noise Protocol Framework](https://noiseprotocol.org), with the secret as the pre-shared
//! key. The threat model is in [deployment](crate::docs::deployment).
//!
//! This module does not depend on CUDA, NCCL or MPI, and never moves gradients.

mod admission;
mod announcements;
mod client;
mod control_channel;
mod coordinator;
mod endpoint;
mod environment;
mod frame;
#[cfg(unix)]
mod local;
mod member;
#[cfg(feature = "mpi")]
mod mpi_rendezvous;
mod names;
mod noise;
mod notice;
#[cfg(unix)]
mod peer_connections;
mod poll;
mod primitives;
mod protocol;
mod rendezvous;
mod secret;
mod server;
mod split;
mod unauthenticated;

pub use self::environment::Launch;
pub(crate) use self::environment::WORLD_SIZE_LIMIT;
pub use self::member::Member;
#[cfg(feature = "mpi")]
pub(crate) use self::mpi_rendezvous::{Host, accept};
#[cfg(unix)]
pub(crate) use self::noise::NoiseSession;
#[cfg(all(test, target_os = "linux"))]
pub(crate) use self::noise::sessions;
#[cfg(unix)]
pub(crate) use self::peer_connections::{PeerSocket, Peers, Socket};
#[cfg(feature = "cuda")]
pub(crate) use self::rendezvous::DEFAULT_DEADLINE;
pub use self::rendezvous::Rendezvous;
pub(crate) use self::rendezvous::call_deadline;
pub use self::secret::Secret;
pub use crate::error::{BootstrapError, Strangers};
