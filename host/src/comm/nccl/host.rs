//! The communicator for host memory of ranks that have NCCL, where two transports meet: NCCL knows no host memory.

use super::NcclCommunicator;
use crate::call::scope;
use crate::comm::process::ProcessCommunicator;
use crate::error::{Operation, Result};

impl NcclCommunicator {
    /// A communicator of the same ranks for host memory: metrics, a data loader's vote, or gradients that lie there, in a job without MPI. It is made
    /// by the first call, which all ranks have to make together, over the control channel; later calls return the same one. Between machines it carries
    /// [small data](crate::comm::process#several-machines) alone. It has this communicator's deadline, and fails on its own.
    ///
    /// # Errors
    /// Those of [`ProcessCommunicator::new`], and of [`Member::split`](crate::bootstrap::Member::split). A later call tries again.
    pub fn host_communicator(&self) -> Result<&ProcessCommunicator> {
        if let Some(host) = self.host.get() {
            return Ok(host);
        }
        let _scope = scope::within(Operation::SetUp);
        let deadline = self.session.options.deadline;
        let own = self.member();
        // A control channel of its own: failures of one communicator are not those of the other.
        let member = own.split(Some(0), own.rank() as i64, deadline)?.expect("every rank has the colour");
        let host = ProcessCommunicator::new_within(member, deadline)?;
        Ok(self.host.get_or_init(|| host))
    }
}
