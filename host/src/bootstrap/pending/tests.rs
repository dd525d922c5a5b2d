//! The queues of the ranks: which rank receives which event and when, and random programs whose ranks run ahead of each other.

use proptest::prelude::*;

use super::super::matching::check;
use super::super::matching::tests::{Program, altered, orders, programs, steps};
use super::*;

fn barrier() -> Call {
    Call::without_data(Operation::Barrier)
}

fn announced(calls: &[Call]) -> PendingCalls {
    PendingCalls { calls: calls.to_vec(), contribution: None, is_awaited: false }
}

fn awaited(calls: &[Call]) -> PendingCalls {
    PendingCalls { is_awaited: true, ..announced(calls) }
}

/// The ranks whose calls were completed, in order.
fn ranks(completed: Vec<Vec<(usize, PendingCalls)>>) -> Vec<Vec<usize>> {
    completed.into_iter().map(|posts| posts.into_iter().map(|(rank, _)| rank).collect()).collect()
}

#[test]
fn a_rank_is_matched_as_far_as_the_slowest_has_come() {
    let mut pending = Pending::new(3);
    for _ in 0..5 {
        assert!(pending.post(0, announced(&[barrier(), barrier()])).unwrap().is_empty());
    }
    for _ in 0..3 {
        assert!(pending.post(2, announced(&[barrier(), barrier()])).unwrap().is_empty());
    }
    assert_eq!(pending.missing(0), [1]);
    assert_eq!(ranks(pending.post(1, announced(&[barrier(), barrier()])).unwrap()), [[0, 1, 2]]);
    assert!(!pending.lacks(0, 2) && pending.lacks(0, 3) && !pending.is_awaiting(0));
    // A rank gets no report before it requests one, and then one.
    assert_eq!(pending.news(0), None);
    pending.ask(0, 4);
    assert_eq!(pending.news(0), None);
    assert_eq!(ranks(pending.post(1, awaited(&[barrier(), barrier()])).unwrap()), [[0, 1, 2]]);
    assert_eq!((pending.news(0), pending.news(0)), (Some(4), None));
    assert_eq!((pending.last_news(1), pending.last_news(1)), (Some(2), None), "what is awaited does not count");
}

#[test]
fn a_rank_hears_of_each_number_that_it_has_asked_for() {
    for asked in [[1, 3], [3, 1]] {
        let mut pending = Pending::new(2);
        for _ in 0..3 {
            pending.post(0, announced(&[barrier()])).unwrap();
        }
        asked.into_iter().for_each(|calls| pending.ask(0, calls));
        assert_eq!(pending.news(0), None);
        let told = (0..3).map(|_| {
            pending.post(1, announced(&[barrier()])).unwrap();
            pending.news(0)
        });
        assert_eq!(told.collect::<Vec<_>>(), [Some(1), None, Some(3)], "asked for {asked:?}");
        pending.ask(0, 2);
        assert_eq!(pending.news(0), None, "known already");
    }
}

#[test]
fn progress_is_told_now_and_then_without_being_asked_for() {
    let mut pending = Pending::new(1);
    let told = (0..4 * TELL_EVERY).filter_map(|_| {
        pending.post(0, announced(&[barrier()])).unwrap();
        pending.news(0)
    });
    assert_eq!(told.collect::<Vec<_>>(), [1, 2, 3, 4].map(|times| times * TELL_EVERY));
}

#[test]
fn who_leaves_takes_back_only_what_it_waits_in() {
    let mut pending = Pending::new(2);
    pending.post(0, announced(&[barrier()])).unwrap();
    pending.post(0, awaited(&[barrier()])).unwrap();
    pending.depart(0);
    let has_left = |rank| rank == 0;
    assert_eq!(ranks(pending.post(1, announced(&[barrier()])).unwrap()), [[0, 1]]);
    assert_eq!(pending.missed(has_left), None);
    assert!(pending.post(1, announced(&[barrier()])).unwrap().is_empty());
    assert_eq!(pending.missed(has_left), Some((1, 0)));
}

#[test]
fn there_is_room_for_what_members_send_and_no_more() {
    let mut pending = Pending::new(2);
    let mut posted = 0;
    while pending.has_room(0, 1024) {
        pending.post(0, announced(&[barrier(); 1024])).unwrap();
        posted += 1024;
    }
    assert!((ANNOUNCED_LIMIT as usize + CALLS_LIMIT..64 << 10).contains(&posted), "{posted}");
}

/// Announces the calls of all ranks in the given order, in which each rank may be ahead of all others by any number of calls, and none
/// waits.
fn run(programs: &[Program], order: &[prop::sample::Index]) -> Result<Vec<usize>, CommError> {
    let mut pending = Pending::new(programs.len());
    let (mut posted, mut completed) = (vec![0; programs.len()], vec![0; programs.len()]);
    let mut order = order.iter().cycle();
    loop {
        let open: Vec<usize> = (0..programs.len()).filter(|&rank| posted[rank] < programs[rank].len()).collect();
        let (false, Some(index)) = (open.is_empty(), order.next()) else { return Ok(completed) };
        let rank = open[index.index(open.len())];
        for (rank, post) in pending.post(rank, announced(&programs[rank][posted[rank]]))?.into_iter().flatten() {
            assert_eq!(post.calls, programs[rank][completed[rank]], "rank {rank}: out of order");
            completed[rank] += 1;
        }
        posted[rank] += 1;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn equal_programs_always_complete(
        (world_size, steps) in (1..6usize).prop_flat_map(|world_size| (Just(world_size), steps(world_size))),
        order in orders(),
    ) {
        let programs = programs(world_size, &steps);
        let completed = run(&programs, &order).unwrap_or_else(|error| panic!("{error}"));
        prop_assert_eq!(completed, programs.iter().map(Vec::len).collect::<Vec<_>>());
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
        prop_assume!(check(&programs[rank][post], rank, world_size).is_ok());
        if let Ok(completed) = run(&programs, &order) {
            prop_assert!(completed != programs.iter().map(Vec::len).collect::<Vec<_>>(), "all programs completed");
        }
    }
}
