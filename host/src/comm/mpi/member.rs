//! [`MpiCommunicator::member`]: the control channel of an MPI job, over which NCCL can start without environment variables.

use std::time::Duration;

use super::MpiCommunicator;
use crate::bootstrap::{self, BootstrapError, Host, Member, Rendezvous};
use crate::call::scope;
use crate::comm::Ranks;
use crate::comm::message_passing::SetUp;
use crate::error::{CommError, Operation, Result};

impl MpiCommunicator {
    /// Joins the ranks of this communicator to a [control channel](crate::bootstrap): rank 0 listens on a free port of all interfaces,
    /// and its addresses and a fresh secret are sent over MPI. All ranks have to call it.
    ///
    /// With this method, `mpirun -n 4 ./train` is enough to start NCCL: `NcclCommunicator::new(comm.member(deadline)?, …)`.
    ///
    /// # Errors
    /// The errors of a collective; [`Error::Bootstrap`](crate::Error::Bootstrap), on every rank, if rank 0 cannot listen, or if some rank
    /// does not reach it within `deadline`.
    pub fn member(&self, deadline: Duration) -> Result<Member> {
        let _scope = scope::within(Operation::Member);
        let (rank, world_size) = (self.rank(), self.world_size());
        let host = (rank == 0 && world_size > 1).then(Host::open).transpose();
        let told = host.as_ref().map(|host| host.as_ref().map(Host::invitation).unwrap_or_default());
        let message = self.ranks.tell(SetUp::Member, 0, postcard::to_stdvec(&told).expect("plain data"))?;
        if world_size == 1 {
            return Rendezvous::in_process().join(0, 1);
        }
        if let Some(host) = host? {
            return Ok(host.join(world_size, deadline)?);
        }
        let told: Result<Vec<u8>, BootstrapError> = postcard::from_bytes(&message).map_err(|error| {
            let reason =
                format!("its invitation cannot be read, perhaps as it has another version of gradsync: {error}");
            CommError::Transport { operation: Operation::Member, rank: 0, reason }
        })?;
        Ok(bootstrap::accept(&told?, rank, world_size, deadline)?)
    }
}
