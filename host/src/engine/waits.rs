//! The comparison of calls, and the graph of waits between ranks: who has to make which further call before a list is over.

use std::collections::{BTreeSet, VecDeque};

use super::list::{List, Unmatched};
use super::{CallIndex, Engine};
use crate::error::{Call, CommError};

/// The first of several collectives of different ranks that does not match the first one, as a mismatch.
///
/// # Errors
/// [`CommError::Mismatch`], with the first rank and the first rank whose call differs.
pub(crate) fn compare(calls: &[(usize, Call)]) -> Result<(), CommError> {
    let Some(&first) = calls.first() else { return Ok(()) };
    let other = calls.iter().find(|(_, call)| !call.fits(&first.1));
    other.map_or(Ok(()), |&other| Err(CommError::mismatch(first, other)))
}

/// Compares a send with its receive.
///
/// # Errors
/// [`CommError::Mismatch`] if they differ in length or dtype.
pub(crate) fn compare_transfer(send: (usize, Call), receive: (usize, Call)) -> Result<(), CommError> {
    let is_equal = (send.1.len, send.1.dtype) == (receive.1.len, receive.1.dtype);
    if is_equal { Ok(()) } else { Err(CommError::mismatch(send, receive)) }
}

impl Engine {
    pub(super) fn has_collectives(&self, rank: usize) -> bool {
        self.oldest(rank).is_some_and(|list| !list.collectives.is_empty())
    }

    /// The sends and receives in the oldest list of `rank` that have their counterpart in the oldest list of another rank, or in the list
    /// itself.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if a send and its receive differ.
    pub(super) fn counterparts(&self, rank: usize) -> Result<Vec<(CallIndex, CallIndex)>, CommError> {
        let mut found = Vec::new();
        let Some(own) = self.oldest(rank) else { return Ok(found) };
        for &peer in own.sends.keys() {
            self.match_pair(rank, peer, &mut found)?;
        }
        for &peer in own.receives.keys().filter(|&&peer| peer != rank) {
            self.match_pair(peer, rank, &mut found)?;
        }
        Ok(found)
    }

    /// Matches the sends of one rank with the receives of another, in order.
    fn match_pair(
        &self,
        sender: usize,
        receiver: usize,
        found: &mut Vec<(CallIndex, CallIndex)>,
    ) -> Result<(), CommError> {
        let queue = |rank: usize, peer: usize, of: fn(&List) -> &Unmatched| of(self.oldest(rank)?).get(&peer);
        let sends = queue(sender, receiver, |list| &list.sends);
        let receives = queue(receiver, sender, |list| &list.receives);
        for (&(send, sent), &(receive, received)) in sends.into_iter().flatten().zip(receives.into_iter().flatten()) {
            compare_transfer((sender, sent), (receiver, received))?;
            found.push((CallIndex { rank: sender, index: send }, CallIndex { rank: receiver, index: receive }));
        }
        Ok(())
    }

    /// Compares the collectives in the oldest list of `rank` with those of one other rank: all other ranks have the same ones.
    pub(super) fn compare_collectives(&self, rank: usize) -> Result<(), CommError> {
        let collectives = |rank: usize| self.oldest(rank).map_or(&[][..], |list| &list.collectives);
        let own = collectives(rank);
        let Some(&last) = own.last() else { return Ok(()) };
        let Some(peer) = (0..self.world_size()).find(|&peer| peer != rank && self.has_collectives(peer)) else {
            return Ok(());
        };
        let theirs = collectives(peer);
        let fits = |index: &usize| match (own.get(*index), theirs.get(*index)) {
            (Some(call), Some(other)) => call.fits(other),
            _ => false,
        };
        // If one list ends early, its last call is named.
        let at = |calls: &[Call], index: usize| calls.get(index).or(calls.last()).copied().unwrap_or(last);
        match (0..own.len().max(theirs.len())).find(|index| !fits(index)) {
            Some(index) => Err(CommError::mismatch((rank, at(own, index)), (peer, at(theirs, index)))),
            None => Ok(()),
        }
    }

    /// The ranks from which the oldest list of `rank` needs a further call, each with the call that needs it.
    pub(super) fn direct_waits(&self, rank: usize) -> Vec<(usize, Call)> {
        let Some(list) = self.oldest(rank) else { return Vec::new() };
        let transfers = list.sends.iter().chain(&list.receives).map(|(&peer, calls)| (peer, calls[0].1));
        let collectives = list.collectives.first().into_iter().flat_map(|&call| {
            (0..self.world_size()).filter(|&peer| !self.has_collectives(peer)).map(move |peer| (peer, call))
        });
        transfers.chain(collectives).collect()
    }

    /// The ranks whose further calls the oldest list of `rank` needs: `rank` waits for them, directly or through other ranks, and they wait for
    /// no rank themselves.
    pub(crate) fn missing(&self, rank: usize) -> Vec<usize> {
        let mut missing: Vec<usize> = self.all_waits(rank).into_iter().map(|(peer, _)| peer).collect();
        missing.retain(|&peer| self.direct_waits(peer).is_empty());
        missing.sort_unstable();
        missing
    }

    /// The ranks for which `rank` waits, directly or through other ranks, the nearest first, each with the call of `rank` that leads there.
    fn all_waits(&self, rank: usize) -> Vec<(usize, Call)> {
        let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
        let mut open = VecDeque::from(self.direct_waits(rank));
        while let Some((peer, call)) = open.pop_front() {
            if seen.insert(peer) {
                found.push((peer, call));
                open.extend(self.direct_waits(peer).into_iter().map(|(next, _)| (next, call)));
            }
        }
        found
    }

    /// If `rank` waits for itself through other ranks, the mismatch of its call and the call of the nearest rank that waits for it.
    pub(super) fn cycle(&self, rank: usize) -> Option<CommError> {
        // A collective waits for ranks that have posted no collective. Without sends and receives, those ranks do not wait, and there is no
        // cycle.
        if !(0..self.world_size()).any(|rank| self.oldest(rank).is_some_and(List::has_transfers)) {
            return None;
        }
        self.all_waits(rank).into_iter().find_map(|(peer, call)| {
            let (_, back) = self.direct_waits(peer).into_iter().find(|(next, _)| *next == rank)?;
            Some(CommError::mismatch((rank, call), (peer, back)))
        })
    }
}
