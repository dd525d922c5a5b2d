//! Collectives of few bytes: what a rank has for another travels with its call, in the record by which ranks meet.
//!
//! That saves the messages that would follow. Every rank gets all it needs, and reduces what it gets in rank order, so that results are
//! those of `transfer`. Never used for more than [`Meeting::encloses`].

use super::channel::LONGEST_ENCLOSED;
use super::meeting::Meeting;
use super::transfer::Scratch;
use crate::comm::ReduceOp;
use crate::comm::reduction::Reduction;
use crate::dtype::DType;
use crate::error::{Call, Result};

/// What all ranks bring to one of them, at most: it comes one record after the other.
const TOGETHER_BYTES: usize = 64 << 10;

impl Meeting {
    /// Whether so many bytes for every rank travel with a call. The same on all ranks that make it.
    pub(super) fn encloses(&self, bytes: usize) -> bool {
        bytes <= LONGEST_ENCLOSED && bytes * self.channel().world_size() <= TOGETHER_BYTES
    }

    /// Puts every rank's `own` bytes into `output`, in rank order.
    pub(super) fn all_gather_enclosed(&self, call: Call, own: &[u8], output: &mut [u8]) -> Result<()> {
        let others = self.meet_with(call, |_| own)?;
        self.join(|_| own, &others, output);
        Ok(())
    }

    /// Puts every rank's bytes for this one into `output`, in rank order; `input` has as many for each.
    pub(super) fn all_to_all_enclosed(&self, call: Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        let bytes = input.len() / self.channel().world_size();
        let shard = |peer: usize| &input[peer * bytes..(peer + 1) * bytes];
        let others = self.meet_with(call, shard)?;
        self.join(shard, &others, output);
        Ok(())
    }

    /// Replaces the data by all ranks' reduction.
    pub(super) fn all_reduce_enclosed(&self, call: Call, dtype: DType, op: ReduceOp, data: &mut [u8]) -> Result<()> {
        let others = self.meet_with(call, |_| data)?;
        let bytes = data.len() * others.len();
        let mut all = Scratch::new(bytes);
        self.join(|_| &*data, &others, all.bytes(bytes));
        reduce(dtype, op, all.bytes(bytes), data);
        Ok(())
    }

    /// Puts the reduction of all ranks' shards for this one into `output`; `input` has one for each.
    pub(super) fn reduce_scatter_enclosed(
        &self,
        call: Call,
        dtype: DType,
        op: ReduceOp,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let mut all = Scratch::new(input.len());
        self.all_to_all_enclosed(call, input, all.bytes(input.len()))?;
        reduce(dtype, op, all.bytes(input.len()), output);
        Ok(())
    }

    /// What all ranks have brought, this one's included, in rank order.
    fn join<'a>(&self, own: impl Fn(usize) -> &'a [u8], others: &[Vec<u8>], output: &mut [u8]) {
        let (rank, bytes) = (self.channel().rank(), output.len() / others.len());
        for (peer, other) in others.iter().enumerate() {
            let piece = if peer == rank { own(rank) } else { other };
            output[peer * bytes..(peer + 1) * bytes].copy_from_slice(piece);
        }
    }
}

/// Reduces all ranks' operands, which lie one behind the other in scratch memory.
fn reduce(dtype: DType, op: ReduceOp, all: &[u8], output: &mut [u8]) {
    let bytes = output.len();
    if bytes == 0 {
        return;
    }
    let inputs: Vec<*const u8> = all.chunks_exact(bytes).map(<[u8]>::as_ptr).collect();
    // SAFETY: as many elements at each of them; operands of one length lie aligned behind an aligned start, and the output was given as
    // elements. Nothing overlaps.
    unsafe { Reduction::new(dtype, op).run(&inputs, &[output.as_mut_ptr()], bytes / dtype.size_bytes()) };
}
