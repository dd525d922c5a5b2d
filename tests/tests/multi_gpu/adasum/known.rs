//! Cases with an answer that is known without an oracle: ONNX Runtime's numbers, the algebra of the rule, exact opposites. Each world size
//! runs the cases that it permits.

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::double::{Family, OUT_OF_RANGE, UNITS, UNITS_OUT_OF_RANGE, of_magnitudes};
use gradsync_tests::inputs::{Kind, vector};
use gradsync_tests::oracle::{Format, rational};

use super::device::Way;
use super::{Case, Cases};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    match cases.world_size() {
        1 => report.case(&cases.name("one rank keeps its values"), || alone(cases)),
        2 => pairs(cases, report),
        3 => report.case(&cases.name("the odd one out"), || odd_one_out(cases)),
        4 => report.case(&cases.name("two pairs"), || two_pairs(cases)),
        _ => {}
    }
    if cases.world_size() > 1 {
        report.case(&cases.name("sums and means"), || sums_and_means(cases));
    }
    report.case(&cases.name("short layers of f64"), || short_layers_of_double(cases));
    if cases.world_size() > 1 {
        report.case(&cases.name("products out of range"), || products_out_of_range(cases));
    }
    if cases.world_size() > 2 {
        report.case(&cases.name("one cancelling layer"), || one_cancelling_layer(cases));
    }
}

/// The layers of the result by each algorithm, all within their bounds.
fn results(cases: &Cases<'_>, format: Format, inputs: &[&[&[f64]]]) -> Vec<(Algorithm, Vec<Vec<f64>>)> {
    let of = |&algorithm: &Algorithm| {
        let case = Case::plain(format, inputs).with(algorithm, Granularity::Tensor);
        (algorithm, cases.runner.check(&case, "known"))
    };
    cases.algorithms().iter().map(of).collect()
}

fn alone(cases: &Cases<'_>) {
    for format in Format::ALL {
        for algorithm in [Algorithm::Gram, Algorithm::Tree] {
            let case = Case::plain(format, &[&[&[1.0, -2.0, -0.0], &[format.smallest()]]]);
            let case = case.with(algorithm, Granularity::Tensor);
            assert_eq!(cases.runner.check(&case, "alone"), case.inputs[0], "{}", case.name());
        }
    }
}

fn pairs(cases: &Cases<'_>, report: &mut Report) {
    // Upstream gives four decimals, rounded in the first case and truncated in the second, so the tolerances are half a unit and one unit
    // of the fourth decimal. In the first case, each rank has two tensors, in swapped order.
    report.case(&cases.name("upstream's pairs"), || {
        let (a, b) = ([4.0, 5.0, 6.0], [7.0, 8.0, 9.0]);
        for format in [Format::F32, Format::F64] {
            for (algorithm, layers) in results(cases, format, &[&[&a, &b], &[&b, &a]]) {
                for layer in layers {
                    for (got, expected) in layer.iter().zip([5.6301, 6.5235, 7.4169]) {
                        assert!((got - expected).abs() < 5e-5, "{format:?} {algorithm:?}: {layer:?}");
                    }
                }
            }
        }
        let inputs: [&[&[f64]]; 2] = [&[&[4.0, 5.0, 6.0, 7.0]], &[&[8.0, 9.0, 10.0, 11.0]]];
        for (algorithm, layers) in results(cases, Format::F32, &inputs) {
            for (got, expected) in layers[0].iter().zip([6.2643, 7.1228, 7.9812, 8.8397]) {
                assert!((got - expected).abs() < 1e-4, "{algorithm:?}: {layers:?}");
            }
        }
        // The specification gives the exact halves.
        let a = [5.6301, 6.5235, 7.4169].map(|x| Format::F16.round(x));
        for (algorithm, layers) in results(cases, Format::F16, &[&[&a], &[&[7.0, 8.0, 9.0]]]) {
            assert_eq!(layers[0], [6.324_218_75, 7.261_718_75, 8.203_125], "{algorithm:?}");
        }
    });
    report.case(&cases.name("exact pairs"), || {
        type Vector = &'static [f64];
        let known: [(Vector, Vector, Vector); 7] = [
            (&[1.0, 0.0], &[0.0, 1.0], &[1.0, 1.0]),
            (&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]),
            (&[1.0, 2.0], &[2.0, 4.0], &[1.5, 3.0]),
            (&[0.0, 0.0], &[3.0, 4.0], &[3.0, 4.0]),
            (&[0.0, 0.0], &[0.0, 0.0], &[0.0, 0.0]),
            (&[1.0, -2.0, 3.0], &[-1.0, 2.0, -3.0], &[0.0, 0.0, 0.0]),
            (&[8.0], &[-2.0], &[3.0]),
        ];
        for format in Format::ALL {
            // All pairs are layers of one buffer, and a second buffer has them swapped.
            let one: Vec<&[f64]> = known.iter().map(|(a, ..)| *a).collect();
            let other: Vec<&[f64]> = known.iter().map(|(_, b, _)| *b).collect();
            for inputs in [[&one[..], &other[..]], [&other[..], &one[..]]] {
                for (algorithm, layers) in results(cases, format, &inputs) {
                    for (layer, (a, b, expected)) in layers.iter().zip(known) {
                        assert_eq!(layer, expected, "{format:?} {algorithm:?} {a:?} {b:?}");
                    }
                }
            }
        }
    });
    if matches!(cases.runner.way, Way::Peers | Way::Transport) {
        report.case(&cases.name("granularity"), || granularity(cases));
    }
    report.case(&cases.name("overflow and the threshold"), || {
        for format in [Format::F32, Format::F16, Format::BF16] {
            let max = format.max_finite();
            for (algorithm, layers) in results(cases, format, &[&[&[max, max], &[1.0]], &[&[max, -max], &[1.0]]]) {
                assert_eq!(layers[0], [f64::INFINITY, 0.0], "{format:?} {algorithm:?}");
                assert_eq!(layers[1], [1.0], "{format:?} {algorithm:?}");
            }
        }
        // sqrt(2^-511) is no f64; 2^-255 has the square 2^-510 above it, 2^-256 has 2^-512 below it.
        let (above, below) = (2.0_f64.powi(-255), 2.0_f64.powi(-256));
        for (algorithm, layers) in results(cases, Format::F64, &[&[&[above], &[below]], &[&[above], &[below]]]) {
            assert_eq!(layers, [[above], [2.0 * below]], "{algorithm:?}");
        }
    });
}

/// The granularities differ on two layers, of which one is parallel and the other orthogonal.
fn granularity(cases: &Cases<'_>) {
    let inputs: [&[&[f64]]; 2] = [&[&[1.0, 2.0], &[1.0, 0.0]], &[&[1.0, 2.0], &[0.0, 1.0]]];
    for &algorithm in cases.algorithms() {
        let tensor = Case::plain(Format::F32, &inputs).with(algorithm, Granularity::Tensor);
        assert_eq!(cases.runner.check(&tensor, "tensor"), [[1.0, 2.0], [1.0, 1.0]], "{algorithm:?}");
        // The dot product is 5 and both squared norms are 6, so both coefficients are 1 - 5/12.
        let whole = Case::plain(Format::F32, &inputs).with(algorithm, Granularity::Whole);
        let seven = f64::from((7.0_f64 / 12.0) as f32);
        let twice = [f64::from((7.0_f64 / 6.0) as f32), f64::from((7.0_f64 / 3.0) as f32)];
        assert_eq!(cases.runner.check(&whole, "whole"), [twice, [seven, seven]], "{algorithm:?}");
    }
}

fn odd_one_out(cases: &Cases<'_>) {
    let (a, minus, b) = opposites();
    // The orthogonal pair is combined first, and then the third vector: ((a, b), c), not (a, (b, c)), which gives another result for b = c.
    let first: [&[f64]; 3] = [&[1.0, 0.0, 0.0], &[4.0, 0.0], &a];
    let second: [&[f64]; 3] = [&[0.0, 1.0, 0.0], &[2.0, 0.0], &minus];
    let third: [&[f64]; 3] = [&[0.0, 0.0, 5.0], &[2.0, 0.0], &b];
    for format in Format::ALL {
        for (algorithm, layers) in results(cases, format, &[&first, &second, &third]) {
            assert_eq!(layers[0], [1.0, 1.0, 5.0], "{format:?} {algorithm:?}");
            assert_eq!(layers[1], [2.5, 0.0], "{format:?} {algorithm:?}");
            assert_eq!(layers[2], b, "{format:?} {algorithm:?}, a pair that vanishes");
        }
    }
}

fn two_pairs(cases: &Cases<'_>) {
    let (a, minus, b) = opposites();
    let minus_b: Vec<f64> = b.iter().map(|x| -x).collect();
    for format in Format::ALL {
        let inputs: [&[&[f64]]; 4] = [&[&a, &a], &[&minus, &minus], &[&b, &b], &[&b, &minus_b]];
        for (algorithm, layers) in results(cases, format, &inputs) {
            assert_eq!(layers[0], b, "{format:?} {algorithm:?}, one pair that vanishes");
            assert_eq!(layers[1], vec![0.0; b.len()], "{format:?} {algorithm:?}, two of them");
        }
    }
}

/// A vector, its opposite and another vector, of integers so small that every product and sum is exact in any order: a Gram form without
/// the exact path divides 0 by 0 here.
fn opposites() -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let a: Vec<f64> = (0..333).map(|i| f64::from(i % 17 - 8)).collect();
    let minus = a.iter().map(|x| -x).collect();
    (a, minus, (0..333).map(|i| f64::from(i * 5 % 13 - 6)).collect())
}

/// Orthogonal vectors are added up, and equal ones are their own mean.
fn sums_and_means(cases: &Cases<'_>) {
    let world_size = cases.world_size();
    for format in Format::ALL {
        for &algorithm in cases.algorithms() {
            let case = Case::of(Kind::Orthogonal, format, world_size, &[&[100], &[33]], 8);
            let mut case = case.with(algorithm, Granularity::Tensor);
            let sum: Vec<f64> = (0..133).map(|i| case.inputs.iter().map(|layers| layers.concat()[i]).sum()).collect();
            assert_eq!(cases.runner.check(&case, "orthogonal").concat(), sum, "{}", case.name());

            let same = vec![vector(format, 100, 1), vector(format, 33, 2)];
            case.inputs = vec![same.clone(); world_size];
            let layers = cases.runner.check(&case, "identical");
            if format != Format::F64 {
                // The coefficient 1/2 may be wrong by a few 2⁻⁵³, far below half a unit of the narrower dtypes; for f64, only the bound is
                // checked.
                assert_eq!(layers, same, "{}", case.name());
            }
        }
    }
}

/// One layer of nearly opposite vectors takes the exact path, its neighbours do not, and the report counts one layer.
fn one_cancelling_layer(cases: &Cases<'_>) {
    let world_size = cases.world_size();
    for format in [Format::F64, Format::F32] {
        let shapes: [&[usize]; 3] = [&[301], &[257], &[264]];
        let mut case = Case::of(Kind::Random, format, world_size, &shapes, 4);
        let opposite = Case::of(Kind::NearlyOpposite(1e-6), format, world_size, &shapes, 4);
        for (rank, layers) in case.inputs.iter_mut().enumerate() {
            layers[1].clone_from(&opposite.inputs[rank][1]);
        }
        cases.runner.check(&case, "one cancelling layer");
        let outcome = cases.runner.run(&case, "one cancelling layer");
        assert_eq!(outcome.recomputed, 1, "{}", case.name());
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
    super::device::layers(&case, &outcome.arena, what)
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
