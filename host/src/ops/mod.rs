//! What a training loop calls: gradient control on one rank, and reductions over ranks.
//!
//! An operation checks its operands, then runs kernels and collectives; no operation uses another.

mod adasum;
mod all_reduce;
#[cfg(feature = "cuda")]
pub mod cuda;
mod gradient;
pub mod send_recv;
pub mod tensor_parallel;

pub use adasum::{
    AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes, WithinNode, adasum_all_reduce,
    hierarchical_adasum_all_reduce,
};
pub use all_reduce::all_reduce;
pub use gradient::{in_place_accumulate, in_place_accumulate_v2, zero_gradient};

use std::hash::{DefaultHasher, Hash, Hasher};

use crate::buffer::TensorTable;
use crate::comm::{Communicator, gather_words};
use crate::error::{Error, Result};

/// Refuses ranks whose buffers hold other tensors, or that made other choices, and a buffer shared out over another number of ranks
/// than there are.
///
/// Counts alone do not tell: tensors of two ranks may lie in another order in arenas of one length. The comparison comes first, so
/// that whatever is wrong with one rank's call is an error on every rank and nobody waits.
fn same_plan(operation: &'static str, comm: &dyn Communicator, table: &TensorTable, choices: impl Hash) -> Result<()> {
    let mut hasher = DefaultHasher::new();
    (table.fingerprint(), choices).hash(&mut hasher);
    same_hashes(operation, &gather_words(comm, &[hasher.finish()])?)?;
    table.check_world_size(operation, comm.world_size())
}

/// Refuses ranks whose hashes of their tensors and choices differ.
fn same_hashes(operation: &'static str, of_ranks: &[u64]) -> Result<()> {
    let Some(rank) = of_ranks.iter().position(|hash| *hash != of_ranks[0]) else { return Ok(()) };
    let reason = format!(
        "rank 0 and rank {rank} have tensors of other names, shapes, order or dtype, another world size, other options, or \
         memory of another kind"
    );
    Err(Error::InvalidArgument { operation, reason })
}
