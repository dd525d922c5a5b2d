//! What a communicator checks about a rank's own operands before any other rank is involved.
//!
//! Never tells another rank: how they learn of a refused call is the transport's business.

use crate::dtype::DType;
use crate::error::{CommError, Error, Operation, Result};
use crate::kernels::same_len;

/// What an operand is called, its elements and its dtype.
pub(super) type Operand<'a> = (&'a str, usize, DType);

/// Checks that `whole` holds one shard of `shard` elements, of the same dtype, for every rank.
pub(super) fn check_shards(
    operation: Operation,
    world_size: usize,
    (whole_name, whole, whole_dtype): Operand<'_>,
    (shard_name, shard, shard_dtype): Operand<'_>,
) -> Result<()> {
    let name = operation_name(operation);
    if whole_dtype != shard_dtype {
        let what = format!("{whole_name} and {shard_name}");
        return Err(Error::DTypeMismatch { operation: name, what, left: whole_dtype, right: shard_dtype });
    }
    let expected = shard.saturating_mul(world_size);
    same_len(name, (whole_name, whole), (&format!("{world_size} ranks' {shard_name}"), expected))
}

/// Checks that `peer` is another rank.
pub(super) fn check_peer(operation: Operation, peer: usize, rank: usize, world_size: usize) -> Result<()> {
    if peer < world_size && peer != rank {
        return Ok(());
    }
    Err(CommError::InvalidPeer { operation, peer, rank, world_size }.into())
}

fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::ReduceScatter(_) => "reduce_scatter",
        Operation::AllGather => "all_gather",
        Operation::AllToAll => "all_to_all",
        Operation::LendWindows => "lend_windows",
        _ => "collective",
    }
}
