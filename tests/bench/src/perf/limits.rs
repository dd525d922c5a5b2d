//! Upper limits of the hardware as `busbw`, beside which the measured bandwidths are shown. Limits of memory apply to large vectors;
//! small vectors may stay in caches and be faster.

use super::arguments::TransportChoice;
use super::operation::Row;
use super::plan::Place;

/// The known bandwidths, in bytes per second.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    /// The limit that the user gives, in GB/s of busbw; it takes precedence over all others.
    pub(crate) given: Option<f64>,
    /// The rate at which a copy with all cores reads and writes, measured.
    pub(crate) host_memory: Option<f64>,
    /// The rate at which all ranks together read and write while each copies its own memory, measured; known if all ranks are on one
    /// machine.
    pub(crate) processes: Option<f64>,
    /// The bandwidth of a GPU's memory, computed from its clock and bus width.
    pub(crate) device_memory: Option<f64>,
    /// The bandwidth from one GPU to others, in one direction, computed from its links.
    pub(crate) links: Option<f64>,
}

impl Limits {
    /// The highest `busbw` that a row can reach, in GB/s.
    pub(crate) fn of(&self, place: Place, row: &Row) -> Option<f64> {
        if self.given.is_some() {
            return self.given;
        }
        let limit = match place {
            Place::Cpu => self.host_memory?,
            Place::Cuda => self.device_memory?,
            // All ranks share one machine's memory.
            Place::Ranks(TransportChoice::Local) => {
                self.host_memory? * row.bytes() as f64 * row.bus_factor() / row.traffic()
            }
            Place::Ranks(TransportChoice::Nccl | TransportChoice::Peer) if row.ranks > 1 => self.links?,
            // Each byte that a rank receives, which `busbw` counts, needs at least one copy from another process's memory.
            Place::Ranks(TransportChoice::Process | TransportChoice::Mpi) if row.ranks > 1 => {
                self.processes? / 2.0 / row.ranks as f64
            }
            Place::Ranks(_) => return None,
        };
        Some(limit / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use gradsync::DType;

    use super::*;
    use crate::perf::layers::Layers;
    use crate::perf::operation::{Operation, Redop, Types};

    #[test]
    fn limits_divide_the_speed_of_copies_among_ranks() {
        let row = |ranks| Row {
            operation: Operation::AllReduce,
            types: Types::both(DType::F32),
            redop: Redop::None,
            ranks,
            len: 1000,
            layers: Layers::Equal(1),
        };
        let limits = Limits { processes: Some(80e9), host_memory: Some(40e9), ..Limits::default() };
        let over = |transport, ranks| limits.of(Place::Ranks(transport), &row(ranks));
        // 80 GB/s read and written are 40 GB/s copied, 10 GB/s for each of four ranks.
        assert_eq!(over(TransportChoice::Mpi, 4), Some(10.0));
        assert_eq!(over(TransportChoice::Mpi, 1), None);
        // Two ranks read 4000 bytes each and write as many: 16000 bytes at 40 GB/s, for a busbw of 4000 bytes.
        assert_eq!(over(TransportChoice::Local, 2), Some(10.0));
        assert_eq!(over(TransportChoice::Nccl, 2), None);
        let given = Limits { given: Some(1.5), ..limits };
        assert_eq!(given.of(Place::Ranks(TransportChoice::Mpi), &row(4)), Some(1.5));
    }
}
