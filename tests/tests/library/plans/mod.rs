//! Plans of tensor ownership and of ZeRO, of groups, bundles and schedules, against sections 1.2, 1.3, 1.5 and 1.6 of the specification.
//! Ranks are simulated in memory, by plain vectors and the two collectives below.

mod bundle;
#[path = "../../../fuzz/bundle_header.rs"]
mod bundle_header;
mod one_forward_one_backward;
mod ownership;
mod schedule;
mod topology;
mod zero_partition;

use std::ops::Range;

use gradsync_tests::inputs::Random;

/// The world sizes of the simulations.
const WORLD_SIZES: Range<usize> = 1..10;

/// The specification's result for a list of tensors, counted in bytes and found by search.
struct Expected {
    padded: usize,
    shard: usize,
    /// The owner of each tensor, or the first tensor without a rank that owns it entirely.
    owners: Result<Vec<usize>, usize>,
}

fn expected(world_size: usize, lens: &[usize], element_bytes: usize) -> Expected {
    let block = 32 * world_size;
    let mut padded = lens.iter().sum::<usize>() + 1;
    while padded % block != 0 {
        padded += 1;
    }
    let shard = padded / world_size;
    let mut owners = Ok(Vec::new());
    let mut first_byte = 0;
    for (index, len) in lens.iter().enumerate() {
        let edges = |rank: usize| (rank * shard * element_bytes, (rank + 1) * shard * element_bytes);
        let owner = (0..world_size).find(|&rank| edges(rank).0 <= first_byte && first_byte < edges(rank).1);
        let owner = owner.expect("padding follows the last tensor");
        let end = first_byte + len * element_bytes;
        if end > edges(owner).1 && owners.is_ok() {
            owners = Err(index);
        }
        if let Ok(owners) = &mut owners {
            owners.push(owner);
        }
        first_byte = end;
    }
    Expected { padded, shard, owners }
}

/// Cuts the elements at multiples of the shard, and inserts empty tensors at random.
fn cut(world_size: usize, lens: &[usize], random: &mut Random) -> Vec<usize> {
    let shard = expected(world_size, lens, 1).shard;
    let mut cut = Vec::new();
    let mut offset = 0;
    for &len in lens {
        cut.push(0);
        for _ in 0..len {
            if offset % shard == 0 {
                cut.push(0);
            }
            *cut.last_mut().unwrap() += 1;
            offset += 1;
        }
        if random.below(4) == 0 {
            cut.push(0);
        }
    }
    cut
}

/// Lists of odd lengths, with empty tensors; tensors are about as long as shards, or far shorter, or longer.
fn lists(world_size: usize) -> Vec<Vec<usize>> {
    let mut random = Random::new(world_size as u64);
    let mut lists =
        vec![vec![], vec![0], vec![1], vec![0, 0, 3, 0], vec![32 * world_size], vec![63], vec![64], vec![950]];
    for bound in [3, 40, 333, 1500] {
        for count in [1, 2, 7, 30] {
            lists.push((0..count).map(|_| random.below(bound) as usize).collect());
        }
    }
    lists
}

/// Any finite f32 with an ordinary exponent, of either sign; each sum below rounds.
fn values(len: usize, random: &mut Random) -> Vec<f32> {
    (0..len).map(|_| ((random.unit() - 0.5) * (random.below(64) + 1) as f64) as f32).collect()
}

/// Bit patterns that reveal a wrong offset: quiet NaNs with random payloads.
fn garbage(len: usize, random: &mut Random) -> Vec<f32> {
    (0..len).map(|_| f32::from_bits(0x7fc0_0000 | random.below(1 << 22) as u32)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The collective all-gather: every rank gives one shard, and every rank gets all shards in rank order.
fn all_gather(shards: &[&[f32]]) -> Vec<f32> {
    assert!(shards.iter().all(|shard| shard.len() == shards[0].len()), "shards differ in length");
    shards.concat()
}

/// The collective reduce-scatter: every rank gives a whole buffer, and rank r gets shard r of the sum, added in rank order.
fn reduce_scatter(buffers: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let len = buffers[0].len();
    assert!(buffers.iter().all(|buffer| buffer.len() == len), "buffers differ in length");
    assert_eq!(len % buffers.len(), 0, "{len} elements are no {} shards", buffers.len());
    let sum = sum(buffers.iter().map(Vec::as_slice), len);
    let shard = len / buffers.len();
    (0..buffers.len()).map(|rank| sum[rank * shard..(rank + 1) * shard].to_vec()).collect()
}

/// Adds vectors of `len` elements in their order.
fn sum<'a>(vectors: impl Iterator<Item = &'a [f32]>, len: usize) -> Vec<f32> {
    let mut sum: Option<Vec<f32>> = None;
    for vector in vectors {
        assert_eq!(vector.len(), len);
        match &mut sum {
            None => sum = Some(vector.to_vec()),
            Some(sum) => sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value),
        }
    }
    sum.unwrap()
}
