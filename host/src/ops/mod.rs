//! What a training loop calls: gradient control on one rank, and reductions over ranks.
//!
//! An operation checks its operands, then runs kernels and collectives; no operation uses another.

mod adasum;
mod all_reduce;
mod gradient;

pub use adasum::{AdasumOptions, AdasumReport, Algorithm, Granularity, adasum_all_reduce};
pub use all_reduce::all_reduce;
pub use gradient::{in_place_accumulate, in_place_accumulate_v2, zero_gradient};

use crate::buffer::GradientBuffer;
use crate::comm::Communicator;
use crate::error::{Error, Result};

/// Refuses a buffer that is shared out over another number of ranks than there are.
fn same_world(operation: &'static str, comm: &dyn Communicator, buffer: &GradientBuffer) -> Result<()> {
    let (world_size, planned) = (comm.world_size(), buffer.world_size());
    if planned == world_size {
        return Ok(());
    }
    let reason = format!("the buffer is shared out over {planned} ranks, the world has {world_size}");
    Err(Error::InvalidArgument { operation, reason })
}
