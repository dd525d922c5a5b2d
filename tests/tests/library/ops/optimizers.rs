//! The optimizers that compute steps: their formulas against a plain restatement, their states, and their refusals.

use gradsync::train::{Adam, AdamOptions, DeltaOptimizer, Sgd, SgdOptions};
use gradsync::{DType, Error, GradientBuffer};
use gradsync_tests::array::{dtype, values_of, write};
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::{assert_within, gamma};

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

/// With one operand in `f64`, states are `f64` too, so the bound only holds roundings of `f64` and the rounding of the delta.
const FORMATS: [[Format; 3]; 4] = [
    [Format::F64, Format::F64, Format::F64],
    [Format::F64, Format::F32, Format::F16],
    [Format::BF16, Format::F64, Format::BF16],
    [Format::F16, Format::F32, Format::F64],
];

/// A velocity after t steps is a sum in which every gradient passes at most 2t roundings; the delta has one more.
#[test]
fn sgd_takes_steps_with_and_without_momentum() {
    for formats in FORMATS {
        for momentum in [0.0, 0.9] {
            let (rate, mut sgd) =
                (0.3, Sgd::new(SgdOptions::default().with_rate(0.3).with_momentum(momentum)).unwrap());
            let mut velocity = vec![0.0; LENS.iter().sum()];
            let mut magnitude = velocity.clone();
            for (step, [gradients, _, deltas]) in three_steps(&mut sgd, formats).into_iter().enumerate() {
                for ((velocity, magnitude), gradient) in velocity.iter_mut().zip(&mut magnitude).zip(&gradients) {
                    *velocity = momentum * *velocity + gradient;
                    *magnitude = momentum * *magnitude + gradient.abs();
                }
                let exact: Vec<f64> = velocity.iter().map(|velocity| -rate * velocity).collect();
                // The roundings count twice, as this restatement rounds in f64 as well.
                let slack = |size: f64| 2.0 * gamma(2 * (step + 1) + 1) * rate * size;
                let bounds: Vec<f64> = exact
                    .iter()
                    .zip(&magnitude)
                    .map(|(x, &size)| slack(size) + formats[2].rounding_error(x.abs() + slack(size)))
                    .collect();
                assert_within(&format!("{formats:?}, step {step}"), formats[2], &deltas, &exact, &bounds);
            }
            assert_eq!(sgd.velocity().map(GradientBuffer::dtype), (momentum != 0.0).then_some(DType::F64));
        }
    }
}

/// Every number of the formula is a sum of terms of one sign, or bounded by the magnitudes taken here. Three steps and the quotient have
/// fewer than 40 roundings together, in the code and in this restatement.
#[test]
fn adam_takes_steps_with_and_without_bias_correction_and_decay() {
    for formats in FORMATS {
        for bias_correction in [false, true] {
            for weight_decay in [0.0, 0.25] {
                let options = AdamOptions::default()
                    .with_rate(0.5)
                    .with_bias_correction(bias_correction)
                    .with_weight_decay(weight_decay);
                let mut adam = Adam::new(options).unwrap();
                let len = LENS.iter().sum();
                let (mut first, mut size, mut second) = (vec![0.0; len], vec![0.0; len], vec![0.0; len]);
                for (step, [gradients, weights, deltas]) in three_steps(&mut adam, formats).into_iter().enumerate() {
                    let (mut exact, mut bounds) = (Vec::new(), Vec::new());
                    for i in 0..len {
                        first[i] = 0.9 * first[i] + 0.1 * gradients[i];
                        size[i] = 0.9 * size[i] + 0.1 * gradients[i].abs();
                        second[i] = 0.999 * second[i] + 0.001 * gradients[i] * gradients[i];
                        let power = step as i32 + 1;
                        let correct = |value: f64, beta: f64| {
                            if bias_correction { value / (1.0 - beta.powi(power)) } else { value }
                        };
                        let root = correct(second[i], 0.999).sqrt() + 1e-8;
                        exact.push(-0.5 * (correct(first[i], 0.9) / root + weight_decay * weights[i]));
                        let magnitude = 0.5 * (correct(size[i], 0.9) / root + weight_decay * weights[i].abs());
                        // 1 - β₂ᵗ keeps its absolute error, which is at most 1000 times as much relative to the difference.
                        let slack = gamma(40 * if bias_correction { 1000 } else { 1 }) * magnitude;
                        bounds.push(slack + formats[2].rounding_error(exact[i].abs() + slack));
                    }
                    let label = format!("{formats:?}, {options:?}, step {step}");
                    assert_within(&label, formats[2], &deltas, &exact, &bounds);
                }
                assert_eq!(adam.steps(), 3);
            }
        }
    }
}

/// States are kept in `f32` unless an operand is `f64`, and a restored optimizer continues like the saved one.
#[test]
fn sgd_and_adam_states_survive() {
    let halves = [Format::F16, Format::F32, Format::BF16];
    let options = AdamOptions::default();
    let (mut adam, mut sgd) =
        (Adam::new(options).unwrap(), Sgd::new(SgdOptions::default().with_rate(0.1).with_momentum(0.5)).unwrap());
    three_steps(&mut adam, halves);
    three_steps(&mut sgd, halves);
    let copy = |buffer: &GradientBuffer| {
        assert_eq!(buffer.dtype(), DType::F32);
        let values = flat(buffer);
        let starts: Vec<usize> = LENS.iter().scan(0, |end, len| Some(std::mem::replace(end, *end + len))).collect();
        filled(Format::F32, &LENS, |index, len| values[starts[index]..starts[index] + len].to_vec())
    };
    let [first, second] = adam.moments().unwrap().map(copy);
    let mut restored = Adam::with_moments(options, first, second, adam.steps()).unwrap();
    assert_eq!(three_steps(&mut restored, halves), three_steps(&mut adam, halves));
    let mut restored = Sgd::with_velocity(sgd.options(), copy(sgd.velocity().unwrap())).unwrap();
    assert_eq!(three_steps(&mut restored, halves), three_steps(&mut sgd, halves));
    // The state was saved for other tensors.
    let (one, two) =
        (filled(Format::F32, &[3], |_, len| vec![0.0; len]), filled(Format::F32, &[4], |_, len| vec![0.0; len]));
    let error = Adam::with_moments(options, one, two, 1).unwrap_err().to_string();
    assert!(error.contains("[3]") && error.contains("[4]"), "{error}");
}

#[test]
fn sgd_and_adam_refusals_change_nothing() {
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
        refuse(&mut Sgd::new(SgdOptions::default()).unwrap(), sizes, &["[3]", "[4]"]);
        let mut fresh = Adam::new(AdamOptions::default()).unwrap();
        refuse(&mut fresh, sizes, &["[3]", "[4]"]);
        assert!(fresh.moments().is_none() && fresh.steps() == 0);
    }
    let mut adam = Adam::new(AdamOptions::default()).unwrap();
    adam.deltas(&buffer(3), &buffer(3), &mut buffer(3)).unwrap();
    refuse(&mut adam, [4; 3], &["[3]", "[4]"]);
    assert_eq!(adam.steps(), 1);
}

/// Every invalid option is refused by name and value, when an optimizer is made, restored or changed; values at the edge of the range are
/// accepted.
#[test]
fn sgd_and_adam_refuse_options_out_of_range() {
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    let (not_negative, positive, part) =
        (&[-1.0, -5e-324, nan, infinity][..], &[0.0, -1e-3, nan, infinity][..], &[2.0, 1.0, -0.5, nan, infinity][..]);

    let sgd = |change: fn(&mut SgdOptions, f64), value| {
        let mut options = SgdOptions::default();
        change(&mut options, value);
        options
    };
    type Sgds = (&'static str, fn(&mut SgdOptions, f64));
    let rate: Sgds = ("rate", |options, value| options.rate = value);
    let momentum: Sgds = ("momentum", |options, value| options.momentum = value);
    for ((name, change), bad) in [(rate, not_negative), (momentum, part)] {
        for &value in bad {
            let options = sgd(change, value);
            let velocity = filled(Format::F32, &[3], |_, len| vec![0.0; len]);
            let mut changed = Sgd::new(SgdOptions::default()).unwrap();
            refused(
                name,
                value,
                [
                    Sgd::new(options).map(drop),
                    Sgd::with_velocity(options, velocity).map(drop),
                    changed.set_options(options),
                ],
            );
            assert_eq!(changed.options(), SgdOptions::default());
        }
    }
    assert!(Sgd::new(SgdOptions::default().with_rate(0.0).with_momentum(1.0 - f64::EPSILON)).is_ok());

    let adam = |change: fn(&mut AdamOptions, f64), value| {
        let mut options = AdamOptions::default();
        change(&mut options, value);
        options
    };
    type Adams = (&'static str, fn(&mut AdamOptions, f64));
    let rate: Adams = ("rate", |options, value| options.rate = value);
    let beta1: Adams = ("beta1", |options, value| options.beta1 = value);
    let beta2: Adams = ("beta2", |options, value| options.beta2 = value);
    let epsilon: Adams = ("epsilon", |options, value| options.epsilon = value);
    let decay: Adams = ("weight_decay", |options, value| options.weight_decay = value);
    let cases = [(rate, not_negative), (beta1, part), (beta2, part), (epsilon, positive), (decay, not_negative)];
    for ((name, change), bad) in cases {
        for &value in bad {
            let options = adam(change, value);
            let [first, second] = [(); 2].map(|()| filled(Format::F32, &[3], |_, len| vec![0.0; len]));
            let mut changed = Adam::new(AdamOptions::default()).unwrap();
            refused(
                name,
                value,
                [
                    Adam::new(options).map(drop),
                    Adam::with_moments(options, first, second, 1).map(drop),
                    changed.set_options(options),
                ],
            );
            assert_eq!(changed.options(), AdamOptions::default());
        }
    }
    let edge = AdamOptions::default().with_rate(0.0).with_beta1(0.0).with_beta2(0.0).with_epsilon(5e-324);
    assert!(Adam::new(edge).is_ok());
}

#[track_caller]
fn refused(name: &str, value: f64, outcomes: [gradsync::Result<()>; 3]) {
    for outcome in outcomes {
        let error = outcome.expect_err("refused");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        assert!(error.to_string().contains(&format!("{name} is {value}")), "\"{error}\" for {name} {value}");
    }
}

/// Gradients that are not finite, or that overflow a state, would spoil the state for ever: they are refused by tensor and value, the state
/// is unchanged, and the next step is as if there had been none. Without a state nothing is refused.
#[test]
fn sgd_and_adam_refuse_gradients_that_would_poison_a_state() {
    let of = |value: f64| {
        filled(Format::F32, &[3, 2], |_, len| {
            (0..len).map(|i| if i == 1 { f64::from(value as f32) } else { 1.0 }).collect()
        })
    };
    let step = |optimizer: &mut dyn DeltaOptimizer, value: f64| {
        let mut deltas = of(0.0);
        optimizer.deltas(&of(value), &of(0.0), &mut deltas).map(|()| flat(&deltas))
    };
    let momentum = || Sgd::new(SgdOptions::default().with_rate(0.5).with_momentum(0.9)).unwrap();
    let adam = || Adam::new(AdamOptions::default()).unwrap();
    type Make<'a> = &'a dyn Fn() -> Box<dyn DeltaOptimizer>;
    // The largest squares and the largest sums are tested; a sum is up to 1 / (1 - 0.9) times as large as the gradients.
    let cases: [(Make<'_>, f64, f64); 2] =
        [(&|| Box::new(adam()), 1e19, 2e19), (&|| Box::new(momentum()), 1.6e37, 3.5e37)];
    for (make, good, bad) in cases {
        let (mut poisoned, mut clean) = (make(), make());
        for step_number in 0..3 {
            for bad in [bad, -bad, f64::NAN, f64::INFINITY] {
                let error = step(&mut *poisoned, bad).expect_err("refused").to_string();
                // The value is rounded to the buffer's dtype.
                let value = f64::from(bad as f32);
                assert!(error.contains(&format!("{value:e}")) && error.contains("\"t0\""), "{error}");
            }
            assert_eq!(step(&mut *poisoned, 1.0).unwrap(), step(&mut *clean, 1.0).unwrap(), "step {step_number}");
        }
        // The largest allowed gradients stay finite in any number of steps.
        for _ in 0..200 {
            assert!(step(&mut *clean, good).unwrap().iter().all(|delta| delta.is_finite()));
        }
    }
    let mut fresh = adam();
    assert!(step(&mut fresh, f64::NAN).is_err() && fresh.moments().is_none() && fresh.steps() == 0);
    let plain = step(&mut Sgd::new(SgdOptions::default().with_rate(0.5)).unwrap(), 3e38).unwrap();
    assert!(plain.iter().all(|delta| delta.is_finite()));
    // The moments come from a checkpoint that is spoiled already.
    for (first, second) in [(f64::NAN, 1.0), (1.0, f64::INFINITY), (1.0, -1e-30), (1.0, -1.0), (1.0, f64::NEG_INFINITY)]
    {
        let error = Adam::with_moments(AdamOptions::default(), of(first), of(second), 1).unwrap_err().to_string();
        let (name, value) = if first == 1.0 { ("second", second) } else { ("first", first) };
        let words = format!("the {name} moments of \"t0\" have {:e}", f64::from(value as f32));
        assert!(error.contains(&words), "{error}");
    }
    for negative in [-0.0, -1.0] {
        let first = Adam::with_moments(AdamOptions::default(), of(negative), of(1.0), 1);
        assert!(first.is_ok(), "first moments have any sign");
    }
    assert!(Adam::with_moments(AdamOptions::default(), of(1.0), of(-0.0), 1).is_ok());
    let error = Sgd::with_velocity(SgdOptions::default().with_rate(0.5).with_momentum(0.9), of(f64::NAN))
        .unwrap_err()
        .to_string();
    assert!(error.contains("velocities of \"t0\" have NaN"), "{error}");
}

/// The bias correction of second moments near the largest `f64` would make them infinite, and the step zero.
#[test]
fn adam_refuses_moments_that_their_correction_would_overflow() {
    let of = |value: f64| filled(Format::F64, &[3], |_, len| vec![value; len]);
    let options = AdamOptions::default().with_rate(1.0).with_beta2(1.0 - f64::EPSILON / 2.0);
    for second in [1e293, f64::MAX] {
        let error = Adam::with_moments(options, of(1.0), of(second), 0).unwrap_err().to_string();
        assert!(error.contains(&format!("the second moments of \"t0\" have {second:e}")), "{error}");
    }
    assert!(Adam::with_moments(options, of(-1e293), of(1.0), 0).is_err());
    let step = |adam: &mut Adam, gradient: f64| {
        let mut deltas = of(0.0);
        adam.deltas(&of(gradient), &of(0.0), &mut deltas).map(|()| flat(&deltas))
    };
    // The largest gradients have steps that are neither 0 nor infinite, with the smallest correction there is, and after a change of it.
    let mut adam = Adam::new(options).unwrap();
    assert!(step(&mut adam, 1e146).is_err());
    for _ in 0..3 {
        assert!(step(&mut adam, 9.9e145).unwrap().iter().all(|delta| (-1.001..-0.999).contains(delta)));
        adam.set_options(AdamOptions::default().with_rate(1.0).with_beta2(0.0)).unwrap();
    }
    adam.set_options(options).unwrap();
    assert!(step(&mut adam, 9.9e145).unwrap().iter().all(|delta| *delta < 0.0 && delta.is_finite()));
}

/// The number of steps ends in an error that changes nothing.
#[test]
fn adam_refuses_steps_beyond_the_last_number() {
    let of = |value: f64| filled(Format::F32, &[3], |_, len| vec![value; len]);
    let mut adam = Adam::with_moments(AdamOptions::default(), of(0.5), of(1.0), u64::MAX - 1).unwrap();
    let step = |adam: &mut Adam| adam.deltas(&of(1.0), &of(0.0), &mut of(0.0));
    step(&mut adam).unwrap();
    let moments = |adam: &Adam| adam.moments().unwrap().map(flat);
    let before = moments(&adam);
    let error = step(&mut adam).unwrap_err();
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
    assert!(error.to_string().contains("18446744073709551615 steps"), "{error}");
    assert_eq!((adam.steps(), moments(&adam)), (u64::MAX, before));
}
