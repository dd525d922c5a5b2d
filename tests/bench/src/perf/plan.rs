//! The grid of measurements: the sections of each group of ranks, and the rows of each section.
//!
//! Measurements that a place does not support are left out, always with a reason.

use gradsync::ops::Algorithm;

use super::arguments::{Settings, TransportChoice};
use super::operation::{Operation, Redop, Row};

/// A place of measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Kernels on the CPU.
    Cpu,
    /// Kernels on a GPU.
    Cuda,
    /// Collectives.
    Ranks(TransportChoice),
}

impl Place {
    pub(crate) fn backend(self) -> &'static str {
        match self {
            Place::Cpu | Place::Ranks(TransportChoice::Local | TransportChoice::Process | TransportChoice::Mpi) => {
                "cpu"
            }
            Place::Cuda | Place::Ranks(TransportChoice::MpiDevice | TransportChoice::Nccl | TransportChoice::Peer) => {
                "cuda"
            }
        }
    }

    pub(crate) fn transport(self) -> Option<&'static str> {
        match self {
            Place::Cpu | Place::Cuda => None,
            Place::Ranks(TransportChoice::Local) => Some("local"),
            Place::Ranks(TransportChoice::Process) => Some("process"),
            Place::Ranks(TransportChoice::Mpi) => Some("mpi"),
            Place::Ranks(TransportChoice::MpiDevice) => Some("mpi-device"),
            Place::Ranks(TransportChoice::Nccl) => Some("nccl"),
            Place::Ranks(TransportChoice::Peer) => Some("peer"),
        }
    }

    /// The reason why it does not support an operation on `ranks` ranks, if so.
    pub(crate) fn refuses(self, operation: Operation, ranks: usize) -> Option<String> {
        let (name, transport) = (operation.name(), self.transport()?);
        match (self, operation) {
            (Place::Ranks(TransportChoice::Peer), Operation::AllReduce | Operation::Adasum) if ranks == 1 => {
                Some(format!("{name} over {transport} needs two ranks or more"))
            }
            (Place::Ranks(TransportChoice::Peer), Operation::AllReduce | Operation::Adasum) => None,
            (Place::Ranks(TransportChoice::Peer), _) => {
                Some(format!("{transport} carries all_reduce and adasum, not {name}"))
            }
            (
                Place::Ranks(
                    TransportChoice::Local
                    | TransportChoice::Process
                    | TransportChoice::Mpi
                    | TransportChoice::MpiDevice,
                ),
                Operation::OrderedAllReduce,
            ) => Some(format!("nccl carries {name}, not {transport}")),
            (Place::Ranks(TransportChoice::MpiDevice), Operation::Adasum) => {
                Some(format!("{transport} carries collectives, not {name}"))
            }
            (_, Operation::SendRecv) if ranks == 1 => Some(format!("{name} needs two ranks or more")),
            _ => None,
        }
    }

    /// The reason why it does not support a reduction, if so.
    fn refuses_redop(self, operation: Operation, redop: Redop, ranks: usize) -> Option<String> {
        use gradsync::comm::ReduceOp;
        let is_ordered = operation == Operation::OrderedAllReduce || self == Place::Ranks(TransportChoice::Peer);
        match (self, redop) {
            (_, Redop::Adasum(Algorithm::Tree)) if !ranks.is_power_of_two() => {
                Some(format!("adasum by the tree needs a power of two, not {ranks} ranks"))
            }
            (Place::Ranks(TransportChoice::Peer), Redop::Adasum(Algorithm::Tree)) => {
                Some("adasum by the tree takes collectives, which peer access is not".into())
            }
            (Place::Ranks(TransportChoice::Peer), Redop::OnNodes(nodes)) => {
                Some(format!("adasum by {} takes collectives, which peer access is not", nodes.scheme))
            }
            (_, Redop::OnNodes(nodes)) => nodes.refuses(ranks),
            (_, Redop::Reduce(op @ (ReduceOp::Max | ReduceOp::Min))) if is_ordered => {
                let (name, transport) = (operation.name(), self.transport()?);
                Some(format!("{name} over {transport} has sums and means, not {op}"))
            }
            _ => None,
        }
    }
}

/// One operation at one place, which has a table of its own.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Section {
    pub(crate) operation: Operation,
    pub(crate) place: Place,
    pub(crate) ranks: usize,
    pub(crate) rows: Vec<Row>,
    /// Requested measurements that are left out, with the reasons.
    pub(crate) left_out: Vec<String>,
}

impl Settings {
    /// The section of an operation at a place, on `ranks` ranks.
    pub(crate) fn section(&self, operation: Operation, place: Place, ranks: usize) -> Section {
        let mut section = Section { operation, place, ranks, rows: Vec::new(), left_out: Vec::new() };
        if let Some(reason) = place.refuses(operation, ranks) {
            section.left_out.push(reason);
            return section;
        }
        for types in self.types.iter().flat_map(|choice| choice.of(operation)) {
            for redop in self.redops(operation) {
                if let Some(reason) = place.refuses_redop(operation, redop, ranks) {
                    if !section.left_out.contains(&reason) {
                        section.left_out.push(reason);
                    }
                    continue;
                }
                let mut last = 0;
                for bytes in &self.sizes {
                    let mut len = bytes / types.widest();
                    if operation.has_shards() {
                        len -= len % ranks;
                    }
                    // Neighbouring sizes may round to one number of elements.
                    if len == 0 || len == last {
                        section
                            .left_out
                            .push(format!("{bytes} bytes of {types} are no new number of elements on {ranks} ranks"));
                        continue;
                    }
                    last = len;
                    let layers = self.layers.within(len);
                    section.rows.push(Row { operation, types, redop, ranks, len, layers });
                }
            }
        }
        section
    }

    fn redops(&self, operation: Operation) -> Vec<Redop> {
        match operation {
            Operation::Adasum => self.algorithms.clone(),
            operation if operation.reduces() => self.redops.iter().map(|&op| Redop::Reduce(op)).collect(),
            _ => vec![Redop::None],
        }
    }

    /// The sections of all wanted operations at one place.
    pub(crate) fn sections(&self, wanted: impl Fn(Operation) -> bool, place: Place, ranks: usize) -> Vec<Section> {
        let operations = self.operations.iter().filter(|operation| wanted(**operation));
        operations.map(|&operation| self.section(operation, place, ranks)).collect()
    }
}
