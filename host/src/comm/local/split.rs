//! Groups within a group: one collective gathers the ranks' colours and keys; then the ranks of one colour use their own rendezvous.
//!
//! The new group inherits only the deadline of the old one.

use super::operands::{CollectiveCall, Region};
use super::{LocalCommunicator, transfer};
use crate::comm::{Ranks, Split};
use crate::error::{Call, Operation, Result};

/// An encoded choice of a rank: whether it has a colour, the colour, and the bits of the key.
type Choice = [u64; 3];

impl Split for LocalCommunicator {
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        let own: Choice = [u64::from(color.is_some()), color.unwrap_or(0), key as u64];
        let mut all = vec![Choice::default(); self.world_size()];
        let (input, output) = (Region::of_bytes(bytemuck::cast_slice(&own)), bytemuck::cast_slice_mut(&mut all));
        let collective =
            CollectiveCall { call: Call::without_data(Operation::Split), input, output: Region::of_bytes_mut(output) };
        self.shared.collective(self.rank, collective, |calls| transfer::all_gather(calls, self.rank))?;

        let Some(color) = color else { return Ok(None) };
        let same = all.iter().enumerate().filter(|(_, choice)| choice[..2] == own[..2]);
        let mut members: Vec<(i64, usize)> = same.map(|(rank, choice)| (choice[2] as i64, rank)).collect();
        members.sort_unstable();
        let rank = members.partition_point(|member| *member < (key, self.rank));
        let members: Vec<usize> = members.into_iter().map(|(_, rank)| rank).collect();
        Ok(Some(LocalCommunicator::new(rank, self.shared.enter(color, &members))))
    }
}
