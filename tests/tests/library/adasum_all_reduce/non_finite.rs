//! NaN and infinity of one rank, and beside empty layers.

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::guarded;

use gradsync_tests::suite::adasum::case::Case;

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
