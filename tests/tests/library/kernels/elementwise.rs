//! zero, cast, accumulate and scale: equal to the oracle's element-by-element definition, bit for bit up to NaN payloads.

use gradsync::internal::kernels::cpu;
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{edges, vector};
use gradsync_tests::oracle::{Format, elementwise};
use gradsync_tests::tolerance::assert_equal;

use super::{GUARD, PAST_F32, SIZES};

/// Runs `kernel(dst, src)` on slices that start at each of these element offsets. Checks every element, and that nothing beside the
/// destination was written.
fn check(
    what: &str,
    (sums, values): (&Array, &Array),
    kernel: impl Fn(gradsync::SliceMut<'_>, gradsync::Slice<'_>),
    rule: impl Fn(f64, f64) -> f64,
) {
    let len = values.len();
    let expected: Vec<f64> =
        sums.values().into_iter().zip(values.values()).map(|(sum, value)| rule(sum, value)).collect();
    for (dst_offset, src_offset) in [(0, 0), (1, 0), (0, 1), (1, 1)] {
        let shift = |array: &Array, offset: usize, after: usize| {
            let seven = array.format().encode(7.0);
            let (before, after) = (vec![seven; offset], vec![seven; after]);
            let patterns = before.into_iter().chain(array.patterns()).chain(after);
            Array::from_patterns(array.format(), patterns)
        };
        let (mut dst, src) = (shift(sums, dst_offset, GUARD), shift(values, src_offset, 0));
        kernel(dst.part_mut(dst_offset..dst_offset + len), src.part(src_offset..src_offset + len));
        let what = format!("{what}, {len} elements, destination from element {dst_offset}, source from {src_offset}");
        let got = dst.values();
        assert_equal(&what, &got[dst_offset..dst_offset + len], &expected);
        assert!(got[..dst_offset].iter().all(|&x| x == 7.0), "{what}: wrote before the destination");
        assert!(got[dst_offset + len..].iter().all(|&x| x == 7.0), "{what}: wrote after the destination");
    }
}

fn pairs() -> impl Iterator<Item = (Format, Format)> {
    Format::ALL.into_iter().flat_map(|to| Format::ALL.into_iter().map(move |from| (to, from)))
}

fn cast_rule(to: Format) -> impl Fn(f64, f64) -> f64 {
    move |_, value| elementwise::cast(to, value)
}

fn accumulate_rule(to: Format, from: Format) -> impl Fn(f64, f64) -> f64 {
    move |sum, value| elementwise::accumulate(to, sum, from, value)
}

#[test]
fn cast_and_accumulate_of_every_size_and_pair() {
    for (to, from) in pairs() {
        for len in SIZES {
            let sums = Array::new(to, &vector(to, len, 1));
            let values = Array::new(from, &vector(from, len, 2));
            let pair = format!("{to:?} from {from:?}");
            let arrays = (&sums, &values);
            check(&format!("cast {pair}"), arrays, |dst, src| cpu::cast(dst, src).unwrap(), cast_rule(to));
            check(
                &format!("accumulate {pair}"),
                arrays,
                |dst, src| cpu::accumulate(dst, src).unwrap(),
                accumulate_rule(to, from),
            );
            check(
                &format!("scale {pair}"),
                arrays,
                |dst, src| cpu::scale(dst, src, 0.3).unwrap(),
                |_, value| elementwise::scale(to, from, value, 0.3),
            );
        }
    }
}

#[test]
fn cast_and_accumulate_of_every_pair_of_edge_values() {
    for (to, from) in pairs() {
        let (sums, values) = (edges(to), edges(from));
        let product: (Vec<f64>, Vec<f64>) = sums.iter().flat_map(|&s| values.iter().map(move |&v| (s, v))).unzip();
        let arrays = (&Array::new(to, &product.0), &Array::new(from, &product.1));
        let pair = format!("edges, {to:?} from {from:?}");
        check(&format!("cast {pair}"), arrays, |dst, src| cpu::cast(dst, src).unwrap(), cast_rule(to));
        check(
            &format!("accumulate {pair}"),
            arrays,
            |dst, src| cpu::accumulate(dst, src).unwrap(),
            accumulate_rule(to, from),
        );
        let (_, source) = arrays;
        for factor in [1.0, -1.0, 0.0, 1.0 / 3.0, 1e-30, 1e30, 1e300, f64::INFINITY, f64::NAN, 5e-324, 1.0 + 1e-12] {
            check(
                &format!("scale by {factor:e}, {pair}"),
                (&Array::unwritten(to, source.len()), source),
                |dst, src| cpu::scale(dst, src, factor).unwrap(),
                |_, value| elementwise::scale(to, from, value, factor),
            );
        }
    }
}

#[test]
fn scale_rounds_once() {
    // 3 · 0.1 is computed in f32, and in f64 for f64 operands. 2^-24 · 0.5 is a tie among the subnormals of f16 and rounds to even.
    let mut dst = [0.0_f32; 1];
    cpu::scale((&mut dst[..]).into(), (&[3.0_f32][..]).into(), 0.1).unwrap();
    assert_eq!(dst[0], 3.0_f32 * 0.1_f32);
    let mut dst = [0.0_f64; 1];
    cpu::scale((&mut dst[..]).into(), (&[3.0_f32][..]).into(), 0.1).unwrap();
    assert_eq!(dst[0], 3.0 * 0.1);
    let mut dst = Array::unwritten(Format::F16, 3);
    let src = Array::new(Format::F16, &[1.0, 3.0, 5.0].map(|n| n * Format::F16.smallest()));
    cpu::scale(dst.slice_mut(), src.slice(), 0.5).unwrap();
    assert_eq!(dst.values(), [0.0, 2.0, 2.0].map(|n| n * Format::F16.smallest()));
}

#[test]
fn cast_keeps_negative_zero() {
    for (to, from) in pairs() {
        let src = Array::new(from, &[-0.0; 40]);
        let mut dst = Array::unwritten(to, 40);
        cpu::cast(dst.slice_mut(), src.slice()).unwrap();
        assert_eq!(dst, Array::new(to, &[-0.0; 40]), "{to:?} from {from:?}");
    }
}

#[test]
fn zero_writes_all_zero_bits_and_nothing_else() {
    for format in Format::ALL {
        for len in SIZES {
            for offset in [0, 1] {
                let mut array = Array::new(format, &vec![f64::NAN; offset + len + GUARD]);
                cpu::zero(array.part_mut(offset..offset + len));
                let patterns = array.patterns();
                assert!(patterns[offset..offset + len].iter().all(|&bits| bits == 0), "{format:?} {len} {offset}");
                let values = array.values();
                assert!(values[..offset].iter().chain(&values[offset + len..]).all(|value| value.is_nan()));
            }
        }
    }
}

#[test]
fn all_finite_finds_one_bad_element_wherever_it_is() {
    for format in Format::ALL {
        for len in SIZES {
            let mut values = vector(format, len + 1, 3);
            values[len] = f64::NAN;
            if len > 2 {
                values[0] = format.max_finite();
                values[1] = -format.max_finite();
                values[2] = format.smallest();
            }
            let array = Array::new(format, &values);
            assert!(cpu::all_finite(array.part(0..len)), "{format:?}, {len} finite elements");
            assert!(!cpu::all_finite(array.part(0..len + 1)), "{format:?}, NaN after {len} elements");
            for bad in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN] {
                for place in [0, len / 2, len.saturating_sub(1)] {
                    if len == 0 {
                        continue;
                    }
                    let mut values = values[..len].to_vec();
                    values[place] = bad;
                    let array = Array::new(format, &values);
                    assert!(!cpu::all_finite(array.slice()), "{format:?}: {bad} at {place} of {len}");
                }
            }
        }
    }
}

#[test]
fn accumulate_of_more_elements_than_f32_can_count() {
    for (to, from) in [(Format::F32, Format::F32), (Format::F32, Format::BF16), (Format::F16, Format::F16)] {
        let pattern = vector(from, 4099, 4);
        let values: Vec<f64> = pattern.iter().copied().cycle().take(PAST_F32).collect();
        let src = Array::new(from, &values);
        let mut dst = Array::new(to, &vec![1.0; PAST_F32]);
        cpu::accumulate(dst.slice_mut(), src.slice()).unwrap();
        let expected: Vec<f64> = values.iter().map(|&value| elementwise::accumulate(to, 1.0, from, value)).collect();
        assert_equal(&format!("accumulate {to:?} += {from:?}"), &dst.values(), &expected);
    }
}
