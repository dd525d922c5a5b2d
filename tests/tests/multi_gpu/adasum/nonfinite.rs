//! NaN and infinity spread to every element of their layer on every rank, to no other layer, and to no gap.

use gradsync::ops::Granularity;
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::assert_equal;

use super::device::{self, Way};
use super::{Case, Cases};
use crate::report::Report;

const SHAPES: [&[usize]; 3] = [&[37], &[130], &[5]];

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case(&cases.name("one bad element spoils its layer"), || spoiled_layer(cases));
    if matches!(cases.runner.way, Way::Peers | Way::Transport) {
        report.case(&cases.name("over the whole buffer it spoils everything"), || spoiled_buffer(cases));
    }
}

/// The layers of a case for which the oracle has no bounds, with checked gaps.
fn layers(cases: &Cases<'_>, case: &Case, what: &str) -> Vec<Vec<f64>> {
    let outcome = cases.runner.run(case, what);
    device::layers(case, &outcome.arena, what)
}

/// Not a number of any dtype, all of whose bits are set, as those of a mailbox before a packet arrives.
const ALL_BITS: f64 = f64::from_bits(u64::MAX);

/// With a non-finite element on one rank, the partner's coefficient is NaN in either reading of the threshold, and NaN times any number
/// is NaN. The whole layer is therefore NaN as soon as a second rank takes part.
fn spoiled_layer(cases: &Cases<'_>) {
    let world_size = cases.world_size();
    for format in Format::ALL {
        for &algorithm in cases.algorithms() {
            let clean = Case::of(Kind::Random, format, world_size, &SHAPES, 2).with(algorithm, Granularity::Tensor);
            let expected = cases.runner.check(&clean, "clean");
            // The last two in whole packets of every dtype.
            let last = world_size - 1;
            for (bad, len, rank) in
                [(f64::NAN, 1, 0), (f64::NEG_INFINITY, 1, last), (ALL_BITS, 40, 0), (ALL_BITS, 40, last)]
            {
                let mut case = clean.clone();
                case.inputs[rank][1][64..][..len].fill(bad);
                let what = format!("{}, {bad} in {len} elements on rank {rank}", case.name());
                let got = layers(cases, &case, &what);
                assert_eq!((&got[0], &got[2]), (&expected[0], &expected[2]), "{what}: another layer");
                if world_size == 1 {
                    assert_equal(&what, &got[1], &case.inputs[0][1]);
                } else {
                    assert!(got[1].iter().all(|x| x.is_nan()), "{what}: {:?}", got[1]);
                }
            }
        }
    }
}

fn spoiled_buffer(cases: &Cases<'_>) {
    let world_size = cases.world_size();
    for format in [Format::F32, Format::BF16] {
        for &algorithm in cases.algorithms() {
            let mut case = Case::of(Kind::Random, format, world_size, &SHAPES, 2).with(algorithm, Granularity::Whole);
            case.inputs[world_size - 1][2][0] = f64::NAN;
            let got = layers(cases, &case, &case.name()).concat();
            let spoiled = got.iter().filter(|x| x.is_nan()).count();
            let expected = if world_size == 1 { 1 } else { got.len() };
            assert_eq!(spoiled, expected, "{}: elements that are NaN", case.name());
        }
    }
}
