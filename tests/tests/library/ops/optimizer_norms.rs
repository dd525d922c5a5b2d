//! The norm of all gradients: its bits by the order in which squares are added, wherever tensors lie and whatever threads compute it.

use gradsync::TensorView;
use gradsync::train::{Optimizer, OptimizerOptions, Sgd, SgdOptions, TensorStep, UpdateOutcome};
use gradsync::{TensorViewMut, bf16};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::optimizer::{CHUNK, square_sum};

use super::optimizers::sgd;

/// Numbers of many magnitudes, so that another order of additions gives other bits.
fn numbers(format: Format, len: usize, seed: usize) -> Vec<f64> {
    let mut random = Random::new(seed as u64);
    (0..len).map(|_| format.round(random.ordinary(Format::F64) * 2.0_f64.powi(random.below(12) as i32 - 6))).collect()
}

/// Makes one step of tensors by gradients that begin `offset` elements behind the start of their memory; returns the norm.
fn norm<O: OptimizerOptions>(optimizer: &mut Optimizer<O>, gradients: &[(Format, Vec<f64>)], offset: usize) -> f64 {
    let names: Vec<String> = (0..gradients.len()).map(|index| format!("t{index}")).collect();
    let mut weights: Vec<Vec<bf16>> = gradients.iter().map(|(_, data)| vec![bf16::ONE; data.len()]).collect();
    let shifted = |(format, data): &(Format, Vec<f64>)| {
        let mut all = vec![1.0; offset];
        all.extend(data);
        Array::new(*format, &all)
    };
    let gradients: Vec<Array> = gradients.iter().map(shifted).collect();
    let tensors = names.iter().zip(&mut weights).zip(&gradients).map(|((name, weights), gradient)| {
        let shape = [weights.len()];
        TensorStep {
            name,
            weights: TensorViewMut::new(&mut weights[..], shape.to_vec()).unwrap(),
            gradient: Some(TensorView::new(gradient.part(offset..gradient.len()), shape.to_vec()).unwrap()),
        }
    });
    optimizer.step_tensors(tensors).unwrap();
    let report = optimizer.report().unwrap();
    assert_eq!(report.outcome, UpdateOutcome::Applied);
    report.norm
}

fn fresh() -> Sgd {
    sgd(SgdOptions::default())
}

#[track_caller]
fn check(gradients: &[(Format, Vec<f64>)], offsets: &[usize]) {
    let tensors: Vec<(Format, &[f64])> = gradients.iter().map(|(format, data)| (*format, &data[..])).collect();
    let expected = square_sum(&tensors).sqrt();
    for &offset in offsets {
        let norm = norm(&mut fresh(), gradients, offset);
        let lens: Vec<usize> = gradients.iter().map(|(_, data)| data.len()).collect();
        assert_eq!(norm.to_bits(), expected.to_bits(), "{lens:?}, offset {offset}: {norm:e}, expected {expected:e}");
    }
}

/// Lengths around the borders of vectors, lanes, chunks, and the pieces that threads take; memory that is aligned to no more than an element.
#[test]
fn report_norm_has_the_bits_of_its_order() {
    for format in Format::ALL {
        let vector = 16 / format.size_bytes();
        let lanes = 128 * vector;
        for border in [0, 1, vector, lanes, 2 * lanes, CHUNK / 2, CHUNK, CHUNK + lanes, 2 * CHUNK, 3 * CHUNK] {
            for len in [border.saturating_sub(1), border, border + 1] {
                check(&[(format, numbers(format, len, len))], &[0, 1, 3]);
            }
        }
    }
}

/// Tensors of all dtypes, more chunks than there are lanes of totals, and empty tensors.
#[test]
fn report_norm_of_many_tensors_has_the_bits_of_its_order() {
    let of = |seed: usize| {
        let format = Format::ALL[seed % 4];
        let len = [0, 5, 300, CHUNK, CHUNK + 6, 1][seed / 4 % 6];
        (format, numbers(format, len, seed))
    };
    check(&(0..24).map(of).collect::<Vec<_>>(), &[0, 1]);
    let small = |seed: usize| (Format::ALL[seed % 4], numbers(Format::ALL[seed % 4], 1 + seed % 7, seed));
    check(&(0..1100).map(small).collect::<Vec<_>>(), &[0]);
    let long = (Format::BF16, numbers(Format::BF16, 600 * CHUNK + 77, 5));
    check(&[long], &[1]);
    // Another order gives other bits, so that a comparison of bits tests the order.
    let numbers = numbers(Format::F32, 40_000, 1);
    let plain = numbers.iter().fold(0.0, |sum, x| sum + x * x);
    assert_ne!(plain, square_sum(&[(Format::F32, &numbers)]));
}

/// Threads share pieces of tensors; the norm and the weights do not depend on their number.
#[test]
fn report_norm_does_not_depend_on_threads() {
    let gradients: Vec<(Format, Vec<f64>)> =
        Format::ALL.iter().map(|&format| (format, numbers(format, 150_000, 9))).collect();
    let run = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut optimizer = sgd(SgdOptions::default().with_momentum(0.9)).with_max_norm(0.5).unwrap();
            let norm = norm(&mut optimizer, &gradients, 1);
            (norm.to_bits(), super::optimizers::state(&optimizer))
        })
    };
    let first = run(1);
    assert!(run(2) == first && run(5) == first);
}
