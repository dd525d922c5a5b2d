//! A rendezvous relayed by another transport, which already connects the ranks: it broadcasts rank 0's invitation, which has the address
//! where rank 0 listens and a fresh secret.
//!
//! This module does not depend on the transport. Any process with the invitation can join.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::client;
use super::file;
use super::gathering::Applicant;
use super::hosts::OWN_NAME_TIME;
use super::member::Member;
use super::secret::Secret;
use super::server::{self, Service};
use crate::error::BootstrapError;
use crate::trace::{Kind, Recorder};

/// Rank 0 with its listener, before the join.
#[derive(Debug)]
pub(crate) struct Host {
    listener: TcpListener,
    port: u16,
    secret: Secret,
}

impl Host {
    /// Listens on a free port of all interfaces.
    pub(crate) fn open() -> Result<Self, BootstrapError> {
        let listener = server::listen(None, 0)?;
        Ok(Host { port: server::port(&listener)?, listener, secret: Secret::random()? })
    }

    /// The invitation, which the other ranks pass to [`accept`].
    pub(crate) fn invitation(&self) -> Vec<u8> {
        file::describe(self.port, &self.secret, OWN_NAME_TIME)
    }

    /// Joins as rank 0, and waits until all ranks have joined.
    pub(crate) fn join(self, world_size: usize, deadline: Duration) -> Result<Member, BootstrapError> {
        let applicant = applicant(0, world_size, deadline);
        let service = Service::new(None, self.secret, "the address that rank 0 sent by MPI".into());
        applicant.joining(|| server::join(self.listener, service, &applicant, &|| Ok(())))
    }
}

/// Joins the group of rank 0's `invitation`.
pub(crate) fn accept(
    invitation: &[u8],
    rank: usize,
    world_size: usize,
    deadline: Duration,
) -> Result<Member, BootstrapError> {
    let invite = || {
        file::understand(invitation).map_err(|error| BootstrapError::Unreachable {
            address: "the place that rank 0 named".into(),
            deadline,
            reason: error.to_string(),
        })
    };
    // An address of rank 0, such as loopback, may belong to another machine when seen from here.
    let is_final = |error: &BootstrapError| {
        !matches!(
            error,
            BootstrapError::Unreachable { .. }
                | BootstrapError::WrongSecret { .. }
                | BootstrapError::VersionMismatch { .. }
        )
    };
    let applicant = applicant(rank, world_size, deadline);
    applicant.joining(|| client::join(&applicant, invite, is_final))
}

fn applicant(rank: usize, world_size: usize, deadline: Duration) -> Applicant {
    let recorder = Recorder::always(Kind::Processes, "channel", rank, world_size);
    Applicant { rank, world_size, generation: 0, deadline, end: Instant::now().checked_add(deadline), recorder }
}
