//! The transport between processes on systems that are no Unix: making one is an error, and there is none.

use std::sync::Arc;
use std::time::Duration;

use crate::bootstrap::Member;
use crate::comm::message_passing::{Link, MemoryUse};
use crate::error::{Error, Result};

/// The connections of no process.
#[derive(Debug)]
pub(super) enum Mesh {}

impl Mesh {
    pub(super) fn member(&self) -> &Member {
        match *self {}
    }
}

pub(super) fn connect(_: Member, _: Duration, _: MemoryUse) -> Result<Mesh> {
    Err(Error::UnsupportedSystem {
        operation: "process communicator",
        lacks: "has no Unix sockets and no poll, by which ranks that are processes connect: start ranks as threads \
                (`comm::local`), or run them on Linux",
    })
}

pub(super) fn link_of_all(mesh: Arc<Mesh>) -> Box<dyn Link> {
    match *mesh {}
}
