//! Ranks that torchrun has started: the ports at which rank 0 listens, and the mark of a job.
//!
//! torchrun's agent listens at `MASTER_PORT` itself, as long as the job runs, so rank 0 needs another port. All ranks derive the same few
//! ports from the job's variables; rank 0 takes the first that is free, and the other ranks try all of them. Another program may listen
//! at any of them, perhaps another job with the same secret. So the secret is derived for the job, and ranks pass over everybody who does
//! not prove it.

use sha2::{Digest, Sha256};

use super::super::secret::Secret;
use super::family::invalid;
use crate::error::BootstrapError;

/// The number of ports that ranks try.
const PORTS: usize = 8;
/// The first port and the number of ports among which they are: below the ports that systems assign to connections.
const RANGE: (u16, u16) = (20_000, 8_000);

/// A job of torchrun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::bootstrap) struct Torchrun {
    run_id: String,
    /// How often the ranks were started before, if all ranks have the same agent. Agents of several machines may count separately. There a
    /// new start begins only once every agent has ended its ranks, so that starts do not meet.
    pub(in crate::bootstrap) restarts: Option<u64>,
}

impl Torchrun {
    /// The variables by which an agent is recognised.
    pub(super) const VARIABLES: [&str; 2] = ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"];

    /// The job whose agent has started this process, if one has.
    pub(super) fn of(variable: &impl Fn(&str) -> Option<String>) -> Result<Option<Self>, BootstrapError> {
        const RESTARTS: &str = "TORCHELASTIC_RESTART_COUNT";
        let [run_id, uses_store] = Self::VARIABLES.map(variable);
        if run_id.is_none() && uses_store.as_deref() != Some("True") {
            return Ok(None);
        }
        let restarts = match variable(RESTARTS) {
            Some(text) if variable("GROUP_WORLD_SIZE").as_deref() == Some("1") => match text.parse() {
                Ok(restarts) => Some(restarts),
                Err(_) => return Err(invalid(RESTARTS, text, "it must be a whole number from 0".into())),
            },
            _ => None,
        };
        Ok(Some(Torchrun { run_id: run_id.unwrap_or_default(), restarts }))
    }

    /// The ports for rank 0, in the order in which ranks try them.
    pub(in crate::bootstrap) fn ports(&self, master_port: u16) -> Vec<u16> {
        let mut ports = Vec::with_capacity(PORTS);
        for number in 0u64.. {
            let mut digest = self.digest("ports", master_port);
            digest.update(number.to_le_bytes());
            let bytes = digest.finalize();
            let port = RANGE.0 + u16::from_le_bytes([bytes[0], bytes[1]]) % RANGE.1;
            if port != master_port && !ports.contains(&port) {
                ports.push(port);
            }
            if ports.len() == PORTS {
                break;
            }
        }
        ports
    }

    /// The secret of this job's ranks. `MASTER_ADDR` has no part in it, because agents may be given different names of one machine.
    pub(in crate::bootstrap) fn secret(&self, secret: &Secret, master_port: u16) -> Secret {
        secret.derived(&self.digest("secret", master_port).finalize().into())
    }

    fn digest(&self, purpose: &str, master_port: u16) -> Sha256 {
        Sha256::new_with_prefix(format!("gradsync torchrun {purpose} {master_port} {}\n", self.run_id))
    }
}
