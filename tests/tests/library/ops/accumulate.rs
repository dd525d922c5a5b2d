//! zero_gradient, accumulate, overwrite, in_place_accumulator and in_place_accumulator_v2: numbers, the two switches, and refusals.

use gradsync::onnx::{in_place_accumulator, in_place_accumulator_v2};
use gradsync::ops::{accumulate, overwrite, zero_gradient};
use gradsync::{Error, TensorView, TensorViewMut};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{edges, vector};
use gradsync_tests::oracle::{Format, elementwise};
use gradsync_tests::tolerance::assert_equal;
use proptest::prelude::*;

fn view<'a>(array: &'a Array, shape: &'a [usize]) -> TensorView<'a> {
    TensorView::new(array.slice(), shape).unwrap()
}

fn view_mut<'a>(array: &'a mut Array, shape: &'a [usize]) -> TensorViewMut<'a> {
    TensorViewMut::new(array.slice_mut(), shape).unwrap()
}

/// ONNX Runtime's case, (1,2,3) + (4,5,6), for its pairs of dtypes and all others.
#[test]
fn in_place_accumulator_gives_upstreams_case() {
    for to in Format::ALL {
        for from in Format::ALL {
            for update in [None, Some(true)] {
                let mut sum = Array::new(to, &[1.0, 2.0, 3.0]);
                let value = Array::new(from, &[4.0, 5.0, 6.0]);
                in_place_accumulator(view_mut(&mut sum, &[3]), view(&value, &[3]), update).unwrap();
                assert_eq!(sum.values(), [5.0, 7.0, 9.0], "{to:?} += {from:?}, {update:?}");
            }
        }
    }
}

#[test]
fn in_place_accumulator_changes_no_bit_where_the_update_is_off() {
    for to in Format::ALL {
        for from in Format::ALL {
            let before = Array::new(to, &edges(to));
            let mut sum = before.clone();
            let value = Array::new(from, &vec![f64::NAN; before.len()]);
            let shape = [before.len()];
            in_place_accumulator(view_mut(&mut sum, &shape), view(&value, &shape), Some(false)).unwrap();
            assert_eq!(sum, before, "{to:?} += {from:?}");
        }
    }
}

/// ONNX Runtime's V2 case, with the flag that reports an update.
#[test]
fn in_place_accumulator_v2_gives_upstreams_cases() {
    for to in Format::ALL {
        for from in Format::ALL {
            let value = Array::new(from, &[4.0, 5.0, 6.0]);
            let mut buffer = Array::new(to, &[1.0, 2.0, 3.0]);
            let updated = in_place_accumulator_v2(view_mut(&mut buffer, &[3]), view(&value, &[3]), false).unwrap();
            assert!(updated && buffer.values() == [5.0, 7.0, 9.0], "{to:?} += {from:?}: {buffer:?}");
            let updated = in_place_accumulator_v2(view_mut(&mut buffer, &[3]), view(&value, &[3]), true).unwrap();
            assert!(updated && buffer.values() == [4.0, 5.0, 6.0], "{to:?} = {from:?}: {buffer:?}");
        }
    }
}

/// Overwriting replaces NaN, which an addition would keep, and rounds once.
#[test]
fn overwrite_casts_every_edge_value() {
    for to in Format::ALL {
        for from in Format::ALL {
            let value = Array::new(from, &edges(from));
            let mut buffer = Array::new(to, &vec![f64::NAN; value.len()]);
            let shape = [value.len()];
            in_place_accumulator_v2(view_mut(&mut buffer, &shape), view(&value, &shape), true).unwrap();
            let expected: Vec<f64> = value.values().into_iter().map(|x| elementwise::cast(to, x)).collect();
            assert_equal(&format!("{to:?} = {from:?}"), &buffer.values(), &expected);
        }
    }
}

#[test]
fn zero_gradient_clears_nan_and_every_shape() {
    let mut plain = [1.0_f32, 2.0, 3.0];
    zero_gradient(&mut plain).unwrap();
    assert_eq!(plain.map(f32::to_bits), [0; 3]);
    for format in Format::ALL {
        for shape in [&[][..], &[0], &[2, 0, 3], &[5, 17], &[4097]] {
            let len = shape.iter().product();
            let mut gradient = Array::new(format, &vec![f64::NAN; len]);
            zero_gradient(view_mut(&mut gradient, shape)).unwrap();
            assert!(gradient.patterns().iter().all(|&bits| bits == 0), "{format:?} {shape:?}");
        }
    }
}

/// Upstream's CPU kernel broadcasts and its CUDA kernel does not check shapes; here every difference is an error that names both shapes.
#[test]
fn accumulate_refuses_other_shapes() {
    let cases: [(&[usize], &[usize]); 6] =
        [(&[2, 3], &[3, 2]), (&[2, 3], &[6]), (&[2, 3], &[3]), (&[2, 3], &[1]), (&[2, 3], &[2, 1]), (&[], &[1])];
    for (left, right) in cases {
        let len = |shape: &[usize]| shape.iter().product();
        let before = Array::new(Format::F32, &vector(Format::F32, len(left), 1));
        let value = Array::new(Format::F16, &vector(Format::F16, len(right), 2));
        let mut sum = before.clone();
        let mut errors =
            vec![in_place_accumulator(view_mut(&mut sum, left), view(&value, right), None).expect_err("shapes differ")];
        for overwrite in [false, true] {
            let outcome = in_place_accumulator_v2(view_mut(&mut sum, left), view(&value, right), overwrite);
            errors.push(outcome.expect_err("shapes differ"));
        }
        for error in errors {
            assert!(matches!(error, Error::ShapeMismatch { .. }), "{left:?}, {right:?}: {error:?}");
            let text = error.to_string();
            for shape in [left, right] {
                assert!(text.contains(&format!("{shape:?}")), "\"{text}\" does not name {shape:?}");
            }
        }
        assert_eq!(sum, before, "{left:?}, {right:?}: an element was written");
    }
}

#[test]
fn tensor_view_has_to_fit_its_data() {
    let mut data = Array::unwritten(Format::F32, 6);
    for shape in [&[5][..], &[7], &[2, 2], &[], &[0], &[usize::MAX, 2], &[6, usize::MAX, 0]] {
        assert!(TensorView::new(data.slice(), shape).is_err(), "{shape:?} for 6 elements");
        assert!(TensorViewMut::new(data.slice_mut(), shape).is_err(), "{shape:?} for 6 elements");
    }
    for shape in [&[6][..], &[2, 3], &[1, 6, 1]] {
        assert!(TensorView::new(data.slice(), shape).is_ok(), "{shape:?} for 6 elements");
    }
}

/// fp16 accumulators must not lose the low bits of an f32 value before the addition, as upstream's accumulators do.
#[test]
fn accumulate_never_rounds_the_value_first() {
    // 2048 + 1.25 + ... in f16 has steps of 2: 2048 + 1.0009765625 rounds up, 2048 + 1 is a tie and goes down.
    let mut sum = Array::new(Format::F16, &[2048.0]);
    let value = Array::new(Format::F32, &[1.0 + 2.0_f64.powi(-12)]);
    in_place_accumulator(view_mut(&mut sum, &[1]), view(&value, &[1]), None).unwrap();
    assert_eq!(sum.values(), [2050.0]);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn accumulate_gives_the_bits_of_the_hardware_for_any_f32_pair(pairs in proptest::collection::vec(any::<(f32, f32)>(), 0..100)) {
        let (mut sum, value): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
        let expected: Vec<f64> = sum.iter().zip(&value).map(|(a, b)| f64::from(a + b)).collect();
        in_place_accumulator(&mut sum[..], &value[..], None).unwrap();
        assert_equal("f32 += f32", &Array::F32(sum).values(), &expected);
    }

    #[test]
    fn accumulate_takes_any_shape(
        shape in proptest::collection::vec(0_usize..6, 0..4), to in 0_usize..4, from in 0_usize..4, seed in any::<u64>()
    ) {
        let (to, from, len) = (Format::ALL[to], Format::ALL[from], shape.iter().product());
        let mut sum = Array::new(to, &vector(to, len, seed));
        let value = Array::new(from, &vector(from, len, seed ^ 1));
        let expected: Vec<f64> = sum
            .values()
            .into_iter()
            .zip(value.values())
            .map(|(a, b)| elementwise::accumulate(to, a, from, b))
            .collect();
        in_place_accumulator(view_mut(&mut sum, &shape), view(&value, &shape), Some(true)).unwrap();
        assert_equal("sum", &sum.values(), &expected);
    }
}

#[test]
fn accumulate_and_overwrite_equal_upstreams_operators() {
    for (dtype, other) in [(Format::F32, Format::F16), (Format::BF16, Format::F64)] {
        let (before, value) = (Array::new(dtype, &vector(dtype, 6, 1)), Array::new(other, &vector(other, 6, 2)));
        let (mut sum, mut expected) = (before.clone(), before.clone());
        accumulate(view_mut(&mut sum, &[2, 3]), view(&value, &[2, 3])).unwrap();
        in_place_accumulator(view_mut(&mut expected, &[2, 3]), view(&value, &[2, 3]), None).unwrap();
        assert_eq!(sum, expected);
        overwrite(view_mut(&mut sum, &[6]), view(&value, &[6])).unwrap();
        assert!(in_place_accumulator_v2(view_mut(&mut expected, &[6]), view(&value, &[6]), true).unwrap());
        assert_eq!(sum, expected);
        for error in [
            accumulate(view_mut(&mut sum, &[2, 3]), view(&value, &[6])).unwrap_err(),
            overwrite(view_mut(&mut sum, &[2, 3]), view(&value, &[6])).unwrap_err(),
        ] {
            assert!(matches!(&error, Error::ShapeMismatch { left, right, .. } if left == &[2, 3] && right == &[6]));
        }
        assert_eq!(sum, expected, "nothing is written");
    }
}
