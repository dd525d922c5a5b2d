//! How the ranks of a machine exchange host memory: as a `ProcessCommunicator` does, which tries every way, or by MPI where MPI connects the
//! ranks.

use std::time::Duration;

use gradsync::CommError;
use gradsync::bootstrap::Member;
use gradsync::comm::process::ProcessCommunicator;
use serde::{Deserialize, Serialize};

use super::facts::Facts;

/// The way between a rank and the other ranks of its machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Exchange {
    /// There is no other rank on its machine.
    Alone,
    /// Shared memory.
    Memory,
    /// Sockets.
    Sockets,
    /// Messages of MPI.
    Mpi,
    /// None, for this reason.
    Failed(String),
}

impl Exchange {
    /// The ways of all ranks; `mpi_shares_memory` is whether they share memory, if MPI connects them.
    ///
    /// # Errors
    /// Of the control channel.
    pub(super) fn of(
        member: &Member,
        ranks: &[Facts],
        mpi_shares_memory: Option<bool>,
        deadline: Duration,
    ) -> Result<Vec<Self>, CommError> {
        let own = match mpi_shares_memory {
            Some(shares) => Ok(Self::by_mpi(member.rank(), ranks, shares)),
            None => Self::by_processes(member, ranks, deadline),
        };
        let own = own.unwrap_or_else(|error| Exchange::Failed(error.to_string()));
        let bytes = postcard::to_stdvec(&own).expect("plain data");
        let all = member.all_gather(&bytes, deadline)?;
        let decode = |bytes: &Vec<u8>| postcard::from_bytes(bytes);
        Ok(all.iter().map(|bytes| decode(bytes).unwrap_or_else(|error| Exchange::Failed(error.to_string()))).collect())
    }

    fn by_mpi(rank: usize, ranks: &[Facts], shares_memory: bool) -> Self {
        let machine = &ranks[rank].machine;
        match ranks.iter().filter(|other| other.machine == *machine).count() {
            1 => Exchange::Alone,
            _ if shares_memory => Exchange::Memory,
            _ => Exchange::Mpi,
        }
    }

    fn by_processes(member: &Member, ranks: &[Facts], deadline: Duration) -> Result<Self, gradsync::Error> {
        let (rank, is_here) = (member.rank(), |other: &Facts| other.machine == ranks[member.rank()].machine);
        let first = ranks.iter().position(is_here).unwrap_or(rank);
        let group = member.split(Some(first as u64), rank as i64, deadline)?;
        match group.filter(|group| group.world_size() > 1) {
            None => Ok(Exchange::Alone),
            Some(group) => {
                let shares = ProcessCommunicator::new_within(group, deadline)?.shares_memory();
                Ok(if shares { Exchange::Memory } else { Exchange::Sockets })
            }
        }
    }

    /// The word of the table.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Exchange::Alone => "alone",
            Exchange::Memory => "memory",
            Exchange::Sockets => "sockets",
            Exchange::Mpi => "MPI",
            Exchange::Failed(_) => "none",
        }
    }
}
