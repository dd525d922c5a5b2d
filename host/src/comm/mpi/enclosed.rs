//! Collectives of few bytes: what a rank has for another travels with its call, in the record by which ranks meet, or beside it on its board.
//!
//! That saves the messages that would follow. Every rank gets all it needs, and reduces what it gets in rank order, so that results are
//! those of `transfer`. Never used for more than [`Meeting::encloses`].

use std::borrow::Cow;

use super::boards::{self, Boards, Brings};
use super::channel::LONGEST_ENCLOSED;
use super::meeting::Meeting;
use super::transfer::Scratch;
use crate::comm::reduction::Reduction;
use crate::error::{Call, Result};

/// What all ranks bring to one of them in records, at most: it comes one record after the other.
const TOGETHER_BYTES: usize = 64 << 10;

impl Meeting {
    /// Whether so many bytes for every rank travel with a call. The same on all ranks that make it.
    pub(super) fn encloses(&self, bytes: usize) -> bool {
        let together = bytes.saturating_mul(self.channel().world_size());
        if self.boards().is_some() {
            return together <= boards::TOGETHER_BYTES;
        }
        bytes <= LONGEST_ENCLOSED && together <= TOGETHER_BYTES
    }

    /// Puts every rank's `own` bytes into `output`, in rank order. As all others here, this is one round where ranks use each other's memory.
    pub(super) fn all_gather_enclosed(&self, call: Call, own: &[u8], output: &mut [u8]) -> Result<()> {
        self.join(own, &self.bring(call, Brings::for_all(own))?, output);
        Ok(())
    }

    /// The same in two rounds, wherever it is: all ranks have it, or none.
    pub(super) fn all_gather_for_certain(&self, call: Call, own: &[u8], output: &mut [u8]) -> Result<()> {
        self.join(own, &self.meet_with(call, Brings::for_all(own))?, output);
        Ok(())
    }

    /// Puts every rank's bytes for this one into `output`, in rank order; `input` has as many for each.
    pub(super) fn all_to_all_enclosed(&self, call: Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        let brings = Brings::shards(input);
        self.join(self.own_piece(brings), &self.bring(call, brings)?, output);
        Ok(())
    }

    /// Puts the reduction of all ranks' inputs into `output`, which holds this rank's input unless it is given apart.
    pub(super) fn all_reduce_enclosed(
        &self,
        call: Call,
        reduction: Reduction,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<()> {
        let others = self.bring(call, Brings::for_all(input.unwrap_or(output)))?;
        self.reduce(reduction, input, &others, output);
        Ok(())
    }

    /// Puts the reduction of all ranks' shards for this one into `output`; `input` has one for each.
    pub(super) fn reduce_scatter_enclosed(
        &self,
        call: Call,
        reduction: Reduction,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let brings = Brings::shards(input);
        self.reduce(reduction, Some(self.own_piece(brings)), &self.bring(call, brings)?, output);
        Ok(())
    }

    fn bring(&self, call: Call, brings: Brings<'_>) -> Result<Vec<Cow<'_, [u8]>>> {
        let are_lent = self.boards().is_some_and(Boards::are_lent);
        if are_lent { self.meet_within_loan(call, brings) } else { self.meet_with(call, brings) }
    }

    fn own_piece<'a>(&self, brings: Brings<'a>) -> &'a [u8] {
        brings.piece(self.channel().rank(), self.channel().world_size())
    }

    /// What all ranks have brought, this one's included, in rank order.
    fn join(&self, own: &[u8], others: &[Cow<'_, [u8]>], output: &mut [u8]) {
        let (rank, bytes) = (self.channel().rank(), output.len() / others.len());
        for (peer, other) in others.iter().enumerate() {
            let piece = if peer == rank { own } else { other };
            output[peer * bytes..(peer + 1) * bytes].copy_from_slice(piece);
        }
    }

    /// Reduces what all ranks have brought, each as long as the output; without an `own` piece the output has it.
    fn reduce(&self, reduction: Reduction, own: Option<&[u8]>, others: &[Cow<'_, [u8]>], output: &mut [u8]) {
        let (rank, bytes, size) = (self.channel().rank(), output.len(), reduction.dtype.size_bytes());
        if bytes == 0 {
            return;
        }
        // Records are bytes that lie anywhere; what lies on boards is aligned, and so are elements.
        let is_aligned = |(peer, piece): (usize, &Cow<'_, [u8]>)| peer == rank || piece.as_ptr().addr() % size == 0;
        let copied = if others.iter().enumerate().all(is_aligned) { 0 } else { bytes * others.len() };
        let mut room = Scratch::new(copied);
        let mut inputs: Vec<*const u8> = others.iter().map(|other| other.as_ptr()).collect();
        for (peer, place) in room.bytes(copied).chunks_exact_mut(bytes).enumerate().filter(|(peer, _)| *peer != rank) {
            place.copy_from_slice(&others[peer]);
            inputs[peer] = place.as_ptr();
        }
        let output = output.as_mut_ptr();
        inputs[rank] = own.map_or(output.cast_const(), <[u8]>::as_ptr);
        // SAFETY: as many elements at each of them, and at the output, which is one of them or overlaps none; nobody writes to any of them.
        unsafe { reduction.run(&inputs, &[output], bytes / size) };
    }
}
