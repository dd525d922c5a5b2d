//! Groups within a group: the ranks say their colours and keys in one collective, and those of a colour meet in a
//! rendezvous of their own from then on.
//!
//! The new group keeps nothing of the old one but its deadline.

use super::posts::{Memory, Post};
use super::{LocalCommunicator, transfer};
use crate::comm::{Ranks, Split};
use crate::error::{Call, Operation, Result};

/// A rank's choice as it travels: whether it has a colour, the colour, the key's bits.
type Wish = [u64; 3];

impl Split for LocalCommunicator {
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let own: Wish = [u64::from(color.is_some()), color.unwrap_or(0), key as u64];
        let mut all = vec![Wish::default(); self.world_size()];
        let (input, output) = (Memory::of_bytes(bytemuck::cast_slice(&own)), bytemuck::cast_slice_mut(&mut all));
        let post = Post { call: Call::without_data(Operation::Split), input, output: Memory::of_bytes_mut(output) };
        self.shared.meet(self.rank, post, |posts| transfer::all_gather(posts, self.rank))?;

        let Some(color) = color else { return Ok(None) };
        let same = all.iter().enumerate().filter(|(_, wish)| wish[..2] == own[..2]);
        let mut members: Vec<(i64, usize)> = same.map(|(rank, wish)| (wish[2] as i64, rank)).collect();
        members.sort_unstable();
        let rank = members.partition_point(|member| *member < (key, self.rank));
        Ok(Some(LocalCommunicator::new(rank, self.shared.enter(color, members.len()))))
    }
}
