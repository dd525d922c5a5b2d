//! How ranks find each other, and the control channel that stays up afterwards.
//!
//! [`Launch`] says which rank this process is, a [`Rendezvous`] brings the ranks together, and the [`Member`] that each
//! gets is its end of the control channel. Over it ranks compare the calls that they are about to make, learn of
//! failures, and name who is missing. That is what a transport like NCCL cannot do by itself: it neither notices that
//! calls do not fit together nor tells a rank that its peer is gone.
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
//! The channel is a star. Its hub is a state machine in rank 0's process; members in that process call it, the others
//! have a TCP connection to it each. Every connection has a thread that reads and one that writes, on both sides, and
//! all of them end with the member. Members in one process need no thread.
//!
//! # What it notices
//!
//! * Calls that do not fit: before anybody makes them, by [`Member::agree`]; or without waiting, soon after they are made,
//!   by [`Member::announce`].
//! * A process that ends without a farewell: at once, as its connection breaks.
//! * A process that hangs or is stopped, or a machine that is cut off: when somebody's deadline passes, by asking
//!   around ([`Member::late`]). There is no heartbeat.
//!
//! # Strangers
//!
//! Ranks prove to each other that they know the group's [`Secret`] before they believe anything; it never travels, and
//! what strangers send costs next to nothing. Every frame that follows carries a tag, so that whoever is between two ranks
//! can end their connection, but not speak for either, nor alter, repeat or reorder what they say. Frames are not
//! encrypted. Keys are made by HKDF-SHA256 (RFC 5869) of the secret and a nonce of each side; proofs and tags are
//! HMAC-SHA256 (RFC 2104), cut to 128 bits. Who can do what: [deployment](crate::docs::deployment).
//!
//! It knows nothing of CUDA, NCCL or MPI, and never moves gradients.

#[cfg(feature = "mpi")]
mod carried;
mod client;
mod connection;
mod environment;
mod file;
mod frame;
mod gathering;
mod handshake;
mod hosts;
mod hub;
mod matching;
mod member;
mod message;
mod pending;
mod poll;
mod recorder;
mod rendezvous;
mod seal;
mod seat;
mod secret;
mod server;
mod split;
mod trust;
mod unproven;

#[cfg(feature = "mpi")]
pub(crate) use self::carried::{Host, accept};
pub use self::environment::Launch;
pub use self::member::Member;
pub use self::rendezvous::{DEFAULT_DEADLINE, Rendezvous};
pub use self::secret::Secret;
pub use crate::error::{BootstrapError, Strangers};
