//! The optimizers that compute steps: their formulas against a plain restatement, their states, and their refusals.

use gradsync::train::{AdamW, AdamWOptions, DeltaOptimizer, Optimizer, OptimizerOptions, Sgd, SgdOptions};
use gradsync::{Error, GradientBuffer, Result};
use gradsync_tests::array::{dtype, values_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::{assert_within, gamma, gamma_of};

/// Lengths of more than one block of the widest kind, of one that ends inside a block, of no element, and of one element.
const LENS: [usize; 4] = [1300, 512, 0, 1];

/// A buffer with one tensor per length, filled with the values that `value` gives for its index and length.
pub(crate) fn filled(format: Format, lens: &[usize], value: impl Fn(usize, usize) -> Vec<f64>) -> GradientBuffer {
    let tensors = lens.iter().enumerate().map(|(index, &len)| (format!("t{index}"), vec![len]));
    let mut buffer = GradientBuffer::new(dtype(format), 1, tensors).unwrap();
    for (index, segment) in buffer.segments().to_vec().into_iter().enumerate() {
        write(buffer.as_mut_slice(), segment.start, &value(index, segment.len()));
    }
    buffer
}

/// The values of all tensors of a buffer, end to end.
pub(crate) fn flat(buffer: &GradientBuffer) -> Vec<f64> {
    (0..buffer.tensor_count()).flat_map(|index| values_of(buffer.tensor(index).data())).collect()
}

pub(crate) fn sgd(options: SgdOptions) -> Sgd {
    Sgd::new(options).unwrap()
}

pub(crate) fn adamw(options: AdamWOptions) -> AdamW {
    AdamW::new(options).unwrap()
}

/// The state of an optimizer: the name of each vector and of its parameter, its format and its values, and the numbers.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) vectors: Vec<(String, &'static str, Format, Vec<f64>)>,
    pub(crate) numbers: Vec<f64>,
}

/// Bitwise: NaN and the sign of zero count.
impl PartialEq for State {
    fn eq(&self, other: &Self) -> bool {
        let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<u64>>();
        let all = |state: &Self| -> Vec<_> {
            let vectors = state.vectors.iter();
            vectors.map(|(name, vector, format, data)| (name.clone(), *vector, *format, bits(data))).collect()
        };
        all(self) == all(other) && bits(&self.numbers) == bits(&other.numbers)
    }
}

pub(crate) fn state<O: OptimizerOptions>(optimizer: &Optimizer<O>) -> State {
    let vector = |(name, vector, data): (&str, &'static str, gradsync::Slice<'_>)| {
        (name.to_owned(), vector, gradsync_tests::array::format(data.dtype()), values_of(data))
    };
    State { vectors: optimizer.vectors().map(vector).collect(), numbers: optimizer.numbers().unwrap() }
}

/// Restores a state for these weights.
pub(crate) fn restore<O: OptimizerOptions>(
    optimizer: &mut Optimizer<O>,
    weights: &mut GradientBuffer,
    state: &State,
) -> Result<()> {
    let mut vectors = state.vectors.iter();
    optimizer.restore(&state.numbers, weights.tensors_mut(), |name, vector, data| {
        let saved = vectors.next().expect("a vector for each call");
        assert_eq!((&saved.0[..], saved.1, dtype(saved.2)), (name, vector, data.dtype()));
        write(data, 0, &saved.3);
        Ok(())
    })
}

fn random(format: Format, seed: usize) -> GradientBuffer {
    filled(format, &LENS, |index, len| vector(format, len, (100 * seed + index) as u64))
}

/// Three steps of an optimizer: for each step the gradients, the weights and the deltas, as `f64` values.
fn three_steps(optimizer: &mut dyn DeltaOptimizer, formats: [Format; 3]) -> Vec<[Vec<f64>; 3]> {
    (0..3)
        .map(|step| {
            let (gradients, weights) = (random(formats[0], step), random(formats[1], 10 + step));
            let mut deltas = filled(formats[2], &LENS, |_, len| vec![0.0; len]);
            optimizer.deltas(&gradients, &weights, &mut deltas).unwrap();
            [flat(&gradients), flat(&weights), flat(&deltas)]
        })
        .collect()
}

/// Gradients, weights and deltas. With one operand in `f64`, states are `f64` too, and `f32` otherwise.
const FORMATS: [[Format; 3]; 8] = [
    [Format::F64, Format::F64, Format::F64],
    [Format::F64, Format::F32, Format::F16],
    [Format::BF16, Format::F64, Format::BF16],
    [Format::F16, Format::F32, Format::F64],
    [Format::F32, Format::F32, Format::F32],
    [Format::BF16, Format::F32, Format::F16],
    [Format::F32, Format::BF16, Format::F32],
    [Format::F16, Format::F16, Format::F16],
];

fn state_format(formats: [Format; 3]) -> Format {
    if formats.contains(&Format::F64) { Format::F64 } else { Format::F32 }
}

/// Every operation is one of `f64`, in the order of the formula, and each stored number is rounded once: the bits are those of a plain
/// restatement, for any dtypes. So results that were published with this optimizer stay what they are.
#[test]
fn sgd_has_the_bits_of_its_formula_in_f64() {
    let plain = SgdOptions::default().with_rate(0.3);
    let heavy = plain.with_momentum(0.9);
    let all = [plain, heavy, heavy.with_nesterov(true), plain.with_weight_decay(0.07), heavy.with_weight_decay(0.07)];
    for (formats, options) in FORMATS.into_iter().flat_map(|formats| all.map(|options| (formats, options))) {
        let (mut sgd, kept) = (sgd(options), state_format(formats));
        let mut velocity = vec![0.0; LENS.iter().sum()];
        for (step, [gradients, weights, deltas]) in three_steps(&mut sgd, formats).into_iter().enumerate() {
            for (((velocity, gradient), weight), delta) in velocity.iter_mut().zip(gradients).zip(weights).zip(deltas) {
                let gradient =
                    if options.weight_decay == 0.0 { gradient } else { gradient + options.weight_decay * weight };
                let next = if options.momentum == 0.0 { gradient } else { options.momentum * *velocity + gradient };
                let direction = if options.nesterov { gradient + options.momentum * next } else { next };
                let expected = formats[2].round(-(options.rate * direction));
                assert_eq!(
                    delta.to_bits(),
                    expected.to_bits(),
                    "{formats:?}, {options:?}, step {step}: {delta} {expected}"
                );
                *velocity = kept.round(next);
            }
        }
        let expected: Vec<u64> = velocity.iter().map(|velocity| velocity.to_bits()).collect();
        let state = state(&sgd);
        let of = |name| state.vectors.iter().filter(move |vector| vector.1 == name);
        let kept_bits: Vec<u64> = of("velocity").flat_map(|vector| &vector.3).map(|value| value.to_bits()).collect();
        assert_eq!(kept_bits, if options.momentum == 0.0 { Vec::new() } else { expected }, "{formats:?}, {options:?}");
        assert!(of("velocity").all(|vector| vector.2 == kept));
    }
}

/// Roundings on the path of a gradient to a delta in step t, of which each has a relative error of one unit of the state's format u:
/// * a moment: in each step the coefficient, the product and the sum, and the square of the gradient once: 3t and 3t + 1;
/// * the corrected moments and the root: the coefficient and the product, the root, ε and the sum: 2 and 5;
/// * the quotient, the decay with its coefficient, the sum, and the product with the rate and its coefficient: 1, 2, 1 and 2.
///
/// Together 6t + 14. The restatement in `f64` has as many. There and in the code, the correction 1 - βᵗ keeps an absolute error of t units of
/// `f64`, which is at most 1 / (1 - β) units relative to the difference: 1000 and 10 times.
#[test]
fn adamw_takes_steps_with_and_without_bias_correction_and_decay() {
    for formats in FORMATS {
        for (bias_correction, weight_decay) in [(false, 0.0), (false, 0.25), (true, 0.0), (true, 0.25)] {
            let options = AdamWOptions::default()
                .with_rate(0.5)
                .with_bias_correction(bias_correction)
                .with_weight_decay(weight_decay);
            let (mut adamw, kept) = (adamw(options), state_format(formats));
            let len = LENS.iter().sum();
            let (mut first, mut size, mut second) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
            for (step, [gradients, weights, deltas]) in three_steps(&mut adamw, formats).into_iter().enumerate() {
                let (mut exact, mut bounds) = (Vec::new(), Vec::new());
                let roundings = 6 * (step + 1) + 14;
                let relative = gamma_of(kept.unit_roundoff(), roundings) + gamma(roundings + 2 * 1010);
                for i in 0..len {
                    first[i] = 0.9 * first[i] + 0.1 * gradients[i];
                    size[i] = 0.9 * size[i] + 0.1 * gradients[i].abs();
                    second[i] = 0.999 * second[i] + 0.001 * gradients[i] * gradients[i];
                    let power = step as i32 + 1;
                    let correct =
                        |value: f64, beta: f64| if bias_correction { value / (1.0 - beta.powi(power)) } else { value };
                    let root = correct(second[i], 0.999).sqrt() + 1e-8;
                    exact.push(-0.5 * (correct(first[i], 0.9) / root + weight_decay * weights[i]));
                    let magnitude = 0.5 * (correct(size[i], 0.9) / root + weight_decay * weights[i].abs());
                    let slack = relative * magnitude;
                    bounds.push(slack + formats[2].rounding_error(exact[i].abs() + slack));
                }
                let label = format!("{formats:?}, {options:?}, step {step}");
                assert_within(&label, formats[2], &deltas, &exact, &bounds);
            }
            assert_eq!(adamw.applied_steps().unwrap(), 3);
            assert!(state(&adamw).vectors.iter().all(|vector| vector.2 == kept));
        }
    }
}

/// A restored optimizer continues like the saved one. A state that was saved for other tensors is refused by name.
#[test]
fn sgd_and_adamw_states_survive() {
    let halves = [Format::F16, Format::F32, Format::BF16];
    let options = SgdOptions::default().with_rate(0.1).with_momentum(0.5);
    let (mut adam, mut heavy) = (adamw(AdamWOptions::default()), sgd(options));
    three_steps(&mut adam, halves);
    three_steps(&mut heavy, halves);
    let mut weights = random(Format::F32, 0);
    let mut restored = adamw(AdamWOptions::default());
    restore(&mut restored, &mut weights, &state(&adam)).unwrap();
    assert_eq!(state(&restored), state(&adam));
    assert_eq!(three_steps(&mut restored, halves), three_steps(&mut adam, halves));
    let mut restored = sgd(options);
    restore(&mut restored, &mut weights, &state(&heavy)).unwrap();
    assert_eq!(three_steps(&mut restored, halves), three_steps(&mut heavy, halves));
    let mut others = filled(Format::F32, &[3], |_, len| vec![1.0; len]);
    let mut deltas = filled(Format::F32, &[3], |_, len| vec![0.0; len]);
    let gradients = filled(Format::F32, &[3], |_, len| vec![1.0; len]);
    restore(&mut restored, &mut weights, &state(&heavy)).unwrap();
    let error = restored.deltas(&gradients, &others, &mut deltas).unwrap_err().to_string();
    assert!(error.contains("1 tensors, and the state is of 4"), "{error}");
    assert!(restored.step(&mut others, &gradients).is_err());
}

#[test]
fn sgd_and_adamw_refusals_change_nothing() {
    let buffer = |len: usize| filled(Format::F32, &[len], |_, len| vec![1.0; len]);
    let refuse = |optimizer: &mut dyn DeltaOptimizer, sizes: [usize; 3], words: &[&str]| {
        let mut deltas = buffer(sizes[2]);
        let error =
            optimizer.deltas(&buffer(sizes[0]), &buffer(sizes[1]), &mut deltas).expect_err("refused").to_string();
        for word in words {
            assert!(error.contains(word), "\"{error}\" does not say \"{word}\"");
        }
        assert_eq!(flat(&deltas), vec![1.0; sizes[2]], "something was written");
    };
    for sizes in [[3, 4, 3], [3, 3, 4], [4, 3, 3]] {
        refuse(&mut sgd(SgdOptions::default()), sizes, &["[3]", "[4]"]);
        let mut fresh = adamw(AdamWOptions::default());
        refuse(&mut fresh, sizes, &["[3]", "[4]"]);
        assert!(fresh.vectors().next().is_none() && fresh.applied_steps().unwrap() == 0);
    }
    let mut adam = adamw(AdamWOptions::default());
    adam.deltas(&buffer(3), &buffer(3), &mut buffer(3)).unwrap();
    let before = state(&adam);
    refuse(&mut adam, [4; 3], &["\"t0\"", "4 elements of f32", "3 of f32"]);
    assert!(adam.applied_steps().unwrap() == 1 && state(&adam) == before);
}

/// Every invalid option is refused by name and value, when an optimizer is made or changed; values at the edge of the range are accepted.
#[test]
fn sgd_and_adamw_refuse_options_out_of_range() {
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    let (not_negative, positive, part) =
        (&[-1.0, -5e-324, nan, infinity][..], &[0.0, -1e-3, nan, infinity][..], &[2.0, 1.0, -0.5, nan, infinity][..]);

    type Sgds = (&'static str, fn(&mut SgdOptions, f64));
    let rate: Sgds = ("rate", |options, value| options.rate = value);
    let momentum: Sgds = ("momentum", |options, value| options.momentum = value);
    let decay: Sgds = ("weight_decay", |options, value| options.weight_decay = value);
    for ((name, change), bad) in [(rate, not_negative), (momentum, part), (decay, not_negative)] {
        for &value in bad {
            let mut options = SgdOptions::default();
            change(&mut options, value);
            let mut changed = sgd(SgdOptions::default());
            refused(name, value, [Sgd::<gradsync::memory::Host>::new(options).map(drop), changed.set_options(options)]);
            assert_eq!(changed.options(), SgdOptions::default());
        }
    }
    sgd(SgdOptions::default().with_rate(0.0).with_momentum(1.0 - f64::EPSILON));
    let ahead = Sgd::<gradsync::memory::Host>::new(SgdOptions::default().with_nesterov(true)).unwrap_err().to_string();
    assert!(ahead.contains("`nesterov` is true and momentum is 0"), "{ahead}");

    type Adams = (&'static str, fn(&mut AdamWOptions, f64));
    let rate: Adams = ("rate", |options, value| options.rate = value);
    let beta1: Adams = ("beta1", |options, value| options.beta1 = value);
    let beta2: Adams = ("beta2", |options, value| options.beta2 = value);
    let epsilon: Adams = ("epsilon", |options, value| options.epsilon = value);
    let decay: Adams = ("weight_decay", |options, value| options.weight_decay = value);
    let cases = [(rate, not_negative), (beta1, part), (beta2, part), (epsilon, positive), (decay, not_negative)];
    for ((name, change), bad) in cases {
        for &value in bad {
            let mut options = AdamWOptions::default();
            change(&mut options, value);
            let mut changed = adamw(AdamWOptions::default());
            let made = AdamW::<gradsync::memory::Host>::new(options).map(drop);
            refused(name, value, [made, changed.set_options(options)]);
            assert_eq!(changed.options(), AdamWOptions::default());
        }
    }
    adamw(AdamWOptions::default().with_rate(0.0).with_beta1(0.0).with_beta2(0.0).with_epsilon(5e-324));
}

#[track_caller]
fn refused(name: &str, value: f64, outcomes: [Result<()>; 2]) {
    for outcome in outcomes {
        let error = outcome.expect_err("refused");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{name} is {value}")), "\"{error}\" for {name} {value}");
    }
}

/// Gradients that are not finite, or that may overflow a state, would spoil the state for ever: they are refused by tensor or by norm, the
/// state is unchanged, and the next step is as if there had been none. Without a state, finite gradients of `f32` are not refused.
#[test]
fn sgd_and_adamw_refuse_gradients_that_would_poison_a_state() {
    let of = |value: f64| {
        filled(Format::F32, &[3, 2], |index, len| {
            (0..len).map(|i| if (index, i) == (1, 1) { f64::from(value as f32) } else { 1.0 }).collect()
        })
    };
    let step = |optimizer: &mut dyn DeltaOptimizer, value: f64| {
        let mut deltas = of(0.0);
        optimizer.deltas(&of(value), &of(0.0), &mut deltas).map(|()| flat(&deltas))
    };
    let heavy = SgdOptions::default().with_rate(0.5).with_momentum(0.9);
    type Make<'a> = &'a dyn Fn() -> Box<dyn DeltaOptimizer>;
    // The largest squares and the largest sums are tested; a sum is up to 1 / (1 - 0.9) times as large as the gradients.
    let cases: [(Make<'_>, f64, f64); 2] = [
        (&|| Box::new(adamw(AdamWOptions::default().with_weight_decay(0.0))), 1.3e19, 1.31e19),
        (&|| Box::new(sgd(heavy)), 3.3e37, 3.5e37),
    ];
    for (make, good, bad) in cases {
        let (mut poisoned, mut clean) = (make(), make());
        for step_number in 0..3 {
            for bad in [bad, -bad, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let error = step(&mut *poisoned, bad).expect_err("refused").to_string();
                // The norm is that of the only large element, which is rounded to the buffer's dtype.
                let norm = format!("a norm of {:e}", f64::from(bad as f32).abs());
                let words = if bad.is_finite() { &norm } else { "gradients of \"t1\" have NaN or infinities" };
                assert!(error.contains(words) && error.contains(&format!("behind {step_number} applied")), "{error}");
            }
            assert_eq!(step(&mut *poisoned, 1.0).unwrap(), step(&mut *clean, 1.0).unwrap(), "step {step_number}");
        }
        // The largest allowed gradients stay finite in any number of steps.
        for _ in 0..200 {
            assert!(step(&mut *clean, good).unwrap().iter().all(|delta| delta.is_finite() && *delta != 0.0));
        }
    }
    let mut fresh = adamw(AdamWOptions::default());
    assert!(step(&mut fresh, f64::NAN).is_err() && fresh.applied_steps().unwrap() == 0);
    assert!(state(&fresh).vectors.iter().all(|(_, _, _, data)| data.iter().all(|&value| value == 0.0)));
    let plain = step(&mut sgd(SgdOptions::default().with_rate(0.5)), 3e38).unwrap();
    assert!(plain.iter().all(|delta| delta.is_finite()));
    assert!(step(&mut sgd(SgdOptions::default()), f64::NAN).is_err());
}

/// A saved state that is spoiled already is refused by vector, tensor and value; so are numbers that no step leaves. The optimizer keeps the
/// state that it had.
#[test]
fn restore_refuses_spoiled_states() {
    let of = |value: f64| filled(Format::F32, &[3, 2], |_, len| vec![value; len]);
    let mut adam = adamw(AdamWOptions::default());
    adam.step(&mut of(1.0), &of(1.0)).unwrap();
    let good = state(&adam);
    let refuse = |adam: &mut AdamW, bad: &State, words: &[&str]| {
        let error = restore(adam, &mut of(1.0), bad).expect_err("refused");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        words.iter().for_each(|word| assert!(error.to_string().contains(word), "\"{error}\" does not say {word}"));
        assert_eq!(state(adam), good);
    };
    // Vectors 2 and 3 are the moments of the second tensor.
    let spoiled: [(usize, f64, &[&str]); 6] = [
        (2, f64::NAN, &["\"first\"", "\"t1\"", "NaN or infinities"]),
        (3, f64::INFINITY, &["\"second\"", "\"t1\"", "NaN or infinities"]),
        (3, f64::NEG_INFINITY, &["\"second\"", "\"t1\""]),
        (3, -1.0, &["\"second\"", "\"t1\"", "-1e0"]),
        (3, -f64::from(1e-30_f32), &["\"second\"", "\"t1\"", "has -1.0000000"]),
        (1, -Format::F32.smallest(), &["\"second\"", "\"t0\"", "has -1.40129846"]),
    ];
    for (index, value, words) in spoiled {
        let mut bad = good.clone();
        bad.vectors[index].3[1] = value;
        refuse(&mut adam, &bad, words);
    }
    // Numbers 0 and 1 count steps, 6 and 7 are powers of β, 10 and 11 the scale and its steps.
    let numbers = [
        (0, "applied", &[-1.0, 0.5, f64::NAN, f64::INFINITY, 2.0_f64.powi(53)][..]),
        (1, "skipped", &[-1.0, 0.5, f64::NAN, 2.0_f64.powi(53)]),
        (6, "power1", &[-0.1, 1.1, f64::NAN, f64::INFINITY]),
        (7, "power2", &[-0.1, 1.1, f64::NAN]),
        (10, "scale", &[0.0, -1.0, f64::NAN, f64::INFINITY]),
        (11, "steps_of_scale", &[-1.0, 0.5, f64::NAN]),
    ];
    for (index, name, values) in numbers {
        for &value in values {
            let mut bad = good.clone();
            bad.numbers[index] = value;
            refuse(&mut adam, &bad, &[&format!("the saved {name} is {value}")]);
        }
    }
    for count in [0, 11, 13] {
        let bad = State { numbers: vec![1.0; count], ..good.clone() };
        refuse(&mut adam, &bad, &[&format!("{count} numbers of steps, and there are 12")]);
    }
    // An error of the caller, in the last vector.
    let mut calls = 0;
    let outcome = adam.restore(&good.numbers, of(1.0).tensors_mut(), |_, _, data| {
        write(data, 0, &[0.5, 0.5]);
        calls += 1;
        if calls < 4 { Ok(()) } else { Err(Error::InvalidArgument { operation: "load", reason: "no file".into() }) }
    });
    assert!(outcome.unwrap_err().to_string().contains("no file") && state(&adam) == good);
    // First moments have any sign, and -0 is a mean of squares, which no step leaves negative.
    let mut edge = good.clone();
    edge.vectors[0].3[1] = -1.0;
    edge.vectors[1].3 = vec![-0.0; 3];
    restore(&mut adam, &mut of(1.0), &edge).unwrap();
    let mut weights = of(1.0);
    adam.step(&mut weights, &of(0.0)).unwrap();
    assert!(state(&adam).vectors[1].3.iter().all(|&second| second == 0.0));
    assert!(flat(&weights).iter().all(|weight| weight.is_finite()));

    let mut heavy = sgd(SgdOptions::default().with_momentum(0.9));
    heavy.step(&mut of(1.0), &of(1.0)).unwrap();
    let mut bad = state(&heavy);
    bad.vectors[1].3[0] = f64::NAN;
    let error = restore(&mut heavy, &mut of(1.0), &bad).unwrap_err().to_string();
    assert!(error.contains("\"velocity\" of \"t1\" has NaN"), "{error}");
}

/// The largest gradients of `f64` have steps that are neither 0 nor infinite, with the smallest correction of second moments there is, which
/// multiplies them by 2⁵³, and after a change of it.
#[test]
fn adamw_corrections_do_not_overflow() {
    let of = |value: f64| filled(Format::F64, &[1], |_, len| vec![value; len]);
    let plain = AdamWOptions::default().with_rate(1.0).with_weight_decay(0.0);
    let options = plain.with_beta2(1.0 - f64::EPSILON / 2.0);
    let step = |adam: &mut AdamW, gradient: f64| {
        let mut deltas = of(0.0);
        adam.deltas(&of(gradient), &of(0.0), &mut deltas).map(|()| flat(&deltas)[0])
    };
    let mut adam = adamw(options);
    assert!(step(&mut adam, 1e146).is_err());
    for _ in 0..3 {
        assert!((-1.001..-0.999).contains(&step(&mut adam, 9.9e145).unwrap()));
        adam.set_options(plain.with_beta2(0.0)).unwrap();
    }
    adam.set_options(options).unwrap();
    let delta = step(&mut adam, 9.9e145).unwrap();
    assert!(delta < 0.0 && delta.is_finite());
}
