//! A list of calls that a rank has posted, with the calls that have no counterpart yet.

use std::collections::{BTreeMap, VecDeque};

use crate::error::{Call, CommError, Operation};

/// A call with its index in its list.
pub(super) type Indexed = (usize, Call);

/// Sends or receives without a counterpart, in order, by the rank that has to make it. No queue is empty.
pub(super) type Unmatched = BTreeMap<usize, VecDeque<Indexed>>;

#[derive(Clone, Debug)]
pub(super) struct List {
    /// The operation that errors name: the operation of the first call, or the operation that this call is a step of.
    pub(super) operation: Operation,
    /// Whether the rank waits until the list is over.
    pub(super) is_awaited: bool,
    /// The collectives, in order; empty once every rank has posted the same ones.
    pub(super) collectives: Vec<Call>,
    pub(super) sends: Unmatched,
    pub(super) receives: Unmatched,
    /// The number of matched parts that are being carried out: each send, each receive, and all collectives together.
    pub(super) running: usize,
}

impl List {
    pub(super) fn new(calls: &[Call], is_awaited: bool) -> Self {
        let mut list = List {
            operation: calls.first().map_or(Operation::Exchange, Call::called),
            is_awaited,
            collectives: Vec::new(),
            sends: Unmatched::new(),
            receives: Unmatched::new(),
            running: 0,
        };
        for (index, &call) in calls.iter().enumerate() {
            let (to, from) = call.operation.peers();
            if to.is_none() && from.is_none() {
                list.collectives.push(call);
            }
            for (queues, peer) in [(&mut list.sends, to), (&mut list.receives, from)] {
                if let Some(peer) = peer {
                    queues.entry(peer).or_default().push_back((index, call));
                }
            }
        }
        list
    }

    /// Whether every call has its counterpart and has been carried out.
    pub(super) fn is_over(&self) -> bool {
        self.collectives.is_empty() && !self.has_transfers() && self.running == 0
    }

    /// Whether sends or receives have no counterpart.
    pub(super) fn has_transfers(&self) -> bool {
        !(self.sends.is_empty() && self.receives.is_empty())
    }

    pub(super) fn begin_collectives(&mut self) {
        self.collectives.clear();
        self.running += 1;
    }

    /// Begins the first send to `peer`.
    pub(super) fn begin_send(&mut self, peer: usize) {
        take_first(&mut self.sends, peer);
        self.running += 1;
    }

    /// Begins the first receive from `peer`.
    pub(super) fn begin_receive(&mut self, peer: usize) {
        take_first(&mut self.receives, peer);
        self.running += 1;
    }
}

fn take_first(unmatched: &mut Unmatched, peer: usize) {
    if let Some(calls) = unmatched.get_mut(&peer) {
        calls.pop_front();
        if calls.is_empty() {
            unmatched.remove(&peer);
        }
    }
}

/// Refuses calls that name a rank which does not exist, and sends of `rank` to itself without a receive in the same list, or the reverse.
pub(crate) fn check(calls: &[Call], rank: usize, world_size: usize) -> Result<(), CommError> {
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
