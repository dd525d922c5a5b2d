//! Weights after many steps, within derived bounds: against exact formulas for random options, and against PyTorch.

use std::process::Command;

use gradsync::train::{AdamW, AdamWOptions, Optimizer, OptimizerOptions, Sgd, SgdOptions};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{Random, vector};
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::optimizer::{Options, Weight};
use gradsync_tests::tolerance::{UNIT, assert_within, gamma};
use proptest::prelude::*;

use super::optimizer_case::Model;
use super::optimizers::{adamw, sgd};

/// The weights after the last step.
fn trained<O: OptimizerOptions>(
    optimizer: &mut Optimizer<O>,
    mut model: Model,
    steps: impl Iterator<Item = Vec<Option<Array>>>,
) -> Vec<Vec<f64>> {
    steps.for_each(|gradients| optimizer.step_tensors(model.steps(&gradients)).unwrap());
    model.weights.iter().map(Array::values).collect()
}

const LEN: usize = 40;

/// Twenty steps of weights and gradients of these formats: the weights are those of the formula within the bound of their state's precision,
/// rounded once more where they are copies.
fn check<O: OptimizerOptions>(
    mut optimizer: Optimizer<O>,
    [format, of_gradients]: [Format; 2],
    seed: u64,
    advance: impl Fn(&mut Weight, f64, i32, f64),
) {
    let mut random = Random::new(seed);
    let steps: Vec<Vec<f64>> = (0..20)
        .map(|step| {
            // From 2⁻¹⁰ to 2¹⁰ times ordinary numbers, whose squares neither vanish nor overflow.
            let scale = 2.0_f64.powi(random.below(21) as i32 - 10);
            vector(of_gradients, LEN, seed + step + 1).into_iter().map(|x| of_gradients.round(x * scale)).collect()
        })
        .collect();
    let model = Model::new(&[(format, LEN)]);
    let mut weights: Vec<Weight> = model.weights[0].values().into_iter().map(Weight::new).collect();
    let state = if [format, of_gradients].contains(&Format::F64) { Format::F64 } else { Format::F32 };
    for (step, gradients) in (1..).zip(&steps) {
        for (weight, &gradient) in weights.iter_mut().zip(gradients) {
            advance(weight, state.unit_roundoff(), step, gradient);
        }
    }
    let steps = steps.iter().map(|data| vec![Some(Array::new(of_gradients, data))]);
    let found = trained(&mut optimizer, model, steps);
    let exact: Vec<f64> = weights.iter().map(|weight| weight.exact).collect();
    let copied = |weight: &Weight| match format == state {
        true => weight.bound,
        false => weight.bound + format.rounding_error(weight.exact.abs() + weight.bound),
    };
    let bounds: Vec<f64> = weights.iter().map(copied).collect();
    assert_within(&format!("{:?}, {format:?}", optimizer.options()), format, &found[0], &exact, &bounds);
}

const FORMATS: [[Format; 2]; 6] = [
    [Format::F32, Format::F32],
    [Format::F32, Format::BF16],
    [Format::BF16, Format::BF16],
    [Format::F16, Format::F32],
    [Format::F64, Format::F64],
    [Format::F64, Format::F32],
];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn sgd_any_steps(
        formats in 0..FORMATS.len(),
        rate in 1e-4..0.5_f64,
        momentum in prop::sample::select(vec![0.0, 0.5, 0.9, 0.99]),
        nesterov in any::<bool>(),
        decay in prop::sample::select(vec![0.0, 0.01, 0.5]),
        seed in any::<u32>(),
    ) {
        let nesterov = nesterov && momentum > 0.0;
        let options = SgdOptions::default().with_rate(rate).with_momentum(momentum);
        let options = options.with_nesterov(nesterov).with_weight_decay(decay);
        check(sgd(options), FORMATS[formats], u64::from(seed), |weight, unit, _, gradient| {
            weight.sgd(Options { unit, rate, decay, gradient_error: 0.0 }, momentum, nesterov, gradient);
        });
    }

    #[test]
    fn adamw_any_steps(
        formats in 0..FORMATS.len(),
        rate in 1e-4..0.5_f64,
        beta1 in prop::sample::select(vec![0.0, 0.5, 0.9, 0.99]),
        beta2 in prop::sample::select(vec![0.0, 0.9, 0.99, 0.999]),
        epsilon in prop::sample::select(vec![1e-8, 1e-5, 0.1]),
        decay in prop::sample::select(vec![0.0, 0.01, 0.5]),
        seed in any::<u32>(),
    ) {
        let options = AdamWOptions::default().with_rate(rate).with_beta1(beta1).with_beta2(beta2);
        let options = options.with_epsilon(epsilon).with_weight_decay(decay);
        check(adamw(options), FORMATS[formats], u64::from(seed), |weight, unit, step, gradient| {
            let options = Options { unit, rate, decay, gradient_error: 0.0 };
            weight.adamw(options, [beta1, beta2, epsilon], step, gradient);
        });
    }
}

/// Weights by PyTorch, for each case without and with clipping to 1.
#[derive(serde::Deserialize)]
struct Recorded {
    by: String,
    weights: std::collections::BTreeMap<String, [Vec<f64>; 2]>,
}

const SCRIPT: &str = include_str!("torch_steps.py");
const RECORDED: &str = include_str!("torch_steps.json");
const TORCH_LENS: [usize; 2] = [7, 3];
const TORCH_STEPS: usize = 100;

/// The script's numbers.
fn number(index: usize, step: usize) -> f64 {
    let mixed = (index as u64 * 2_654_435_761 + step as u64 * 2_246_822_519 + 374_761_393) % (1 << 32);
    mixed as f64 / 2.0_f64.powi(32) - 0.5
}

/// For each tensor the script's numbers of a step, times a factor.
fn numbers(step: usize, factor: f64) -> Vec<Vec<f64>> {
    let begins = [0, TORCH_LENS[0]];
    let of = |(begin, len): (usize, usize)| (begin..begin + len).map(|index| factor * number(index, step)).collect();
    begins.into_iter().zip(TORCH_LENS).map(of).collect()
}

/// The formula of one weight in step `t`.
type Advance<'a> = &'a dyn Fn(&mut Weight, Options, i32, f64);

/// 100 steps of all-`f64` tensors by the numbers of the script, and the bounds for weights that PyTorch has computed.
///
/// The norm has 10 squares, a root and a quotient; PyTorch's has the roots of tensors too, and the compensation of its 1e-6: 20 and 30
/// roundings, which all gradients of a step have in common.
fn against_torch<O: OptimizerOptions>(
    mut optimizer: Optimizer<O>,
    options: Options,
    max_norm: Option<f64>,
    advance: Advance<'_>,
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let mut model = Model::new(&TORCH_LENS.map(|len| (Format::F64, len)));
    let begin = numbers(0, 4.0);
    model.weights = begin.iter().map(|values| Array::new(Format::F64, values)).collect();
    let mut weights: Vec<Weight> = begin.into_iter().flatten().map(Weight::new).collect();
    let steps: Vec<Vec<Vec<f64>>> =
        (1..=TORCH_STEPS).map(|step| numbers(step, 2.0_f64.powi(step as i32 % 6 - 3))).collect();
    for (step, gradients) in (1..).zip(&steps) {
        let norm = gradients.iter().flatten().map(|x| x * x).sum::<f64>().sqrt();
        let factor = max_norm.map_or(1.0, |most| (most / norm).min(1.0));
        let gradient_error = if max_norm.is_some() { gamma(50) } else { 0.0 };
        for (weight, gradient) in weights.iter_mut().zip(gradients.iter().flatten()) {
            advance(weight, Options { gradient_error, ..options }, step, factor * gradient);
        }
    }
    let arrays = |gradients: &Vec<Vec<f64>>| gradients.iter().map(|data| Some(Array::new(Format::F64, data))).collect();
    let found = trained(&mut optimizer, model, steps.iter().map(arrays)).concat();
    // Both computations differ from the exact one, which is computed in `f64` itself.
    let bounds = weights.iter().map(|weight| 3.0 * weight.bound).collect();
    (found, weights.into_iter().map(|weight| weight.exact).collect(), bounds)
}

fn compare_with_torch(text: &str) {
    let recorded: Recorded = serde_json::from_str(text).expect("the script's JSON");
    let limited = [None, Some(1.0)];
    let check = |name: &str, max_norm: Option<f64>, (found, exact, bounds): (Vec<f64>, Vec<f64>, Vec<f64>)| {
        let label = format!("{name} with {max_norm:?} of {}", recorded.by);
        let theirs = &recorded.weights[name][usize::from(max_norm.is_some())];
        assert_within(&label, Format::F64, &found, theirs, &bounds);
        assert_within(&label, Format::F64, theirs, &exact, &bounds);
        // The bound is small beside a step, and clipping makes a difference.
        assert!(bounds.iter().all(|&bound| bound < 1e-9), "{label}: {bounds:?}");
    };
    let plain = SgdOptions::default();
    let sgds = [
        ("sgd", plain.with_rate(0.1)),
        ("sgd with momentum", plain.with_rate(0.1).with_momentum(0.9).with_weight_decay(0.01)),
        ("sgd with nesterov", plain.with_rate(0.05).with_momentum(0.8).with_weight_decay(0.1).with_nesterov(true)),
    ];
    for ((name, options), max_norm) in sgds.into_iter().flat_map(|case| limited.map(|max_norm| (case, max_norm))) {
        let optimizer: Sgd = Sgd::new(options).unwrap();
        let optimizer = max_norm.map_or(Ok(optimizer), |most| Sgd::new(options).unwrap().with_max_norm(most)).unwrap();
        let SgdOptions { rate, momentum, nesterov, weight_decay: decay, .. } = options;
        let advance: Advance<'_> = &|weight, options, _, gradient| weight.sgd(options, momentum, nesterov, gradient);
        let options = Options { unit: UNIT, rate, decay, gradient_error: 0.0 };
        check(name, max_norm, against_torch(optimizer, options, max_norm, advance));
    }
    let odd = AdamWOptions::default().with_rate(0.05).with_beta1(0.8).with_beta2(0.95).with_epsilon(1e-6);
    let adams = [("adamw", AdamWOptions::default()), ("adamw with decay", odd.with_weight_decay(0.1))];
    for ((name, options), max_norm) in adams.into_iter().flat_map(|case| limited.map(|max_norm| (case, max_norm))) {
        let optimizer: AdamW = AdamW::new(options).unwrap();
        let optimizer =
            max_norm.map_or(Ok(optimizer), |most| AdamW::new(options).unwrap().with_max_norm(most)).unwrap();
        let AdamWOptions { rate, beta1, beta2, epsilon, weight_decay: decay, .. } = options;
        let advance: Advance<'_> =
            &|weight, options, step, gradient| weight.adamw(options, [beta1, beta2, epsilon], step, gradient);
        let options = Options { unit: UNIT, rate, decay, gradient_error: 0.0 };
        check(name, max_norm, against_torch(optimizer, options, max_norm, advance));
    }
    assert_eq!(recorded.weights.len(), sgds.len() + adams.len());
    assert!(recorded.weights.values().all(|[plain, clipped]| plain != clipped));
}

/// 100 steps in `float64`, as PyTorch 2.15 has made them, and as the installed one makes them now. The variable PYTHON names another Python.
#[test]
fn sgd_and_adamw_weights_are_pytorchs() {
    compare_with_torch(RECORDED);
    let python = || Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()));
    let has_torch = python().args(["-c", "import torch"]).output().is_ok_and(|output| output.status.success());
    if !has_torch {
        println!("not run: {:?} has no PyTorch; the recorded weights were compared", python());
        return;
    }
    let output = python().args(["-c", SCRIPT]).output().expect("python starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    compare_with_torch(&String::from_utf8_lossy(&output.stdout));
}
