//! The assignment of examples to ranks: in every epoch, for every number of ranks, and across restarts.

use std::collections::HashMap;

use gradsync::Error;
use gradsync::comm::{Ranks, Split};
use gradsync::train::{Position, ShardOptions, ShardedIndices, Tail};
use gradsync_tests::ranks::{agreed, guarded, on_ranks};
use proptest::prelude::*;

/// The order of an epoch, as a single rank sees it.
fn order(len: usize, options: ShardOptions, epoch: u64) -> Vec<usize> {
    let position = Position { epoch, ..Position::start(len, options) };
    ShardedIndices::resume(len, 0, 1, options, position).unwrap().collect()
}

fn tails() -> impl Strategy<Value = Tail> {
    prop_oneof![Just(Tail::Drop), Just(Tail::Pad), Just(Tail::Uneven)]
}

fn counted(examples: impl IntoIterator<Item = usize>) -> HashMap<usize, usize> {
    let mut counts = HashMap::new();
    examples.into_iter().for_each(|example| *counts.entry(example).or_default() += 1);
    counts
}

proptest! {
    #[test]
    fn each_epoch_is_a_permutation_and_epochs_and_seeds_differ(
        len in 0usize..2000,
        seed in any::<u64>(),
        epoch in 0u64..5,
    ) {
        let options = ShardOptions::default().with_seed(seed);
        let own = order(len, options, epoch);
        let mut sorted = own.clone();
        sorted.sort_unstable();
        prop_assert_eq!(sorted, (0..len).collect::<Vec<_>>());
        prop_assert_eq!(&own, &order(len, options, epoch));
        // Two random orders out of 20! are equal once in 2e18 pairs.
        if len >= 20 {
            prop_assert_ne!(&own, &order(len, options, epoch + 1));
            prop_assert_ne!(&own, &order(len, options.with_seed(seed ^ 1), epoch));
        }
        prop_assert_eq!(order(len, options.with_shuffles(false), epoch), (0..len).collect::<Vec<_>>());
    }

    #[test]
    fn ranks_share_an_epoch(
        len in 0usize..300,
        world_size in 1usize..12,
        seed in any::<u64>(),
        tail in tails(),
    ) {
        let options = ShardOptions::default().with_seed(seed).with_tail(tail);
        let ranks = (0..world_size).map(|rank| ShardedIndices::new(len, rank, world_size, options).unwrap());
        let lens: Vec<usize> = ranks.clone().map(|rank| rank.remaining()).collect();
        let taken: Vec<Vec<usize>> = ranks.map(Iterator::collect).collect();
        prop_assert_eq!(&lens, &taken.iter().map(Vec::len).collect::<Vec<_>>());
        let counts = counted(taken.iter().flatten().copied());
        let repeated: usize = counts.values().map(|count| count - 1).sum();
        match tail {
            Tail::Drop => {
                prop_assert!(lens.iter().all(|own| *own == len / world_size));
                prop_assert_eq!((counts.len(), repeated), (len / world_size * world_size, 0));
            }
            Tail::Pad => {
                prop_assert!(lens.iter().all(|own| *own == len.div_ceil(world_size)));
                prop_assert_eq!((counts.len(), repeated), (len, len.div_ceil(world_size) * world_size - len));
                // The repeated examples are the first ones of the epoch.
                let padded = (0..repeated).map(|place| order(len, options, 0)[place % len]);
                let more = counted((0..len).chain(padded));
                prop_assert_eq!(counts, more);
            }
            _ => {
                prop_assert!(lens.windows(2).all(|pair| pair[0] == pair[1] || pair[0] == pair[1] + 1));
                prop_assert_eq!((counts.len(), repeated), (len, 0));
            }
        }
    }

    /// Interruptions at any moment, and restarts with other numbers of ranks and other batches: after every batch all ranks are at one
    /// position, and the examples taken so far are exactly the order up to there, followed by the examples that `Pad` repeats at the end.
    #[test]
    fn restarts_neither_repeat_nor_skip(
        len in 0usize..200,
        seed in any::<u64>(),
        runs in prop::collection::vec((1usize..9, 1usize..6, 0usize..12), 1..6),
        last in 1usize..9,
        tail in tails(),
        epoch in 0u64..3,
    ) {
        let options = ShardOptions::default().with_seed(seed).with_tail(tail);
        let mut position = Position { epoch, ..Position::start(len, options) };
        let order = order(len, options, epoch);
        let mut had = Vec::new();
        for (world_size, batch, batches) in runs.into_iter().chain([(last, 4, len + 1)]) {
            let resume = |rank| ShardedIndices::resume(len, rank, world_size, options, position).unwrap();
            let mut ranks: Vec<ShardedIndices> = (0..world_size).map(resume).collect();
            for _ in 0..batches {
                had.extend(ranks.iter_mut().flat_map(|rank| rank.next_batch(batch)));
                position = ranks[0].local_position();
                prop_assert!(ranks.iter().all(|rank| rank.local_position() == position), "{:?}", ranks);
                let consumed = position.consumed as usize;
                let repeated = had.len() - consumed;
                prop_assert!(repeated == 0 || (tail == Tail::Pad && consumed == len && repeated < 9));
                let padded = (0..repeated).map(|place| order[place % len]);
                prop_assert_eq!(counted(had.iter().copied()), counted(order[..consumed].iter().copied().chain(padded)));
            }
        }
        let left_out = len - position.consumed as usize;
        prop_assert!(if tail == Tail::Drop { left_out < last } else { left_out == 0 }, "{} left out", left_out);
    }

    /// Every way to take examples asks for equally many on all ranks, and gives the examples that single calls of `next` give.
    #[test]
    fn iterator_adaptors_count_as_single_calls(
        len in 0usize..60,
        world_size in 1usize..6,
        tail in tails(),
        count in 0usize..15,
        step in 1usize..4,
    ) {
        let options = ShardOptions::default().with_tail(tail);
        type Takes = fn(&mut ShardedIndices, usize, usize) -> Vec<usize>;
        // Each is followed by a plain restatement: the number of examples asked for, and the places of the examples among them.
        let cases: [(Takes, usize, Vec<usize>); 6] = [
            (|indices, count, _| indices.by_ref().take(count).collect(), count, (0..count).collect()),
            (|indices, count, _| indices.next_batch(count), count, (0..count).collect()),
            (|indices, count, _| indices.nth(count).into_iter().collect(), count + 1, vec![count]),
            (|indices, count, _| indices.by_ref().skip(count).take(2).collect(), count + 2, vec![count, count + 1]),
            (
                |indices, count, step| indices.by_ref().step_by(step).take(count).collect(),
                if count == 0 { 0 } else { (count - 1) * step + 1 },
                (0..count).map(|index| index * step).collect(),
            ),
            (|indices, _, _| indices.by_ref().collect(), len + 1, (0..=len).collect()),
        ];
        for (takes, asked, places) in cases {
            let mut positions = Vec::new();
            for rank in 0..world_size {
                let mut indices = ShardedIndices::new(len, rank, world_size, options).unwrap();
                let mut single = indices.clone();
                let taken = takes(&mut indices, count, step);
                let singly: Vec<Option<usize>> = (0..asked).map(|_| single.next()).collect();
                let expected: Vec<usize> = places.iter().filter_map(|&place| singly[place]).collect();
                prop_assert_eq!(taken, expected);
                prop_assert_eq!(indices.size_hint(), (single.len(), Some(single.len())));
                positions.extend([indices.local_position(), single.local_position()]);
                prop_assert_eq!(single.len(), single.count());
            }
            prop_assert!(positions.iter().all(|position| *position == positions[0]), "{:?}", positions);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Ranks that end their loops when they have no example left agree on a position at any moment, and others continue there.
    #[test]
    fn agreed_positions_continue_on_other_ranks(
        len in 0usize..60,
        (world_size, batch, batches) in (1usize..5, 1usize..5, 0usize..12),
        last in 1usize..5,
        tail in tails(),
    ) {
        let options = ShardOptions::default().with_tail(tail);
        let run = |world_size: usize, from: Position, batches: usize| {
            let of_ranks = on_ranks(world_size, |comm| {
                let mut indices = ShardedIndices::resume(len, comm.rank(), world_size, options, from).unwrap();
                let mut taken = Vec::new();
                for _ in 0..batches {
                    if indices.remaining() > 0 {
                        taken.extend(indices.next_batch(batch));
                    }
                }
                (taken, indices.position(&comm).unwrap())
            });
            let (taken, positions): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
            assert!(positions.iter().all(|position| *position == positions[0]), "{positions:?}");
            (taken.concat(), positions[0])
        };
        let (mut had, position) = run(world_size, Position::start(len, options), batches);
        let (rest, end) = run(last, position, len);
        had.extend(rest);
        let counts = counted(had.iter().copied());
        let repeated = had.len() - counts.len();
        prop_assert!(if tail == Tail::Pad { repeated < 4 } else { repeated == 0 }, "{} repeated", repeated);
        let left_out = len - counts.len();
        prop_assert!(if tail == Tail::Drop { left_out < last } else { left_out == 0 }, "{} left out", left_out);
        prop_assert_eq!(end.consumed as usize, counts.len());
    }
}

/// 10 examples on 4 ranks: after two examples each, ranks 0 and 1 have one left; in the third turn ranks 2 and 3 ask for one and get none.
#[test]
fn the_position_at_the_end_of_an_uneven_epoch() {
    guarded(60, || {
        let options = ShardOptions::default().with_seed(3).with_tail(Tail::Uneven);
        let at = |consumed| Position { consumed, ..Position::start(10, options) };
        for batch in [1, 2, 3, 4] {
            let positions = agreed("uneven", 4, |comm| {
                let mut indices = ShardedIndices::new(10, comm.rank(), 4, options).unwrap();
                let mut positions = Vec::new();
                for asked in (batch..7).step_by(batch) {
                    indices.next_batch(batch);
                    let agreed = indices.position(&comm).unwrap();
                    assert_eq!(indices.local_position(), agreed);
                    assert_eq!(indices.position_after(&comm, asked).unwrap(), agreed);
                    positions.push(agreed);
                }
                positions
            });
            let expected: Vec<Position> = (batch..7).step_by(batch).map(|asked| at(10.min(4 * asked as u64))).collect();
            assert_eq!(positions, expected, "batches of {batch}");
        }
        // Ranks 2 and 3 leave such a loop without asking for a third example; `for` loops ask until there is none.
        let ends = agreed("the end", 4, |comm| {
            let mut indices = ShardedIndices::new(10, comm.rank(), 4, options).unwrap();
            let mut by_for = indices.clone();
            while indices.remaining() > 0 {
                indices.next();
            }
            for _ in by_for.by_ref() {}
            let trained = 3 - usize::from(comm.rank() > 1);
            let after = by_for.position_after(&comm, trained).unwrap();
            [indices.position(&comm).unwrap(), by_for.position(&comm).unwrap(), by_for.local_position(), after]
        });
        assert_eq!(ends, [at(10); 4]);
        // A loader has prefetched everything, and two examples were trained on.
        let trained = agreed("prefetched", 4, |comm| {
            let mut indices = ShardedIndices::new(10, comm.rank(), 4, options).unwrap();
            indices.by_ref().for_each(drop);
            indices.position_after(&comm, 2).unwrap()
        });
        assert_eq!(trained, at(8));
    });
}

/// A rank that takes another number of examples than the others: every rank gets the same error, which lists all ranks and their numbers.
#[test]
fn ranks_that_drift_apart_are_named_on_every_rank() {
    guarded(60, || {
        for (world_size, tail) in
            [2, 3, 4].into_iter().flat_map(|ranks| [Tail::Drop, Tail::Pad, Tail::Uneven].map(|tail| (ranks, tail)))
        {
            let options = ShardOptions::default().with_tail(tail);
            let last = world_size - 1;
            let text = agreed("drift", world_size, |comm| {
                let mut indices = ShardedIndices::new(50, comm.rank(), world_size, options).unwrap();
                indices.next_batch(if comm.rank() == last { 7 } else { 6 });
                let error = indices.position(&comm).expect_err("one rank is ahead");
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
                assert_eq!(indices.position_after(&comm, 6).unwrap().consumed, 6 * world_size as u64);
                // The group stays usable, and the others can catch up.
                if comm.rank() != last {
                    indices.next();
                }
                assert_eq!(indices.position(&comm).unwrap().consumed, 7 * world_size as u64);
                error.to_string()
            });
            let others = if last == 1 { "rank 0".into() } else { format!("ranks {:?}", (0..last).collect::<Vec<_>>()) };
            let numbers = |asked| format!("{asked} examples of epoch 0 from 0 on, so position {}", asked * world_size);
            for words in [format!("{others}: {}", numbers(6)), format!("rank {last}: {}", numbers(7))] {
                assert!(text.contains(&words), "{text}");
            }
        }
        // One rank has begun the next epoch, or continues elsewhere.
        let texts = agreed("drift", 2, |comm| {
            let options = ShardOptions::default();
            let mut indices = ShardedIndices::new(50, comm.rank(), 2, options).unwrap();
            if comm.rank() == 1 {
                indices.next_epoch().unwrap();
            }
            let epochs = indices.position(&comm).unwrap_err().to_string();
            let position = Position { consumed: 10 * comm.rank() as u64, ..Position::start(50, options) };
            let resumed = ShardedIndices::resume(50, comm.rank(), 2, options, position).unwrap();
            [epochs, resumed.position(&comm).unwrap_err().to_string()]
        });
        assert!(texts[0].contains("rank 1: 0 examples of epoch 1 from 0 on, so position 0"), "{}", texts[0]);
        assert!(texts[1].contains("rank 1: 0 examples of epoch 0 from 10 on, so position 10"), "{}", texts[1]);
        // Turns of one rank at the end of an uneven epoch: rank 1 has no example left, and rank 0 has.
        let text = agreed("drift", 2, |comm| {
            let mut indices =
                ShardedIndices::new(5, comm.rank(), 2, ShardOptions::default().with_tail(Tail::Uneven)).unwrap();
            indices.next_batch(if comm.rank() == 0 { 2 } else { 3 });
            indices.position(&comm).unwrap_err().to_string()
        });
        assert!(text.contains("rank 0: 2 examples") && text.contains("rank 1: 3 examples"), "{text}");
    });
}

#[test]
fn positions_of_other_data_or_of_some_ranks_are_refused() {
    guarded(60, || {
        let plain = ShardOptions::default();
        let cases = [
            (51, plain, r#"len: rank 0 has "50", rank 2 has "51""#),
            (50, plain.with_seed(1), r#"seed: rank 0 has "0", rank 2 has "1""#),
            (50, plain.with_shuffles(false), r#"shuffles: rank 0 has "true", rank 2 has "false""#),
            (50, plain.with_tail(Tail::Pad), r#"tail: rank 0 has "Drop", rank 2 has "Pad""#),
        ];
        for (len, options, words) in cases {
            let text = agreed(words, 3, |comm| {
                let (len, options) = if comm.rank() == 2 { (len, options) } else { (50, plain) };
                let error = ShardedIndices::new(len, comm.rank(), 3, options).unwrap().position(&comm).unwrap_err();
                assert!(matches!(error, Error::Disagreement(_)), "{error:?}");
                error.to_string()
            });
            assert_eq!(text, format!("position: ranks disagree on {words}"));
        }
        let texts = on_ranks(4, |comm| {
            let half = comm.split(Some(comm.rank() as u64 / 2), 0).unwrap().expect("a group");
            ShardedIndices::new(50, comm.rank(), 4, plain).unwrap().position(&half).unwrap_err().to_string()
        });
        assert!(texts[3].contains("4 ranks share the examples, and only {2, 3} of them"), "{}", texts[3]);
        // Ranks that work on the same examples, as in tensor parallelism, agree as well.
        let positions = on_ranks(4, |comm| {
            let mut indices = ShardedIndices::new(50, comm.rank() / 2, 2, plain).unwrap();
            indices.next_batch(4);
            indices.position(&comm).unwrap().consumed
        });
        assert_eq!(positions, [8; 4]);
    });
}

const PINNED: [[usize; 10]; 3] =
    [[5, 1, 9, 6, 7, 2, 4, 0, 8, 3], [8, 9, 1, 7, 6, 4, 3, 2, 0, 5], [4, 7, 0, 5, 9, 3, 6, 2, 8, 1]];

/// Checkpoints depend on these orders, so the orders must never change. A Python program of the documented algorithm computed them.
#[test]
fn orders_are_pinned() {
    let options = ShardOptions::default().with_seed(42);
    assert_eq!(order(10, options, 0), PINNED[0]);
    assert_eq!(order(10, options, 1), PINNED[1]);
    assert_eq!(order(10, ShardOptions::default(), 0), PINNED[2]);
}

#[test]
fn bad_numbers_are_named() {
    let options = ShardOptions::default();
    let refused = |len, rank, world_size, consumed| {
        let position = Position { epoch: 3, consumed, ..Position::start(len, options) };
        ShardedIndices::resume(len, rank, world_size, options, position).map(drop).unwrap_err().to_string()
    };
    assert!(refused(10, 4, 4, 0).contains("rank 4 is none of 4 ranks"));
    assert!(refused(10, 0, 0, 0).contains("rank 0 is none of 0 ranks"));
    assert!(refused(10, 0, 1, 11).contains("11 examples of epoch 3 were consumed, and there are 10"));
    assert!(refused(10, 0, 1, u64::MAX).contains("18446744073709551615 examples"));
    let mut indices = ShardedIndices::new(10, 1, 3, options).unwrap();
    assert_eq!((indices.next_batch(2).len(), indices.next_batch(2).len(), indices.next_batch(2).len()), (2, 1, 0));
    let start = Position::start(10, options);
    assert_eq!(indices.local_position(), Position { consumed: 9, ..start });
    indices.next_epoch().unwrap();
    assert_eq!((indices.epoch(), indices.remaining()), (1, 3));
    assert_eq!(indices.local_position(), Position { epoch: 1, ..start });
}

/// A position is valid for the data and options that it was made with, also after it was saved as text.
#[test]
fn resuming_with_other_data_or_options_is_refused() {
    let options = ShardOptions::default().with_seed(7).with_tail(Tail::Uneven);
    let mut indices = ShardedIndices::new(10, 0, 1, options).unwrap();
    indices.next_batch(4);
    let text = serde_json::to_string(&indices.local_position()).unwrap();
    let position: Position = serde_json::from_str(&text).unwrap();
    assert_eq!(position, indices.local_position());
    let refused = |len, options| {
        let error = ShardedIndices::resume(len, 0, 1, options, position).map(drop).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        error.to_string()
    };
    assert!(refused(11, options).contains("saved with len 10 and cannot continue with len 11"));
    assert!(refused(10, options.with_seed(8)).contains("saved with seed 7 and cannot continue with seed 8"));
    assert!(refused(10, options.with_shuffles(false)).contains("saved with shuffles true and"));
    assert!(
        refused(10, options.with_tail(Tail::Drop))
            .contains("saved with tail Uneven and cannot continue with tail Drop")
    );
    let rest: Vec<usize> = ShardedIndices::resume(10, 0, 1, options, position).unwrap().collect();
    assert_eq!(rest, indices.collect::<Vec<_>>());
}

/// Counters at the end of their range: errors or right values, and neither a panic nor the numbers of another epoch.
#[test]
fn counters_do_not_wrap() {
    let options = ShardOptions::default();
    let position = Position { epoch: u64::MAX, ..Position::start(10, options) };
    let mut indices = ShardedIndices::resume(10, 0, 2, options, position).unwrap();
    indices.next();
    let error = indices.next_epoch().unwrap_err();
    assert!(error.to_string().contains("epoch 18446744073709551615"), "{error}");
    assert_eq!(indices.local_position(), Position { consumed: 2, ..position });

    for tail in [Tail::Drop, Tail::Pad, Tail::Uneven] {
        let (len, options) = (usize::MAX, options.with_shuffles(false).with_tail(tail));
        for rank in 0..4 {
            let mut indices = ShardedIndices::new(len, rank, 4, options).unwrap();
            assert_eq!(indices.next(), Some(rank));
            // 2⁶⁴ - 1 examples are 2⁶² - 1 turns of four ranks, and three more.
            let last = len / 4;
            let expected = match (tail, rank) {
                (Tail::Drop, _) => None,
                (Tail::Pad, 3) => Some(0),
                (_, 3) => None,
                _ => Some(4 * last + rank),
            };
            assert_eq!(indices.nth(last - 1), expected, "{tail:?}, rank {rank}");
            assert_eq!((indices.next(), indices.nth(usize::MAX), indices.len()), (None, None, 0));
            let consumed = if tail == Tail::Drop { len - 3 } else { len };
            assert_eq!(indices.local_position().consumed, consumed as u64);
        }
    }
}
