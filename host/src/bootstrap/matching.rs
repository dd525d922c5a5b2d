//! The matching of posts, for [`Member::agree`](super::Member::agree), as a pure state machine.
//!
//! Posts go in; releases and mismatches come out. Nothing here knows of time, threads, connections or departed ranks.
//!
//! A rank has at most one post at a time, and each of its calls must find a counterpart in another rank's post while
//! both are waiting. So an incomplete post waits for *further* posts of certain ranks, and for each of
//! them: these waits are the edges of a graph of the ranks, and posts on a cycle can never complete. A new cycle leads
//! through the newest post.

#[cfg(test)]
pub(super) mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::error::{Call, CommError, Operation};

/// Calls without a counterpart yet, in order, by the rank that has to make the counterpart.
type Unmatched = BTreeMap<usize, VecDeque<Call>>;

/// The post that a rank waits in.
#[derive(Debug)]
struct Post {
    /// Its name in errors: the operation of its first call, or the operation of which this call is a step.
    operation: Operation,
    /// Its collectives, in order; none are left once every rank's post has the same.
    collectives: Vec<Call>,
    sends: Unmatched,
    receives: Unmatched,
}

impl Post {
    fn new(calls: &[Call]) -> Self {
        let operation = calls.first().map_or(Operation::Exchange, Call::called);
        let mut post = Post { operation, collectives: Vec::new(), sends: Unmatched::new(), receives: Unmatched::new() };
        for &call in calls {
            let (to, from) = call.operation.peers();
            if to.is_none() && from.is_none() {
                post.collectives.push(call);
            }
            for (queues, peer) in [(&mut post.sends, to), (&mut post.receives, from)] {
                if let Some(peer) = peer {
                    queues.entry(peer).or_default().push_back(call);
                }
            }
        }
        post
    }

    fn is_complete(&self) -> bool {
        self.collectives.is_empty() && self.sends.is_empty() && self.receives.is_empty()
    }
}

/// Refuses calls that name a rank which does not exist, and sends of `rank` to itself without a receive in the same
/// post, or the reverse.
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

/// The posts of all ranks. After a mismatch it is not to be used again.
#[derive(Debug)]
pub(super) struct Matching {
    posts: Vec<Option<Post>>,
}

impl Matching {
    pub(super) fn new(world_size: usize) -> Self {
        Matching { posts: (0..world_size).map(|_| None).collect() }
    }

    /// `rank`, which waits in no post, makes one of `calls`, which [`check`] has passed. Returns the ranks whose posts
    /// are now complete, in order.
    ///
    /// # Errors
    /// [`CommError::Mismatch`] if some post can never be completed.
    pub(super) fn post(&mut self, rank: usize, calls: &[Call]) -> Result<Vec<usize>, CommError> {
        let mut post = Post::new(calls);
        self.match_transfers(rank, &mut post)?;
        self.compare_collectives(rank, &post)?;
        self.posts[rank] = Some(post);
        if (0..self.posts.len()).all(|rank| self.has_collectives(rank)) {
            self.posts.iter_mut().flatten().for_each(|post| post.collectives.clear());
        }

        let is_complete = |rank: &usize| self.posts[*rank].as_ref().is_some_and(Post::is_complete);
        let released: Vec<usize> = (0..self.posts.len()).filter(is_complete).collect();
        for &rank in &released {
            self.posts[rank] = None;
        }
        match self.cycle(rank) {
            Some((one, other)) => Err(CommError::mismatch(one, other)),
            None => Ok(released),
        }
    }

    /// Removes the post of `rank`, if it has one.
    pub(super) fn withdraw(&mut self, rank: usize) {
        self.posts[rank] = None;
    }

    /// The name of the post of `rank` in errors, if it has one.
    pub(super) fn operation(&self, rank: usize) -> Option<Operation> {
        self.posts[rank].as_ref().map(|post| post.operation)
    }

    /// Whether `rank` waits for a further post of `peer`.
    pub(super) fn needs(&self, rank: usize, peer: usize) -> bool {
        self.waits(rank).iter().any(|(awaited, _)| *awaited == peer)
    }

    /// The ranks without a post for which `rank` waits, directly or through other ranks that wait for them.
    pub(super) fn missing(&self, rank: usize) -> Vec<usize> {
        let mut missing = BTreeSet::new();
        let mut seen = BTreeSet::from([rank]);
        let mut open = vec![rank];
        while let Some(rank) = open.pop() {
            for (peer, _) in self.waits(rank) {
                if self.posts[peer].is_none() {
                    missing.insert(peer);
                } else if seen.insert(peer) {
                    open.push(peer);
                }
            }
        }
        missing.into_iter().collect()
    }

    fn has_collectives(&self, rank: usize) -> bool {
        self.posts[rank].as_ref().is_some_and(|post| !post.collectives.is_empty())
    }

    /// Matches the sends and receives of a new post with the waiting ones.
    fn match_transfers(&mut self, rank: usize, post: &mut Post) -> Result<(), CommError> {
        match_pairs((rank, &mut post.sends), (rank, &mut post.receives))?;
        for (peer, other) in self.posts.iter_mut().enumerate() {
            if let Some(other) = other {
                match_pairs((rank, &mut post.sends), (peer, &mut other.receives))?;
                match_pairs((peer, &mut other.sends), (rank, &mut post.receives))?;
            }
        }
        Ok(())
    }

    /// The waiting collectives are all the same, so comparing with one rank's is enough.
    fn compare_collectives(&self, rank: usize, post: &Post) -> Result<(), CommError> {
        let Some(&last) = post.collectives.last() else { return Ok(()) };
        let Some(peer) = (0..self.posts.len()).find(|&peer| self.has_collectives(peer)) else { return Ok(()) };
        let theirs = self.posts[peer].as_ref().map_or(&[][..], |other| &other.collectives);
        let longest = theirs.len().max(post.collectives.len());
        // Where one list ends early, the call before its end is named for it.
        let at = |calls: &[Call], index: usize| calls.get(index).or(calls.last()).copied().unwrap_or(last);
        let fits = |index: usize| match (post.collectives.get(index), theirs.get(index)) {
            (Some(own), Some(other)) => own.fits(other),
            _ => false,
        };
        match (0..longest).find(|&index| !fits(index)) {
            Some(index) => Err(CommError::mismatch((rank, at(&post.collectives, index)), (peer, at(theirs, index)))),
            None => Ok(()),
        }
    }

    /// The ranks of which the post of `rank` needs a further post, each with the call that needs it.
    fn waits(&self, rank: usize) -> Vec<(usize, Call)> {
        let Some(post) = &self.posts[rank] else { return Vec::new() };
        let transfers = post.sends.iter().chain(&post.receives).map(|(&peer, calls)| (peer, calls[0]));
        let collectives = post.collectives.first().into_iter().flat_map(|&call| {
            (0..self.posts.len()).filter(|&peer| !self.has_collectives(peer)).map(move |peer| (peer, call))
        });
        transfers.chain(collectives).collect()
    }

    /// If `rank` waits for itself, through others: its call and the next rank's.
    fn cycle(&self, rank: usize) -> Option<((usize, Call), (usize, Call))> {
        // A collective waits for ranks without one. Where there are only collectives, these ranks wait for no rank.
        let has_transfers = |post: &Post| !(post.sends.is_empty() && post.receives.is_empty());
        if !self.posts.iter().flatten().any(has_transfers) {
            return None;
        }
        let mut seen = BTreeSet::new();
        self.waits(rank).into_iter().find_map(|(next, call)| {
            let onward = self.path(next, rank, &mut seen)?;
            Some(((rank, call), (next, onward)))
        })
    }

    /// The call by which `from` waits for `target`, directly or through others.
    fn path(&self, from: usize, target: usize, seen: &mut BTreeSet<usize>) -> Option<Call> {
        if !seen.insert(from) {
            return None;
        }
        let waits = self.waits(from);
        let direct = waits.iter().find(|(next, _)| *next == target).map(|(_, call)| *call);
        direct.or_else(|| waits.iter().find_map(|&(next, call)| self.path(next, target, seen).map(|_| call)))
    }
}

/// Removes the sends of one rank and the receives of another that match, in order.
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
