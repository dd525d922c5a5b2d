//! Layers of `f64` against exact rational arithmetic: short ones, and vectors whose products leave the range of `f64`.

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::double::{Family, OUT_OF_RANGE, UNITS, UNITS_OUT_OF_RANGE, of_magnitudes};
use gradsync_tests::oracle::{Format, rational};

use super::{Case, Cases};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case(&cases.name("short layers of f64"), || short_layers_of_double(cases));
    if cases.world_size() > 1 {
        report.case(&cases.name("products out of range"), || products_out_of_range(cases));
    }
}

/// Short layers of `f64`, some in several windows, against exact rational arithmetic: the error is at most 8 units of `2^-52` of the
/// largest input.
fn short_layers_of_double(cases: &Cases<'_>) {
    let ranks = cases.world_size();
    for family in Family::ALL {
        let lens = [1, 1, 2, 5, 17, if ranks > 8 { 20 } else { 100 }];
        let layers: Vec<Vec<Vec<f64>>> =
            lens.iter().zip(7..).map(|(&len, seed)| family.vectors(ranks, len, seed)).collect();
        let found = run_layers(cases, &layers, Algorithm::Gram, "short layers of f64");
        for (inputs, found) in layers.iter().zip(found) {
            let unit = rational::unit(inputs).max(f64::MIN_POSITIVE);
            let error = rational::adasum(inputs).error_of(&found, unit);
            assert!(error <= UNITS, "{family:?}, {ranks} ranks, {} elements: {error} units", found.len());
        }
    }
}

/// The results of layers of `f64`, given as layers × ranks × elements, without a comparison with the oracle of `f64`'s range.
fn run_layers(cases: &Cases<'_>, layers: &[Vec<Vec<f64>>], algorithm: Algorithm, what: &str) -> Vec<Vec<f64>> {
    let inputs: Vec<Vec<&[f64]>> =
        (0..cases.world_size()).map(|rank| layers.iter().map(|layer| &layer[rank][..]).collect()).collect();
    let inputs: Vec<&[&[f64]]> = inputs.iter().map(|rank| &rank[..]).collect();
    let case = Case::plain(Format::F64, &inputs).with(algorithm, Granularity::Tensor);
    let outcome = cases.runner.run(&case, what);
    case.layers(&outcome)
}

/// Products, or their products with weights, leave the range of `f64`, though the result does not. Layers are in one window and in several.
fn products_out_of_range(cases: &Cases<'_>) {
    let ranks = cases.world_size();
    let lens: &[usize] = if ranks < 8 { &[1, 128, 129, 1000] } else { &[1, 33, 129] };
    for &algorithm in cases.algorithms() {
        for magnitudes in OUT_OF_RANGE {
            let layers: Vec<_> =
                lens.iter().zip(1..).map(|(&len, seed)| of_magnitudes(magnitudes, ranks, len, seed)).collect();
            let what = format!("{magnitudes:?}, {algorithm:?} over {ranks}, {:?}", cases.runner.way);
            for (inputs, found) in layers.iter().zip(run_layers(cases, &layers, algorithm, &what)) {
                let error = rational::adasum(inputs).error_of(&found, rational::unit(inputs));
                assert!(error <= UNITS_OUT_OF_RANGE, "{what}, {} elements: {error} units", found.len());
            }
        }
        let equal = [vec![vec![1e160; 129]; ranks], vec![vec![f64::MAX; 1000]; ranks]];
        for (layer, found) in equal.iter().zip(run_layers(cases, &equal, algorithm, "equal vectors")) {
            assert!(found == layer[0], "{algorithm:?} of equal vectors over {ranks}, {:?}", cases.runner.way);
        }
        let mut spoiled = vec![vec![1e160; 130]; ranks];
        spoiled[ranks - 1][7] = f64::INFINITY;
        let found = run_layers(cases, &[spoiled], algorithm, "an infinity beside large vectors");
        assert!(
            found[0].iter().all(|x| x.is_nan()),
            "{algorithm:?} over {ranks}, {:?}: {:?}",
            cases.runner.way,
            found[0]
        );
    }
}
