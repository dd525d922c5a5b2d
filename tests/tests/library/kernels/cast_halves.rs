//! Conversions of the 16-bit dtypes: all 65536 patterns, and properties of rounding into them.

use gradsync::internal::kernels::cpu;
use gradsync::{Float, bf16, f16};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::{Format, elementwise};
use gradsync_tests::tolerance::assert_equal;
use proptest::prelude::*;

const HALVES: [Format; 2] = [Format::F16, Format::BF16];

fn cast(to: Format, src: &Array) -> Array {
    let mut dst = Array::unwritten(to, src.len());
    cpu::cast(dst.slice_mut(), src.slice()).unwrap();
    dst
}

fn expected(to: Format, src: &Array) -> Vec<f64> {
    src.values().into_iter().map(|value| elementwise::cast(to, value)).collect()
}

#[test]
fn cast_takes_all_patterns_to_every_dtype() {
    for from in HALVES {
        let src = Array::from_patterns(from, 0..=u64::from(u16::MAX));
        for to in Format::ALL {
            assert_equal(&format!("{from:?} to {to:?}"), &cast(to, &src).values(), &expected(to, &src));
        }
    }
}

#[test]
fn cast_up_and_down_keeps_all_patterns() {
    for from in HALVES {
        // NaN payloads are not part of the contract.
        let numbers = (0..=u64::from(u16::MAX)).filter(|&pattern| !from.decode(pattern).is_nan());
        let src = Array::from_patterns(from, numbers);
        for over in [Format::F32, Format::F64, from] {
            assert_eq!(cast(from, &cast(over, &src)), src, "{from:?} over {over:?}");
        }
    }
}

#[test]
fn accumulate_takes_all_patterns() {
    for from in HALVES {
        let src = Array::from_patterns(from, 0..=u64::from(u16::MAX));
        for to in Format::ALL {
            let base = to.round(1.0 / 3.0);
            let mut dst = Array::new(to, &vec![base; src.len()]);
            cpu::accumulate(dst.slice_mut(), src.slice()).unwrap();
            let expected: Vec<f64> =
                src.values().into_iter().map(|value| elementwise::accumulate(to, base, from, value)).collect();
            assert_equal(&format!("{to:?} += {from:?}"), &dst.values(), &expected);
        }
    }
}

/// Values around the midpoint of every two neighbours, subnormals and the overflow threshold included: the midpoint itself, and the nearest
/// numbers of `from` on either side.
#[test]
fn cast_rounds_every_midpoint_to_even() {
    for to in HALVES {
        for from in [Format::F32, Format::F64] {
            let mut values = Vec::new();
            let finite =
                (0..u64::from(u16::MAX) / 2).map(|pattern| to.decode(pattern)).filter(|value| value.is_finite());
            for low in finite {
                let quantum = to.next_away(low) - low;
                // Above the largest number the neighbour is infinite; the overflow threshold is half the last quantum above the largest
                // number.
                let half = if quantum.is_finite() {
                    quantum / 2.0
                } else {
                    low * to.unit_roundoff() / (2.0 - 2.0 * to.unit_roundoff())
                };
                let middle = from.round(low + half);
                let bits = from.encode(middle);
                values.extend([middle, from.decode(bits + 1)]);
                if bits > 0 {
                    values.push(from.decode(bits - 1));
                }
            }
            let negative: Vec<f64> = values.iter().map(|value| -value).collect();
            values.extend(negative);
            let src = Array::new(from, &values);
            assert_equal(&format!("midpoints, {from:?} to {to:?}"), &cast(to, &src).values(), &expected(to, &src));
        }
    }
}

#[test]
fn element_from_f64_rounds_once() {
    // The value is above a tie by the last bit of f64: rounding through f32 first would land on the tie and go down.
    let above = |tie: f64| f64::from_bits(tie.to_bits() + 1);
    // The call is qualified, as the inherent `from_f64` of `half` looks at the upper 32 bits only and goes down here.
    assert_eq!(<f16 as Float>::from_f64(above(1.0 + 2.0_f64.powi(-11))).to_bits(), 0x3c01);
    assert_eq!(<bf16 as Float>::from_f64(above(1.0 + 2.0_f64.powi(-8))).to_bits(), 0x3f81);
    assert_eq!(<f32 as Float>::from_f64(above(1.0 + 2.0_f64.powi(-24))), 1.0 + f32::EPSILON);
    for to in HALVES {
        for pattern in 0..=u16::MAX {
            let value = to.decode(u64::from(pattern));
            let got = match to {
                Format::F16 => Float::to_f64(f16::from_bits(pattern)),
                _ => Float::to_f64(bf16::from_bits(pattern)),
            };
            assert!(got.to_bits() == value.to_bits() || (got.is_nan() && value.is_nan()), "{to:?} {pattern:#06x}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn cast_takes_any_f32_pattern(patterns in proptest::collection::vec(any::<u32>(), 1..200)) {
        let src = Array::from_patterns(Format::F32, patterns.into_iter().map(u64::from));
        for to in Format::ALL {
            assert_equal(&format!("F32 to {to:?}"), &cast(to, &src).values(), &expected(to, &src));
        }
    }

    /// Uniform f64 patterns are nearly always outside the narrow ranges, so exponents are drawn near them.
    #[test]
    fn cast_takes_any_f64(numbers in proptest::collection::vec((any::<u64>(), -160_i32..140), 1..200)) {
        let patterns = numbers.into_iter().map(|(bits, exponent)| {
            (bits & 0x800f_ffff_ffff_ffff) | (((exponent + 1023) as u64) << 52)
        });
        let src = Array::from_patterns(Format::F64, patterns);
        for to in Format::ALL {
            assert_equal(&format!("F64 to {to:?}"), &cast(to, &src).values(), &expected(to, &src));
        }
    }

    #[test]
    fn cast_is_monotonic(mut numbers in proptest::collection::vec(any::<f32>(), 2..200)) {
        numbers.sort_by(f32::total_cmp);
        let src = Array::F32(numbers);
        for to in HALVES {
            let got = cast(to, &src).values();
            prop_assert!(got.windows(2).all(|pair| pair[0] <= pair[1]), "{to:?}: {got:?}");
        }
    }

    #[test]
    fn accumulate_takes_any_halves(patterns in proptest::collection::vec(any::<(u16, u16)>(), 1..200)) {
        for to in HALVES {
            for from in HALVES {
                let mut dst = Array::from_patterns(to, patterns.iter().map(|pair| u64::from(pair.0)));
                let src = Array::from_patterns(from, patterns.iter().map(|pair| u64::from(pair.1)));
                let expected: Vec<f64> = dst
                    .values()
                    .into_iter()
                    .zip(src.values())
                    .map(|(sum, value)| elementwise::accumulate(to, sum, from, value))
                    .collect();
                cpu::accumulate(dst.slice_mut(), src.slice()).unwrap();
                assert_equal(&format!("{to:?} += {from:?}"), &dst.values(), &expected);
            }
        }
    }
}

/// The payload may lie in bits that a narrower format lacks; a truncated payload would turn the NaN into an infinity.
#[test]
fn cast_keeps_nan_of_every_payload() {
    for bit in 0..23 {
        for sign in [0, 0x8000_0000] {
            // 41 elements fill whole vector registers and leave a remainder.
            let values = vec![f32::from_bits(0x7f80_0000 | sign | 1 << bit); 41];
            let (mut brain, mut half) = (vec![bf16::ZERO; 41], vec![f16::ZERO; 41]);
            cpu::cast((&mut brain).into(), (&values).into()).unwrap();
            cpu::cast((&mut half).into(), (&values).into()).unwrap();
            assert!(brain.iter().all(|value| value.is_nan()), "bf16 of a NaN with bit {bit}: {brain:?}");
            assert!(half.iter().all(|value| value.is_nan()), "f16 of a NaN with bit {bit}: {half:?}");
        }
    }
}
