//! Pipelined collectives, for ranks that share memory: operands go through the mailboxes in pieces that stay in the caches, and no
//! messages are sent.
//!
//! In each round, a rank publishes one piece; then every rank copies its part of all ranks' pieces, or reduces it in rank order,
//! directly from the mailboxes. The result of an all-reduce is published along with the next piece. Each mailbox has two slots, used in
//! turn: a rank enters a round only after it has read all slots of the round before, so once all ranks have arrived, the slot that was
//! read in that round may be overwritten.
//!
//! This runs after a call that all ranks have agreed to; a rank that fails on the way sends a record.

use std::ptr::copy_nonoverlapping;

use super::mailbox::{MAX_TOTAL_BYTES, Mailboxes};
use super::record::Record;
use super::transfer::{AgreedCollective, LINE_LEN};
use crate::comm::reduction::Reduction;
use crate::error::Result;

impl AgreedCollective<'_> {
    /// The pipeline of this collective, if the ranks share memory and a piece of `parts` parts fits into a slot; elements have `size`
    /// bytes.
    pub(super) fn pipeline(&self, size: usize, parts: usize) -> Option<Pipeline<'_>> {
        let part = MAX_TOTAL_BYTES / size / parts / LINE_LEN * LINE_LEN;
        let mailboxes = self.handshake.mailboxes.as_ref().filter(|_| part > 0)?;
        Some(Pipeline { transfer: self, mailboxes, part })
    }
}

/// A collective whose operands go through the mailboxes.
#[derive(Debug)]
pub(super) struct Pipeline<'a> {
    transfer: &'a AgreedCollective<'a>,
    mailboxes: &'a Mailboxes,
    /// The elements of a part of a piece, or its bytes if data are only moved.
    part: usize,
}

impl Pipeline<'_> {
    /// Replaces all ranks' data by their reduction, in pieces with a part for each rank; after the piece, the slot has room for one more
    /// part.
    ///
    /// # Safety
    /// `data` has `len` elements to read and write, which nothing else uses; lengths agree on all ranks.
    pub(super) unsafe fn all_reduce(&self, reduction: Reduction<'_>, data: *mut u8, len: usize) -> Result<()> {
        let (rank, world_size) = self.rank_and_world_size();
        let (size, piece) = (reduction.size_bytes(), self.part * world_size);
        let (pieces, behind_piece) = (len.div_ceil(piece), piece * size);
        // The beginning of a piece's part in the data, and its length.
        let part = |number: usize, peer: usize| {
            let begin = len.min(number * piece + peer * self.part);
            (begin, self.part.min(len - begin))
        };
        for step in 0..=pieces {
            let begin = len.min(step * piece);
            let bytes = piece.min(len - begin) * size;
            // SAFETY: within the data, and within the next slot, which no other rank reads yet.
            unsafe { copy_nonoverlapping(data.add(begin * size), self.mailboxes.next_slot(), bytes) };
            self.publish_slot()?;
            for peer in (0..world_size).filter(|&peer| step > 0 && peer != rank) {
                let (begin, len) = part(step - 1, peer);
                // SAFETY: that rank's part of the previous piece, which it has published behind its slot.
                unsafe {
                    let result = self.mailboxes.slot(peer).add(behind_piece);
                    copy_nonoverlapping(result, data.add(begin * size), len * size);
                }
            }
            let (begin, len) = part(step, rank);
            let offset = rank * self.part * size;
            let inputs: Vec<_> = (0..world_size).map(|peer| self.mailboxes.slot(peer).wrapping_add(offset)).collect();
            let along = self.mailboxes.next_slot().wrapping_add(behind_piece);
            // SAFETY: every rank's operands of this part, aligned; the outputs are in the data, and in this rank's next slot, which no
            // other rank reads yet.
            unsafe { reduction.run(&inputs, &[data.add(begin * size), along], len) };
        }
        Ok(())
    }

    /// Writes the reduction of all ranks' shards for this rank to `output`, in pieces of a part of every shard.
    ///
    /// # Safety
    /// `input` has a shard of `len` elements for every rank, and `output` room for one; nothing else uses them, and lengths agree on all
    /// ranks.
    pub(super) unsafe fn reduce_scatter(
        &self,
        reduction: Reduction<'_>,
        input: *const u8,
        output: *mut u8,
        len: usize,
    ) -> Result<()> {
        let (rank, world_size) = self.rank_and_world_size();
        let size = reduction.size_bytes();
        for begin in (0..len).step_by(self.part) {
            let part = self.part.min(len - begin);
            let next = self.mailboxes.next_slot();
            let own = |peer: usize| input.wrapping_add((peer * len + begin) * size);
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                // SAFETY: within the shard, and within the next slot, which no other rank reads yet.
                unsafe { copy_nonoverlapping(own(peer), next.add(peer * self.part * size), part * size) };
            }
            self.publish_slot()?;
            let offset = rank * self.part * size;
            let received = |peer: usize| self.mailboxes.slot(peer).wrapping_add(offset);
            let inputs: Vec<_> =
                (0..world_size).map(|peer| if peer == rank { own(peer) } else { received(peer) }).collect();
            // SAFETY: every rank's operands of this part, aligned, and room for as many elements.
            unsafe { reduction.run(&inputs, &[output.add(begin * size)], part) };
        }
        Ok(())
    }

    /// Writes every other rank's shard for this rank to `output`, in pieces of a part of every shard.
    ///
    /// # Safety
    /// `input` has a shard of `bytes` bytes for every rank, and `output` room for as many of every rank; they are the same, or apart.
    /// Nothing else uses them, and lengths agree on all ranks.
    pub(super) unsafe fn all_to_all(&self, input: *const u8, output: *mut u8, bytes: usize) -> Result<()> {
        let (rank, world_size) = self.rank_and_world_size();
        let others = || (0..world_size).filter(|&peer| peer != rank);
        for begin in (0..bytes).step_by(self.part) {
            let (part, next) = (self.part.min(bytes - begin), self.mailboxes.next_slot());
            for peer in others() {
                // SAFETY: within the shard, and within the next slot, which no other rank reads yet.
                unsafe { copy_nonoverlapping(input.add(peer * bytes + begin), next.add(peer * self.part), part) };
            }
            self.publish_slot()?;
            for peer in others() {
                // SAFETY: within the slot that the peer has published; if the output is the input, this part of it is in this rank's slot.
                unsafe {
                    let published = self.mailboxes.slot(peer).add(rank * self.part);
                    copy_nonoverlapping(published, output.add(peer * bytes + begin), part);
                }
            }
        }
        Ok(())
    }

    /// Writes the other ranks' inputs to their shards of `output`, in pieces of a part.
    ///
    /// # Safety
    /// `input` has `bytes` bytes, and `output` room for as many of every rank; the input may be this rank's shard there. Nothing else uses
    /// them, and lengths agree on all ranks.
    pub(super) unsafe fn all_gather(&self, input: *const u8, output: *mut u8, bytes: usize) -> Result<()> {
        let (rank, world_size) = self.rank_and_world_size();
        for begin in (0..bytes).step_by(self.part) {
            let part = self.part.min(bytes - begin);
            // SAFETY: within the input, and within the next slot, which no other rank reads yet.
            unsafe { copy_nonoverlapping(input.add(begin), self.mailboxes.next_slot(), part) };
            self.publish_slot()?;
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                // SAFETY: within the slot that the peer has published, and within the peer's shard of the output.
                unsafe { copy_nonoverlapping(self.mailboxes.slot(peer), output.add(peer * bytes + begin), part) };
            }
        }
        Ok(())
    }

    /// Writes the root's data to the data of all other ranks, in pieces.
    ///
    /// # Safety
    /// `data` has `bytes` bytes to read on the root, and to write on all other ranks, which nothing else uses; lengths agree on all ranks.
    pub(super) unsafe fn broadcast(&self, data: *mut u8, bytes: usize, root: usize) -> Result<()> {
        let is_root = self.rank_and_world_size().0 == root;
        for begin in (0..bytes).step_by(self.part) {
            let part = self.part.min(bytes - begin);
            if is_root {
                // SAFETY: within the data, and within the next slot, which no other rank reads yet.
                unsafe { copy_nonoverlapping(data.add(begin), self.mailboxes.next_slot(), part) };
            }
            self.publish_slot()?;
            if !is_root {
                // SAFETY: within the slot that the root has published, and within the data.
                unsafe { copy_nonoverlapping(self.mailboxes.slot(root), data.add(begin), part) };
            }
        }
        Ok(())
    }

    fn rank_and_world_size(&self) -> (usize, usize) {
        let link = self.transfer.handshake.link();
        (link.rank(), link.world_size())
    }

    /// Publishes the next slot in a separate round, and waits for the other ranks.
    fn publish_slot(&self) -> Result<()> {
        self.mailboxes.advance();
        self.transfer.handshake.end_step(self.transfer.operation, &Record::Go, Ok(()))
    }
}
