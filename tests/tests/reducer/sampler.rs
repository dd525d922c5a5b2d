//! The assignment of examples to ranks: in every epoch, for every number of ranks, and across restarts.

use std::collections::HashMap;

use gradsync::train::{Position, ShardOptions, ShardedIndices, Tail};
use proptest::prelude::*;

/// The order of an epoch, as a single rank sees it.
fn order(len: usize, options: ShardOptions, epoch: u64) -> Vec<usize> {
    ShardedIndices::resume(len, 0, 1, options, Position { epoch, consumed: 0 }).unwrap().collect()
}

/// Returns the examples that each rank takes between two checkpoints, at most `count` each, and the position at the end.
fn take(
    (len, world_size, options): (usize, usize, ShardOptions),
    from: Position,
    count: usize,
) -> (Vec<Vec<usize>>, Position) {
    let mut positions = Vec::new();
    let of_rank = |rank| {
        let mut indices = ShardedIndices::resume(len, rank, world_size, options, from).unwrap();
        let taken = indices.next_batch(count);
        // A loader that has prefetched examples does not change the position.
        let _ahead = indices.next_batch(3);
        positions.push(indices.position_after(count));
        taken
    };
    let taken: Vec<_> = (0..world_size).map(of_rank).collect();
    assert!(positions.windows(2).all(|pair| pair[0] == pair[1]), "{positions:?}");
    (taken, positions[0])
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
        tail in prop_oneof![Just(Tail::Drop), Just(Tail::Pad), Just(Tail::Uneven)],
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

    /// Restarts with varying numbers of ranks: no example is repeated, and none is skipped except the end of the epoch that `Drop` leaves
    /// out.
    #[test]
    fn restarts_neither_repeat_nor_skip(
        len in 1usize..500,
        seed in any::<u64>(),
        runs in prop::collection::vec((1usize..9, 0usize..40), 1..6),
        last in 1usize..9,
        tail in prop_oneof![Just(Tail::Drop), Just(Tail::Uneven)],
        epoch in 0u64..3,
    ) {
        let options = ShardOptions::default().with_seed(seed).with_tail(tail);
        let mut position = Position { epoch, consumed: 0 };
        let mut had = Vec::new();
        for (world_size, count) in runs {
            let (taken, next) = take((len, world_size, options), position, count);
            // A checkpoint is made when every rank has taken the same number of examples.
            if taken.iter().any(|taken| taken.len() < count) {
                break;
            }
            had.extend(taken.into_iter().flatten());
            position = next;
            prop_assert_eq!(position, Position { epoch, consumed: had.len() as u64 });
        }
        let (taken, _) = take((len, last, options), position, len);
        had.extend(taken.into_iter().flatten());
        let counts = counted(had.iter().copied());
        prop_assert_eq!(counts.len(), had.len(), "an example twice");
        let left_out = len - had.len();
        prop_assert!(if tail == Tail::Drop { left_out < last } else { left_out == 0 }, "{} left out", left_out);
    }
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
        let position = Position { epoch: 3, consumed };
        ShardedIndices::resume(len, rank, world_size, options, position).map(drop).unwrap_err().to_string()
    };
    assert!(refused(10, 4, 4, 0).contains("rank 4 is none of 4 ranks"));
    assert!(refused(10, 0, 0, 0).contains("rank 0 is none of 0 ranks"));
    assert!(refused(10, 0, 1, 11).contains("11 examples of epoch 3 were consumed, and there are 10"));
    assert!(refused(10, 0, 1, u64::MAX).contains("18446744073709551615 examples"));
    let mut indices = ShardedIndices::new(10, 1, 3, options).unwrap();
    assert_eq!((indices.next_batch(2).len(), indices.next_batch(2).len(), indices.next_batch(2).len()), (2, 1, 0));
    assert_eq!(indices.position(), Position { epoch: 0, consumed: 9 });
    indices.next_epoch().unwrap();
    assert_eq!((indices.epoch(), indices.remaining(), indices.position().consumed), (1, 3, 0));
}
