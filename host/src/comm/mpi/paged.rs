//! Reductions of ranks that have boards: their operands go through these in chunks that stay in the caches, and no message is sent.
//!
//! A rank brings a chunk to each round; behind it every rank reduces its part of all ranks' chunks, in rank order, where they lie. What an
//! all-reduce has made of a chunk is brought along with the next one. There are two places on each board, used in turn: a rank comes to a round
//! when it has read all of the one before, so that whoever has seen all come may write to the place that was read there.
//!
//! Runs behind a call that all ranks have agreed to; a rank that fails on the way says so by a record.

use std::ptr::copy_nonoverlapping;

use super::boards::{Boards, TOGETHER_BYTES};
use super::transfer::{LINE_LEN, Transfer};
use crate::comm::reduction::Reduction;
use crate::dtype::DType;
use crate::error::Result;

impl Transfer<'_> {
    /// Boards, if a chunk of so many parts, of these elements, has room on one.
    pub(super) fn pages(&self, dtype: DType, parts: usize) -> Option<Pages<'_>> {
        let part = TOGETHER_BYTES / dtype.size_bytes() / parts / LINE_LEN * LINE_LEN;
        let boards = self.meeting.boards().filter(|_| part > 0)?;
        Some(Pages { transfer: self, boards, part })
    }
}

/// A collective of ranks that have boards.
#[derive(Debug)]
pub(super) struct Pages<'a> {
    transfer: &'a Transfer<'a>,
    boards: &'a Boards,
    /// Elements of a chunk that one rank reduces.
    part: usize,
}

impl Pages<'_> {
    /// Replaces all ranks' data by their reduction, in chunks of a part for each rank; beside a chunk there is room for another part.
    ///
    /// # Safety
    /// `data` has `len` elements to read and write, used by nobody else; lengths agree on all ranks.
    pub(super) unsafe fn all_reduce(&self, reduction: Reduction, data: *mut u8, len: usize) -> Result<()> {
        let (rank, world_size) = self.place_in_world();
        let (size, chunk) = (reduction.dtype.size_bytes(), self.part * world_size);
        let (chunks, behind_chunk) = (len.div_ceil(chunk), chunk * size);
        // Where a chunk's part begins in the data, and how long it is.
        let part = |number: usize, peer: usize| {
            let begin = len.min(number * chunk + peer * self.part);
            (begin, self.part.min(len - begin))
        };
        for step in 0..=chunks {
            let begin = len.min(step * chunk);
            let bytes = chunk.min(len - begin) * size;
            // SAFETY: within the data, and within the place, which nobody reads yet.
            unsafe { copy_nonoverlapping(data.add(begin * size), self.boards.next_place(), bytes) };
            self.turn()?;
            for peer in (0..world_size).filter(|&peer| step > 0 && peer != rank) {
                let (begin, len) = part(step - 1, peer);
                // SAFETY: that rank's part of the chunk before, which it has brought along.
                unsafe {
                    let result = self.boards.place(peer).add(behind_chunk);
                    copy_nonoverlapping(result, data.add(begin * size), len * size);
                }
            }
            let (begin, len) = part(step, rank);
            let offset = rank * self.part * size;
            let inputs: Vec<_> = (0..world_size).map(|peer| self.boards.place(peer).wrapping_add(offset)).collect();
            let along = self.boards.next_place().wrapping_add(behind_chunk);
            // SAFETY: every rank's operands of this part, aligned; in the data, and on the own board where nobody reads yet.
            unsafe { reduction.run(&inputs, &[data.add(begin * size), along], len) };
        }
        Ok(())
    }

    /// Puts the reduction of all ranks' shards for this one into `output`, in chunks of a part of every shard.
    ///
    /// # Safety
    /// `input` has a shard of `len` elements for every rank, and `output` room for one; used by nobody else, and lengths agree on all ranks.
    pub(super) unsafe fn reduce_scatter(
        &self,
        reduction: Reduction,
        input: *const u8,
        output: *mut u8,
        len: usize,
    ) -> Result<()> {
        let (rank, world_size) = self.place_in_world();
        let size = reduction.dtype.size_bytes();
        for begin in (0..len).step_by(self.part) {
            let part = self.part.min(len - begin);
            let next = self.boards.next_place();
            let own = |peer: usize| input.wrapping_add((peer * len + begin) * size);
            for peer in (0..world_size).filter(|&peer| peer != rank) {
                // SAFETY: within the shard, and within the place, which nobody reads yet.
                unsafe { copy_nonoverlapping(own(peer), next.add(peer * self.part * size), part * size) };
            }
            self.turn()?;
            let offset = rank * self.part * size;
            let brought = |peer: usize| self.boards.place(peer).wrapping_add(offset);
            let inputs: Vec<_> =
                (0..world_size).map(|peer| if peer == rank { own(peer) } else { brought(peer) }).collect();
            // SAFETY: every rank's operands of this part, aligned, and room for as many.
            unsafe { reduction.run(&inputs, &[output.add(begin * size)], part) };
        }
        Ok(())
    }

    fn place_in_world(&self) -> (usize, usize) {
        let channel = self.transfer.meeting.channel();
        (channel.rank(), channel.world_size())
    }

    /// Brings what is in the next place to a round, and waits for the others.
    fn turn(&self) -> Result<()> {
        self.boards.turn();
        self.transfer.meeting.go_on(self.transfer.operation)
    }
}
