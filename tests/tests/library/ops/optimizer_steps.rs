//! Whole steps of optimizers: clipping, the scale of the loss, skipped steps, schedules, groups, master copies, restored states, refusals.

use gradsync::memory::Host;
use gradsync::train::{
    AdamW, AdamWOptions, DeltaOptimizer, LossScaler, Optimizer, OptimizerOptions, ParameterGroup, Schedule, Sgd,
    SgdOptions, TensorStep, UpdateOutcome,
};
use gradsync::{Error, TensorView, TensorViewMut};
use gradsync_tests::array::{Array, patterns_of, write};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::Format::{BF16, F16, F32, F64};
use gradsync_tests::oracle::optimizer::{Rule, Scaler};
use gradsync_tests::tolerance::{assert_within, gamma};

use super::optimizer_case::{Case, Model, gradients};
use super::optimizers::{adamw, filled, flat, restore, sgd, state};

/// Formats of weights and gradients, and lengths: of all sorts of states and master copies, empty, short, and longer than a piece of a thread.
const TENSORS: [(Format, Format, usize); 9] = [
    (F32, F32, 70_000),
    (BF16, BF16, 1300),
    (F16, F32, 513),
    (F32, F16, 0),
    (F64, F64, 700),
    (F32, F64, 64),
    (F64, BF16, 1),
    (BF16, F32, 5),
    (F16, F16, 1),
];

fn formats_of_gradients() -> Vec<(Format, usize)> {
    TENSORS.iter().map(|&(_, gradient, len)| (gradient, len)).collect()
}

fn rules_of_sgd() -> Vec<(SgdOptions, Rule)> {
    let plain = SgdOptions::default().with_rate(0.3);
    let heavy = plain.with_momentum(0.9);
    let all = [plain, heavy, heavy.with_nesterov(true), heavy.with_weight_decay(0.07), plain.with_weight_decay(0.5)];
    all.map(|options| (options, Rule::Sgd { momentum: options.momentum, nesterov: options.nesterov })).to_vec()
}

fn rules_of_adamw() -> Vec<(AdamWOptions, Rule)> {
    let plain = AdamWOptions::default().with_rate(0.1);
    let odd = plain.with_beta1(0.0).with_beta2(0.5).with_epsilon(1e-3).with_weight_decay(0.0);
    let all = [plain, plain.with_bias_correction(false), odd];
    let rule = |options: AdamWOptions| {
        let AdamWOptions { beta1, beta2, epsilon, bias_correction, .. } = options;
        (options, Rule::AdamW { beta1, beta2, epsilon, corrects: bias_correction })
    };
    all.map(rule).to_vec()
}

/// Twelve steps with clipping, a scale of the loss, a schedule, groups, absent gradients, and steps that are skipped: all bits of weights,
/// master copies, vectors and numbers are those of the oracle after each step.
fn take_steps<O: OptimizerOptions>(options: O, rate: f64, decay: f64, rule: Rule) {
    let scaler = LossScaler::default().with_initial(1024.0).with_growth(4.0).with_backoff(0.25).with_growth_interval(3);
    let optimizer = Optimizer::<O>::new(options)
        .unwrap()
        .with_max_norm(0.25)
        .unwrap()
        .with_scaler(scaler)
        .unwrap()
        .with_schedule(Schedule::stable_then_decay(5, 9).with_warm_up(3).with_last(0.125))
        .unwrap()
        .with_groups([
            ParameterGroup::matching("t1").with_rate(0.1).with_weight_decay(Some(0.3)),
            ParameterGroup::matching("t2").with_frozen(true),
            ParameterGroup::matching("t*4").with_weight_decay(Some(0.0)),
        ])
        .unwrap();
    let mut case = Case::new(optimizer, (rule, rate, decay), &TENSORS);
    case.expected.max_norm = Some(0.25);
    case.expected.scaler = Some(Scaler { growth: 4.0, backoff: 0.25, interval: 3.0 });
    (case.expected.parameters[1].rate, case.expected.parameters[1].decay) = (0.1, 0.3);
    case.expected.parameters[2].is_frozen = true;
    case.expected.parameters[4].decay = 0.0;
    let mut applied = 0_u32;
    for step in 0..12 {
        let mut gradients = gradients(&formats_of_gradients(), step);
        if step % 3 == 1 {
            // The last tensor is absent in the first of these steps, before its state has changed.
            (gradients[0], gradients[8]) = (None, None);
        }
        if step == 9 {
            gradients.iter_mut().for_each(|gradient| *gradient = None);
        }
        let bad = [(2, 1, f64::INFINITY), (6, 4, f64::NAN), (7, 0, f64::NEG_INFINITY)];
        let bad = bad.iter().find(|(at, _, _)| *at == step);
        if let Some(&(_, tensor, value)) = bad {
            let data = gradients[tensor].get_or_insert_with(|| Array::new(F32, &[1.0; 70_000]));
            let last = data.len() - 1;
            write(data.slice_mut(), last, &[value]);
        }
        // A frozen tensor's gradients are ignored, even NaN.
        write(gradients[2].get_or_insert_with(|| Array::new(F32, &[1.0; 513])).slice_mut(), 0, &[f64::NAN]);
        let step_of_rate = f64::from(applied);
        let factor = match applied {
            0..3 => (step_of_rate + 1.0) / 3.0,
            3..5 => 1.0,
            5..9 => 0.125 + 0.875 * (1.0 - (step_of_rate - 5.0) / 4.0),
            _ => 0.125,
        };
        case.step(&format!("{:?}, step {step}", case.optimizer.options()), factor, &gradients);
        applied += u32::from(bad.is_none());
        let report = case.optimizer.report().unwrap();
        let outcome = if bad.is_none() { UpdateOutcome::Applied } else { UpdateOutcome::NotFinite };
        assert_eq!((report.outcome, report.applied), (outcome, u64::from(applied)));
        assert_eq!(report.skipped, step as u64 + 1 - u64::from(applied));
        assert_eq!(case.optimizer.latest_report().unwrap().map(|latest| latest.applied), Some(report.applied));
        assert_eq!(case.optimizer.loss_scale().unwrap(), report.scale);
        assert_eq!(case.optimizer.loss_scale_view().unwrap().to_f64_vec(), [report.scale]);
    }
    // 1024 is divided by 4 in steps 2, 6 and 7, and multiplied by 4 after steps 5 and 10, each the third applied step in a row.
    assert_eq!(case.optimizer.loss_scale().unwrap(), 256.0);
}

#[test]
fn sgd_steps_have_the_bits_of_the_formula() {
    for (options, rule) in rules_of_sgd() {
        take_steps(options, options.rate, options.weight_decay, rule);
    }
}

#[test]
fn adamw_steps_have_the_bits_of_the_formula() {
    for (options, rule) in rules_of_adamw() {
        take_steps(options, options.rate, options.weight_decay, rule);
    }
}

/// One step of SGD with the rate 1 from weights of 0, so that the weights are the gradients as they were used.
fn used(optimizer: Sgd, data: &[f64]) -> (Vec<f64>, Sgd) {
    let mut optimizer = optimizer;
    let of = |values: &[f64]| filled(F64, &[values.len()], |_, _| values.to_vec());
    let (mut weights, gradients) = (of(&vec![0.0; data.len()]), of(data));
    optimizer.step(&mut weights, &gradients).unwrap();
    (flat(&weights).into_iter().map(|weight| -weight).collect(), optimizer)
}

/// 3, 4 and 12 have the norm 13. Gradients beyond the limit are multiplied by one quotient, with two roundings each; others keep their bits.
/// The report has the norm before the clipping.
#[test]
fn with_max_norm_scales_gradients_beyond_it() {
    let data = [3.0, -4.0, 12.0];
    for max_norm in [1e-300, 0.1, 1.0, 12.999, 13.0, 13.001, 1e300] {
        let (found, optimizer) = used(Sgd::new(1.0).unwrap().with_max_norm(max_norm).unwrap(), &data);
        assert_eq!(optimizer.report().unwrap().norm, 13.0);
        if max_norm >= 13.0 {
            assert_eq!(found, data);
            continue;
        }
        let exact = data.map(|gradient| gradient * (max_norm / 13.0));
        // The quotient and the product, here and in the code.
        assert_within("clipped", F64, &found, &exact, &exact.map(|value| gamma(4) * value.abs()));
    }
    for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = Sgd::<Host>::new(1.0).unwrap().with_max_norm(bad).unwrap_err().to_string();
        assert!(error.contains(&format!("max_norm is {bad}")), "{error}");
    }
}

/// Clipping is by the norm without the scale; gradients that are absent or frozen do not count.
#[test]
fn report_norm_is_of_present_gradients_without_the_scale() {
    let scaler = LossScaler::default().with_initial(8.0);
    let optimizer = Sgd::new(1.0).unwrap().with_scaler(scaler).unwrap().with_max_norm(6.5).unwrap();
    let (found, optimizer) = used(optimizer, &[24.0, -32.0, 96.0]);
    assert_eq!((found, optimizer.report().unwrap().norm), (vec![1.5, -2.0, 6.0], 13.0));

    let group = ParameterGroup::matching("t1").with_frozen(true);
    let mut optimizer: Sgd = Sgd::new(1.0).unwrap().with_groups([group]).unwrap();
    let mut model = Model::new(&[(F32, 1); 4]);
    let mut values = [3.0, 5.0, 7.0, 4.0].map(|value| Some(Array::new(F32, &[value])));
    values[2] = None;
    optimizer.step_tensors(model.steps(&values)).unwrap();
    assert_eq!(optimizer.report().unwrap().norm, 5.0);
}

/// The scale halves in each bad step down to 2⁻³², doubles after the interval up to the largest `f32`, and starts to count again after each
/// change; without a scaler it is 1.
#[test]
fn loss_scaler_grows_and_falls() {
    let scaler = LossScaler::default().with_initial(4.0).with_growth_interval(2);
    let mut optimizer: Sgd = Sgd::new(1.0).unwrap().with_scaler(scaler).unwrap();
    assert_eq!((optimizer.loss_scale().unwrap(), optimizer.loss_scale_view().is_none()), (4.0, true));
    let of = |value: f64| filled(F16, &[2], |_, len| vec![value; len]);
    let mut weights = of(0.0);
    let mut scales = |good: &[bool]| -> Vec<f64> {
        let step = |&good: &bool| {
            let gradients = of(if good { 0.0 } else { f64::INFINITY });
            optimizer.step(&mut weights, &gradients).unwrap();
            optimizer.loss_scale().unwrap()
        };
        good.iter().map(step).collect()
    };
    assert_eq!(scales(&[true, true, true, false, true, true, false, false]), [4.0, 8.0, 8.0, 4.0, 4.0, 8.0, 4.0, 2.0]);
    let falling = scales(&[false; 40]);
    assert!(falling[..33].iter().enumerate().all(|(step, &scale)| scale == 2.0_f64.powi(-(step as i32))));
    assert!(falling[33..].iter().all(|&scale| scale == 2.0_f64.powi(-32)));
    let rising = scales(&[true; 400]);
    assert_eq!(rising[1], 2.0_f64.powi(-31));
    assert_eq!(rising[399], f64::from(f32::MAX));

    let none: Sgd = Sgd::new(1.0).unwrap();
    assert_eq!(none.loss_scale().unwrap(), 1.0);
    let options = LossScaler::default();
    for (name, bad) in [
        ("initial", options.with_initial(0.0)),
        ("initial", options.with_initial(f64::INFINITY)),
        ("growth", options.with_growth(0.5)),
        ("growth", options.with_growth(f64::NAN)),
        ("backoff", options.with_backoff(0.0)),
        ("backoff", options.with_backoff(1.5)),
    ] {
        let error = Sgd::<Host>::new(1.0).unwrap().with_scaler(bad).unwrap_err().to_string();
        assert!(error.contains(&format!("{name} is ")), "{error}");
    }
}

/// A power-of-two scale of loss and gradients changes no bit of the weights.
#[test]
fn loss_scaler_divides_gradients() {
    let scaled = |scale: f64| {
        let scaler = LossScaler::default().with_initial(scale).with_growth_interval(0);
        let mut optimizer = adamw(AdamWOptions::default()).with_scaler(scaler).unwrap().with_max_norm(0.5).unwrap();
        let mut weights = filled(F32, &[100], |_, len| vec![1.0; len]);
        for step in 0..5 {
            let gradients = filled(F32, &[100], |_, len| {
                gradsync_tests::inputs::vector(F32, len, step).into_iter().map(|value| value * scale).collect()
            });
            optimizer.step(&mut weights, &gradients).unwrap();
        }
        (patterns_of(weights.as_slice()), optimizer.report().unwrap().norm)
    };
    assert!(scaled(65536.0) == scaled(1.0) && scaled(2.0_f64.powi(-20)) == scaled(1.0));
}

/// The rate in each step, against the cosine of the standard library. A cosine has an error of 2⁻⁵⁰, and a slope of π, by which the two
/// roundings of the progress count; the half, the sums and the products have five roundings.
#[test]
fn schedule_factor_is_the_formula() {
    let cosine = Schedule::cosine(1000).with_warm_up(100).with_last(0.1);
    let bound = 0.5 * (2.0_f64.powi(-50) + std::f64::consts::PI * gamma(2)) + gamma(2 * 5);
    for step in 0..1200_u64 {
        let at = step as f64;
        let exact = match step {
            0..100 => (at + 1.0) / 100.0,
            100..1000 => 0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * ((at - 100.0) / 900.0)).cos()),
            _ => 0.1,
        };
        let found = cosine.factor(step);
        assert!((found - exact).abs() <= bound, "{step}: {found} {exact}");
    }
    let linear = Schedule::linear(12).with_warm_up(4).with_last(0.5);
    let expected = [0.25, 0.5, 0.75, 1.0, 1.0, 0.9375, 0.875, 0.8125, 0.75, 0.6875, 0.625, 0.5625, 0.5, 0.5];
    assert_eq!(std::array::from_fn(|step| linear.factor(step as u64)), expected);
    let stable = Schedule::stable_then_decay(3, 7).with_warm_up(2);
    assert_eq!(std::array::from_fn(|step| stable.factor(step as u64)), [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]);
    let constant = Schedule::constant().with_warm_up(2);
    assert_eq!([0, 1, 2, 1000, u64::MAX].map(|step| constant.factor(step)), [0.5, 1.0, 1.0, 1.0, 1.0]);

    // Applied steps count, skipped ones do not; the rate of the options is multiplied, and may change.
    let scaler = LossScaler::default();
    let mut optimizer: Sgd = Sgd::new(0.25).unwrap().with_schedule(stable).unwrap().with_scaler(scaler).unwrap();
    let of = |value: f64| filled(F32, &[2], |_, len| vec![value; len]);
    let mut rates = Vec::new();
    for step in 0..8 {
        if step == 5 {
            optimizer.set_options(SgdOptions::default().with_rate(0.5)).unwrap();
        }
        let bad = step == 1 || step == 4;
        optimizer.step(&mut of(1.0), &of(if bad { f64::NAN } else { 1.0 })).unwrap();
        rates.push(optimizer.report().unwrap().rate);
    }
    assert_eq!(rates, [0.125, 0.125, 0.25, 0.25, 0.25, 0.5, 0.375, 0.25]);
    for bad in [
        Schedule::cosine(0),
        Schedule::cosine(10).with_warm_up(10),
        Schedule::linear(5).with_warm_up(7),
        Schedule::stable_then_decay(4, 4),
        Schedule::stable_then_decay(3, 9).with_warm_up(4),
    ] {
        let error = Sgd::<Host>::new(1.0).unwrap().with_schedule(bad).unwrap_err().to_string();
        assert!(error.contains("these must ascend"), "{error}");
    }
    for last in [-0.1, 1.1, f64::NAN] {
        let error = Sgd::<Host>::new(1.0).unwrap().with_schedule(Schedule::linear(5).with_last(last)).unwrap_err();
        assert!(error.to_string().contains(&format!("last is {last}")), "{error}");
    }
}

/// Groups: the first that matches applies; a rate of 0 moves no weight, a frozen parameter has no state either; a group without parameters
/// and numbers out of range are refused by pattern.
#[test]
fn parameter_group_has_options_of_its_own() {
    let groups = [
        ParameterGroup::matching("t0").with_rate(0.0),
        ParameterGroup::matching("t[12]"),
        ParameterGroup::matching("t1").with_rate(0.5),
        ParameterGroup::matching("t*").with_frozen(true),
    ];
    let usable = [&groups[0], &groups[2], &groups[3]].map(Clone::clone);
    let mut optimizer: Sgd =
        Sgd::new(SgdOptions::default().with_rate(1.0).with_momentum(0.5)).unwrap().with_groups(usable).unwrap();
    let mut weights = filled(F32, &[2; 3], |_, len| vec![1.0; len]);
    optimizer.step(&mut weights, &filled(F32, &[2; 3], |_, len| vec![0.5; len])).unwrap();
    assert_eq!(flat(&weights), [1.0, 1.0, 0.75, 0.75, 1.0, 1.0]);
    let kept: Vec<String> = state(&optimizer).vectors.into_iter().map(|vector| vector.0).collect();
    assert_eq!(kept, ["t0", "t1"]);

    let mut optimizer: Sgd = Sgd::new(1.0).unwrap().with_groups(groups).unwrap();
    let error = optimizer.step(&mut weights, &filled(F32, &[2; 3], |_, len| vec![0.5; len])).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
    assert!(error.to_string().contains(r#"no parameter matches the group "t[12]""#), "{error}");
    assert_eq!(flat(&weights), [1.0, 1.0, 0.75, 0.75, 1.0, 1.0]);
    for (name, group) in [
        ("rate", ParameterGroup::matching("a*").with_rate(-1.0)),
        ("rate", ParameterGroup::matching("a*").with_rate(f64::NAN)),
        ("weight_decay", ParameterGroup::matching("a*").with_weight_decay(Some(-0.5))),
        ("weight_decay", ParameterGroup::matching("a*").with_weight_decay(Some(f64::INFINITY))),
    ] {
        let error = AdamW::<Host>::new(1.0).unwrap().with_groups([group]).unwrap_err().to_string();
        assert!(error.contains(r#"the group "a*""#) && error.contains(&format!("{name} is")), "{error}");
    }
}

/// 1000 steps of -0.01 from 1 end at -9: the master copy has 1000 roundings to `f32` of numbers up to 9, and the step, rounded once, counts
/// 1000 times. Without a copy, weights of `bf16` stand still at -4. In every step the weights are the copy, rounded.
#[test]
fn step_moves_16_bit_weights_by_master_copies() {
    let plain = (0..1000).fold(1.0, |weight: f64, _| BF16.round(weight - 0.01));
    assert_eq!(plain, -4.0);
    for format in [F16, BF16] {
        let mut optimizer = sgd(SgdOptions::default().with_rate(0.01));
        let mut weights = filled(format, &[3], |_, len| vec![1.0; len]);
        let gradients = filled(format, &[3], |_, len| vec![1.0; len]);
        for _ in 0..1000 {
            optimizer.step(&mut weights, &gradients).unwrap();
            let masters = &state(&optimizer).vectors[0];
            assert_eq!((masters.1, masters.2), ("master", F32));
            assert_eq!(flat(&weights), masters.3.iter().map(|&weight| format.round(weight)).collect::<Vec<f64>>());
        }
        let slack = 1000.0 * (F32.rounding_error(9.0) + F32.rounding_error(0.01)) * (1.0 + gamma(1000));
        let masters = &state(&optimizer).vectors[0].3;
        assert_within("masters", F32, masters, &[-9.0; 3], &[slack; 3]);
        assert_within("weights", format, &flat(&weights), &[-9.0; 3], &[slack + format.rounding_error(9.0 + slack); 3]);
    }
}

/// Weights that the program changes are those of the next step when it says so, and after a step as deltas, which it applies itself.
#[test]
fn reload_weights_and_deltas_renew_master_copies() {
    let of = |value: f64| filled(BF16, &[3], |_, len| vec![value; len]);
    let mut optimizer = sgd(SgdOptions::default().with_rate(0.5));
    let mut weights = of(1.0);
    optimizer.step(&mut weights, &of(1.0)).unwrap();
    optimizer.reload_weights();
    let mut other = of(8.0);
    optimizer.step(&mut other, &of(1.0)).unwrap();
    assert_eq!((flat(&weights), flat(&other)), (vec![0.5; 3], vec![7.5; 3]));
    let mut deltas = of(0.0);
    optimizer.deltas(&of(1.0), &of(2.0), &mut deltas).unwrap();
    assert_eq!(flat(&deltas), [-0.5; 3]);
    let mut applied = of(1.5);
    optimizer.step(&mut applied, &of(1.0)).unwrap();
    assert_eq!(flat(&applied), [1.0; 3]);
}

/// A saved optimizer and its restored copy make the same steps, to the bit, with all options.
fn continues<O: OptimizerOptions>(options: O) {
    // The precision of a restored state is that of the weights, as no gradient is known.
    let tensors = TENSORS.iter().filter(|&&(weights, gradient, _)| weights == F64 || gradient != F64);
    let formats: Vec<(Format, usize)> = tensors.clone().map(|&(_, gradient, len)| (gradient, len)).collect();
    let tensors: Vec<(Format, usize)> = tensors.map(|&(weights, _, len)| (weights, len)).collect();
    let make = || {
        let groups = [ParameterGroup::matching("t2").with_frozen(true), ParameterGroup::matching("t7").with_rate(0.5)];
        let optimizer = Optimizer::<O>::new(options).unwrap().with_max_norm(0.5).unwrap();
        let optimizer = optimizer.with_schedule(Schedule::cosine(9).with_warm_up(2)).unwrap();
        let scaler = LossScaler::default().with_initial(4.0).with_growth_interval(3);
        optimizer.with_scaler(scaler).unwrap().with_groups(groups).unwrap()
    };
    let (mut saved, mut model) = (make(), Model::new(&tensors));
    saved.step_tensors(model.steps(&gradients(&formats, 8))).unwrap();
    for step in 0..8 {
        let mut restored = make();
        let mut copy = model.clone();
        copy.restore(&mut restored, &state(&saved)).unwrap();
        assert_eq!((&copy.weights, state(&restored)), (&model.weights, state(&saved)), "step {step}");
        assert_eq!(restored.loss_scale().unwrap(), saved.loss_scale().unwrap());
        let mut gradients = gradients(&formats, step);
        if step == 4 {
            write(gradients[1].as_mut().unwrap().slice_mut(), 0, &[f64::INFINITY]);
        }
        saved.step_tensors(model.steps(&gradients)).unwrap();
        restored.step_tensors(copy.steps(&gradients)).unwrap();
        assert_eq!((copy.weights, state(&restored)), (model.weights.clone(), state(&saved)), "step {step}");
    }
}

#[test]
fn restore_continues_to_the_bit() {
    rules_of_sgd().into_iter().for_each(|(options, _)| continues(options));
    rules_of_adamw().into_iter().for_each(|(options, _)| continues(options));
}

/// A scale that was saved with a scaler does not divide the gradients of a program that has none.
#[test]
fn restore_drops_a_scale_without_a_scaler() {
    let of = |value: f64| filled(F32, &[2], |_, len| vec![value; len]);
    let mut saved: Sgd = Sgd::new(1.0).unwrap().with_scaler(LossScaler::default().with_initial(1024.0)).unwrap();
    saved.step(&mut of(0.0), &of(1.0)).unwrap();
    let (mut restored, mut weights) = (sgd(SgdOptions::default().with_rate(1.0)), of(0.0));
    restore(&mut restored, &mut weights, &state(&saved)).unwrap();
    assert_eq!(restored.loss_scale().unwrap(), 1.0);
    restored.step(&mut weights, &of(1.0)).unwrap();
    assert_eq!(flat(&weights), [-1.0; 2]);
}

/// Without momentum there is no velocity; if momentum is set again, it starts from zero.
#[test]
fn sgd_drops_velocities_without_momentum() {
    let of = |value: f64| filled(F32, &[2], |_, len| vec![value; len]);
    let heavy = SgdOptions::default().with_rate(1.0).with_momentum(0.5);
    let (mut optimizer, mut weights) = (sgd(heavy), of(0.0));
    for (options, weight, vectors) in
        [(heavy, -1.0, 1), (heavy, -2.5, 1), (heavy.with_momentum(0.0), -3.5, 0), (heavy, -4.5, 1)]
    {
        optimizer.set_options(options).unwrap();
        optimizer.step(&mut weights, &of(1.0)).unwrap();
        assert_eq!((flat(&weights), optimizer.vectors().count()), (vec![weight; 2], vectors));
    }
}

/// Calls that do not fit are refused with the tensor named, before anything is written: every bit of weights and state stays, and the next
/// step is as if there had been none. The tensor that is wrong is the last one, so that earlier ones would show a half-written step.
#[test]
fn step_tensors_refusals_write_nothing() {
    let tensors = [(F32, F32, 5), (BF16, BF16, 3), (F32, F32, 4)];
    let formats: Vec<(Format, usize)> = tensors.iter().map(|&(_, gradient, len)| (gradient, len)).collect();
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, corrects: true };
    for is_first in [true, false] {
        let options = AdamWOptions::default();
        let mut case = Case::new(adamw(options), (rule, options.rate, options.weight_decay), &tensors);
        if !is_first {
            case.step("before", 1.0, &gradients(&formats, 0));
        }
        let Case { model, optimizer, .. } = &mut case;
        type Change = fn(&mut Model, &mut Vec<Option<Array>>);
        let of_any: [(Change, &[&str]); 4] = [
            (|_, gradients| gradients[2] = Some(Array::new(F32, &[1.0; 3])), &["\"t2\"", "3 elements", "have 4"]),
            (|model, _| model.names[2] = "t0".into(), &["\"t0\""]),
            (|_, gradients| gradients[2] = Some(Array::new(F32, &[f64::NAN; 4])), &["\"t2\"", "NaN"]),
            (|_, gradients| gradients[2] = Some(Array::new(F32, &[2.0_f64.powi(65); 4])), &["a norm of 7.37869762"]),
        ];
        let of_later: [(Change, &[&str]); 7] = [
            (|model, _| model.weights[2] = Array::new(BF16, &[1.0; 4]), &["\"t2\"", "bf16", "f32"]),
            (
                |model, gradients| {
                    (model.weights[2], gradients[2]) = (Array::new(F32, &[1.0; 6]), Some(Array::new(F32, &[1.0; 6])));
                },
                &["\"t2\"", "6 elements", "of 4"],
            ),
            (|model, _| drop(model.names.pop()), &["2 tensors, and the state is of 3"]),
            (|model, _| model.names.clear(), &["0 tensors, and the state is of 3"]),
            (|model, _| model.names[2] = "other".into(), &["\"other\"", "\"t2\""]),
            (|model, _| model.names.swap(0, 2), &["\"t2\"", "\"t0\""]),
            (|_, gradients| gradients[2] = Some(Array::new(F64, &[1.0; 4])), &["\"t2\"", "f64", "f32"]),
        ];
        let later = of_later.iter().filter(|_| !is_first);
        for (change, words) in of_any.iter().chain(later) {
            let (mut changed, mut gradients) = (model.clone(), gradients(&formats, 1));
            change(&mut changed, &mut gradients);
            let (weights, before) = (changed.weights.clone(), state(optimizer));
            let error = optimizer.step_tensors(changed.steps(&gradients)).expect_err(words[0]);
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
            words.iter().for_each(|word| assert!(error.to_string().contains(word), "\"{error}\" does not say {word}"));
            assert_eq!(changed.weights, weights, "{error}: weights");
            let after = state(optimizer);
            if !is_first {
                assert_eq!(after.vectors, before.vectors, "{error}: vectors");
            }
            let skipped = f64::from(u8::from(error.to_string().contains("behind")));
            assert_eq!(after.numbers[1], before.numbers[1] + skipped, "{error}");
            assert_eq!(
                (after.numbers[0], &after.numbers[6..11]),
                (before.numbers[0], &before.numbers[6..11]),
                "{error}"
            );
        }
        // Integers, and floats that are not aligned, are no operands of an optimizer.
        let mut integers = [1_i32; 4];
        let steps = integers.chunks_mut(4).map(|data| TensorStep {
            name: "t2",
            weights: TensorViewMut::new(data, vec![4]).unwrap(),
            gradient: None,
        });
        let mut changed = model.clone();
        let first = gradients(&formats, 1);
        let error =
            optimizer.step_tensors(changed.steps(&first[..2]).into_iter().chain(steps)).unwrap_err().to_string();
        assert!(error.contains("i32") || error.contains("\"t2\""), "{error}");
        assert_eq!(changed.weights, model.weights);
        let bytes = [0_u64; 3];
        let bytes = &bytemuck_bytes(&bytes)[1..17];
        let gradient = TensorView::of_bytes(gradsync::DType::F32, vec![4], bytes).unwrap();
        let mut tensors = changed.steps(&first);
        tensors[2].gradient = Some(gradient);
        assert!(optimizer.step_tensors(tensors).unwrap_err().to_string().contains("aligned"));
        assert_eq!(changed.weights, model.weights);
        // The next step is the one that the oracle makes, which has seen two skipped ones.
        let skipped = optimizer.report().unwrap().skipped as f64;
        (case.expected.numbers[1], case.expected.numbers[11]) = (skipped, 0.0);
        case.step("behind all refusals", 1.0, &gradients(&formats, 2));
    }
}

fn bytemuck_bytes(words: &[u64]) -> &[u8] {
    gradsync::Slice::from(words).as_bytes()
}

/// Before the first step there is no report and no vector; a call without tensors is none.
#[test]
fn optimizer_before_its_first_step() {
    let mut optimizer = adamw(AdamWOptions::default());
    assert!(optimizer.report().unwrap_err().to_string().contains("no step was made"));
    assert_eq!((optimizer.latest_report().unwrap(), optimizer.applied_steps().unwrap()), (None, 0));
    assert!(optimizer.vectors().next().is_none() && optimizer.loss_scale_view().is_none());
    optimizer.step_tensors(std::iter::empty()).unwrap();
    assert!(optimizer.report().is_err());
    assert_eq!(state(&optimizer).numbers.len(), 12);
}
