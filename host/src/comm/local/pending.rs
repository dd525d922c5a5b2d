//! The pending calls of a local group's ranks, and the waits between ranks that these calls cause.
//!
//! This module does not block, measure time, or dereference an address. A transfer is matched with its counterpart in the peer's call at
//! once, in order for each pair of ranks, and matched transfers complete without further calls. So a rank waits only for *further* calls
//! of the peers of its unmatched transfers, and of ranks that are not in its collective. Ranks that wait for each other in a cycle can
//! never complete: that is a mismatch. The number of unmatched transfers between two calls does not change when other transfers are
//! matched, so a new cycle begins with a new call and leads through its rank.

use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::ops::Range;

use crate::comm::Operands;
use crate::error::{Call, CommError};
use crate::slice::SliceMut;

/// A rank's buffer, as the other ranks see it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Region {
    pub(super) start: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: a plain address; it is followed only while its owner waits inside the call that registered it.
unsafe impl Send for Region {}

impl Region {
    pub(super) const NONE: Region = Region { start: std::ptr::null_mut(), bytes: 0 };

    /// The region of memory that is read and written.
    pub(super) fn of_mut(data: SliceMut<'_>) -> Self {
        Region::of_bytes_mut(data.as_bytes_mut())
    }

    /// The regions of an input and an output, which are identical or disjoint.
    pub(super) fn of_operands(mut operands: Operands<'_>) -> (Self, Self) {
        let (input, output) = operands.raw_bytes();
        let region = |bytes: *mut [u8]| Region { start: bytes.cast(), bytes: bytes.len() };
        (region(input.cast_mut()), region(output))
    }

    /// The region of memory that is only read.
    pub(super) fn of_bytes(bytes: &[u8]) -> Self {
        Region { start: bytes.as_ptr().cast_mut(), bytes: bytes.len() }
    }

    /// Like [`of_mut`](Self::of_mut), for bytes.
    pub(super) fn of_bytes_mut(bytes: &mut [u8]) -> Self {
        Region { start: bytes.as_mut_ptr(), bytes: bytes.len() }
    }

    /// Shard `index` of `bytes` bytes.
    pub(super) fn shard(self, index: usize, bytes: usize) -> Self {
        self.range(index * bytes..(index + 1) * bytes)
    }

    /// These of its bytes.
    pub(super) fn range(self, bytes: Range<usize>) -> Self {
        assert!(bytes.end <= self.bytes, "bytes {bytes:?} lie beyond {} bytes", self.bytes);
        Region { start: self.start.wrapping_add(bytes.start), bytes: bytes.len() }
    }
}

/// A rank's call of a collective, with its operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct CollectiveCall {
    pub(super) call: Call,
    pub(super) input: Region,
    pub(super) output: Region,
}

/// A rank's send to, or receive from, another rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) peer: usize,
    pub(super) call: Call,
    pub(super) memory: Region,
}

/// Unfinished transfers by peer, in order.
type Queues = BTreeMap<usize, VecDeque<Transfer>>;

/// A rank's transfers outside collectives.
#[derive(Debug)]
struct Exchange {
    outgoing: Queues,
    incoming: Queues,
    /// The number of peers that are copying out of this rank's memory.
    copies: usize,
}

#[derive(Debug)]
enum Waiting {
    Collective(CollectiveCall),
    Exchange(Exchange),
}

/// The pending call of each rank.
#[derive(Debug)]
pub(super) struct PendingCalls(Vec<Option<Waiting>>);

impl PendingCalls {
    pub(super) fn new(world_size: usize) -> Self {
        PendingCalls((0..world_size).map(|_| None).collect())
    }

    /// Registers the collective of `rank`, which is in no call.
    ///
    /// # Errors
    /// [`CommError::Mismatch`], as [`check`](Self::check); the call stays registered.
    pub(super) fn collective(&mut self, rank: usize, collective: CollectiveCall) -> Result<(), CommError> {
        self.0[rank] = Some(Waiting::Collective(collective));
        self.check(rank)
    }

    /// Registers the transfers of `rank`, which is in no call.
    ///
    /// # Errors
    /// As [`collective`](Self::collective).
    pub(super) fn exchange(
        &mut self,
        rank: usize,
        outgoing: impl IntoIterator<Item = Transfer>,
        incoming: impl IntoIterator<Item = Transfer>,
    ) -> Result<(), CommError> {
        let exchange = Exchange { outgoing: queues(outgoing), incoming: queues(incoming), copies: 0 };
        self.0[rank] = Some(Waiting::Exchange(exchange));
        self.check(rank)
    }

    /// Removes the call of `rank`.
    pub(super) fn withdraw(&mut self, rank: usize) {
        self.0[rank] = None;
    }

    /// Removes the calls of all ranks.
    pub(super) fn withdraw_all(&mut self) {
        self.0.fill_with(|| None);
    }

    /// The calls of all ranks, if all are in a collective.
    pub(super) fn all_collective(&self) -> Option<Vec<CollectiveCall>> {
        (0..self.0.len()).map(|rank| self.collective_of(rank).copied()).collect()
    }

    /// Whether another rank is copying out of `rank`'s memory.
    pub(super) fn is_being_copied(&self, rank: usize) -> bool {
        self.exchange_of(rank).is_some_and(|exchange| exchange.copies > 0)
    }

    /// Whether `rank` is in an exchange whose transfers are all finished.
    pub(super) fn is_over(&self, rank: usize) -> bool {
        self.exchange_of(rank).is_some_and(|exchange| exchange.outgoing.is_empty() && exchange.incoming.is_empty())
    }

    /// A peer whose send matches the next receive of `rank`.
    pub(super) fn offer_for(&self, rank: usize) -> Option<usize> {
        let offers = |peer: &&usize| self.exchange_of(**peer).is_some_and(|other| other.outgoing.contains_key(&rank));
        self.exchange_of(rank)?.incoming.keys().find(offers).copied()
    }

    /// Begins the copy of the data that `peer` [offers](Self::offer_for) to `rank`. Returns source and destination, of equal sizes.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if the two transfers differ in length or dtype.
    pub(super) fn take(&mut self, rank: usize, peer: usize) -> Result<(Region, Region), CommError> {
        let wanted = self.exchange_mut(rank).incoming[&peer][0];
        let exchange = self.exchange_mut(peer);
        let offered = exchange.outgoing[&rank][0];
        if (offered.call.len, offered.call.dtype) != (wanted.call.len, wanted.call.dtype) {
            return Err(CommError::mismatch((peer, offered.call), (rank, wanted.call)));
        }
        exchange.copies += 1;
        Ok((offered.memory, wanted.memory))
    }

    /// Records that `rank` has finished the copy from `peer`.
    pub(super) fn finish(&mut self, rank: usize, peer: usize) {
        let exchange = self.exchange_mut(peer);
        exchange.copies -= 1;
        pop(&mut exchange.outgoing, rank);
        pop(&mut self.exchange_mut(rank).incoming, peer);
    }

    /// The ranks whose calls the call of `rank` needs to complete: `rank` waits for them, directly or through other ranks, and they wait
    /// for no rank themselves.
    pub(super) fn missing(&self, rank: usize) -> Vec<usize> {
        self.awaited(rank).into_keys().filter(|&peer| self.waits(peer).is_empty()).collect()
    }

    /// Returns an error if the newest call, which is the call of `rank`, can never complete together with the calls of the other ranks.
    fn check(&self, rank: usize) -> Result<(), CommError> {
        if let Some(own) = self.collective_of(rank) {
            for peer in 0..self.0.len() {
                if let Some(other) = self.collective_of(peer).filter(|other| !other.call.fits(&own.call)) {
                    return Err(CommError::mismatch((rank, own.call), (peer, other.call)));
                }
            }
        }
        for (peer, call) in self.awaited(rank) {
            if let Some((_, back)) = self.waits(peer).into_iter().find(|(next, _)| *next == rank) {
                return Err(CommError::mismatch((rank, call), (peer, back)));
            }
        }
        Ok(())
    }

    /// The ranks for which `rank` waits, directly or through other ranks, each with the call of `rank` that leads there.
    fn awaited(&self, rank: usize) -> BTreeMap<usize, Call> {
        let mut found = BTreeMap::new();
        // The search is breadth-first, so a rank that `rank` awaits directly is found with the call that awaits it.
        let mut open = VecDeque::from(self.waits(rank));
        while let Some((peer, call)) = open.pop_front() {
            if let Entry::Vacant(entry) = found.entry(peer) {
                entry.insert(call);
                open.extend(
                    self.waits(peer).into_iter().filter(|(next, _)| *next != rank).map(|(next, _)| (next, call)),
                );
            }
        }
        found
    }

    /// The ranks from which `rank` needs a further call, each with the call that needs it.
    fn waits(&self, rank: usize) -> Vec<(usize, Call)> {
        match &self.0[rank] {
            None => Vec::new(),
            Some(Waiting::Collective(collective)) => {
                let absent = |peer: &usize| self.collective_of(*peer).is_none();
                (0..self.0.len()).filter(absent).map(|peer| (peer, collective.call)).collect()
            }
            Some(Waiting::Exchange(own)) => {
                let outgoing = own
                    .outgoing
                    .iter()
                    .map(|(&peer, queue)| (peer, queue, self.exchange_of(peer).map(|other| &other.incoming)));
                let incoming = own
                    .incoming
                    .iter()
                    .map(|(&peer, queue)| (peer, queue, self.exchange_of(peer).map(|other| &other.outgoing)));
                let left_over = |(peer, queue, theirs): (usize, &VecDeque<Transfer>, Option<&Queues>)| {
                    let met = theirs.and_then(|theirs| theirs.get(&rank)).map_or(0, VecDeque::len);
                    queue.get(met).map(|transfer| (peer, transfer.call))
                };
                outgoing.chain(incoming).filter_map(left_over).collect()
            }
        }
    }

    fn collective_of(&self, rank: usize) -> Option<&CollectiveCall> {
        match &self.0[rank] {
            Some(Waiting::Collective(collective)) => Some(collective),
            _ => None,
        }
    }

    fn exchange_of(&self, rank: usize) -> Option<&Exchange> {
        match &self.0[rank] {
            Some(Waiting::Exchange(exchange)) => Some(exchange),
            _ => None,
        }
    }

    fn exchange_mut(&mut self, rank: usize) -> &mut Exchange {
        match &mut self.0[rank] {
            Some(Waiting::Exchange(exchange)) => exchange,
            other => unreachable!("rank {rank} is in {other:?}, not in a transfer"),
        }
    }
}

fn queues(transfers: impl IntoIterator<Item = Transfer>) -> Queues {
    let mut queues = Queues::new();
    for transfer in transfers {
        queues.entry(transfer.peer).or_default().push_back(transfer);
    }
    queues
}

/// Removes the first transfer with `peer`, which exists.
fn pop(queues: &mut Queues, peer: usize) {
    if let Some(queue) = queues.get_mut(&peer) {
        queue.pop_front();
        if queue.is_empty() {
            queues.remove(&peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::error::Operation;

    fn send(peer: usize) -> Transfer {
        Transfer { peer, call: Call::new(Operation::Send { peer }, 4, DType::U8), memory: Region::NONE }
    }

    fn recv(peer: usize) -> Transfer {
        Transfer { peer, call: Call::new(Operation::Recv { peer }, 4, DType::U8), memory: Region::NONE }
    }

    fn barrier() -> CollectiveCall {
        CollectiveCall { call: Call::without_data(Operation::Barrier), input: Region::NONE, output: Region::NONE }
    }

    #[test]
    fn the_missing_are_at_the_end_of_the_chain() {
        let mut calls = PendingCalls::new(4);
        calls.exchange(0, [send(1)], []).unwrap();
        assert_eq!(calls.missing(0), [1]);
        calls.exchange(1, [], [recv(2)]).unwrap();
        assert_eq!(calls.missing(0), [2]);
        calls.collective(3, barrier()).unwrap();
        assert_eq!(calls.missing(3), [2]);
    }

    /// A deadline applies only to missing ranks, not to matched transfers.
    #[test]
    fn no_rank_is_missing_where_all_transfers_match() {
        let mut calls = PendingCalls::new(3);
        calls.exchange(0, [send(1), send(1), send(2)], [recv(2)]).unwrap();
        calls.exchange(1, [], [recv(0), recv(0)]).unwrap();
        assert_eq!((calls.missing(0), calls.missing(1)), (vec![2], vec![]));
        calls.exchange(2, [send(0)], [recv(0)]).unwrap();
        assert!(calls.missing(0).is_empty());
        // Copying does not change this, and a transfer that is finished on one side only is unfinished.
        assert_eq!(calls.offer_for(1), Some(0));
        calls.take(1, 0).unwrap();
        assert!(calls.is_being_copied(0) && !calls.is_being_copied(1));
        assert_eq!((calls.missing(0), calls.missing(1)), (vec![], vec![]));
        calls.finish(1, 0);
        assert!(!calls.is_being_copied(0) && !calls.is_over(0) && !calls.is_over(1));
        calls.take(1, 0).unwrap();
        calls.finish(1, 0);
        assert!(calls.is_over(1) && !calls.is_over(0));
        assert_eq!(calls.offer_for(1), None);
    }

    /// A rank whose transfers are finished will return, and may then join a collective that waits for it.
    #[test]
    fn a_rank_whose_transfers_are_over_is_awaited_without_a_mismatch() {
        let mut calls = PendingCalls::new(2);
        calls.exchange(0, [send(1)], []).unwrap();
        calls.exchange(1, [], [recv(0)]).unwrap();
        calls.take(1, 0).unwrap();
        calls.finish(1, 0);
        calls.withdraw(0);
        calls.collective(0, barrier()).unwrap();
        assert!(calls.is_over(1) && calls.all_collective().is_none());
        assert_eq!(calls.missing(0), [1]);
        calls.withdraw(1);
        calls.collective(1, barrier()).unwrap();
        assert_eq!(calls.all_collective().map(|all| all.len()), Some(2));
    }

    #[test]
    fn a_mismatch_names_the_direct_calls_first() {
        let mut calls = PendingCalls::new(3);
        calls.exchange(1, [], [recv(0)]).unwrap();
        calls.exchange(2, [send(1)], []).unwrap();
        // Ranks 0 and 1 wait for each other directly, and also through rank 2.
        let error = calls.exchange(0, [send(2)], [recv(1)]).unwrap_err();
        let expected = CommError::mismatch((0, recv(1).call), (1, recv(0).call));
        assert_eq!(error, expected);
    }
}
