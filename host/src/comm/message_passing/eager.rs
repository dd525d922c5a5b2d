//! The eager protocol, for collectives of few bytes: the payload of each rank travels with its call, in the record or in the mailbox.
//!
//! This saves the later messages. Every rank gets all operands that it needs and reduces them in rank order, so results have the same
//! bits as with `transfer`. [`Handshake::is_eager`] limits the bytes.

use std::borrow::Cow;

use super::handshake::Handshake;
use super::mailbox::{self, Mailboxes, Payload, Payloads};
use super::record::MAX_EAGER_BYTES;
use super::scratch::Scratch;
use crate::comm::reduction::Reduction;
use crate::error::{Call, Result};

/// The most payload bytes for one rank, of all ranks together, in records, which are received one after another.
const MAX_TOTAL_BYTES: usize = 64 << 10;

impl Handshake {
    /// Whether `bytes` bytes for every rank are sent with a call; equal on all ranks that make the call.
    pub(super) fn is_eager(&self, bytes: usize) -> bool {
        let together = bytes.saturating_mul(self.link().world_size());
        if self.mailboxes.is_some() {
            return together <= mailbox::MAX_TOTAL_BYTES;
        }
        bytes <= MAX_EAGER_BYTES && together <= MAX_TOTAL_BYTES
    }

    /// Gathers every rank's `own` bytes into `output`, in rank order. Within an exposure epoch it takes one round, like all calls here
    /// except [`all_gather_confirmed`](Self::all_gather_confirmed).
    pub(super) fn all_gather_eager(&self, call: Call, own: &[u8], output: &mut [u8]) -> Result<()> {
        self.concatenate(own, &self.exchange_payloads(call, Payload::for_all(own))?, output);
        Ok(())
    }

    /// Like [`all_gather_eager`](Self::all_gather_eager), but always in two rounds: either all ranks get the result, or none.
    pub(super) fn all_gather_confirmed(&self, call: Call, own: &[u8], output: &mut [u8]) -> Result<()> {
        self.concatenate(own, &self.agree(call, Payload::for_all(own), true)?, output);
        Ok(())
    }

    /// Gathers every rank's bytes for this rank into `output`, in rank order; `input` has equally many bytes for each rank.
    pub(super) fn all_to_all_eager(&self, call: Call, input: &[u8], output: &mut [u8]) -> Result<()> {
        let payload = Payload::shards(input);
        self.concatenate(self.own_piece(payload), &self.exchange_payloads(call, payload)?, output);
        Ok(())
    }

    /// Writes the reduction of all ranks' inputs to `output`; without a separate `input`, `output` holds this rank's input.
    pub(super) fn all_reduce_eager(
        &self,
        call: Call,
        reduction: Reduction<'_>,
        input: Option<&[u8]>,
        output: &mut [u8],
    ) -> Result<()> {
        let others = self.exchange_payloads(call, Payload::for_all(input.unwrap_or(output)))?;
        self.reduce(reduction, input, &others, output);
        Ok(())
    }

    /// Writes the reduction of all ranks' shards for this rank to `output`; `input` has one shard for each rank.
    pub(super) fn reduce_scatter_eager(
        &self,
        call: Call,
        reduction: Reduction<'_>,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<()> {
        let payload = Payload::shards(input);
        self.reduce(reduction, Some(self.own_piece(payload)), &self.exchange_payloads(call, payload)?, output);
        Ok(())
    }

    fn exchange_payloads(&self, call: Call, payload: Payload<'_>) -> Result<Payloads<'_>> {
        let in_epoch = self.mailboxes.as_ref().is_some_and(Mailboxes::in_epoch);
        self.agree(call, payload, !in_epoch)
    }

    fn own_piece<'a>(&self, payload: Payload<'a>) -> &'a [u8] {
        payload.piece(self.link().rank(), self.link().world_size())
    }

    /// Concatenates the payloads of all ranks, including this one's, in rank order.
    fn concatenate(&self, own: &[u8], others: &[Cow<'_, [u8]>], output: &mut [u8]) {
        let (rank, bytes) = (self.link().rank(), output.len() / others.len());
        for (peer, other) in others.iter().enumerate() {
            let piece = if peer == rank { own } else { other };
            output[peer * bytes..(peer + 1) * bytes].copy_from_slice(piece);
        }
    }

    /// Reduces the payloads of all ranks, each as long as the output; without an `own` payload, the output holds this rank's payload.
    fn reduce(&self, reduction: Reduction<'_>, own: Option<&[u8]>, others: &[Cow<'_, [u8]>], output: &mut [u8]) {
        let (rank, bytes, size) = (self.link().rank(), output.len(), reduction.size_bytes());
        if bytes == 0 {
            return;
        }
        // The bytes of records can have any alignment; slots of mailboxes are aligned, and so are the elements in them.
        let is_aligned = |(peer, piece): (usize, &Cow<'_, [u8]>)| peer == rank || piece.as_ptr().addr() % size == 0;
        let copied = if others.iter().enumerate().all(is_aligned) { 0 } else { bytes * others.len() };
        let mut room = Scratch::new(copied);
        let mut inputs: Vec<*const u8> = others.iter().map(|other| other.as_ptr()).collect();
        for (peer, copy) in room.bytes(copied).chunks_exact_mut(bytes).enumerate().filter(|(peer, _)| *peer != rank) {
            copy.copy_from_slice(&others[peer]);
            inputs[peer] = copy.as_ptr();
        }
        let output = output.as_mut_ptr();
        inputs[rank] = own.map_or(output.cast_const(), <[u8]>::as_ptr);
        // SAFETY: all inputs have as many elements as the output, which is one of them or overlaps none; nothing else writes to them.
        unsafe { reduction.run(&inputs, &[output], bytes / size) };
    }
}
