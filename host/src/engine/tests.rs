//! The decisions of the engine: each rule alone, then random programs in random interleavings, compared with a plain specification after
//! every step.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::call::ReduceOp;
use crate::dtype::DType;

pub(super) fn send(peer: usize, len: usize) -> Call {
    Call::new(Operation::Send { peer }, len, DType::F32)
}

pub(super) fn recv(peer: usize, len: usize) -> Call {
    Call::new(Operation::Recv { peer }, len, DType::F32)
}

fn exchange(to: usize, from: usize) -> Call {
    Call::new(Operation::SendRecv { to, from }, 3, DType::F32)
}

pub(super) fn reduce(len: usize) -> Call {
    Call::new(Operation::AllReduce(ReduceOp::Sum), len, DType::BF16)
}

pub(super) fn barrier() -> Call {
    Call::without_data(Operation::Barrier)
}

fn pair(left_rank: usize, left: Call, right_rank: usize, right: Call) -> CommError {
    CommError::mismatch((left_rank, left), (right_rank, right))
}

/// An engine with a carrier that carries out at once whatever matches.
struct Carried {
    engine: Engine,
    over: Vec<u64>,
}

impl Carried {
    fn new(world_size: usize) -> Self {
        Carried { engine: Engine::new(world_size), over: vec![0; world_size] }
    }

    /// Posts calls that the rank waits in. Returns the ranks that have lists which are over now, once for each list.
    fn post(&mut self, rank: usize, calls: &[Call]) -> Result<Vec<usize>, CommError> {
        self.post_as(rank, calls, true)
    }

    /// Posts calls that the rank goes on from.
    fn announce(&mut self, rank: usize, calls: &[Call]) -> Result<Vec<usize>, CommError> {
        self.post_as(rank, calls, false)
    }

    fn post_as(&mut self, rank: usize, calls: &[Call], is_awaited: bool) -> Result<Vec<usize>, CommError> {
        let (_, mut open) = self.engine.post(rank, calls, is_awaited);
        while let Some(run) = open.pop() {
            open.extend(self.engine.finish(run));
        }
        let mut over = Vec::new();
        for rank in 0..self.over.len() {
            while self.engine.is_over(Ticket { rank, number: self.over[rank] + 1 }) {
                self.over[rank] += 1;
                over.push(rank);
            }
        }
        self.engine.failure().map_or(Ok(over), |failure| Err(failure.clone()))
    }

    fn missing(&self, rank: usize) -> Vec<usize> {
        self.engine.missing(rank)
    }
}

/// Posts calls in order, and returns the outcome of the last post.
fn after(world_size: usize, posts: &[(usize, &[Call])]) -> Result<Vec<usize>, CommError> {
    let mut carried = Carried::new(world_size);
    let mut outcome = Ok(Vec::new());
    for (rank, calls) in posts {
        outcome = carried.post(*rank, calls);
    }
    outcome
}

#[test]
fn post_of_equal_collectives_releases_all_at_once() {
    let mut carried = Carried::new(3);
    assert_eq!(carried.post(2, &[reduce(4), barrier()]), Ok(vec![]));
    assert_eq!(carried.post(0, &[reduce(4), barrier()]), Ok(vec![]));
    assert_eq!(carried.missing(2), [1]);
    assert_eq!(carried.post(1, &[reduce(4), barrier()]), Ok(vec![0, 1, 2]));
    assert_eq!(carried.post(1, &[barrier()]), Ok(vec![]));
}

#[test]
fn post_names_the_first_difference_of_collectives() {
    let outcome = after(4, &[(2, &[reduce(4)]), (0, &[barrier()])]);
    assert_eq!(outcome, Err(pair(0, barrier(), 2, reduce(4))));
    let outcome = after(4, &[(2, &[reduce(4)]), (3, &[reduce(5)])]);
    assert_eq!(outcome, Err(pair(2, reduce(4), 3, reduce(5))));
    let outcome = after(2, &[(0, &[reduce(4), barrier(), reduce(1)]), (1, &[reduce(4), barrier(), reduce(2)])]);
    assert_eq!(outcome, Err(pair(0, reduce(1), 1, reduce(2))));
    let outcome = after(2, &[(0, &[reduce(4), barrier()]), (1, &[reduce(4)])]);
    assert_eq!(outcome, Err(pair(0, barrier(), 1, reduce(4))), "the list that ends early gives its last call");
}

#[test]
fn post_of_transfers_involves_their_two_ranks_alone() {
    let mut carried = Carried::new(4);
    assert_eq!(carried.post(3, &[barrier()]), Ok(vec![]));
    assert_eq!(carried.post(1, &[recv(2, 5)]), Ok(vec![]));
    assert_eq!(carried.post(2, &[send(1, 5)]), Ok(vec![1, 2]));
    assert_eq!(after(3, &[(0, &[exchange(1, 1)]), (1, &[exchange(0, 0)])]), Ok(vec![0, 1]));
    assert_eq!(after(2, &[(0, &[exchange(1, 1)]), (1, &[recv(0, 3), send(0, 3)])]), Ok(vec![0, 1]));
    let ring: [(usize, &[Call]); 3] = [(0, &[exchange(1, 2)]), (1, &[exchange(2, 0)]), (2, &[exchange(0, 1)])];
    assert_eq!(after(3, &ring), Ok(vec![0, 1, 2]));
}

#[test]
fn post_matches_transfers_of_a_pair_in_order() {
    let mut carried = Carried::new(2);
    assert_eq!(carried.post(0, &[send(1, 1), send(1, 2)]), Ok(vec![]));
    assert_eq!(carried.post(1, &[recv(0, 1)]), Ok(vec![1]), "half of the other's post is enough for this one");
    assert_eq!(carried.missing(0), [1]);
    assert_eq!(carried.post(1, &[recv(0, 2)]), Ok(vec![0, 1]));
    let outcome = after(2, &[(0, &[send(1, 1), send(1, 2)]), (1, &[recv(0, 2), recv(0, 1)])]);
    assert_eq!(outcome, Err(pair(0, send(1, 1), 1, recv(0, 2))));
}

#[test]
fn post_refuses_transfers_of_other_length_or_dtype() {
    let outcome = after(3, &[(2, &[recv(0, 5)]), (0, &[send(2, 6)])]);
    assert_eq!(outcome, Err(pair(0, send(2, 6), 2, recv(0, 5))));
    let bytes = Call::new(Operation::Recv { peer: 0 }, 6, DType::U8);
    assert_eq!(after(2, &[(0, &[send(1, 6)]), (1, &[bytes])]), Err(pair(0, send(1, 6), 1, bytes)));
}

#[test]
fn post_of_a_group_lets_a_rank_send_to_itself() {
    assert_eq!(after(1, &[(0, &[send(0, 2), recv(0, 2)])]), Ok(vec![0]));
    assert_eq!(after(2, &[(1, &[recv(1, 2), send(1, 2)])]), Ok(vec![1]));
    assert_eq!(after(2, &[(0, &[exchange(0, 0)])]), Ok(vec![0]));
    let outcome = after(2, &[(0, &[send(0, 2), recv(0, 3)])]);
    assert_eq!(outcome, Err(pair(0, send(0, 2), 0, recv(0, 3))));

    let refused = |calls: &[Call], peer| {
        let error = check(calls, 1, 3).expect_err("refused");
        assert!(matches!(error, CommError::InvalidPeer { peer: found, rank: 1, .. } if found == peer), "{error:?}");
    };
    refused(&[send(1, 2)], 1);
    refused(&[barrier(), recv(1, 2), send(0, 1)], 1);
    refused(&[exchange(1, 0)], 1);
    refused(&[send(3, 2)], 3);
    refused(&[exchange(0, 7)], 7);
    refused(&[Call::new(Operation::Broadcast { root: 3 }, 1, DType::F32)], 3);
    assert_eq!(check(&[exchange(1, 0), recv(1, 3), exchange(2, 2)], 1, 3), Ok(()));
}

/// A rank in a collective while another waits for it in a transfer.
#[test]
fn post_refuses_a_collective_and_a_transfer_in_a_circle() {
    let expected = Err(pair(0, reduce(4), 1, recv(0, 1)));
    assert_eq!(after(3, &[(0, &[reduce(4)]), (1, &[recv(0, 1)])]), expected);
    assert_eq!(after(3, &[(1, &[recv(0, 1)]), (0, &[reduce(4)])]), expected);
    // There is no mismatch as long as the collective's rank is not the one waited for.
    assert_eq!(after(3, &[(0, &[reduce(4)]), (1, &[recv(2, 1)])]), Ok(vec![]));
    let outcome = after(3, &[(0, &[reduce(4)]), (1, &[recv(2, 1)]), (2, &[reduce(4)])]);
    assert_eq!(outcome, Err(pair(1, recv(2, 1), 2, reduce(4))));
}

#[test]
fn post_refuses_transfers_in_a_circle() {
    assert_eq!(after(2, &[(0, &[send(1, 1)]), (1, &[send(0, 1)])]), Err(pair(0, send(1, 1), 1, send(0, 1))));
    assert_eq!(after(2, &[(0, &[recv(1, 1)]), (1, &[recv(0, 1)])]), Err(pair(0, recv(1, 1), 1, recv(0, 1))));
    // A longer cycle never completes either.
    let ring: [(usize, &[Call]); 3] = [(0, &[send(1, 1)]), (1, &[send(2, 1)]), (2, &[send(0, 1)])];
    assert_eq!(after(3, &ring), Err(pair(1, send(2, 1), 2, send(0, 1))));
    // The transfers of one direction match, and both ranks wait for the rest.
    let outcome = after(2, &[(0, &[send(1, 1), send(1, 2)]), (1, &[recv(0, 1), send(0, 2)])]);
    assert_eq!(outcome, Err(pair(0, send(1, 2), 1, send(0, 2))));
}

#[test]
fn post_of_a_group_waits_for_collectives_and_transfers() {
    let mut carried = Carried::new(3);
    assert_eq!(carried.post(0, &[reduce(4), send(1, 1)]), Ok(vec![]));
    assert_eq!(carried.post(1, &[recv(0, 1)]), Ok(vec![1]), "the transfer does not wait for the collective");
    assert_eq!(carried.post(1, &[reduce(4)]), Ok(vec![]));
    assert_eq!(carried.post(2, &[reduce(4), recv(0, 2)]), Ok(vec![0, 1]), "rank 2 still waits for its data");
    assert_eq!(carried.missing(2), [0]);
    assert_eq!(carried.post(0, &[send(2, 2)]), Ok(vec![0, 2]));
}

#[test]
fn missing_ranks_are_found_through_others() {
    let mut carried = Carried::new(5);
    assert_eq!(carried.post(0, &[send(1, 1)]), Ok(vec![]));
    assert_eq!(carried.post(1, &[recv(2, 1)]), Ok(vec![]));
    assert_eq!(carried.missing(0), [2], "rank 1 is there, and waits for rank 2 itself");
    assert_eq!(carried.post(4, &[barrier()]), Ok(vec![]));
    assert_eq!(carried.missing(4), [2, 3]);
}

/// A deadline applies only to missing ranks, not to calls that are being carried out.
#[test]
fn missing_is_empty_where_all_transfers_match() {
    let mut engine = Engine::new(3);
    let (_, runs) = engine.post(0, &[send(1, 1), send(1, 1), send(2, 1), recv(2, 1)], true);
    assert!(runs.is_empty());
    let (ticket, runs) = engine.post(1, &[recv(0, 1), recv(0, 1)], true);
    let ends = |send, receive| (CallIndex { rank: 0, index: send }, CallIndex { rank: 1, index: receive });
    let expected = [ends(0, 0), ends(1, 1)].map(|(send, receive)| Run::Transfer { send, receive });
    assert_eq!(runs, expected);
    assert_eq!((engine.missing(0), engine.missing(1)), (vec![2], vec![]));
    engine.expire(1, Duration::from_secs(1));
    assert_eq!(engine.failure(), None, "its calls are being carried out");
    assert!(engine.finish(runs[0]).is_empty() && engine.is_running(0) && !engine.is_over(ticket));
    assert!(engine.finish(runs[1]).is_empty() && engine.is_over(ticket) && !engine.is_running(0));
    engine.expire(0, Duration::from_secs(1));
    let timeout = CommError::Timeout {
        operation: Operation::Send { peer: 1 },
        missing: vec![2],
        deadline: Duration::from_secs(1),
    };
    assert_eq!(engine.failure(), Some(&timeout));
    let (_, runs) = engine.post(2, &[recv(0, 1), send(0, 1)], true);
    assert!(runs.is_empty(), "nothing begins after a failure");
}

#[test]
fn post_names_the_direct_calls_of_a_mismatch_first() {
    let mut carried = Carried::new(3);
    assert_eq!(carried.post(1, &[recv(0, 1)]), Ok(vec![]));
    assert_eq!(carried.post(2, &[send(1, 1)]), Ok(vec![]));
    // Ranks 0 and 1 wait for each other directly, and also through rank 2.
    assert_eq!(carried.post(0, &[send(2, 1), recv(1, 1)]), Err(pair(0, recv(1, 1), 1, recv(0, 1))));
}

#[test]
fn depart_is_a_failure_once_the_rank_is_needed() {
    let mut carried = Carried::new(3);
    assert_eq!(carried.announce(0, &[barrier()]), Ok(vec![]));
    assert_eq!(carried.post(0, &[barrier()]), Ok(vec![]));
    carried.engine.depart(0, Departure::Left);
    assert!(!carried.engine.is_waiting(0), "it takes back only the list that it waits in");
    assert_eq!(carried.post(1, &[send(2, 1)]), Ok(vec![]));
    assert_eq!(carried.post(2, &[recv(1, 1)]), Ok(vec![1, 2]));
    assert_eq!(carried.post(1, &[barrier()]), Ok(vec![]));
    assert_eq!(carried.post(2, &[barrier()]), Ok(vec![0, 1, 2]));
    let gone = CommError::PeerGone { operation: Operation::Barrier, rank: 0, departure: Departure::Left };
    assert_eq!(carried.post(2, &[barrier()]), Err(gone));
}

/// The program of a rank: its lists of calls in order.
type Program = Vec<Vec<Call>>;

/// One step of the programs: some collectives, and some transfers from rank to rank.
type Step = (Vec<Call>, Vec<(usize, usize, usize)>);

fn steps(world_size: usize) -> impl Strategy<Value = Vec<Step>> {
    let collective = prop_oneof![Just(barrier()), (1..3usize).prop_map(reduce)];
    let collectives = prop_oneof![Just(vec![]), prop::collection::vec(collective, 1..3)];
    let transfers = prop::collection::vec((0..world_size, 0..world_size, 1..3usize), 0..4);
    prop::collection::vec((collectives, transfers), 1..6)
}

/// The calls of each rank in the steps; a rank without calls in a step posts nothing.
fn programs(world_size: usize, steps: &[Step]) -> Vec<Program> {
    let part = |rank: usize, (collectives, transfers): &Step| {
        let mut calls = collectives.clone();
        for &(source, destination, len) in transfers {
            calls.extend((source == rank).then(|| send(destination, len)));
            calls.extend((destination == rank).then(|| recv(source, len)));
        }
        (!calls.is_empty()).then_some(calls)
    };
    (0..world_size).map(|rank| steps.iter().filter_map(|step| part(rank, step)).collect()).collect()
}

/// The plain specification: the state of a group after these posts, in whichever order they were made, where calls that match are carried out
/// at once. It tries every rule until none applies.
struct Specified {
    /// The number of lists of each rank that are over.
    over: Vec<usize>,
    /// The calls in the oldest list of each rank that have not matched.
    open: Vec<Vec<Call>>,
}

fn is_collective(call: &Call) -> bool {
    call.operation.peers() == (None, None)
}

impl Specified {
    fn new(posted: &[Program]) -> Self {
        let first = |lists: &Program| lists.first().cloned().unwrap_or_default();
        let mut state = Specified { over: vec![0; posted.len()], open: posted.iter().map(first).collect() };
        while state.match_transfer() || state.match_collectives() || state.end_list(posted) {}
        state
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let world_size = self.open.len();
        (0..world_size).flat_map(move |source| (0..world_size).map(move |destination| (source, destination)))
    }

    /// The first send from one rank to another, and the first receive there.
    fn transfer(&self, source: usize, destination: usize) -> Option<(Call, Call)> {
        let send = self.open[source].iter().find(|call| call.operation.peers().0 == Some(destination))?;
        let receive = self.open[destination].iter().find(|call| call.operation.peers().1 == Some(source))?;
        Some((*send, *receive))
    }

    /// The first send to a rank meets its first receive, if they are equal in length and dtype.
    fn match_transfer(&mut self) -> bool {
        for (source, destination) in self.pairs() {
            if let Some((send, receive)) = self.transfer(source, destination)
                && (send.len, send.dtype) == (receive.len, receive.dtype)
            {
                for (rank, call) in [(source, send), (destination, receive)] {
                    let index = self.open[rank].iter().position(|open| *open == call).expect("it is open");
                    self.open[rank].remove(index);
                }
                return true;
            }
        }
        false
    }

    fn collectives(&self, rank: usize) -> Vec<Call> {
        self.open[rank].iter().copied().filter(is_collective).collect()
    }

    /// The collectives of all ranks are the same.
    fn match_collectives(&mut self) -> bool {
        let first = self.collectives(0);
        let are_equal = !first.is_empty() && (1..self.open.len()).all(|rank| self.collectives(rank) == first);
        if are_equal {
            self.open.iter_mut().for_each(|calls| calls.retain(|call| !is_collective(call)));
        }
        are_equal
    }

    /// A list without unmatched calls is over, and the next one follows.
    fn end_list(&mut self, posted: &[Program]) -> bool {
        let is_over = |&rank: &usize| self.open[rank].is_empty() && self.over[rank] < posted[rank].len();
        let Some(rank) = (0..posted.len()).find(is_over) else { return false };
        self.over[rank] += 1;
        self.open[rank] = posted[rank].get(self.over[rank]).cloned().unwrap_or_default();
        true
    }

    /// Whether a call of one rank waits for a further call of another.
    fn waits(&self, rank: usize, peer: usize) -> bool {
        self.open[rank].iter().any(|call| match call.operation.peers() {
            (None, None) => self.collectives(peer).is_empty(),
            (to, from) => to == Some(peer) || from == Some(peer),
        })
    }

    /// The ranks that a rank waits for, through any number of others.
    fn waits_for(&self, rank: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut open = vec![rank];
        while let Some(rank) = open.pop() {
            open.extend((0..self.open.len()).filter(|&peer| self.waits(rank, peer) && found.insert(peer)));
        }
        found
    }

    fn missing(&self, rank: usize) -> Vec<usize> {
        self.waits_for(rank).into_iter().filter(|&peer| self.open[peer].is_empty()).collect()
    }

    /// Whether calls can never match: two that meet differ, or ranks wait in a cycle.
    fn has_mismatch(&self) -> bool {
        let differ = |(one, other)| {
            let (left, right) = (self.collectives(one), self.collectives(other));
            self.transfer(one, other).is_some() || !left.is_empty() && !right.is_empty() && left != right
        };
        self.pairs().any(differ) || (0..self.open.len()).any(|rank| self.waits_for(rank).contains(&rank))
    }

    /// Whether a rank waits for a rank that has left.
    fn needs(&self, left: usize) -> bool {
        self.open[left].is_empty() && (0..self.open.len()).any(|rank| self.waits(rank, left))
    }

    /// Compares the engine's state with this one.
    fn compare(&self, carried: &Carried, has_left: &[bool]) {
        let gone = (0..has_left.len()).any(|rank| has_left[rank] && self.needs(rank));
        match carried.engine.failure() {
            None => {
                assert!(!self.has_mismatch() && !gone, "no failure was found: {:?}", self.open);
                assert_eq!(carried.over.iter().map(|&over| over as usize).collect::<Vec<_>>(), self.over);
                (0..has_left.len()).for_each(|rank| assert_eq!(carried.missing(rank), self.missing(rank)));
            }
            Some(CommError::Mismatch { left_rank, left, right_rank, right }) => {
                assert!(self.has_mismatch(), "{:?}", self.open);
                assert!(
                    self.open[*left_rank].contains(left) && self.open[*right_rank].contains(right),
                    "{:?}",
                    self.open
                );
            }
            Some(CommError::PeerGone { rank, .. }) => assert!(has_left[*rank] && self.needs(*rank), "{:?}", self.open),
            Some(failure) => panic!("{failure}"),
        }
    }
}

/// Runs all programs until they end, fail, or no rank can post; `order` chooses the next rank to post, and `stays` has the number of lists
/// after which a rank leaves. Ranks wait in their lists, or go on from them and may be ahead of each other by any number of calls. Compares the
/// engine with its specification after every step. Returns the lists of each rank that are over.
fn interleave(
    programs: &[Program],
    stays: &[usize],
    order: &[prop::sample::Index],
    are_awaited: bool,
) -> Result<Vec<u64>, CommError> {
    let world_size = programs.len();
    let (mut carried, mut posted) = (Carried::new(world_size), vec![Program::new(); world_size]);
    let mut has_left = vec![false; world_size];
    for turn in 0.. {
        let is_free = |rank: usize| posted[rank].len() as u64 == carried.over[rank] || !are_awaited;
        let has_more = |rank: usize| posted[rank].len() < programs[rank].len() || stays[rank] == posted[rank].len();
        let ready: Vec<usize> =
            (0..world_size).filter(|&rank| !has_left[rank] && is_free(rank) && has_more(rank)).collect();
        if ready.is_empty() {
            break;
        }
        let rank = *order[turn % order.len()].get(&ready);
        if stays[rank] == posted[rank].len() {
            has_left[rank] = true;
            carried.engine.depart(rank, Departure::Left);
        } else {
            let list = programs[rank][posted[rank].len()].clone();
            posted[rank].push(list.clone());
            // The failure is compared below.
            let _ = carried.post_as(rank, &list, are_awaited);
        }
        Specified::new(&posted).compare(&carried, &has_left);
        if let Some(failure) = carried.engine.failure() {
            return Err(failure.clone());
        }
    }
    Ok(carried.over)
}

fn orders() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 40)
}

/// Returns a call that differs from `call` in one property.
fn altered(call: Call, how: usize, world_size: usize) -> Call {
    let mut call = call;
    let next = |peer: usize| (peer + 1) % world_size;
    match how % 3 {
        0 => call.len += 1,
        1 => call.dtype = Some(DType::I64),
        _ => {
            call.operation = match call.operation {
                Operation::Send { peer } if how % 2 == 0 => Operation::Send { peer: next(peer) },
                Operation::Send { peer } => Operation::Recv { peer },
                Operation::Recv { peer } if how % 2 == 0 => Operation::Recv { peer: next(peer) },
                Operation::Recv { peer } => Operation::Send { peer },
                Operation::Barrier => Operation::AllGather,
                _ => Operation::Barrier,
            }
        }
    }
    call
}

/// The choice of one call, and of its alteration.
type Alteration = (prop::sample::Index, prop::sample::Index, prop::sample::Index, usize);

/// Alters a call of the programs. Returns whether the altered list can be posted: a call to the rank itself needs its counterpart.
fn alter(programs: &mut [Program], (rank, post, call, how): &Alteration) -> bool {
    let world_size = programs.len();
    let rank = rank.index(world_size);
    if programs[rank].is_empty() {
        return false;
    }
    let list = post.get_mut(&mut programs[rank]);
    let call = call.get_mut(list);
    *call = altered(*call, *how, world_size);
    check(list, rank, world_size).is_ok()
}

const STAYS: [usize; 8] = [usize::MAX; 8];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn engine_completes_equal_programs(
        (world_size, steps) in (1..9usize).prop_flat_map(|world_size| (Just(world_size), steps(world_size))),
        (order, are_awaited) in (orders(), any::<bool>()),
    ) {
        let programs = programs(world_size, &steps);
        let over = interleave(&programs, &STAYS, &order, are_awaited).unwrap_or_else(|error| panic!("{error}"));
        let all: Vec<u64> = programs.iter().map(|program| program.len() as u64).collect();
        prop_assert_eq!(over, all);
    }

    #[test]
    fn engine_never_passes_one_altered_call(
        (world_size, steps) in (2..9usize).prop_flat_map(|world_size| (Just(world_size), steps(world_size))),
        (order, are_awaited) in (orders(), any::<bool>()),
        alteration in any::<Alteration>(),
    ) {
        let mut programs = programs(world_size, &steps);
        prop_assume!(alter(&mut programs, &alteration));
        if let Ok(over) = interleave(&programs, &STAYS, &order, are_awaited) {
            let all: Vec<u64> = programs.iter().map(|program| program.len() as u64).collect();
            prop_assert!(over != all, "all programs completed");
        }
    }

    /// Up to three altered calls and two ranks that leave.
    #[test]
    fn programs_of_eight_ranks_end_as_specified(
        steps in steps(8),
        (order, are_awaited) in (orders(), any::<bool>()),
        alterations in prop::collection::vec(any::<Alteration>(), 0..4),
        leaving in prop::collection::vec((0..8usize, 0..5usize), 0..3),
    ) {
        let mut programs = programs(8, &steps);
        for alteration in &alterations {
            prop_assume!(alter(&mut programs, alteration));
        }
        let mut stays = STAYS;
        leaving.iter().for_each(|&(rank, lists)| stays[rank] = lists);
        // Every state on the way is compared.
        let _ = interleave(&programs, &stays, &order, are_awaited);
    }
}
