//! The matching of calls, for [`Member::agree`](super::Member::agree), as a pure state machine.
//!
//! Its input is the calls that ranks post; its output is the ranks to release, and mismatches. It does not depend on time, threads,
//! connections or departed ranks.
//!
//! A rank posts one list of calls at a time and waits until all of them are matched: each call must find its counterpart in another
//! rank's list while both ranks wait. So a rank with unmatched calls waits for *further* calls of certain ranks, and for each of them:
//! these waits are the edges of a graph of the ranks, and calls on a cycle can never complete. A new cycle leads through the rank that
//! posted last.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::{Call, CommError, Operation};

/// Unmatched calls in order, by the rank that has to make the counterpart.
type Unmatched = BTreeMap<usize, VecDeque<Call>>;

/// The calls that a rank waits in.
#[derive(Debug)]
struct WaitingCalls {
    /// The operation that errors name: the operation of the first call, or the operation that this call is a step of.
    operation: Operation,
    /// The collectives, in order; cleared once every rank has posted the same list.
    collectives: Vec<Call>,
    sends: Unmatched,
    receives: Unmatched,
}

impl WaitingCalls {
    fn new(calls: &[Call]) -> Self {
        let operation = calls.first().map_or(Operation::Exchange, Call::called);
        let mut own =
            WaitingCalls { operation, collectives: Vec::new(), sends: Unmatched::new(), receives: Unmatched::new() };
        for &call in calls {
            let (to, from) = call.operation.peers();
            if to.is_none() && from.is_none() {
                own.collectives.push(call);
            }
            for (queues, peer) in [(&mut own.sends, to), (&mut own.receives, from)] {
                if let Some(peer) = peer {
                    queues.entry(peer).or_default().push_back(call);
                }
            }
        }
        own
    }

    fn is_complete(&self) -> bool {
        self.collectives.is_empty() && self.sends.is_empty() && self.receives.is_empty()
    }
}

/// Refuses calls that name a rank which does not exist, and sends of `rank` to itself without a receive in the same list, or the reverse.
pub(super) fn check(calls: &[Call], rank: usize, world_size: usize) -> Result<(), CommError> {
    let invalid = |operation, peer| Err(CommError::InvalidPeer { operation, peer, rank, world_size });
    let (mut to_itself, mut from_itself) = (Vec::new(), Vec::new());
    for call in calls {
        let operation = call.operation;
        let (to, from) = operation.peers();
        let root = if let Operation::Broadcast { root } = operation { Some(root) } else { None };
        if let Some(peer) = [to, from, root].into_iter().flatten().find(|&peer| peer >= world_size) {
            return invalid(operation, peer);
        }
        to_itself.extend((to == Some(rank)).then_some(operation));
        from_itself.extend((from == Some(rank)).then_some(operation));
    }
    let balanced = to_itself.len().min(from_itself.len());
    match to_itself.get(balanced).or(from_itself.get(balanced)) {
        Some(&operation) => invalid(operation, rank),
        None => Ok(()),
    }
}

/// The calls that all ranks wait in. Not to be used after a mismatch.
#[derive(Debug)]
pub(super) struct Matching {
    waiting: Vec<Option<WaitingCalls>>,
}

impl Matching {
    pub(super) fn new(world_size: usize) -> Self {
        Matching { waiting: (0..world_size).map(|_| None).collect() }
    }

    /// Posts the calls of `rank`, which waits in no call; [`check`] has accepted them. Returns the ranks whose calls are now complete, in
    /// order.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if the calls of some rank can never be completed.
    pub(super) fn post(&mut self, rank: usize, calls: &[Call]) -> Result<Vec<usize>, CommError> {
        let mut own = WaitingCalls::new(calls);
        self.match_transfers(rank, &mut own)?;
        self.compare_collectives(rank, &own)?;
        self.waiting[rank] = Some(own);
        if (0..self.waiting.len()).all(|rank| self.has_collectives(rank)) {
            self.waiting.iter_mut().flatten().for_each(|waiting| waiting.collectives.clear());
        }

        let is_complete = |rank: &usize| self.waiting[*rank].as_ref().is_some_and(WaitingCalls::is_complete);
        let released: Vec<usize> = (0..self.waiting.len()).filter(is_complete).collect();
        for &rank in &released {
            self.waiting[rank] = None;
        }
        match self.cycle(rank) {
            Some((one, other)) => Err(CommError::mismatch(one, other)),
            None => Ok(released),
        }
    }

    /// Removes the calls of `rank`, if it has any.
    pub(super) fn withdraw(&mut self, rank: usize) {
        self.waiting[rank] = None;
    }

    /// The operation that errors about the calls of `rank` name, if it has calls.
    pub(super) fn operation(&self, rank: usize) -> Option<Operation> {
        self.waiting[rank].as_ref().map(|waiting| waiting.operation)
    }

    /// Whether `rank` waits for further calls of `peer`.
    pub(super) fn needs(&self, rank: usize, peer: usize) -> bool {
        self.waits(rank).iter().any(|(awaited, _)| *awaited == peer)
    }

    /// The ranks without calls for which `rank` waits, directly or through other ranks that wait for them.
    pub(super) fn missing(&self, rank: usize) -> Vec<usize> {
        let mut missing = BTreeSet::new();
        let mut seen = BTreeSet::from([rank]);
        let mut open = vec![rank];
        while let Some(rank) = open.pop() {
            for (peer, _) in self.waits(rank) {
                if self.waiting[peer].is_none() {
                    missing.insert(peer);
                } else if seen.insert(peer) {
                    open.push(peer);
                }
            }
        }
        missing.into_iter().collect()
    }

    fn has_collectives(&self, rank: usize) -> bool {
        self.waiting[rank].as_ref().is_some_and(|waiting| !waiting.collectives.is_empty())
    }

    /// Matches the sends and receives of new calls with those of waiting ranks.
    fn match_transfers(&mut self, rank: usize, own: &mut WaitingCalls) -> Result<(), CommError> {
        match_pairs((rank, &mut own.sends), (rank, &mut own.receives))?;
        for (peer, other) in self.waiting.iter_mut().enumerate() {
            if let Some(other) = other {
                match_pairs((rank, &mut own.sends), (peer, &mut other.receives))?;
                match_pairs((peer, &mut other.sends), (rank, &mut own.receives))?;
            }
        }
        Ok(())
    }

    /// Compares the collectives of new calls with those of one waiting rank: all waiting ranks have the same list.
    fn compare_collectives(&self, rank: usize, own: &WaitingCalls) -> Result<(), CommError> {
        let Some(&last) = own.collectives.last() else { return Ok(()) };
        let Some(peer) = (0..self.waiting.len()).find(|&peer| self.has_collectives(peer)) else { return Ok(()) };
        let theirs = self.waiting[peer].as_ref().map_or(&[][..], |other| &other.collectives);
        let longest = theirs.len().max(own.collectives.len());
        // Where one list ends early, its last call is named.
        let at = |calls: &[Call], index: usize| calls.get(index).or(calls.last()).copied().unwrap_or(last);
        let fits = |index: usize| match (own.collectives.get(index), theirs.get(index)) {
            (Some(call), Some(other)) => call.fits(other),
            _ => false,
        };
        match (0..longest).find(|&index| !fits(index)) {
            Some(index) => Err(CommError::mismatch((rank, at(&own.collectives, index)), (peer, at(theirs, index)))),
            None => Ok(()),
        }
    }

    /// The ranks from which `rank` needs further calls, each with the call that needs them.
    fn waits(&self, rank: usize) -> Vec<(usize, Call)> {
        let Some(waiting) = &self.waiting[rank] else { return Vec::new() };
        let transfers = waiting.sends.iter().chain(&waiting.receives).map(|(&peer, calls)| (peer, calls[0]));
        let collectives = waiting.collectives.first().into_iter().flat_map(|&call| {
            (0..self.waiting.len()).filter(|&peer| !self.has_collectives(peer)).map(move |peer| (peer, call))
        });
        transfers.chain(collectives).collect()
    }

    /// If `rank` waits for itself through other ranks, returns its call and the next rank's call.
    fn cycle(&self, rank: usize) -> Option<((usize, Call), (usize, Call))> {
        // A collective waits for ranks that have posted no collective. If no rank has transfers, those ranks do not wait, and there is no
        // cycle.
        let has_transfers = |waiting: &WaitingCalls| !(waiting.sends.is_empty() && waiting.receives.is_empty());
        if !self.waiting.iter().flatten().any(has_transfers) {
            return None;
        }
        let mut seen = BTreeSet::new();
        self.waits(rank).into_iter().find_map(|(next, call)| {
            let onward = self.path(next, rank, &mut seen)?;
            Some(((rank, call), (next, onward)))
        })
    }

    /// The call by which `from` waits for `target`, directly or through other ranks.
    fn path(&self, from: usize, target: usize, seen: &mut BTreeSet<usize>) -> Option<Call> {
        if !seen.insert(from) {
            return None;
        }
        let waits = self.waits(from);
        let direct = waits.iter().find(|(next, _)| *next == target).map(|(_, call)| *call);
        direct.or_else(|| waits.iter().find_map(|&(next, call)| self.path(next, target, seen).map(|_| call)))
    }
}

/// Removes matching sends of one rank and receives of another, in order.
fn match_pairs(
    (sender, sends): (usize, &mut Unmatched),
    (receiver, receives): (usize, &mut Unmatched),
) -> Result<(), CommError> {
    let (Some(outgoing), Some(incoming)) = (sends.get_mut(&receiver), receives.get_mut(&sender)) else { return Ok(()) };
    while let (Some(send), Some(receive)) = (outgoing.front(), incoming.front()) {
        if (send.len, send.dtype) != (receive.len, receive.dtype) {
            return Err(CommError::mismatch((sender, *send), (receiver, *receive)));
        }
        outgoing.pop_front();
        incoming.pop_front();
    }
    sends.retain(|_, calls| !calls.is_empty());
    receives.retain(|_, calls| !calls.is_empty());
    Ok(())
}
