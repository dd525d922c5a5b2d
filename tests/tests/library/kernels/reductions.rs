//! Squared norms, dots and Gram matrices per segment, within the bound of an f64 sum in any order.

use std::ops::Range;

use gradsync::Slice;
use gradsync::internal::kernels::cpu;
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{Kind, Random, generate, vector};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::exact::dot_f64;
use gradsync_tests::tolerance::{dot, within};

use super::{PAST_F32, SIZES};

/// Segments with gaps, empty ones, one-element ones, and odd boundaries, up to the end of `len` elements.
fn segments(len: usize, seed: u64) -> Vec<Range<usize>> {
    let mut random = Random::new(seed);
    let mut segments: Vec<Range<usize>> = std::iter::once(0..0).collect();
    let mut start = 0;
    while start < len {
        let choices = [0, 1, 2, 33, 257, 4097, len];
        let end = (start + choices[random.below(7) as usize]).min(len);
        segments.push(start..end);
        start = end + random.below(3) as usize;
    }
    segments.push(len..len);
    segments
}

#[track_caller]
fn assert_dot(what: &str, got: f64, a: &[f64], b: &[f64]) {
    let (exact, bound) = (dot_f64(a, b), dot(a, b));
    assert!(within(Format::F64, got, exact, bound), "{what}: {got:e}, exact {exact:e}, allowed {bound:e} off");
}

#[test]
fn squared_norms_and_dots_of_every_size() {
    for format in Format::ALL {
        for len in SIZES {
            for offset in [0, 1] {
                let a = Array::new(format, &vector(format, len + offset, 5));
                let b = Array::new(format, &vector(format, len + offset, 6));
                let (x, y) = (&a.values()[offset..], &b.values()[offset..]);
                let (part_a, part_b) = (a.part(offset..offset + len), b.part(offset..offset + len));
                let segments = segments(len, len as u64);
                let norms = cpu::squared_norms(part_a, &segments).unwrap();
                let dots = cpu::dots(part_a, part_b, &segments).unwrap();
                assert_eq!((norms.len(), dots.len()), (segments.len(), segments.len()));
                for ((segment, norm), [ab, aa, bb]) in segments.iter().zip(norms).zip(dots) {
                    let what = format!("{format:?}, {segment:?} of {len}, from element {offset}");
                    let (x, y) = (&x[segment.clone()], &y[segment.clone()]);
                    assert_dot(&format!("squared norm, {what}"), norm, x, x);
                    assert_dot(&format!("a·b, {what}"), ab, x, y);
                    assert_dot(&format!("|a|², {what}"), aa, x, x);
                    assert_dot(&format!("|b|², {what}"), bb, y, y);
                    if segment.is_empty() {
                        assert_eq!([norm, ab, aa, bb], [0.0; 4], "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn gram_of_every_rank_count() {
    for format in Format::ALL {
        for world_size in [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 64] {
            let len = 5003;
            let inputs = generate(Kind::Random, format, world_size, len, 7);
            let arrays: Vec<Array> = inputs.iter().map(|input| Array::new(format, input)).collect();
            let slices: Vec<Slice<'_>> = arrays.iter().map(Array::slice).collect();
            let segments = [0..0, 0..1, 1..34, 34..4131, 4131..4131, 4140..5003];
            let gram = cpu::gram(&slices, &segments).unwrap();
            let triangle = world_size * (world_size + 1) / 2;
            assert_eq!(gram.len(), segments.len() * triangle, "{format:?}, {world_size} ranks");
            for (layer, segment) in segments.iter().enumerate() {
                let mut place = layer * triangle;
                for i in 0..world_size {
                    for j in i..world_size {
                        let what = format!("{format:?}, {world_size} ranks, ({i},{j}) of {segment:?}");
                        assert_dot(&what, gram[place], &inputs[i][segment.clone()], &inputs[j][segment.clone()]);
                        place += 1;
                    }
                }
            }
        }
    }
}

#[test]
fn gram_of_every_size() {
    for format in Format::ALL {
        for len in SIZES {
            let inputs = generate(Kind::Random, format, 3, len + 1, 8);
            let arrays: Vec<Array> = inputs.iter().map(|input| Array::new(format, input)).collect();
            let slices: Vec<Slice<'_>> = arrays.iter().map(|array| array.part(1..len + 1)).collect();
            let gram = cpu::gram(&slices, std::slice::from_ref(&(0..len))).unwrap();
            for (got, (i, j)) in gram.iter().zip([(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]) {
                assert_dot(&format!("{format:?} ({i},{j}) of {len}"), *got, &inputs[i][1..], &inputs[j][1..]);
            }
        }
    }
}

/// Values of f32 near its maximum must not overflow when squared, and subnormals must not vanish.
#[test]
fn dots_and_gram_keep_huge_and_subnormal_products() {
    for format in [Format::F32, Format::F16, Format::BF16] {
        for magnitude in [format.max_finite(), format.smallest()] {
            let a = Array::new(format, &vec![magnitude; 1001]);
            let x = a.values();
            let segments = std::slice::from_ref(&(0..1001));
            let norm = cpu::squared_norms(a.slice(), segments).unwrap()[0];
            assert!(norm.is_finite() && norm > 0.0, "{format:?} {magnitude:e}: {norm:e}");
            assert_dot("squared norm", norm, &x, &x);
            for got in cpu::dots(a.slice(), a.slice(), segments).unwrap()[0] {
                assert_dot("dots", got, &x, &x);
            }
            for got in cpu::gram(&[a.slice(), a.slice()], segments).unwrap() {
                assert_dot("gram", got, &x, &x);
            }
        }
    }
}

/// The largest cancellation: a sum of products of both signs with a total of 0 or 1. Integers make it exact in any order.
#[test]
fn dots_and_gram_of_integers_are_exact() {
    for format in Format::ALL {
        let len = 4097;
        let x: Vec<f64> = (0..len).map(|i| f64::from(i % 15 - 7)).collect();
        let y: Vec<f64> = (0..len).map(|i| f64::from((i * i + 3) % 13 - 6)).collect();
        let (a, b) = (Array::new(format, &x), Array::new(format, &y));
        let segments = [0..4, 5..6, 100..4000];
        let dots = cpu::dots(a.slice(), b.slice(), &segments).unwrap();
        let gram = cpu::gram(&[a.slice(), b.slice()], &segments).unwrap();
        for (i, segment) in segments.iter().enumerate() {
            let (x, y) = (&x[segment.clone()], &y[segment.clone()]);
            let (xy, xx, yy) = (dot_f64(x, y), dot_f64(x, x), dot_f64(y, y));
            assert_eq!(dots[i], [xy, xx, yy], "{format:?} {segment:?}");
            assert_eq!(gram[3 * i..3 * i + 3], [xx, xy, yy], "{format:?} {segment:?}");
        }
        let whole = cpu::dots(a.slice(), b.slice(), std::slice::from_ref(&(0..4097))).unwrap();
        assert_eq!(whole, [[dot_f64(&x, &y), dot_f64(&x, &x), dot_f64(&y, &y)]], "{format:?}");
    }
}

/// Products of vectors of different dtypes are formed in f64, where each operand is exact.
#[test]
fn dots_and_gram_of_different_dtypes() {
    for left in Format::ALL {
        for right in Format::ALL {
            let (x, y) = (vector(left, 3001, 17), vector(right, 3001, 18));
            let (a, b) = (Array::new(left, &x), Array::new(right, &y));
            let whole = std::slice::from_ref(&(0..3001));
            let what = format!("{left:?} · {right:?}");
            assert_dot(&what, cpu::dots(a.slice(), b.slice(), whole).unwrap()[0][0], &x, &y);
            assert_dot(&what, cpu::gram(&[a.slice(), b.slice()], whole).unwrap()[1], &x, &y);
        }
    }
}

#[test]
fn dots_and_gram_keep_nan_and_infinity_in_their_segment() {
    for format in Format::ALL {
        for bad in [f64::NAN, f64::INFINITY] {
            let mut values = vector(format, 300, 9);
            values[150] = bad;
            let (a, b) = (Array::new(format, &values), Array::new(format, &vector(format, 300, 10)));
            let segments = [0..150, 150..151, 151..300];
            let norms = cpu::squared_norms(a.slice(), &segments).unwrap();
            let dots = cpu::dots(a.slice(), b.slice(), &segments).unwrap();
            let gram = cpu::gram(&[a.slice(), b.slice()], &segments).unwrap();
            for segment in [0, 2] {
                assert!(norms[segment].is_finite() && dots[segment].iter().all(|x| x.is_finite()));
                assert!(gram[3 * segment..3 * segment + 3].iter().all(|x| x.is_finite()));
            }
            let same = |x: f64| x.is_nan() == bad.is_nan() && !x.is_finite();
            assert!(same(norms[1]) && same(dots[1][0]) && same(dots[1][1]) && dots[1][2].is_finite(), "{dots:?}");
            assert!(same(gram[3]) && same(gram[4]) && gram[5].is_finite(), "{gram:?}");
        }
    }
}

#[test]
fn dots_and_gram_of_more_elements_than_f32_can_count() {
    // The sum of ones is exactly their count.
    let a = Array::F32(vec![1.0; PAST_F32]);
    let whole = std::slice::from_ref(&(0..PAST_F32));
    assert_eq!(cpu::squared_norms(a.slice(), whole).unwrap(), [PAST_F32 as f64]);
    assert_eq!(cpu::dots(a.slice(), a.slice(), whole).unwrap(), [[PAST_F32 as f64; 3]]);
    assert_eq!(cpu::gram(&[a.slice(), a.slice()], whole).unwrap(), [PAST_F32 as f64; 3]);
}
