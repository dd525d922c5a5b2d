//! Adasum of optimizer steps: ONNX Runtime's case, the oracle, nodes, and many steps in a row.

use gradsync::GradientBuffer;
use gradsync::comm::Ranks;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, Nodes};
use gradsync::train::{AdamWOptions, Reduction, Sgd, StepOptions, StepOutcome, Stepper};
use gradsync_tests::array::{dtype, format, patterns_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::{Format, elementwise, reduce};
use gradsync_tests::ranks::{agreed, guarded};
use gradsync_tests::tolerance::adasum::{Method, expect};
use gradsync_tests::tolerance::assert_within;

use super::optimizers::{adamw, filled, flat};

const LENS: [usize; 4] = [5, 130, 0, 1];

fn segments() -> Vec<std::ops::Range<usize>> {
    LENS.iter().scan(0, |end, &len| Some(std::mem::replace(end, *end + len)..*end)).collect()
}

/// Runs `body` on `nodes × on_node` ranks, each with three communicators: over all ranks, over the ranks of its node, and over the ranks
/// with its index on every node. Returns the results node by node.
pub(crate) fn on_nodes<T: Send>(nodes: usize, on_node: usize, body: impl Fn(Nodes<'_>) -> T + Sync) -> Vec<Vec<T>> {
    let group = |size| gradsync::comm::local::group(size).unwrap();
    let mut all = group(nodes * on_node).into_iter();
    let mut across: Vec<_> = (0..on_node).map(|_| group(nodes).into_iter()).collect();
    let body = &body;
    std::thread::scope(|scope| {
        let mut handles = Vec::new();
        for _ in 0..nodes {
            let ranks = group(on_node).into_iter().zip(&mut across);
            let ranks = ranks.map(|(node, across)| {
                let (all, across) = (all.next().unwrap(), across.next().unwrap());
                scope.spawn(move || body(Nodes { all: &all, node: &node, across: &across }))
            });
            handles.push(ranks.collect::<Vec<_>>());
        }
        let join = |handle: std::thread::ScopedJoinHandle<'_, T>| handle.join().expect("no rank panics");
        handles.into_iter().map(|node| node.into_iter().map(join).collect()).collect()
    })
}

pub(crate) fn sgd(rate: f64) -> Sgd {
    Sgd::new(rate).unwrap()
}

/// Adasum of the ranks' steps, with default options.
pub(crate) fn adasum() -> Reduction {
    Reduction::Adasum(AdasumOptions::default())
}

/// ONNX Runtime's hierarchical Adam: two ranks on one node, moments as given, no bias correction.
///
/// The published numbers have four digits, hence the tolerance of 1e-4, plus the roundings of the formats. Sums and halves of the gradients
/// are exact. Moments are kept in f32 or f64 (an error of 2^-24 relative to numbers below 1, inside the 1e-4). The delta is below 0.55
/// and rounded once, and so is the weight.
#[test]
fn upstream_hierarchical_adam() {
    guarded(60, || {
        for (gradient_format, weight_format) in [
            (Format::F32, Format::F32),
            (Format::F16, Format::F32),
            (Format::F16, Format::F16),
            (Format::F64, Format::F64),
        ] {
            let results = on_nodes(1, 2, |nodes| {
                let values = if nodes.node.rank() == 0 { [3.0, 4.0, 5.0] } else { [5.0, 6.0, 7.0] };
                let buffer = |format: Format, values: [f64; 3]| {
                    filled(format, &[3], |_, _| values.iter().map(|&value| format.round(value)).collect())
                };
                let options = AdamWOptions::default().with_rate(0.5).with_bias_correction(false).with_weight_decay(0.0);
                let (mut adam, mut weights) = (adamw(options), buffer(weight_format, [1.0, 2.0, 3.0]));
                let numbers = adam.numbers().unwrap();
                let load = |_: &str, vector: &str, data: gradsync::SliceMut<'_>| {
                    let values = match vector {
                        "first" => [0.1, 0.2, 0.3],
                        "second" => [0.4, 0.5, 0.6],
                        _ => [1.0, 2.0, 3.0],
                    };
                    let format = format(data.dtype());
                    write(data, 0, &values.map(|value| format.round(value)));
                    Ok(())
                };
                adam.restore(&numbers, weights.tensors_mut(), load).unwrap();
                let gradients = buffer(gradient_format, values);
                let report = Stepper::on_nodes(nodes, adasum()).step(&gradients, &mut weights, &mut adam).unwrap();
                assert_eq!(report.outcome, StepOutcome::Applied);
                flat(&weights)
            });
            assert_eq!(results[0][0], results[0][1]);
            let expected = [0.6199, 1.5305, 2.4542];
            let bounds =
                expected.map(|x| 1e-4 + weight_format.rounding_error(0.55) + weight_format.rounding_error(x + 1e-3));
            let what = format!("{gradient_format:?} gradients, {weight_format:?} weights");
            assert_within(&what, weight_format, &results[0][0], &expected, &bounds);
        }
    });
}

/// The expected result of a step of plain SGD: gradients scaled by `elementwise::scale`, deltas rounded once, Adasum within its own bound,
/// and weights rounded once.
struct Expected {
    exact: Vec<f64>,
    bounds: Vec<f64>,
}

fn expected(
    gradients: &[Vec<f64>],
    formats: [Format; 3],
    rate: f64,
    weights: &[f64],
    options: AdasumOptions,
) -> Expected {
    let [_, weight_format, delta_format] = formats;
    let round = |gradient: &Vec<f64>| gradient.iter().map(|&x| delta_format.round(-(rate * x))).collect::<Vec<f64>>();
    let deltas: Vec<Vec<f64>> = gradients.iter().map(round).collect();
    let end = weights.len();
    let layers = if options.granularity == Granularity::Whole { vec![0..end] } else { segments() };
    let method = if options.algorithm == Algorithm::Tree { Method::Tree } else { Method::Gram };
    let adasum = expect(method, delta_format, &deltas, &layers);
    let exact: Vec<f64> = weights.iter().zip(&adasum.exact).map(|(weight, delta)| weight + delta).collect();
    // The sum itself is first rounded to the working precision, which is the weights' dtype or wider: at most one more rounding.
    let bounds = exact.iter().zip(&adasum.bounds).map(|(x, bound)| {
        let once = bound + weight_format.rounding_error(x.abs() + bound);
        once + Format::F32.rounding_error(x.abs() + once)
    });
    Expected { bounds: bounds.collect(), exact }
}

pub(crate) fn random(format: Format, seed: usize) -> GradientBuffer {
    filled(format, &LENS, |index, len| vector(format, len, (1000 * seed + index) as u64))
}

const FORMATS: [[Format; 3]; 5] = [
    [Format::F32, Format::F32, Format::F32],
    [Format::F64, Format::F64, Format::F64],
    [Format::F16, Format::F32, Format::F32],
    [Format::BF16, Format::F32, Format::BF16],
    [Format::F16, Format::F16, Format::F16],
];

#[test]
fn two_three_and_four_ranks_against_the_oracle() {
    guarded(120, || {
        for formats in FORMATS {
            for world_size in [1, 2, 3, 4] {
                for algorithm in [Algorithm::Auto, Algorithm::Gram, Algorithm::Tree] {
                    for granularity in [Granularity::Tensor, Granularity::Whole] {
                        if algorithm == Algorithm::Tree && !usize::is_power_of_two(world_size) {
                            continue;
                        }
                        for accumulation_steps in [1, 3] {
                            let adasum =
                                AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity);
                            let delta_dtype = (formats[1] != formats[2]).then_some(dtype(formats[2]));
                            let reduction = Reduction::Adasum(adasum);
                            let options = StepOptions::from(reduction)
                                .with_accumulation_steps(accumulation_steps)
                                .with_delta_dtype(delta_dtype);
                            check(formats, world_size, options, adasum);
                        }
                    }
                }
            }
        }
    });
}

fn check(formats: [Format; 3], world_size: usize, options: StepOptions, adasum: AdasumOptions) {
    let what = format!("{formats:?} over {world_size}, {options:?}");
    let bits = agreed(&what, world_size, |comm| {
        let (gradients, mut weights) = (random(formats[0], comm.rank()), random(formats[1], 77));
        let before = patterns_of(gradients.as_slice());
        let report = Stepper::new(&comm, options).step(&gradients, &mut weights, &mut sgd(0.3)).unwrap();
        assert_eq!(report.outcome, StepOutcome::Applied, "{what}");
        assert!(report.adasum.is_some(), "{what}");
        assert_eq!(patterns_of(gradients.as_slice()), before, "{what}: the gradients are the caller's");
        (patterns_of(weights.as_slice()), flat(&weights).into_iter().map(f64::to_bits).collect::<Vec<u64>>())
    });
    let got: Vec<f64> = bits.1.into_iter().map(f64::from_bits).collect();
    assert_eq!(
        bits.0.iter().filter(|&&bits| bits != 0).count(),
        got.iter().filter(|&&x| x != 0.0).count(),
        "{what}: gaps"
    );
    let factor = 1.0 / options.accumulation_steps as f64;
    let scale = |x: f64| elementwise::scale(formats[0], formats[0], x, factor);
    let gradients: Vec<Vec<f64>> =
        (0..world_size).map(|rank| flat(&random(formats[0], rank)).into_iter().map(scale).collect()).collect();
    let expected = expected(&gradients, formats, 0.3, &flat(&random(formats[1], 77)), adasum);
    assert_within(&what, formats[1], &got, &expected.exact, &expected.bounds);
}

/// Means inside nodes first, then Adasum across nodes: every rank of every node ends with the same weights.
#[test]
fn nodes_against_the_oracle() {
    guarded(120, || {
        for formats in FORMATS {
            for (nodes, on_node) in [(1, 3), (2, 1), (2, 2), (3, 2), (2, 3)] {
                let what = format!("{formats:?}, {nodes} nodes of {on_node}");
                let delta_dtype = Some(dtype(formats[2]));
                let options = StepOptions::from(adasum()).with_accumulation_steps(2).with_delta_dtype(delta_dtype);
                let results = on_nodes(nodes, on_node, |nodes| {
                    let gradients = random(formats[0], nodes.all.rank());
                    let mut weights = random(formats[1], 77);
                    let report =
                        Stepper::on_nodes(nodes, options).step(&gradients, &mut weights, &mut sgd(0.3)).unwrap();
                    assert_eq!(report.outcome, StepOutcome::Applied, "{what}");
                    flat(&weights)
                });
                for weights in results.iter().flatten() {
                    assert_eq!(weights, &results[0][0], "{what}: ranks have different weights");
                }
                let scale = |x: f64| elementwise::scale(formats[0], formats[0], x, 0.5);
                let of_rank = |rank| flat(&random(formats[0], rank)).into_iter().map(scale).collect::<Vec<f64>>();
                let of_node = |node: usize| -> Vec<f64> {
                    let ranks: Vec<Vec<f64>> = (node * on_node..(node + 1) * on_node).map(of_rank).collect();
                    reduce::all_reduce(reduce::Op::Mean, formats[0], &ranks)
                };
                let gradients: Vec<Vec<f64>> = (0..nodes).map(of_node).collect();
                let expected =
                    expected(&gradients, formats, 0.3, &flat(&random(formats[1], 77)), AdasumOptions::default());
                assert_within(&what, formats[1], &results[0][0], &expected.exact, &expected.bounds);
            }
        }
    });
}

/// Many steps with state: ranks stay bit-identical, and a skipped step changes nothing.
#[test]
fn weights_stay_equal_over_many_steps() {
    guarded(60, || {
        let run = |with_bad_steps: bool| {
            agreed("many steps", 3, |comm| {
                let mut weights = random(Format::F32, 77);
                let mut adam = adamw(AdamWOptions::default().with_rate(0.05));
                let mut stepper = Stepper::new(&comm, adasum());
                for step in 0..12 {
                    let seed = 3 * step + comm.rank();
                    if with_bad_steps && step % 4 == 2 {
                        let bad = filled(Format::F16, &LENS, |_, len| {
                            vec![if comm.rank() == 1 { f64::NAN } else { 1.0 }; len]
                        });
                        let report = stepper.step(&bad, &mut weights, &mut adam).unwrap();
                        assert_eq!(report.outcome, StepOutcome::GradientsNotFinite { ranks: vec![1] });
                    }
                    let gradients = random(Format::F16, seed);
                    let report = stepper.step(&gradients, &mut weights, &mut adam).unwrap();
                    assert_eq!(report.outcome, StepOutcome::Applied);
                }
                assert_eq!(adam.applied_steps().unwrap(), 12);
                patterns_of(weights.as_slice())
            })
        };
        assert_eq!(run(false), run(true));
    });
}
