//! Cases with an answer that is known without an oracle: ONNX Runtime's numbers, the algebra of the rule, exact opposites, and numbers that
//! are not finite. Each world size runs the cases that it permits.

use gradsync::ops::{Algorithm, Granularity};

use super::case::{Case, Outcome};
use crate::inputs::{Kind, vector};
use crate::oracle::Format;
use crate::suite::Report;
use crate::tolerance::assert_equal;

/// Runs a case over ranks of some transport.
pub trait Runner {
    /// The algorithms to try with this number of ranks.
    fn algorithms(&self, world_size: usize) -> &'static [Algorithm];

    /// Runs a case twice; all ranks and both runs have to agree bit for bit.
    fn run(&self, case: &Case, what: &str) -> Outcome;

    /// Runs a case, compares the result and the report with the oracle, and returns the layers.
    fn check(&self, case: &Case, label: &str) -> Vec<Vec<f64>>;
}

/// All cases; `name` makes the names of cases.
pub fn run(runner: &impl Runner, world_size: usize, name: impl Fn(&str) -> String, report: &mut impl Report) {
    match world_size {
        1 => report.case(&name("one rank keeps its values"), || alone(runner)),
        2 => {
            report.case(&name("upstream's pairs"), || upstream(runner));
            report.case(&name("exact pairs"), || exact_pairs(runner));
            report.case(&name("granularity"), || granularity(runner));
            report.case(&name("overflow and the threshold"), || limits(runner));
        }
        3 => report.case(&name("the odd one out"), || odd_one_out(runner)),
        4 => report.case(&name("two pairs"), || two_pairs(runner)),
        _ => {}
    }
    if world_size > 1 {
        report.case(&name("sums and means"), || sums_and_means(runner, world_size));
    }
    if world_size > 2 {
        report.case(&name("one cancelling layer"), || one_cancelling_layer(runner, world_size));
    }
    report.case(&name("one bad element spoils its layer"), || spoiled_layer(runner, world_size));
    report.case(&name("over the whole buffer it spoils everything"), || spoiled_buffer(runner, world_size));
}

/// The layers of the result by each algorithm, all within their bounds.
fn results(runner: &impl Runner, format: Format, inputs: &[&[&[f64]]]) -> Vec<(Algorithm, Vec<Vec<f64>>)> {
    let of = |&algorithm: &Algorithm| {
        let case = Case::plain(format, inputs).with(algorithm, Granularity::Tensor);
        (algorithm, runner.check(&case, "known"))
    };
    runner.algorithms(inputs.len()).iter().map(of).collect()
}

fn alone(runner: &impl Runner) {
    for format in Format::ALL {
        for algorithm in [Algorithm::Gram, Algorithm::Tree] {
            let case = Case::plain(format, &[&[&[1.0, -2.0, -0.0], &[format.smallest()]]]);
            let case = case.with(algorithm, Granularity::Tensor);
            assert_eq!(runner.check(&case, "alone"), case.inputs[0], "{}", case.name());
        }
    }
}

fn upstream(runner: &impl Runner) {
    // Upstream gives four decimals, rounded in the first case and truncated in the second, so the tolerances are half a unit and one unit
    // of the fourth decimal. In the first case, each rank has two tensors, in swapped order.
    let (a, b) = ([4.0, 5.0, 6.0], [7.0, 8.0, 9.0]);
    for format in [Format::F32, Format::F64] {
        for (algorithm, layers) in results(runner, format, &[&[&a, &b], &[&b, &a]]) {
            for layer in layers {
                for (got, expected) in layer.iter().zip([5.6301, 6.5235, 7.4169]) {
                    assert!((got - expected).abs() < 5e-5, "{format:?} {algorithm:?}: {layer:?}");
                }
            }
        }
    }
    let inputs: [&[&[f64]]; 2] = [&[&[4.0, 5.0, 6.0, 7.0]], &[&[8.0, 9.0, 10.0, 11.0]]];
    for (algorithm, layers) in results(runner, Format::F32, &inputs) {
        for (got, expected) in layers[0].iter().zip([6.2643, 7.1228, 7.9812, 8.8397]) {
            assert!((got - expected).abs() < 1e-4, "{algorithm:?}: {layers:?}");
        }
    }
    // The specification gives the exact halves.
    let a = [5.6301, 6.5235, 7.4169].map(|x| Format::F16.round(x));
    for (algorithm, layers) in results(runner, Format::F16, &[&[&a], &[&[7.0, 8.0, 9.0]]]) {
        assert_eq!(layers[0], [6.324_218_75, 7.261_718_75, 8.203_125], "{algorithm:?}");
    }
}

fn exact_pairs(runner: &impl Runner) {
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
            for (algorithm, layers) in results(runner, format, &inputs) {
                for (layer, (a, b, expected)) in layers.iter().zip(known) {
                    assert_eq!(layer, expected, "{format:?} {algorithm:?} {a:?} {b:?}");
                }
            }
        }
    }
}

fn limits(runner: &impl Runner) {
    for format in [Format::F32, Format::F16, Format::BF16] {
        let max = format.max_finite();
        for (algorithm, layers) in results(runner, format, &[&[&[max, max], &[1.0]], &[&[max, -max], &[1.0]]]) {
            assert_eq!(layers[0], [f64::INFINITY, 0.0], "{format:?} {algorithm:?}");
            assert_eq!(layers[1], [1.0], "{format:?} {algorithm:?}");
        }
    }
    // sqrt(2^-511) is no f64; 2^-255 has the square 2^-510 above it, 2^-256 has 2^-512 below it.
    let (above, below) = (2.0_f64.powi(-255), 2.0_f64.powi(-256));
    for (algorithm, layers) in results(runner, Format::F64, &[&[&[above], &[below]], &[&[above], &[below]]]) {
        assert_eq!(layers, [[above], [2.0 * below]], "{algorithm:?}");
    }
}

/// The granularities differ on two layers, of which one is parallel and the other orthogonal.
fn granularity(runner: &impl Runner) {
    let inputs: [&[&[f64]]; 2] = [&[&[1.0, 2.0], &[1.0, 0.0]], &[&[1.0, 2.0], &[0.0, 1.0]]];
    for &algorithm in runner.algorithms(2) {
        let tensor = Case::plain(Format::F32, &inputs).with(algorithm, Granularity::Tensor);
        assert_eq!(runner.check(&tensor, "tensor"), [[1.0, 2.0], [1.0, 1.0]], "{algorithm:?}");
        // The dot product is 5 and both squared norms are 6, so both coefficients are 1 - 5/12.
        let whole = Case::plain(Format::F32, &inputs).with(algorithm, Granularity::Whole);
        let seven = f64::from((7.0_f64 / 12.0) as f32);
        let twice = [f64::from((7.0_f64 / 6.0) as f32), f64::from((7.0_f64 / 3.0) as f32)];
        assert_eq!(runner.check(&whole, "whole"), [twice, [seven, seven]], "{algorithm:?}");
    }
}

fn odd_one_out(runner: &impl Runner) {
    let (a, minus, b) = opposites();
    // The orthogonal pair is combined first, and then the third vector: ((a, b), c), not (a, (b, c)), which gives another result for b = c.
    let first: [&[f64]; 3] = [&[1.0, 0.0, 0.0], &[4.0, 0.0], &a];
    let second: [&[f64]; 3] = [&[0.0, 1.0, 0.0], &[2.0, 0.0], &minus];
    let third: [&[f64]; 3] = [&[0.0, 0.0, 5.0], &[2.0, 0.0], &b];
    for format in Format::ALL {
        for (algorithm, layers) in results(runner, format, &[&first, &second, &third]) {
            assert_eq!(layers[0], [1.0, 1.0, 5.0], "{format:?} {algorithm:?}");
            assert_eq!(layers[1], [2.5, 0.0], "{format:?} {algorithm:?}");
            assert_eq!(layers[2], b, "{format:?} {algorithm:?}, a pair that vanishes");
        }
    }
}

fn two_pairs(runner: &impl Runner) {
    let (a, minus, b) = opposites();
    let minus_b: Vec<f64> = b.iter().map(|x| -x).collect();
    for format in Format::ALL {
        let inputs: [&[&[f64]]; 4] = [&[&a, &a], &[&minus, &minus], &[&b, &b], &[&b, &minus_b]];
        for (algorithm, layers) in results(runner, format, &inputs) {
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
fn sums_and_means(runner: &impl Runner, world_size: usize) {
    for format in Format::ALL {
        for &algorithm in runner.algorithms(world_size) {
            let case = Case::of(Kind::Orthogonal, format, world_size, &[&[100], &[33]], 8);
            let mut case = case.with(algorithm, Granularity::Tensor);
            let sum: Vec<f64> = (0..133).map(|i| case.inputs.iter().map(|layers| layers.concat()[i]).sum()).collect();
            assert_eq!(runner.check(&case, "orthogonal").concat(), sum, "{}", case.name());

            let same = vec![vector(format, 100, 1), vector(format, 33, 2)];
            case.inputs = vec![same.clone(); world_size];
            let layers = runner.check(&case, "identical");
            if format != Format::F64 {
                // The coefficient 1/2 may be wrong by a few 2⁻⁵³, far below half a unit of the narrower dtypes; for f64, only the bound is
                // checked.
                assert_eq!(layers, same, "{}", case.name());
            }
        }
    }
}

/// One layer of nearly opposite vectors takes the exact path, its neighbours do not, and the report counts one layer.
fn one_cancelling_layer(runner: &impl Runner, world_size: usize) {
    for format in [Format::F64, Format::F32] {
        let shapes: [&[usize]; 3] = [&[301], &[257], &[264]];
        let mut case = Case::of(Kind::Random, format, world_size, &shapes, 4);
        let opposite = Case::of(Kind::NearlyOpposite(1e-6), format, world_size, &shapes, 4);
        for (rank, layers) in case.inputs.iter_mut().enumerate() {
            layers[1].clone_from(&opposite.inputs[rank][1]);
        }
        runner.check(&case, "one cancelling layer");
        let outcome = runner.run(&case, "one cancelling layer");
        assert_eq!(outcome.recomputed, 1, "{}", case.name());
    }
}

/// The shapes of cases with a number that is not finite.
const SHAPES: [&[usize]; 3] = [&[37], &[130], &[5]];

/// Not a number of any dtype, all of whose bits are set, as those of a mailbox before a packet arrives.
const ALL_BITS: f64 = f64::from_bits(u64::MAX);

/// With a non-finite element on one rank, the partner's coefficient is NaN in either reading of the threshold, and NaN times any number
/// is NaN. The whole layer is therefore NaN as soon as a second rank takes part.
fn spoiled_layer(runner: &impl Runner, world_size: usize) {
    for format in Format::ALL {
        for &algorithm in runner.algorithms(world_size) {
            let clean = Case::of(Kind::Random, format, world_size, &SHAPES, 2).with(algorithm, Granularity::Tensor);
            let expected = runner.check(&clean, "clean");
            // The last two fill whole packets of every dtype.
            let last = world_size - 1;
            for (bad, len, rank) in [
                (f64::NAN, 1, 0),
                (f64::INFINITY, 1, 0),
                (f64::NEG_INFINITY, 1, last),
                (ALL_BITS, 40, 0),
                (ALL_BITS, 40, last),
            ] {
                let mut case = clean.clone();
                case.inputs[rank][1][64..][..len].fill(bad);
                let what = format!("{}, {bad} in {len} elements on rank {rank}", case.name());
                let got = case.layers(&runner.run(&case, &what));
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

fn spoiled_buffer(runner: &impl Runner, world_size: usize) {
    for format in [Format::F32, Format::BF16] {
        for &algorithm in runner.algorithms(world_size) {
            let mut case = Case::of(Kind::Random, format, world_size, &SHAPES, 2).with(algorithm, Granularity::Whole);
            case.inputs[world_size - 1][2][0] = f64::NAN;
            let got = case.layers(&runner.run(&case, &case.name())).concat();
            let spoiled = got.iter().filter(|x| x.is_nan()).count();
            let expected = if world_size == 1 { 1 } else { got.len() };
            assert_eq!(spoiled, expected, "{}: elements that are NaN", case.name());
        }
    }
}
