//! `Groups`: communicators of every kind of parallel group, over ranks as threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Collectives, CommError, Ranks, ReduceOp, Split};
use gradsync::groups::{GroupKind, Groups, Sizes};
use gradsync::{Error, Result};
use gradsync_tests::ranks::{guarded, on_ranks};
use gradsync_tests::suite::groups::members as gathered;

fn sizes(local: usize, data: usize, horizontal: usize, pipeline: usize) -> Sizes {
    Sizes { world: data * horizontal * pipeline, local, data, horizontal, pipeline }
}

/// The worlds: one node; nodes across data groups; nodes that cut through tensor groups; uneven nodes; each direction alone; one rank.
fn worlds() -> Vec<Sizes> {
    vec![
        sizes(4, 2, 3, 4),
        sizes(4, 2, 2, 1),
        sizes(8, 4, 2, 3),
        sizes(4, 8, 1, 2),
        sizes(4, 6, 1, 2),
        sizes(2, 3, 2, 2),
        sizes(8, 8, 1, 1),
        sizes(2, 8, 1, 1),
        sizes(1, 6, 1, 1),
        sizes(4, 1, 8, 1),
        sizes(4, 1, 1, 5),
        sizes(1, 1, 1, 1),
    ]
}

/// The ranks of a rank's group, by the grid of section 1.3 of the specification; `None` where nodes share a data group unevenly.
fn members(sizes: Sizes, kind: GroupKind, rank: usize) -> Option<Vec<usize>> {
    let Sizes { world, local, data, horizontal, .. } = sizes;
    let place = |rank: usize| (rank % horizontal, rank / horizontal % data, rank / (horizontal * data));
    let (x, y, z) = place(rank);
    let all = |is_in: &dyn Fn(usize) -> bool| -> Vec<usize> { (0..world).filter(|&other| is_in(other)).collect() };
    let data_of = |rank: usize| (place(rank).0, place(rank).2);
    let on_node = |rank: usize| all(&|other| data_of(other) == data_of(rank) && other / local == rank / local);
    let index = |rank: usize| on_node(rank).iter().position(|&other| other == rank);
    let is_even = (0..world).all(|one| {
        all(&|other| data_of(other) == data_of(one)).iter().all(|&other| on_node(other).len() == on_node(one).len())
    });
    match kind {
        GroupKind::World => Some(all(&|_| true)),
        GroupKind::Data => Some(all(&|other| data_of(other) == (x, z))),
        GroupKind::NodeLocalData => Some(on_node(rank)),
        GroupKind::CrossNodeData => {
            is_even.then(|| all(&|other| data_of(other) == (x, z) && index(other) == index(rank)))
        }
        GroupKind::Horizontal => Some(all(&|other| (place(other).1, place(other).2) == (y, z))),
        GroupKind::Pipeline => Some(all(&|other| (place(other).0, place(other).1) == (x, y))),
        other => unreachable!("no oracle for {other:?}"),
    }
}

/// All groups of a kind.
fn partition(sizes: Sizes, kind: GroupKind) -> Option<Vec<Vec<usize>>> {
    (0..sizes.world).map(|rank| members(sizes, kind, rank)).collect()
}

#[test]
fn every_kind_has_exactly_its_ranks() {
    guarded(120, || {
        for sizes in worlds() {
            for first in 0..GroupKind::ALL.len() {
                on_ranks(sizes.world, |comm| {
                    let rank = comm.rank();
                    let groups = Groups::new(comm, sizes).unwrap();
                    assert_eq!(groups.topology().rank(), rank);
                    // Groups may be created in any order that is the same on all ranks.
                    for kind in GroupKind::ALL.into_iter().cycle().skip(first).take(GroupKind::ALL.len()) {
                        let what = format!("{kind} of rank {rank}, {sizes:?}");
                        match members(sizes, kind, rank) {
                            Some(members) => {
                                let comm = groups.get(kind).unwrap();
                                assert_eq!(gathered(comm, rank), members, "{what}");
                                assert_eq!(comm.rank(), groups.topology().group(kind).unwrap().index, "{what}");
                            }
                            None => {
                                let text = groups.get(kind).expect_err(&what).to_string();
                                assert!(text.contains("data group"), "{what}: \"{text}\"");
                            }
                        }
                    }
                });
            }
        }
    });
}

/// A communicator that counts its splits.
struct Counted<'a> {
    inner: LocalCommunicator,
    splits: &'a AtomicUsize,
}

impl Split for Counted<'_> {
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Self>> {
        self.splits.fetch_add(1, Ordering::SeqCst);
        Ok(self.inner.split(color, key)?.map(|inner| Counted { inner, splits: self.splits }))
    }
}

impl Ranks for Counted<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        self.inner.gather_words(words)
    }
}

#[test]
fn a_group_is_split_off_once_and_by_one_of_its_kinds() {
    guarded(60, || {
        for sizes in worlds() {
            let kinds: Vec<GroupKind> =
                GroupKind::ALL.into_iter().filter(|&kind| partition(sizes, kind).is_some()).collect();
            let mut distinct: Vec<_> = kinds.iter().filter_map(|&kind| partition(sizes, kind)).collect();
            distinct.sort();
            distinct.dedup();
            on_ranks(sizes.world, |inner| {
                let splits = AtomicUsize::new(0);
                let groups = Groups::new(Counted { inner, splits: &splits }, sizes).unwrap();
                for &kind in kinds.iter().rev() {
                    let comm = groups.get(kind).unwrap();
                    assert!(std::ptr::eq(comm, groups.get(kind).unwrap()), "{kind}, {sizes:?}");
                }
                // The world's communicator exists already.
                assert_eq!(splits.load(Ordering::SeqCst), distinct.len() - 1, "{sizes:?}");
                for &one in &kinds {
                    for &other in &kinds {
                        let is_same = std::ptr::eq(groups.get(one).unwrap(), groups.get(other).unwrap());
                        let is_right = partition(sizes, one) == partition(sizes, other);
                        assert_eq!(is_same, is_right, "{one} and {other}, {sizes:?}");
                    }
                }
            });
        }
    });
}

/// The sum of one bit per rank over the ranks of a kind of group.
fn ranks_summed(groups: &Groups<LocalCommunicator>, kind: GroupKind) -> u64 {
    let mut bits = [(1u64 << groups.topology().rank()) as f64];
    groups.get(kind).unwrap().all_reduce(&mut bits, ReduceOp::Sum).unwrap();
    bits[0] as u64
}

/// ONNX Runtime forms the intersection of the ranks across nodes with the data group, and then stores the list without the intersection.
#[test]
fn reductions_across_nodes_stay_in_the_data_group() {
    guarded(20, || {
        let sums = on_ranks(16, |comm| {
            // 4 nodes of 4 ranks, and two stages of 8 ranks each.
            let groups = Groups::new(comm, sizes(4, 8, 1, 2)).unwrap();
            ranks_summed(&groups, GroupKind::CrossNodeData)
        });
        for (rank, sum) in sums.into_iter().enumerate() {
            let first = rank / 8 * 8 + rank % 4;
            assert_eq!(sum, 1 << first | 1 << (first + 4), "rank {rank}: {sum:b}");
        }
    });
}

/// ONNX Runtime's graphs for ZeRO shard over the data group, but run the collectives over the world.
#[test]
fn shards_of_the_data_group_are_reduced_over_the_data_group() {
    guarded(20, || {
        let shapes = sizes(4, 2, 2, 2);
        let outcomes = on_ranks(8, |comm| {
            let rank = comm.rank();
            let groups = Groups::new(comm, shapes).unwrap();
            let data = groups.get(GroupKind::Data).unwrap();
            // There is one shard per rank of the data group, and each shard has 3 gradients.
            let gradients: Vec<f32> = (0..3 * data.world_size()).map(|place| (100 * rank + place) as f32).collect();
            let mut shard = [0.0f32; 3];
            data.reduce_scatter(&gradients, &mut shard, ReduceOp::Sum).unwrap();
            let mut weights = [0.0f32; 6];
            data.all_gather(&shard, &mut weights).unwrap();
            weights
        });
        for (rank, weights) in outcomes.into_iter().enumerate() {
            // The data groups are ranks 0 and 2, 1 and 3, 4 and 6, 5 and 7.
            let pair = rank & !2;
            let expected = [0, 1, 2, 3, 4, 5].map(|place| (100 * (2 * pair + 2) + 2 * place) as f32);
            assert_eq!(weights, expected, "rank {rank}");
        }
    });
}

#[test]
fn sizes_that_differ_are_an_error_on_every_rank_that_names_two() {
    guarded(60, || {
        let right = sizes(4, 2, 2, 2);
        let wrong = [
            ("world", Sizes { world: 16, data: 4, ..right }),
            ("local", Sizes { local: 2, ..right }),
            ("data", Sizes { data: 4, pipeline: 1, ..right }),
            ("horizontal", Sizes { horizontal: 4, pipeline: 1, ..right }),
            // These sizes belong to no world at all, and are compared nevertheless.
            ("pipeline", Sizes { pipeline: 0, ..right }),
        ];
        for (name, wrong) in wrong {
            for deviant in [3, 7] {
                let texts = on_ranks(8, |comm| {
                    let sizes = if comm.rank() == deviant { wrong } else { right };
                    Groups::new(comm, sizes).map(|_| ()).expect_err("the sizes differ").to_string()
                });
                for (rank, text) in texts.into_iter().enumerate() {
                    let what = format!("{name} size of rank {deviant}, seen by rank {rank}: \"{text}\"");
                    assert!(text.starts_with(&format!("groups: ranks disagree on {name} size: rank 0 has ")), "{what}");
                    assert!(text.contains(&format!(", rank {deviant} has ")), "{what}");
                }
            }
        }
    });
}

#[test]
fn sizes_that_are_wrong_on_all_ranks_are_refused() {
    guarded(20, || {
        for (wrong, words) in [
            (sizes(4, 4, 2, 1), ["8", "4 ranks"]),
            (Sizes { data: 3, ..sizes(4, 4, 1, 1) }, ["3", "4"]),
            (Sizes { local: 0, ..sizes(4, 4, 1, 1) }, ["local", "0"]),
        ] {
            for error in on_ranks(4, |comm| Groups::new(comm, wrong).map(|_| ()).expect_err("wrong")) {
                let text = error.to_string();
                assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
                assert!(words.iter().all(|word| text.contains(word)), "\"{text}\"");
            }
        }
    });
}

#[test]
fn ranks_that_ask_for_other_kinds_are_told() {
    guarded(20, || {
        on_ranks(8, |comm| {
            let rank = comm.rank();
            let groups = Groups::new(comm, sizes(4, 2, 2, 2)).unwrap();
            let kind = if rank == 5 { GroupKind::Pipeline } else { GroupKind::Horizontal };
            let text = groups.get(kind).map(|_| ()).expect_err("rank 5 asks for another").to_string();
            assert_eq!(text, "ranks disagree: rank 0 called groups(horizontal), rank 5 called groups(pipeline)");
            // All ranks still make their calls in the same order.
            groups.get(GroupKind::Horizontal).unwrap().barrier().unwrap();
        });
    });
}

/// Neither the refusal nor the next call on another group waits for ranks that did not ask.
#[test]
fn a_refused_kind_is_refused_without_the_others() {
    guarded(20, || {
        on_ranks(12, |comm| {
            let rank = comm.rank();
            let groups = Groups::new(comm, sizes(4, 6, 1, 2)).unwrap();
            if rank == 7 {
                assert!(groups.get(GroupKind::CrossNodeData).is_err());
            }
            groups.get(GroupKind::Data).unwrap().barrier().unwrap();
        });
    });
}

#[test]
fn a_rank_that_leaves_is_an_error_on_the_others() {
    guarded(20, || {
        on_ranks(4, |comm| {
            let rank = comm.rank();
            let groups = Groups::new(comm, sizes(4, 2, 2, 1)).unwrap();
            groups.get(GroupKind::Data).unwrap();
            if rank == 2 {
                return;
            }
            let error = groups.get(GroupKind::Horizontal).map(|_| ()).expect_err("rank 2 is gone");
            assert!(matches!(error, Error::Comm(CommError::PeerGone { rank: 2, .. })), "{error:?}");
            // Groups that were split off before remain usable.
            let outcome = groups.get(GroupKind::Data).unwrap().barrier();
            assert_eq!(outcome.is_ok(), rank != 0, "rank {rank}: {outcome:?}");
        });
    });
}
