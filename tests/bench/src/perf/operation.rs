//! The operations that can be measured, as data: their names, and the byte counts of their bandwidths.
//!
//! `algbw` is the size of a row divided by its time. `busbw` is `algbw` times a factor which makes operations and numbers of ranks
//! comparable with the hardware's limits: for collectives nccl-tests' factors, for kernels the ratio of the memory traffic to the row's
//! size.

use clap::ValueEnum;
use gradsync::DType;
use gradsync::comm::ReduceOp;
use gradsync::ops::Algorithm;

use super::layers::Layers;
use super::nodes::OnNodes;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Operation {
    /// Sets a vector to zero.
    Zero,
    /// Copies a vector, from one dtype to another.
    Cast,
    /// Copies a vector times a number, from one dtype to another.
    Scale,
    /// Adds a vector to another, of another dtype too.
    Accumulate,
    /// |a|².
    SquaredNorms,
    /// a·b, |a|² and |b|².
    Dots,
    /// All inner products of as many vectors as --ranks says.
    Gram,
    /// The weighted sum of as many vectors as --ranks says.
    Combine,
    /// The reduction of all ranks' vectors, on every rank.
    AllReduce,
    /// An all-reduce over nccl that sums in rank order and rounds once; over peer, all_reduce does so itself.
    OrderedAllReduce,
    /// All ranks' shards, on every rank.
    AllGather,
    /// A shard of the reduction for each rank.
    ReduceScatter,
    /// A shard from each rank to each rank.
    AllToAll,
    /// A vector to the next rank, and one from the rank before.
    SendRecv,
    /// The Adasum of all ranks' gradient buffers, on every rank.
    Adasum,
    /// A step of AdamW over a model's tensors: the norm of bf16 gradients, clipping, f32 weights and moments, and a bf16 copy of the weights.
    #[value(skip)]
    AdamwStep,
    /// A step of a reducer of host memory whose gradients have one bucket: they are copied into it, and it is reduced.
    Reducer,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Operation::Zero => "zero",
            Operation::Cast => "cast",
            Operation::Scale => "scale",
            Operation::Accumulate => "accumulate",
            Operation::SquaredNorms => "squared_norms",
            Operation::Dots => "dots",
            Operation::Gram => "gram",
            Operation::Combine => "combine",
            Operation::AllReduce => "all_reduce",
            Operation::OrderedAllReduce => "ordered_all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllToAll => "all_to_all",
            Operation::SendRecv => "send_recv",
            Operation::Adasum => "adasum",
            Operation::AdamwStep => "adamw_step",
            Operation::Reducer => "reducer",
        }
    }

    /// Whether it is a kernel, which uses one rank's memory alone.
    pub(crate) fn is_kernel(self) -> bool {
        use Operation::{Accumulate, Cast, Combine, Scale, Zero};
        matches!(self, Zero | Cast | Scale | Accumulate | Combine) || self.only_reads()
    }

    /// Whether it is a kernel whose results are only a few numbers.
    pub(crate) fn only_reads(self) -> bool {
        matches!(self, Operation::SquaredNorms | Operation::Dots | Operation::Gram)
    }

    /// Whether its operands may have two dtypes.
    pub(crate) fn takes_pairs(self) -> bool {
        matches!(self, Operation::Cast | Operation::Scale | Operation::Accumulate)
    }

    /// Whether `-o` applies to it.
    pub(crate) fn reduces(self) -> bool {
        matches!(
            self,
            Operation::AllReduce | Operation::OrderedAllReduce | Operation::ReduceScatter | Operation::Reducer
        )
    }

    /// Whether a row's size is divided among the ranks.
    pub(crate) fn has_shards(self) -> bool {
        matches!(self, Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll)
    }

    /// Whether a row's vector is divided into tensors.
    pub(crate) fn has_tensors(self) -> bool {
        matches!(self, Operation::Adasum | Operation::Reducer)
    }

    /// The number of vectors that a kernel reads; `ranks` if the kernel accepts any number.
    pub(crate) fn vectors(self, ranks: usize) -> usize {
        match self {
            Operation::Zero => 0,
            Operation::Gram | Operation::Combine => ranks,
            Operation::Dots => 2,
            _ => 1,
        }
    }
}

/// The dtypes of the result and of the input values, which may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Types {
    pub(crate) to: DType,
    pub(crate) from: DType,
}

impl Types {
    pub(crate) fn both(dtype: DType) -> Self {
        Self { to: dtype, from: dtype }
    }

    /// The element size of the wider dtype, in bytes.
    pub(crate) fn widest(self) -> usize {
        self.to.size_bytes().max(self.from.size_bytes())
    }
}

impl std::fmt::Display for Types {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.to == self.from {
            return f.pad(self.to.name());
        }
        f.pad(&format!("{}:{}", self.to, self.from))
    }
}

/// The reduction of a row: the column `redop`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Redop {
    None,
    Reduce(ReduceOp),
    Adasum(Algorithm),
    OnNodes(OnNodes),
}

impl Redop {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Redop::None => "none",
            Redop::Reduce(ReduceOp::Sum) => "sum",
            Redop::Reduce(ReduceOp::Mean) => "mean",
            Redop::Reduce(ReduceOp::Max) => "max",
            Redop::Reduce(ReduceOp::Min) => "min",
            Redop::Reduce(op) => unreachable!("{op} is not measured"),
            Redop::Adasum(Algorithm::Gram) => "gram",
            Redop::Adasum(Algorithm::Tree) => "tree",
            Redop::Adasum(_) => "auto",
            Redop::OnNodes(nodes) => nodes.scheme.name(),
        }
    }
}

/// One row of the table: an operation and its size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) operation: Operation,
    pub(crate) types: Types,
    pub(crate) redop: Redop,
    /// The number of ranks, or, for kernels on any number of vectors, the number of vectors.
    pub(crate) ranks: usize,
    /// Elements of the whole vector, over all shards.
    pub(crate) len: usize,
    /// The tensors of the vector, for operations on tensors.
    pub(crate) layers: Layers,
}

impl Row {
    /// The row in words.
    pub(crate) fn described(&self) -> String {
        let Types { to, .. } = self.types;
        let (operation, redop) = (self.operation.name(), self.redop.name());
        format!("{operation} ({redop}) of {} × {to} on {} ranks", self.len, self.ranks)
    }

    /// The nodes of an Adasum of two levels.
    pub(crate) fn nodes(&self) -> Option<OnNodes> {
        if let Redop::OnNodes(nodes) = self.redop { Some(nodes) } else { None }
    }

    /// The column `size`: bytes of the whole vector, in the wider dtype.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.types.widest()
    }

    /// The column `count`: elements of one rank's part.
    pub(crate) fn count(&self) -> usize {
        if self.operation.has_shards() { self.len / self.ranks } else { self.len }
    }

    /// Elements of one rank's shard.
    pub(crate) fn shard(&self) -> usize {
        self.len / self.ranks
    }

    /// `busbw` over `algbw`.
    pub(crate) fn bus_factor(&self) -> f64 {
        let ranks = self.ranks as f64;
        match self.operation {
            Operation::AllReduce | Operation::OrderedAllReduce | Operation::Adasum | Operation::Reducer => {
                2.0 * (ranks - 1.0) / ranks
            }
            Operation::AllGather | Operation::ReduceScatter | Operation::AllToAll => (ranks - 1.0) / ranks,
            Operation::SendRecv => 1.0,
            _ => self.traffic() / (self.bytes().max(1)) as f64,
        }
    }

    /// Bytes that the memory of one machine has to move if it holds all ranks: each input is read once and each output written once. Adasum
    /// must know its weights before it uses them, so its inputs are read twice; if nodes are summed first, the nodes' sums are read twice.
    pub(crate) fn traffic(&self) -> f64 {
        let (len, ranks) = (self.len as f64, self.ranks as f64);
        let (to, from) = (len * self.types.to.size_bytes() as f64, len * self.types.from.size_bytes() as f64);
        match self.operation {
            Operation::Zero => to,
            Operation::Cast | Operation::Scale => to + from,
            Operation::Accumulate => 2.0 * to + from,
            // The gradients are read twice; weights and two moments are read and written, and the copy is written.
            Operation::AdamwStep => 2.0 * from + 6.0 * to + from,
            Operation::SquaredNorms => from,
            Operation::Dots => 2.0 * from,
            Operation::Gram => ranks * from,
            Operation::Combine => to + ranks * from,
            Operation::AllReduce
            | Operation::OrderedAllReduce
            | Operation::AllGather
            | Operation::AllToAll
            | Operation::SendRecv
            | Operation::Reducer => 2.0 * ranks * to,
            Operation::ReduceScatter => (ranks + 1.0) * to,
            Operation::Adasum => match self.nodes().filter(|nodes| nodes.is_of_sums()) {
                Some(nodes) => (2.0 * ranks + ranks / nodes.per_node as f64) * to,
                None => 3.0 * ranks * to,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(operation: Operation, ranks: usize) -> Row {
        let types = Types::both(DType::F32);
        Row { operation, types, redop: Redop::None, ranks, len: 1200, layers: Layers::Equal(1) }
    }

    #[test]
    fn bus_factor_is_of_nccl_tests() {
        assert_eq!(row(Operation::AllReduce, 4).bus_factor(), 1.5);
        assert_eq!(row(Operation::Adasum, 2).bus_factor(), 1.0);
        for operation in [Operation::AllGather, Operation::ReduceScatter, Operation::AllToAll] {
            assert_eq!(row(operation, 4).bus_factor(), 0.75);
            assert_eq!((row(operation, 4).bytes(), row(operation, 4).count()), (4800, 300));
        }
        assert_eq!(row(Operation::SendRecv, 4).bus_factor(), 1.0);
        assert_eq!(row(Operation::AllReduce, 4).count(), 1200);
    }

    #[test]
    fn bytes_of_kernels_are_what_memory_moves() {
        assert_eq!(row(Operation::Zero, 1).bus_factor(), 1.0);
        assert_eq!(row(Operation::Accumulate, 1).bus_factor(), 3.0);
        assert_eq!(row(Operation::Gram, 8).bus_factor(), 8.0);
        assert_eq!(row(Operation::Combine, 8).bus_factor(), 9.0);
        let types = Types { to: DType::F32, from: DType::BF16 };
        let mixed = Row { types, ..row(Operation::Cast, 1) };
        assert_eq!((mixed.bytes(), mixed.bus_factor()), (4800, 1.5));
        assert_eq!(mixed.types.to_string(), "f32:bf16");
    }
}
