//! An optimizer step with its state divided over ranks, against the same step on one rank: the bits are equal.

use gradsync::DType;
use gradsync::internal::plan::layout::Layout;
use gradsync::internal::plan::ownership::Ownership;
use gradsync::internal::plan::zero::{ZeroPart, partition, partition_padded, views_of};
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

/// The state for the views of every rank; no other state is kept.
fn states(views: &[ZeroPart], world_size: usize) -> Vec<Vec<Vec<f32>>> {
    let state = |rank| views_of(views, rank).iter().map(|view| vec![0.0; view.within.len()]).collect::<Vec<_>>();
    let states: Vec<_> = (0..world_size).map(state).collect();
    let elements: usize = states.iter().flatten().map(Vec::len).sum();
    assert_eq!(elements, views.iter().map(|view| view.within.len()).sum::<usize>(), "a view belongs to no rank");
    states
}

/// Updates one view, whose elements are in `gradient`, `momentum` and `parameter`.
fn update_view(view: &ZeroPart, gradient: &[f32], momentum: &mut [f32], parameter: &mut [f32]) {
    assert!([gradient.len(), momentum.len(), parameter.len()] == [view.within.len(); 3], "{view:?}");
    for (i, index) in view.within.clone().enumerate() {
        update(view.tensor, index, gradient[i], &mut momentum[i], &mut parameter[i]);
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

/// The job with arenas in the layout of a gradient buffer: reduce-scatter, update of the rank's own views, all-gather in place.
fn check_arena(world_size: usize, lens: &[usize], random: &mut Random) {
    let job = Job::new(world_size, lens, random);
    let layout = Layout::new(DType::F32, world_size, lens).unwrap();
    let views = partition(&layout.segments, layout.shard_len, world_size).unwrap();
    check_cover(&views, &layout.segments.iter().map(|s| s.start).collect::<Vec<_>>(), lens, layout.shard_len);
    let gap = f32::from_bits(0x7fc0_1234);
    let mut states = states(&views, world_size);
    let mut parameters = vec![arena(&job.parameters, &layout, world_size, gap); world_size];
    for ranks in &job.gradients {
        let buffers: Vec<_> = ranks.iter().map(|tensors| arena(tensors, &layout, world_size, 0.0)).collect();
        let reduced = reduce_scatter(&buffers);
        for (rank, parameters) in parameters.iter_mut().enumerate() {
            let begin = rank * layout.shard_len;
            for (view, momentum) in views_of(&views, rank).iter().zip(&mut states[rank]) {
                let gradient = &reduced[rank][view.place.start - begin..view.place.end - begin];
                update_view(view, gradient, momentum, &mut parameters[view.place.clone()]);
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

/// The job in ONNX Runtime's form: the views are tensors of their own, scattered and gathered by ownership.
fn check_padded(world_size: usize, lens: &[usize], random: &mut Random) {
    let job = Job::new(world_size, lens, random);
    let views = partition_padded(world_size, lens).unwrap();
    let offsets: Vec<usize> = (0..lens.len()).map(|index| lens[..index].iter().sum()).collect();
    check_cover(&views, &offsets, lens, expected(world_size, lens, 1).window);
    let view_lens: Vec<_> = views.iter().map(|view| view.within.len()).collect();
    let ownership = Ownership::new("test", world_size, &view_lens).unwrap();
    let pieces = |tensors: &[Vec<f32>]| -> Vec<Vec<f32>> {
        views.iter().map(|view| tensors[view.tensor][view.within.clone()].to_vec()).collect()
    };
    let mut states = states(&views, world_size);
    let mut parameters = vec![pieces(&job.parameters); world_size];
    for ranks in &job.gradients {
        let mut scratch = vec![vec![f32::NAN; ownership.padded_len()]; world_size];
        for (rank, tensors) in ranks.iter().enumerate() {
            let pieces = pieces(tensors);
            for step in ownership.scatter_moves(rank).copy_in {
                scratch[rank][step.place].copy_from_slice(&pieces[step.tensor]);
            }
        }
        let reduced = reduce_scatter(&scratch);
        let mut windows = vec![vec![f32::NAN; ownership.window_len()]; world_size];
        for rank in 0..world_size {
            let begin = ownership.window(rank).start;
            // A rank's own view is a tensor that the scatter reduces to this rank and that the gather sends from it.
            for (step, momentum) in ownership.scatter_moves(rank).copy_out.iter().zip(&mut states[rank]) {
                let inside = step.place.start - begin..step.place.end - begin;
                let parameter = &mut parameters[rank][step.tensor];
                update_view(&views[step.tensor], &reduced[rank][inside], momentum, parameter);
            }
            for step in ownership.gather_moves(rank).copy_in {
                let inside = step.place.start - begin..step.place.end - begin;
                windows[rank][inside].copy_from_slice(&parameters[rank][step.tensor]);
            }
        }
        let gathered = all_gather(&windows.iter().map(Vec::as_slice).collect::<Vec<_>>());
        for (rank, parameters) in parameters.iter_mut().enumerate() {
            for step in ownership.gather_moves(rank).copy_out {
                parameters[step.tensor].copy_from_slice(&gathered[step.place]);
            }
        }
    }
    let truth = pieces(&job.unsharded());
    for (rank, parameters) in parameters.iter().enumerate() {
        for (index, (found, truth)) in parameters.iter().zip(&truth).enumerate() {
            assert_eq!(bits(found), bits(truth), "view {index} on rank {rank} of {world_size}, {lens:?}");
        }
    }
}

/// Checks that each element is in exactly one view, at its offset, in the window that contains it.
fn check_cover(views: &[ZeroPart], offsets: &[usize], lens: &[usize], window: usize) {
    let mut wanted = Vec::new();
    for (tensor, (&offset, &len)) in offsets.iter().zip(lens).enumerate() {
        wanted.extend((0..len).map(|index| (tensor, index, offset + index, (offset + index) / window)));
    }
    let mut found = Vec::new();
    for view in views {
        assert!(!view.within.is_empty() && view.within.len() == view.place.len(), "{view:?}");
        let elements = view.within.clone().zip(view.place.clone());
        found.extend(elements.map(|(index, place)| (view.tensor, index, place, view.rank)));
    }
    assert_eq!(found, wanted);
    // Tensors are cut only at the edges of windows.
    let same = |pair: &[ZeroPart]| pair[0].tensor == pair[1].tensor && pair[0].rank == pair[1].rank;
    assert!(!views.windows(2).any(same), "{views:?}");
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
    // 1024 elements on 4 ranks become 1152 with padding, in windows of 288. Tensor 1 begins in rank 0's window and ends in rank 2's.
    let views = partition_padded(4, &[100, 700, 0, 224]).unwrap();
    let found: Vec<_> = views.iter().map(|view| (view.tensor, view.within.clone(), view.rank)).collect();
    let wanted = [(0, 0..100, 0), (1, 0..188, 0), (1, 188..476, 1), (1, 476..700, 2), (3, 0..64, 2), (3, 64..224, 3)];
    assert_eq!(found, wanted);
    let sides: Vec<_> = views.iter().filter(|view| view.tensor == 1).map(|view| view.rank.cmp(&1)).collect();
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
