//! The decisions of the matching: each rule alone, then random programs in random interleavings, checked against an independent account
//! of the matched calls.

use proptest::prelude::*;

use super::*;
use crate::call::ReduceOp;
use crate::dtype::DType;

fn send(peer: usize, len: usize) -> Call {
    Call::new(Operation::Send { peer }, len, DType::F32)
}

fn recv(peer: usize, len: usize) -> Call {
    Call::new(Operation::Recv { peer }, len, DType::F32)
}

fn exchange(to: usize, from: usize) -> Call {
    Call::new(Operation::SendRecv { to, from }, 3, DType::F32)
}

fn reduce(len: usize) -> Call {
    Call::new(Operation::AllReduce(ReduceOp::Sum), len, DType::BF16)
}

fn barrier() -> Call {
    Call::without_data(Operation::Barrier)
}

fn pair(left_rank: usize, left: Call, right_rank: usize, right: Call) -> CommError {
    CommError::mismatch((left_rank, left), (right_rank, right))
}

/// Posts calls in order, and returns the decision about the last of them.
fn after(world_size: usize, posts: &[(usize, &[Call])]) -> Result<Vec<usize>, CommError> {
    let mut matching = Matching::new(world_size);
    let mut outcome = Ok(Vec::new());
    for (rank, calls) in posts {
        outcome = matching.post(*rank, calls);
    }
    outcome
}

#[test]
fn equal_collectives_release_everybody_at_once() {
    let mut matching = Matching::new(3);
    assert_eq!(matching.post(2, &[reduce(4), barrier()]), Ok(vec![]));
    assert_eq!(matching.post(0, &[reduce(4), barrier()]), Ok(vec![]));
    assert_eq!(matching.missing(2), [1]);
    assert_eq!(matching.post(1, &[reduce(4), barrier()]), Ok(vec![0, 1, 2]));
    assert_eq!(matching.post(1, &[barrier()]), Ok(vec![]));
}

#[test]
fn unequal_collectives_are_named_at_the_first_difference() {
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
fn transfers_involve_only_their_two_ranks() {
    let mut matching = Matching::new(4);
    assert_eq!(matching.post(3, &[barrier()]), Ok(vec![]));
    assert_eq!(matching.post(1, &[recv(2, 5)]), Ok(vec![]));
    assert_eq!(matching.post(2, &[send(1, 5)]), Ok(vec![1, 2]));
    assert_eq!(after(3, &[(0, &[exchange(1, 1)]), (1, &[exchange(0, 0)])]), Ok(vec![0, 1]));
    assert_eq!(after(2, &[(0, &[exchange(1, 1)]), (1, &[recv(0, 3), send(0, 3)])]), Ok(vec![0, 1]));
    let ring: [(usize, &[Call]); 3] = [(0, &[exchange(1, 2)]), (1, &[exchange(2, 0)]), (2, &[exchange(0, 1)])];
    assert_eq!(after(3, &ring), Ok(vec![0, 1, 2]));
}

#[test]
fn transfers_of_a_pair_meet_in_order() {
    let mut matching = Matching::new(2);
    assert_eq!(matching.post(0, &[send(1, 1), send(1, 2)]), Ok(vec![]));
    assert_eq!(matching.post(1, &[recv(0, 1)]), Ok(vec![1]), "half of the other's post is enough for this one");
    assert_eq!(matching.missing(0), [1]);
    assert_eq!(matching.post(1, &[recv(0, 2)]), Ok(vec![0, 1]));
    let outcome = after(2, &[(0, &[send(1, 1), send(1, 2)]), (1, &[recv(0, 2), recv(0, 1)])]);
    assert_eq!(outcome, Err(pair(0, send(1, 1), 1, recv(0, 2))));
}

#[test]
fn transfers_need_equal_length_and_dtype() {
    let outcome = after(3, &[(2, &[recv(0, 5)]), (0, &[send(2, 6)])]);
    assert_eq!(outcome, Err(pair(0, send(2, 6), 2, recv(0, 5))));
    let bytes = Call::new(Operation::Recv { peer: 0 }, 6, DType::U8);
    assert_eq!(after(2, &[(0, &[send(1, 6)]), (1, &[bytes])]), Err(pair(0, send(1, 6), 1, bytes)));
}

#[test]
fn a_rank_meets_itself_inside_a_group() {
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
fn a_collective_and_a_transfer_that_wait_for_each_other() {
    let expected = Err(pair(0, reduce(4), 1, recv(0, 1)));
    assert_eq!(after(3, &[(0, &[reduce(4)]), (1, &[recv(0, 1)])]), expected);
    assert_eq!(after(3, &[(1, &[recv(0, 1)]), (0, &[reduce(4)])]), expected);
    // There is no mismatch as long as the collective's rank is not the one waited for.
    assert_eq!(after(3, &[(0, &[reduce(4)]), (1, &[recv(2, 1)])]), Ok(vec![]));
    let outcome = after(3, &[(0, &[reduce(4)]), (1, &[recv(2, 1)]), (2, &[reduce(4)])]);
    assert_eq!(outcome, Err(pair(1, recv(2, 1), 2, reduce(4))));
}

#[test]
fn transfers_that_wait_for_each_other() {
    assert_eq!(after(2, &[(0, &[send(1, 1)]), (1, &[send(0, 1)])]), Err(pair(0, send(1, 1), 1, send(0, 1))));
    assert_eq!(after(2, &[(0, &[recv(1, 1)]), (1, &[recv(0, 1)])]), Err(pair(0, recv(1, 1), 1, recv(0, 1))));
    // A longer cycle never completes either.
    let ring: [(usize, &[Call]); 3] = [(0, &[send(1, 1)]), (1, &[send(2, 1)]), (2, &[send(0, 1)])];
    assert_eq!(after(3, &ring), Err(pair(0, send(1, 1), 2, send(0, 1))));
    // The transfers of one direction match, and both ranks wait for the rest.
    let outcome = after(2, &[(0, &[send(1, 1), send(1, 2)]), (1, &[recv(0, 1), send(0, 2)])]);
    assert_eq!(outcome, Err(pair(0, send(1, 2), 1, send(0, 2))));
}

#[test]
fn a_group_of_collectives_and_transfers_waits_for_both() {
    let mut matching = Matching::new(3);
    assert_eq!(matching.post(0, &[reduce(4), send(1, 1)]), Ok(vec![]));
    assert_eq!(matching.post(1, &[recv(0, 1)]), Ok(vec![1]), "the transfer does not wait for the collective");
    assert_eq!(matching.post(1, &[reduce(4)]), Ok(vec![]));
    assert_eq!(matching.post(2, &[reduce(4), recv(0, 2)]), Ok(vec![0, 1]), "rank 2 still waits for its data");
    assert_eq!(matching.missing(2), [0]);
    assert_eq!(matching.post(0, &[send(2, 2)]), Ok(vec![0, 2]));
}

#[test]
fn missing_ranks_are_found_through_others() {
    let mut matching = Matching::new(5);
    assert_eq!(matching.post(0, &[send(1, 1)]), Ok(vec![]));
    assert_eq!(matching.post(1, &[recv(2, 1)]), Ok(vec![]));
    assert_eq!(matching.missing(0), [2], "rank 1 is there, and waits for rank 2 itself");
    assert_eq!(matching.post(4, &[barrier()]), Ok(vec![]));
    assert_eq!(matching.missing(4), [2, 3]);
    assert!(matching.needs(0, 1) && !matching.needs(0, 2) && matching.needs(4, 0) && !matching.needs(4, 4));
}

/// The program of a rank: its lists of calls in order.
pub(in crate::bootstrap) type Program = Vec<Vec<Call>>;

/// One step of the programs: some collectives, and some transfers from rank to rank.
pub(in crate::bootstrap) type Step = (Vec<Call>, Vec<(usize, usize, usize)>);

pub(in crate::bootstrap) fn steps(world_size: usize) -> impl Strategy<Value = Vec<Step>> {
    let collective = prop_oneof![Just(barrier()), (1..3usize).prop_map(reduce)];
    let collectives = prop_oneof![Just(vec![]), prop::collection::vec(collective, 1..3)];
    let transfers = prop::collection::vec((0..world_size, 0..world_size, 1..3usize), 0..4);
    prop::collection::vec((collectives, transfers), 1..6)
}

/// The calls of each rank in the steps; a rank without calls in a step posts nothing.
pub(in crate::bootstrap) fn programs(world_size: usize, steps: &[Step]) -> Vec<Program> {
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

/// The collectives among the calls, in order.
fn collectives(posts: &[Vec<Call>]) -> Vec<Call> {
    posts.concat().into_iter().filter(|call| call.operation.peers() == (None, None)).collect()
}

fn lengths(posts: &[Vec<Call>], is_half: impl Fn(Operation) -> bool) -> Vec<(usize, Option<DType>)> {
    posts.concat().into_iter().filter(|call| is_half(call.operation)).map(|call| (call.len, call.dtype)).collect()
}

/// Asserts that every released call has its counterpart among the posted calls.
fn account(programs: &[Program], posted: &[usize], released: &[usize]) {
    let world = 0..programs.len();
    for rank in world.clone() {
        let done = collectives(&programs[rank][..released[rank]]);
        for peer in world.clone() {
            let theirs = collectives(&programs[peer][..posted[peer]]);
            assert!(theirs.starts_with(&done), "rank {rank} was released from {done:?}, rank {peer} posted {theirs:?}");
            let sends = |op: Operation| op.peers().0 == Some(peer);
            let receives = |op: Operation| op.peers().1 == Some(rank);
            let sent = lengths(&programs[rank][..posted[rank]], sends);
            let received = lengths(&programs[peer][..posted[peer]], receives);
            let sent_and_released = lengths(&programs[rank][..released[rank]], sends);
            let received_and_released = lengths(&programs[peer][..released[peer]], receives);
            assert!(received.starts_with(&sent_and_released), "{rank} to {peer}: {sent_and_released:?} {received:?}");
            assert!(sent.starts_with(&received_and_released), "{rank} to {peer}: {sent:?} {received_and_released:?}");
        }
    }
}

/// Runs all programs until they end or no rank can post; `order` chooses the next rank to post.
fn interleave(programs: &[Program], order: &[prop::sample::Index]) -> Result<Vec<usize>, CommError> {
    let mut matching = Matching::new(programs.len());
    let (mut posted, mut released) = (vec![0; programs.len()], vec![0; programs.len()]);
    for turn in 0.. {
        let may_post = |rank: &usize| posted[*rank] == released[*rank] && posted[*rank] < programs[*rank].len();
        let ready: Vec<usize> = (0..programs.len()).filter(may_post).collect();
        if ready.is_empty() {
            break;
        }
        let rank = *order[turn % order.len()].get(&ready);
        posted[rank] += 1;
        let now = matching.post(rank, &programs[rank][posted[rank] - 1])?;
        now.iter().for_each(|&rank| released[rank] += 1);
        account(programs, &posted, &released);
    }
    for rank in (0..programs.len()).filter(|&rank| posted[rank] > released[rank]) {
        let missing = matching.missing(rank);
        assert!(!missing.is_empty(), "rank {rank} waits for nobody, and no cycle was found");
        assert!(missing.iter().all(|&peer| released[peer] == programs[peer].len()), "{missing:?} are waiting");
    }
    Ok(released)
}

pub(in crate::bootstrap) fn orders() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 40)
}

/// Returns a call that differs from `call` in one property.
pub(in crate::bootstrap) fn altered(call: Call, how: usize, world_size: usize) -> Call {
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn equal_programs_always_complete(
        (world_size, steps) in (1..6usize).prop_flat_map(|world_size| (Just(world_size), steps(world_size))),
        order in orders(),
    ) {
        let programs = programs(world_size, &steps);
        let released = interleave(&programs, &order).unwrap_or_else(|error| panic!("{error}"));
        let all: Vec<usize> = programs.iter().map(Vec::len).collect();
        prop_assert_eq!(released, all);
    }

    #[test]
    fn one_altered_call_never_passes(
        (world_size, steps) in (2..6usize).prop_flat_map(|world_size| (Just(world_size), steps(world_size))),
        order in orders(),
        (rank, post, call, how) in any::<(prop::sample::Index, prop::sample::Index, prop::sample::Index, usize)>(),
    ) {
        let mut programs = programs(world_size, &steps);
        let rank = rank.index(world_size);
        prop_assume!(!programs[rank].is_empty());
        let post = post.index(programs[rank].len());
        let calls = programs[rank][post].len();
        let call = &mut programs[rank][post][call.index(calls)];
        *call = altered(*call, how, world_size);
        // A call to this rank itself without a counterpart is refused before it is posted.
        prop_assume!(check(&programs[rank][post], rank, world_size).is_ok());
        if let Ok(released) = interleave(&programs, &order) {
            prop_assert!(released != programs.iter().map(Vec::len).collect::<Vec<_>>(), "all programs completed");
        }
    }
}
