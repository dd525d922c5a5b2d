//! An optimizer step with its state divided over ranks, against the same step on one rank: the bits are equal.

use gradsync::DType;
use gradsync::internal::plan::layout::Layout;
use gradsync::internal::plan::ownership::Ownership;
use gradsync::internal::plan::zero::{ZeroPart, partition, partition_padded, parts_of};
use gradsync_tests::inputs::Random;
use proptest::prelude::*;

use super::{WORLD_SIZES, all_gather, bits, expected, lists, reduce_scatter, sum, values};

const STEPS: usize = 3;

/// Momentum for one element of a tensor. The rate differs between tensors and between elements, so that an update of the wrong element is
/// detected.
fn update(tensor: usize, index: usize, gradient: f32, momentum: &mut f32, parameter: &mut f32) {
    let rate = 0.1 / (1 + tensor) as f32 + 1e-4 * (index % 101) as f32;
    *momentum = 0.9 * *momentum + gradient;
    *parameter -= rate * *momentum;
}

/// A training job: initial parameters, and gradients by step, rank and tensor.
struct Job {
    parameters: Vec<Vec<f32>>,
    gradients: Vec<Vec<Vec<Vec<f32>>>>,
}

impl Job {
    fn new(world_size: usize, lens: &[usize], random: &mut Random) -> Job {
        let mut tensors = || lens.iter().map(|&len| values(len, random)).collect::<Vec<_>>();
        let parameters = tensors();
        let gradients = (0..STEPS).map(|_| (0..world_size).map(|_| tensors()).collect()).collect();
        Job { parameters, gradients }
    }

    /// The final parameters of a single rank that holds every gradient and all state.
    fn unsharded(&self) -> Vec<Vec<f32>> {
        let mut parameters = self.parameters.clone();
        let mut momentum: Vec<Vec<f32>> = parameters.iter().map(|tensor| vec![0.0; tensor.len()]).collect();
        for ranks in &self.gradients {
            for (tensor, parameter) in parameters.iter_mut().enumerate() {
                let gradient = sum(ranks.iter().map(|tensors| tensors[tensor].as_slice()), parameter.len());
                for (index, value) in parameter.iter_mut().enumerate() {
                    update(tensor, index, gradient[index], &mut momentum[tensor][index], value);
                }
            }
        }
        parameters
    }
}

/// The state for the parts of every rank; no other state is kept.
fn states(parts: &[ZeroPart], world_size: usize) -> Vec<Vec<Vec<f32>>> {
    let state = |rank| parts_of(parts, rank).iter().map(|part| vec![0.0; part.within.len()]).collect::<Vec<_>>();
    let states: Vec<_> = (0..world_size).map(state).collect();
    let elements: usize = states.iter().flatten().map(Vec::len).sum();
    assert_eq!(elements, parts.iter().map(|part| part.within.len()).sum::<usize>(), "a part belongs to no rank");
    states
}

/// Updates one part, whose elements are in `gradient`, `momentum` and `parameter`.
fn update_part(part: &ZeroPart, gradient: &[f32], momentum: &mut [f32], parameter: &mut [f32]) {
    assert!([gradient.len(), momentum.len(), parameter.len()] == [part.within.len(); 3], "{part:?}");
    for (i, index) in part.within.clone().enumerate() {
        update(part.tensor, index, gradient[i], &mut momentum[i], &mut parameter[i]);
    }
}

/// Tensors at their segments of an arena, with `gap` between them.
fn arena(tensors: &[Vec<f32>], layout: &Layout, world_size: usize, gap: f32) -> Vec<f32> {
    let mut arena = vec![gap; layout.shard_len * world_size];
    for (tensor, segment) in tensors.iter().zip(&layout.segments) {
        arena[segment.clone()].copy_from_slice(tensor);
    }
    arena
}

/// The job with arenas in the layout of a gradient buffer: reduce-scatter, update of the rank's own parts, all-gather in place.
fn check_arena(world_size: usize, lens: &[usize], random: &mut Random) {
    let job = Job::new(world_size, lens, random);
    let layout = Layout::new(DType::F32, world_size, lens).unwrap();
    let parts = partition(&layout.segments, layout.shard_len, world_size).unwrap();
    check_cover(&parts, &layout.segments.iter().map(|s| s.start).collect::<Vec<_>>(), lens, layout.shard_len);
    let gap = f32::from_bits(0x7fc0_1234);
    let mut states = states(&parts, world_size);
    let mut parameters = vec![arena(&job.parameters, &layout, world_size, gap); world_size];
    for ranks in &job.gradients {
        let buffers: Vec<_> = ranks.iter().map(|tensors| arena(tensors, &layout, world_size, 0.0)).collect();
        let reduced = reduce_scatter(&buffers);
        for (rank, parameters) in parameters.iter_mut().enumerate() {
            let begin = rank * layout.shard_len;
            for (part, momentum) in parts_of(&parts, rank).iter().zip(&mut states[rank]) {
                let gradient = &reduced[rank][part.range.start - begin..part.range.end - begin];
                update_part(part, gradient, momentum, &mut parameters[part.range.clone()]);
            }
        }
        let shard = |rank: usize| rank * layout.shard_len..(rank + 1) * layout.shard_len;
        let shards: Vec<_> = parameters.iter().enumerate().map(|(rank, arena)| &arena[shard(rank)]).collect();
        let gathered = all_gather(&shards);
        parameters.fill(gathered);
    }
    let truth = bits(&arena(&job.unsharded(), &layout, world_size, gap));
    for (rank, parameters) in parameters.iter().enumerate() {
        assert_eq!(bits(parameters), truth, "rank {rank} of {world_size}, {lens:?}");
    }
}

/// The job in ONNX Runtime's form: the parts are tensors of their own, scattered and gathered by ownership.
fn check_padded(world_size: usize, lens: &[usize], random: &mut Random) {
    let job = Job::new(world_size, lens, random);
    let parts = partition_padded(world_size, lens).unwrap();
    let offsets: Vec<usize> = (0..lens.len()).map(|index| lens[..index].iter().sum()).collect();
    check_cover(&parts, &offsets, lens, expected(world_size, lens, 1).shard);
    let part_lens: Vec<_> = parts.iter().map(|part| part.within.len()).collect();
    let ownership = Ownership::new("test", world_size, &part_lens).unwrap();
    let pieces = |tensors: &[Vec<f32>]| -> Vec<Vec<f32>> {
        parts.iter().map(|part| tensors[part.tensor][part.within.clone()].to_vec()).collect()
    };
    let mut states = states(&parts, world_size);
    let mut parameters = vec![pieces(&job.parameters); world_size];
    for ranks in &job.gradients {
        let mut scratch = vec![vec![f32::NAN; ownership.padded_len()]; world_size];
        for (rank, tensors) in ranks.iter().enumerate() {
            let pieces = pieces(tensors);
            for step in ownership.scatter_moves(rank).copy_in {
                scratch[rank][step.range].copy_from_slice(&pieces[step.tensor]);
            }
        }
        let reduced = reduce_scatter(&scratch);
        let mut shards = vec![vec![f32::NAN; ownership.shard_len()]; world_size];
        for rank in 0..world_size {
            let begin = ownership.shard(rank).start;
            // A rank's own part is a tensor that the scatter reduces to this rank and that the gather sends from it.
            for (step, momentum) in ownership.scatter_moves(rank).copy_out.iter().zip(&mut states[rank]) {
                let inside = step.range.start - begin..step.range.end - begin;
                let parameter = &mut parameters[rank][step.tensor];
                update_part(&parts[step.tensor], &reduced[rank][inside], momentum, parameter);
            }
            for step in ownership.gather_moves(rank).copy_in {
                let inside = step.range.start - begin..step.range.end - begin;
                shards[rank][inside].copy_from_slice(&parameters[rank][step.tensor]);
            }
        }
        let gathered = all_gather(&shards.iter().map(Vec::as_slice).collect::<Vec<_>>());
        for (rank, parameters) in parameters.iter_mut().enumerate() {
            for step in ownership.gather_moves(rank).copy_out {
                parameters[step.tensor].copy_from_slice(&gathered[step.range]);
            }
        }
    }
    let truth = pieces(&job.unsharded());
    for (rank, parameters) in parameters.iter().enumerate() {
        for (index, (found, truth)) in parameters.iter().zip(&truth).enumerate() {
            assert_eq!(bits(found), bits(truth), "part {index} on rank {rank} of {world_size}, {lens:?}");
        }
    }
}

/// Checks that each element is in exactly one part, at its offset, in the shard that contains it.
fn check_cover(parts: &[ZeroPart], offsets: &[usize], lens: &[usize], shard: usize) {
    let mut wanted = Vec::new();
    for (tensor, (&offset, &len)) in offsets.iter().zip(lens).enumerate() {
        wanted.extend((0..len).map(|index| (tensor, index, offset + index, (offset + index) / shard)));
    }
    let mut found = Vec::new();
    for part in parts {
        assert!(!part.within.is_empty() && part.within.len() == part.range.len(), "{part:?}");
        let elements = part.within.clone().zip(part.range.clone());
        found.extend(elements.map(|(index, range)| (part.tensor, index, range, part.rank)));
    }
    assert_eq!(found, wanted);
    // Tensors are cut only at the edges of shards.
    let same = |pair: &[ZeroPart]| pair[0].tensor == pair[1].tensor && pair[0].rank == pair[1].rank;
    assert!(!parts.windows(2).any(same), "{parts:?}");
}

#[test]
fn a_sharded_step_is_the_whole_step() {
    for world_size in WORLD_SIZES {
        let mut random = Random::new(120 + world_size as u64);
        for lens in lists(world_size) {
            check_arena(world_size, &lens, &mut random);
            check_padded(world_size, &lens, &mut random);
        }
    }
}

#[test]
fn pieces_are_previous_current_and_next() {
    // 1024 elements on 4 ranks become 1152 with padding, in shards of 288. Tensor 1 begins in rank 0's shard and ends in rank 2's.
    let parts = partition_padded(4, &[100, 700, 0, 224]).unwrap();
    let found: Vec<_> = parts.iter().map(|part| (part.tensor, part.within.clone(), part.rank)).collect();
    let wanted = [(0, 0..100, 0), (1, 0..188, 0), (1, 188..476, 1), (1, 476..700, 2), (3, 0..64, 2), (3, 64..224, 3)];
    assert_eq!(found, wanted);
    let sides: Vec<_> = parts.iter().filter(|part| part.tensor == 1).map(|part| part.rank.cmp(&1)).collect();
    assert_eq!(sides, [std::cmp::Ordering::Less, std::cmp::Ordering::Equal, std::cmp::Ordering::Greater]);
}

proptest! {
    #[test]
    fn any_job_is_the_same_sharded(
        lens in prop::collection::vec(prop_oneof![Just(0usize), 1usize..40, 0usize..600], 0..10),
        world_size in WORLD_SIZES,
        seed in any::<u64>(),
    ) {
        let mut random = Random::new(seed);
        check_arena(world_size, &lens, &mut random);
        check_padded(world_size, &lens, &mut random);
    }
}
