//! Whole tensors gathered from their owners and reduced to their owners, over every rank of worlds of 1 to 9.

use gradsync::Error;
use gradsync::internal::plan::ownership::{Moves, Ownership, PaddedLayout};
use gradsync_tests::inputs::Random;
use proptest::prelude::*;

use super::{WORLD_SIZES, all_gather, bits, cut, expected, garbage, lists, reduce_scatter, sum, values};

/// The tensors of one rank.
type Tensors = Vec<Vec<f32>>;

fn copy_in(moves: &Moves, tensors: &Tensors, scratch: &mut [f32]) {
    for step in &moves.copy_in {
        scratch[step.range.clone()].copy_from_slice(&tensors[step.tensor]);
    }
}

/// All-gathers the tensors of all ranks by ownership, through scratch buffers that begin as garbage.
fn gather(ownership: &Ownership, ranks: &mut [Tensors], random: &mut Random) {
    let mut scratch = Vec::new();
    for (rank, tensors) in ranks.iter().enumerate() {
        let before = garbage(ownership.padded_len(), random);
        let mut after = before.clone();
        copy_in(&ownership.gather_moves(rank), tensors, &mut after);
        let shard = ownership.shard(rank);
        assert_eq!(bits(&after[..shard.start]), bits(&before[..shard.start]), "rank {rank} wrote before its shard");
        assert_eq!(bits(&after[shard.end..]), bits(&before[shard.end..]), "rank {rank} wrote behind its shard");
        scratch.push(after);
    }
    let shards: Vec<_> = scratch.iter().enumerate().map(|(rank, all)| &all[ownership.shard(rank)]).collect();
    let gathered = all_gather(&shards);
    for (rank, tensors) in ranks.iter_mut().enumerate() {
        for step in ownership.gather_moves(rank).copy_out {
            tensors[step.tensor].copy_from_slice(&gathered[step.range]);
        }
    }
}

/// Reduce-scatters the tensors of all ranks by ownership; each rank gets its shard alone.
fn scatter(ownership: &Ownership, ranks: &mut [Tensors], random: &mut Random) {
    let scratch = ranks.iter().enumerate().map(|(rank, tensors)| {
        let mut scratch = garbage(ownership.padded_len(), random);
        copy_in(&ownership.scatter_moves(rank), tensors, &mut scratch);
        scratch
    });
    let shards = reduce_scatter(&scratch.collect::<Vec<_>>());
    for (rank, tensors) in ranks.iter_mut().enumerate() {
        let begin = ownership.shard(rank).start;
        for step in ownership.scatter_moves(rank).copy_out {
            tensors[step.tensor].copy_from_slice(&shards[rank][step.range.start - begin..step.range.end - begin]);
        }
    }
}

fn check_gather(world_size: usize, lens: &[usize], random: &mut Random) {
    let ownership = Ownership::new("all_gather", world_size, lens).unwrap();
    let owners = expected(world_size, lens, 4).owners.unwrap();
    // The values are NaNs, as their payloads have to arrive too.
    let truth: Tensors = lens.iter().map(|&len| garbage(len, random)).collect();
    let mut ranks: Vec<Tensors> = Vec::new();
    for rank in 0..world_size {
        let tensors = lens.iter().enumerate();
        let own = |tensor: usize| owners[tensor] == rank;
        ranks.push(tensors.map(|(i, &len)| if own(i) { truth[i].clone() } else { garbage(len, random) }).collect());
    }
    gather(&ownership, &mut ranks, random);
    for (rank, tensors) in ranks.iter().enumerate() {
        for (index, (found, truth)) in tensors.iter().zip(&truth).enumerate() {
            assert_eq!(bits(found), bits(truth), "tensor {index} on rank {rank} of {world_size}, {lens:?}");
        }
    }
}

fn check_scatter(world_size: usize, lens: &[usize], random: &mut Random) {
    let ownership = Ownership::new("reduce_scatter", world_size, lens).unwrap();
    let owners = expected(world_size, lens, 4).owners.unwrap();
    let before: Vec<Tensors> = (0..world_size).map(|_| lens.iter().map(|&len| values(len, random)).collect()).collect();
    let mut after = before.clone();
    scatter(&ownership, &mut after, random);
    for (rank, tensors) in after.iter().enumerate() {
        for (index, found) in tensors.iter().enumerate() {
            let total = sum(before.iter().map(|tensors| tensors[index].as_slice()), lens[index]);
            let truth = if owners[index] == rank { &total } else { &before[rank][index] };
            assert_eq!(bits(found), bits(truth), "tensor {index} on rank {rank} of {world_size}, {lens:?}");
        }
    }
}

/// The plan against the specification, in bytes of every element size. Returns whether each tensor has one owner.
fn check_plan(world_size: usize, lens: &[usize]) -> bool {
    let plan = Ownership::new("plan", world_size, lens);
    for element_bytes in [1, 2, 4, 8] {
        let expected = expected(world_size, lens, element_bytes);
        let layout = PaddedLayout::new("plan", world_size, lens).unwrap();
        assert_eq!((layout.padded_len, layout.shard_len), (expected.padded, expected.shard), "{lens:?}");
        match (&plan, &expected.owners) {
            (Ok(plan), Ok(owners)) => {
                assert_eq!(plan.owners(), owners, "{world_size} ranks, {lens:?}");
                assert_eq!(plan.world_size(), world_size);
                assert_eq!((plan.padded_len(), plan.shard_len()), (expected.padded, expected.shard));
                let mut offset = 0;
                for (start, len) in plan.offsets().zip(lens) {
                    assert_eq!(start, offset);
                    offset += len;
                }
                for rank in 0..world_size {
                    let owned = (0..lens.len()).filter(|&index| owners[index] == rank);
                    assert!(plan.owned(rank).eq(owned), "rank {rank} of {world_size}, {lens:?}");
                    let shard = plan.shard(rank);
                    assert_eq!((shard.start, shard.len()), (rank * expected.shard, expected.shard));
                }
            }
            (Err(error), Err(index)) => check_refusal(error, world_size, lens, *index, expected.shard),
            (plan, expected) => panic!("{plan:?}, but expected {expected:?} for {world_size} ranks, {lens:?}"),
        }
    }
    plan.is_ok()
}

/// The refusal is typed, and names the tensor, its elements, and the shard with its rank.
fn check_refusal(error: &Error, world_size: usize, lens: &[usize], index: usize, shard: usize) {
    let Error::InvalidArgument { operation: "plan", reason } = error else {
        panic!("{error:?} for {world_size} ranks, {lens:?}");
    };
    let begin: usize = lens[..index].iter().sum();
    let rank = begin / shard;
    for part in [
        format!("tensor {index} "),
        format!("{begin}..{}", begin + lens[index]),
        format!("{}..{}", rank * shard, (rank + 1) * shard),
        format!("rank {rank}"),
    ] {
        assert!(reason.contains(&part), "{reason} does not say {part}");
    }
}

#[test]
fn padding_of_the_specification() {
    for (world_size, total, padded, shard) in
        [(2, 63, 64, 32), (2, 64, 128, 64), (2, 950, 960, 480), (2, 1024, 1088, 544), (4, 950, 1024, 256)]
    {
        let layout = PaddedLayout::new("plan", world_size, &[total]).unwrap();
        assert_eq!((layout.padded_len, layout.shard_len), (padded, shard), "{total} on {world_size} ranks");
        let single = vec![1; total];
        let ownership = Ownership::new("plan", world_size, &single).unwrap();
        assert_eq!((ownership.padded_len(), ownership.shard_len()), (padded, shard));
        assert_eq!(ownership.owned(0), 0..shard.min(total));
    }
}

#[test]
fn plans_match_the_specification() {
    let (mut accepted, mut refused) = (0, 0);
    for world_size in WORLD_SIZES {
        for lens in lists(world_size) {
            if check_plan(world_size, &lens) {
                accepted += 1
            } else {
                refused += 1
            }
            assert!(check_plan(world_size, &cut(world_size, &lens, &mut Random::new(1))));
        }
    }
    assert!(accepted > 20 && refused > 20, "{accepted} lists accepted, {refused} refused");
}

#[test]
fn one_element_over_the_edge_is_one_too_many() {
    // 950 elements on 2 ranks: shards of 480.
    assert!(check_plan(2, &[480, 470]));
    assert!(check_plan(2, &[480, 0, 470, 0]));
    assert!(!check_plan(2, &[481, 469]));
    assert!(!check_plan(2, &[479, 2, 469]));
    // A tensor longer than any shard has no owner, wherever it starts; on one rank there is no edge.
    assert!(!check_plan(2, &[950]));
    assert!(check_plan(1, &[950]));
    // Padding follows the last tensor, so the few elements may all lie in the first shards.
    assert!(check_plan(9, &[1, 0, 30, 1, 0]));
    assert_eq!(Ownership::new("plan", 9, &[1, 0, 30, 1, 0]).unwrap().owners(), [0, 0, 0, 0, 1]);
}

#[test]
fn gathered_tensors_are_their_owners() {
    for world_size in WORLD_SIZES {
        let mut random = Random::new(40 + world_size as u64);
        for lens in lists(world_size) {
            check_gather(world_size, &cut(world_size, &lens, &mut random), &mut random);
        }
    }
}

#[test]
fn scattered_tensors_are_sums_at_their_owners_alone() {
    for world_size in WORLD_SIZES {
        let mut random = Random::new(80 + world_size as u64);
        for lens in lists(world_size) {
            check_scatter(world_size, &cut(world_size, &lens, &mut random), &mut random);
        }
    }
}

#[test]
fn a_scatter_and_a_gather_are_an_all_reduce() {
    let mut random = Random::new(7);
    for world_size in WORLD_SIZES {
        let lens = cut(world_size, &[77, 0, 401, 1, 90], &mut random);
        let ownership = Ownership::new("plan", world_size, &lens).unwrap();
        let before: Vec<Tensors> =
            (0..world_size).map(|_| lens.iter().map(|&len| values(len, &mut random)).collect()).collect();
        let mut after = before.clone();
        scatter(&ownership, &mut after, &mut random);
        gather(&ownership, &mut after, &mut random);
        for (index, &len) in lens.iter().enumerate() {
            let total = sum(before.iter().map(|tensors| tensors[index].as_slice()), len);
            assert!(after.iter().all(|tensors| bits(&tensors[index]) == bits(&total)), "tensor {index}, {lens:?}");
        }
    }
}

proptest! {
    #[test]
    fn any_list_is_refused_or_gathered_and_scattered(
        lens in prop::collection::vec(prop_oneof![Just(0usize), 1usize..20, 0usize..300], 0..12),
        world_size in WORLD_SIZES,
        seed in any::<u64>(),
    ) {
        let mut random = Random::new(seed);
        if check_plan(world_size, &lens) {
            check_gather(world_size, &lens, &mut random);
            check_scatter(world_size, &lens, &mut random);
        }
    }
}
