//! What the hardware can do at best, as `busbw`: the line that bandwidths are drawn against.

use super::arguments::TransportChoice;
use super::operation::Row;
use super::plan::Place;

/// Bandwidths in bytes a second, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// What the user says, in GB/s of busbw; goes before everything else.
    pub(crate) given: Option<f64>,
    /// Bytes that a copy with all cores reads and writes, measured.
    pub(crate) host_memory: Option<f64>,
    /// Of a GPU's memory, from its clock and its width.
    pub(crate) device_memory: Option<f64>,
    /// From one GPU to others, in one direction, from its links.
    pub(crate) links: Option<f64>,
}

impl Limits {
    /// The highest `busbw` that a row could have, in GB/s.
    pub(crate) fn of(&self, place: Place, row: &Row) -> Option<f64> {
        if self.given.is_some() {
            return self.given;
        }
        let limit = match place {
            Place::Cpu => self.host_memory?,
            Place::Cuda => self.device_memory?,
            // All ranks share one memory.
            Place::Ranks(TransportChoice::Local) => {
                self.host_memory? * row.bytes() as f64 * row.bus_factor() / row.traffic()
            }
            Place::Ranks(TransportChoice::Nccl | TransportChoice::Peer) if row.ranks > 1 => self.links?,
            Place::Ranks(_) => return None,
        };
        Some(limit / 1e9)
    }
}
