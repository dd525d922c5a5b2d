//! NaN and infinity spread to every element of their layer on every rank, and to no other layer.

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::guarded;

use crate::case::Case;

const SHAPES: [&[usize]; 3] = [&[37], &[130], &[5]];

/// With one non-finite element on one rank, the partner's coefficient is NaN in either reading of the threshold, and NaN times any number
/// is NaN. The whole layer is therefore NaN as soon as a second rank takes part.
#[test]
fn one_bad_element_spoils_its_layer_only() {
    guarded(120, || {
        for format in Format::ALL {
            for world_size in [2, 3, 4, 5, 8] {
                for algorithm in [Algorithm::Gram, Algorithm::Tree] {
                    if matches!(algorithm, Algorithm::Tree) && !usize::is_power_of_two(world_size) {
                        continue;
                    }
                    let clean = Case::of(Kind::Random, format, world_size, &SHAPES, 2);
                    let clean = clean.with(algorithm, Granularity::Tensor);
                    let expected = clean.layers(&clean.run());
                    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                        for rank in [0, world_size - 1] {
                            let mut case = clean.clone();
                            case.inputs[rank][1][64] = bad;
                            let what = format!("{}, {bad} on rank {rank}", case.name());
                            let got = case.layers(&case.run());
                            assert_eq!((&got[0], &got[2]), (&expected[0], &expected[2]), "{what}: another layer");
                            assert!(got[1].iter().all(|x| x.is_nan()), "{what}: {:?}", got[1]);
                        }
                    }
                }
            }
        }
    });
}

#[test]
fn over_the_whole_buffer_it_spoils_everything() {
    guarded(60, || {
        for algorithm in [Algorithm::Gram, Algorithm::Tree] {
            let mut case = Case::of(Kind::Random, Format::F32, 4, &SHAPES, 2).with(algorithm, Granularity::Whole);
            case.inputs[3][2][0] = f64::NAN;
            // `layers` also checks that NaN did not reach the gaps.
            assert!(case.layers(&case.run()).concat().iter().all(|x| x.is_nan()), "{algorithm:?}");
        }
    });
}

#[test]
fn one_rank_keeps_its_values() {
    guarded(60, || {
        for format in Format::ALL {
            for algorithm in [Algorithm::Gram, Algorithm::Tree] {
                let case = Case::plain(format, &[&[&[1.0, f64::INFINITY, -0.0], &[format.smallest()]]]);
                let case = case.with(algorithm, Granularity::Tensor);
                let got = case.layers(&case.run());
                assert_eq!(got, case.inputs[0], "{}", case.name());
            }
        }
    });
}

#[test]
fn an_empty_layer_is_not_spoiled_by_its_neighbours() {
    guarded(60, || {
        let bad: [&[f64]; 3] = [&[f64::NAN], &[], &[1.0]];
        let good: [&[f64]; 3] = [&[2.0], &[], &[1.0]];
        let case = Case::plain(Format::F32, &[&bad, &good]);
        let got = case.layers(&case.run());
        assert!(got[0][0].is_nan() && got[1].is_empty() && got[2] == [1.0], "{got:?}");
    });
}
