//! The communicator for host memory of ranks that use NCCL, which has no collectives on host memory.

use super::NcclCommunicator;
use crate::call::scope;
use crate::comm::process::ProcessCommunicator;
use crate::error::{Operation, Result};

impl NcclCommunicator {
    /// Returns a communicator of the same ranks for host memory: for metrics, a data loader's vote, or gradients in host memory, in a job
    /// without MPI. It is made by the first call, which all ranks have to make together, over the control channel; later calls return the
    /// same one. Between machines it sends only [small data](crate::comm::process#several-machines). It has this communicator's deadline,
    /// and fails independently.
    ///
    /// # Errors
    /// The errors of [`ProcessCommunicator::new`], and of [`Member::split`](crate::bootstrap::Member::split). A later call tries again.
    pub fn host_communicator(&self) -> Result<&ProcessCommunicator> {
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let _scope = scope::within(Operation::SetUp);
        let deadline = self.session.options.deadline;
        let own = self.member();
        // The new communicator gets its own control channel, so that failures of one communicator do not affect the other.
        let member = own.split(Some(0), own.rank() as i64, deadline)?.expect("every rank has the colour");
        let host = ProcessCommunicator::new_within(member, deadline)?;
        Ok(self.host.get_or_init(|| host))
    }
}
