//! [`Member::split`]: groups within a group, as MPI_Comm_split makes them (MPI-4.1, 7.4.2).
//!
//! A new group has its own coordinator and may outlive the old group. In one process its ranks join through a shared rendezvous;
//! otherwise its lowest rank listens on a free port, and sends the port and a fresh secret to the other ranks over the old group's
//! channel, which is encrypted.

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::admission::Applicant;
use super::client::{self, Invitation};
use super::frame::decode;
use super::member::{Member, Uplink};
use super::rendezvous::join_in_process;
use super::secret::Secret;
use super::server::{self, Service};
use crate::call::scope;
use crate::error::BootstrapError;
use crate::error::{CommError, Operation, Result};

/// The kinds of exchange in a split.
const COLORS: usize = 1;
const ADDRESSES: usize = 2;

/// The port on which a new group's lowest rank listens, or the reason why it does not.
#[derive(Serialize, Deserialize)]
enum ListenAddress {
    At { port: u16, secret: [u8; 32] },
    Failed(BootstrapError),
}

impl Member {
    /// Splits the group: ranks of one `color` form a group, ordered by `key`, and by their rank here where keys are equal. A rank without
    /// a colour takes part in the call and gets `None`. Blocks until all ranks have called it.
    ///
    /// The new group fails and ends independently of this one.
    ///
    /// # Errors
    /// The errors of a collective, and [`Error::Bootstrap`](crate::Error::Bootstrap) if the ranks of the colour do not join within
    /// `deadline`.
    pub fn split(&self, color: Option<u64>, key: i64, deadline: Duration) -> Result<Option<Member>> {
        let _scope = scope::within(Operation::Split);
        let end = Instant::now().checked_add(deadline);
        let left = || end.map_or(deadline, |end| end.saturating_duration_since(Instant::now()));
        // The lock is held until the end, because the exchanges of two splits must not mix.
        let mut splits = self.splits.lock().unwrap_or_else(PoisonError::into_inner);
        *splits += 1;
        let number = *splits;
        let group = self.colors(color, key, deadline)?;
        let rank = group.iter().position(|&rank| rank == self.rank());

        if let Uplink::InProcess { subgroups, .. } = &self.uplink {
            let (Some(color), Some(rank)) = (color, rank) else { return Ok(None) };
            let recorder = self.recorder().split(number, &group, rank);
            if group.len() == 1 {
                return Ok(Some(Member::single(recorder)));
            }
            let (world_size, deadline) = (group.len(), left());
            let applicant = Applicant { rank, world_size, generation: 0, deadline, end, recorder };
            let joined = applicant.joining(|| join_in_process(&subgroups.of(number, color), &applicant));
            subgroups.remove(number, color);
            return Ok(Some(joined?));
        }

        // All ranks take part in the second exchange, including ranks that do not listen.
        let listener = (rank == Some(0) && group.len() > 1).then(|| self.open());
        let address = listener.as_ref().map(|listener| match listener {
            Ok((_, port, secret)) => ListenAddress::At { port: *port, secret: *secret.bytes() },
            Err(error) => ListenAddress::Failed(error.clone()),
        });
        let mut addresses = self.tell(ADDRESSES, &address, left())?;
        let Some(rank) = rank else { return Ok(None) };
        let recorder = self.recorder().split(number, &group, rank);
        if group.len() == 1 {
            return Ok(Some(Member::single(recorder)));
        }
        let applicant = Applicant { rank, world_size: group.len(), generation: 0, deadline, end, recorder };
        if let Some(listener) = listener {
            let (listener, _, secret) = listener?;
            let service = Service::new(self.network.loopback, secret, format!("split {number} of their group"));
            let join = || server::join(listener, service, &applicant);
            return Ok(Some(applicant.joining(join)?));
        }
        let lowest = group[0];
        let (port, secret) = match addresses.swap_remove(lowest) {
            Some(ListenAddress::At { port, secret }) => (port, Secret::from_bytes(secret)),
            Some(ListenAddress::Failed(error)) => return Err(error.into()),
            None => return Err(malformed(lowest).into()),
        };
        let host = self.address_of(lowest).to_string();
        let invitation = Invitation { hosts: vec![host], ports: vec![port], secret };
        let is_final = |error: &BootstrapError| !matches!(error, BootstrapError::Unreachable { .. });
        Ok(Some(applicant.joining(|| client::join(&applicant, &invitation, is_final))?))
    }

    /// The ranks of this rank's colour in their new order.
    fn colors(&self, color: Option<u64>, key: i64, deadline: Duration) -> Result<Vec<usize>, CommError> {
        let colors = self.tell(COLORS, &(color, key), deadline)?;
        let mut group: Vec<(i64, usize)> = colors
            .into_iter()
            .enumerate()
            .filter(|(_, (theirs, _))| theirs.is_some() && *theirs == color)
            .map(|(rank, (_, key))| (key, rank))
            .collect();
        group.sort_unstable();
        Ok(group.into_iter().map(|(_, rank)| rank).collect())
    }

    /// Gathers a value of every rank.
    pub(super) fn tell<T: Serialize + serde::de::DeserializeOwned>(
        &self,
        kind: usize,
        own: &T,
        deadline: Duration,
    ) -> Result<Vec<T>, CommError> {
        let bytes = postcard::to_stdvec(own).map_err(|_| malformed(self.rank()))?;
        let all = self.gather(kind, &bytes, deadline)?;
        all.iter().enumerate().map(|(rank, bytes)| decode(bytes).map_err(|_| malformed(rank))).collect()
    }

    /// Listens for the ranks of a new group, where this group's ranks can be reached.
    fn open(&self) -> Result<(TcpListener, u16, Secret), BootstrapError> {
        let listener = server::listen(self.network.loopback, 0)?;
        let port = server::port(&listener)?;
        Ok((listener, port, Secret::random()?))
    }

    /// The address at which this rank can reach another.
    pub(super) fn address_of(&self, rank: usize) -> IpAddr {
        let seen = self.network.addresses.get(rank).copied().flatten();
        let coordinator = match &self.uplink {
            Uplink::Remote(link) => link.socket.peer_addr().ok().map(|address| address.ip().to_canonical()),
            Uplink::InProcess { .. } | Uplink::Server { .. } => None,
        };
        // A rank that has connected to rank 0 over loopback is on rank 0's machine.
        let elsewhere = seen.filter(|address| !address.is_loopback());
        self.network.loopback.or(elsewhere).or(coordinator).or(seen).unwrap_or(Ipv4Addr::LOCALHOST.into())
    }
}

fn malformed(rank: usize) -> CommError {
    let reason = "its message to the other ranks does not parse; perhaps it runs another version of gradsync".into();
    CommError::InvalidCall { operation: Operation::Split, rank, reason }
}
