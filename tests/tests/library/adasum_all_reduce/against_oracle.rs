//! Algorithms × dtypes × granularities × rank counts × kinds of input.

use gradsync::comm::Ranks;
use gradsync::ops::{Algorithm, Granularity, adasum_all_reduce};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::guarded;
use gradsync_tests::tolerance::adasum::Method;

use gradsync_tests::suite::adasum::case::Case;

/// Odd sizes, empty tensors, scalars, and tensors larger than a shard, so that shard boundaries fall inside layers.
const SHAPES: [&[usize]; 9] = [&[1], &[0], &[37], &[5, 51], &[], &[64], &[2, 0, 3], &[700], &[3]];

const WORLD_SIZES: [usize; 8] = [1, 2, 3, 4, 5, 7, 8, 16];

/// The algorithms that support this world size.
fn algorithms(world_size: usize) -> &'static [Algorithm] {
    if world_size.is_power_of_two() { &[Algorithm::Gram, Algorithm::Tree] } else { &[Algorithm::Gram] }
}

fn grid(format: Format) {
    guarded(170, move || {
        for world_size in WORLD_SIZES {
            for kind in Kind::ADASUM {
                for &algorithm in algorithms(world_size) {
                    for granularity in [Granularity::Tensor, Granularity::Whole] {
                        let case = Case::of(kind, format, world_size, &SHAPES, world_size as u64);
                        case.with(algorithm, granularity).check(&format!("{kind:?}"));
                    }
                }
            }
        }
    });
}

#[test]
fn f64_of_every_case() {
    grid(Format::F64);
}

#[test]
fn f32_of_every_case() {
    grid(Format::F32);
}

#[test]
fn f16_of_every_case() {
    grid(Format::F16);
}

#[test]
fn bf16_of_every_case() {
    grid(Format::BF16);
}

#[test]
fn sixty_four_ranks() {
    guarded(120, || {
        for kind in [Kind::Random, Kind::Orthogonal, Kind::NearlyOpposite(1e-6)] {
            for algorithm in [Algorithm::Gram, Algorithm::Tree] {
                Case::of(kind, Format::F32, 64, &[&[129], &[0], &[1], &[257]], 5)
                    .with(algorithm, Granularity::Tensor)
                    .check(&format!("{kind:?}"));
            }
        }
        Case::of(Kind::Random, Format::BF16, 63, &[&[129], &[1]], 5).check("63 ranks");
    });
}

#[test]
fn the_default_takes_any_rank_count() {
    guarded(60, || {
        for world_size in [1, 2, 3, 4, 6, 7, 8] {
            Case::of(Kind::Random, Format::F32, world_size, &SHAPES, 3)
                .with(Algorithm::Auto, Granularity::Tensor)
                .check("auto");
        }
    });
}

#[test]
fn larger_layers() {
    guarded(120, || {
        for (format, world_size) in [(Format::F32, 4), (Format::BF16, 3), (Format::F64, 2)] {
            for &algorithm in algorithms(world_size) {
                Case::of(Kind::Random, format, world_size, &[&[65_537], &[255, 257], &[4095], &[4097]], 6)
                    .with(algorithm, Granularity::Tensor)
                    .check("large");
            }
        }
    });
}

#[test]
fn buffers_without_elements() {
    guarded(60, || {
        for shapes in [&[][..], &[&[0_usize][..]], &[&[0], &[3, 0]]] {
            for algorithm in [Algorithm::Gram, Algorithm::Tree] {
                let case = Case::of(Kind::Random, Format::F32, 4, shapes, 1).with(algorithm, Granularity::Tensor);
                assert_eq!(case.layers(&case.run()).concat(), [] as [f64; 0]);
            }
        }
    });
}

/// Each result is within its own bound of the exact result, so the two results differ by at most the sum of the bounds. For vectors that do
/// not cancel, this sum is a few units in the last place.
#[test]
fn gram_and_tree_agree() {
    guarded(120, || {
        for format in Format::ALL {
            for kind in Kind::ADASUM {
                for world_size in [2, 4, 8] {
                    let gram = Case::of(kind, format, world_size, &SHAPES, 17);
                    let tree = gram.clone().with(Algorithm::Tree, Granularity::Tensor);
                    let (a, b) = (gram.layers(&gram.run()).concat(), tree.layers(&tree.run()).concat());
                    let (bound_a, bound_b) = (gram.expectation(Method::Gram), tree.expectation(Method::Tree));
                    for i in 0..a.len() {
                        let bound = bound_a.bounds[i] + bound_b.bounds[i];
                        assert!((a[i] - b[i]).abs() <= bound, "{format:?} {kind:?}, {world_size} ranks, element {i}");
                    }
                }
            }
        }
    });
}

#[test]
fn a_step_finds_nothing_of_the_one_before() {
    guarded(60, || {
        for world_size in [3, 4] {
            for &algorithm in algorithms(world_size) {
                let case = |seed| {
                    Case::of(Kind::Random, Format::F32, world_size, &SHAPES, seed).with(algorithm, Granularity::Tensor)
                };
                let (first, second) = (case(1), case(100));
                let ranks = gradsync::internal::run_each(world_size, |comm| {
                    let (mut used, mut fresh) = (first.buffer(comm.rank()), second.buffer(comm.rank()));
                    adasum_all_reduce(&comm, &mut used, first.options()).unwrap();
                    used.as_mut_slice().as_bytes_mut().copy_from_slice(fresh.as_slice().as_bytes());
                    adasum_all_reduce(&comm, &mut used, second.options()).unwrap();
                    adasum_all_reduce(&comm, &mut fresh, second.options()).unwrap();
                    let same = used.as_slice().as_bytes() == fresh.as_slice().as_bytes();
                    assert!(same, "{algorithm:?} of {world_size}");
                });
                ranks.unwrap().into_iter().for_each(|rank| rank.expect("no rank panicked"));
            }
        }
    });
}
