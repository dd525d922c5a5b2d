//! combine: a weighted sum of P vectors per segment, computed in f64 with one rounding into any output dtype.

use gradsync::Slice;
use gradsync::internal::kernels::cpu;
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{Kind, Random, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::exact::dot_f64;
use gradsync_tests::tolerance::{combine, within};

use super::SIZES;

#[test]
fn every_dtype_pair_and_rank_count() {
    for to in Format::ALL {
        for from in Format::ALL {
            for world_size in [1, 2, 3, 5, 8, 9, 16] {
                let lens = [0, 1, 33, 4097, 257];
                check(to, from, world_size, &lens, 0);
                check(to, from, world_size, &lens, 1);
            }
        }
    }
}

#[test]
fn every_size() {
    for (to, from) in [(Format::F32, Format::F32), (Format::BF16, Format::BF16), (Format::F16, Format::F64)] {
        for len in SIZES {
            check(to, from, 4, &[len], 1);
        }
    }
}

fn check(to: Format, from: Format, world_size: usize, lens: &[usize], offset: usize) {
    let len: usize = lens.iter().sum();
    let inputs = generate(Kind::Random, from, world_size, len + offset, 11);
    let arrays: Vec<Array> = inputs.iter().map(|input| Array::new(from, input)).collect();
    let slices: Vec<Slice<'_>> = arrays.iter().map(|array| array.part(offset..offset + len)).collect();
    let mut start = 0;
    let segments: Vec<_> = lens
        .iter()
        .map(|len| {
            start += len;
            start - len..start
        })
        .collect();
    let mut random = Random::new(12);
    let weights: Vec<f64> = (0..lens.len() * world_size).map(|_| random.sign() * 2.0 * random.unit()).collect();
    let mut dst = Array::unwritten(to, len + offset + 1);
    cpu::combine(dst.part_mut(offset..offset + len), &slices, &weights, &segments).unwrap();
    let got = dst.values();
    for (layer, segment) in segments.iter().enumerate() {
        let weights = &weights[layer * world_size..(layer + 1) * world_size];
        for i in segment.clone() {
            let column: Vec<f64> = inputs.iter().map(|input| input[offset + i]).collect();
            let (exact, bound) = (dot_f64(weights, &column), combine(to, weights, &column));
            assert!(
                within(to, got[offset + i], exact, bound),
                "{to:?} from {from:?}, {world_size} ranks, layer {layer}, element {i} of {len}: {:e}, exact {exact:e}, \
                 allowed {bound:e} off",
                got[offset + i]
            );
        }
    }
    assert!(got[..offset].iter().chain(&got[offset + len..]).all(|&x| x == 7.0), "wrote outside the destination");
}

#[test]
fn powers_of_two_as_weights_are_exact_up_to_the_one_rounding() {
    for to in Format::ALL {
        for from in Format::ALL {
            let inputs = generate(Kind::Random, from, 2, 1000, 13);
            let arrays: Vec<Array> = inputs.iter().map(|input| Array::new(from, input)).collect();
            let mut dst = Array::unwritten(to, 1000);
            let slices = [arrays[0].slice(), arrays[1].slice()];
            cpu::combine(dst.slice_mut(), &slices, &[0.5, 2.0], std::slice::from_ref(&(0..1000))).unwrap();
            let expected: Vec<f64> = (0..1000).map(|i| to.round(0.5 * inputs[0][i] + 2.0 * inputs[1][i])).collect();
            assert_eq!(dst.values(), expected, "{to:?} from {from:?}");
        }
    }
}

#[test]
fn nan_infinity_overflow_and_subnormals() {
    for format in Format::ALL {
        let (max, tiny) = (format.max_finite(), format.smallest());
        let a = Array::new(format, &[f64::NAN, f64::INFINITY, f64::INFINITY, max, tiny, max, f64::NAN]);
        let b = Array::new(format, &[1.0, 1.0, f64::NEG_INFINITY, max, tiny, -max, 1.0]);
        let mut dst = Array::unwritten(format, 7);
        let segments = [0..6, 6..7];
        cpu::combine(dst.slice_mut(), &[a.slice(), b.slice()], &[1.0, 1.0, 0.0, 1.0], &segments).unwrap();
        let got = dst.values();
        assert!(got[0].is_nan() && got[2].is_nan(), "{format:?}: {got:?}");
        assert_eq!(got[1], f64::INFINITY, "{format:?}");
        assert_eq!(got[3], f64::INFINITY, "{format:?}: twice the largest number");
        assert_eq!(got[4], 2.0 * tiny, "{format:?}: twice the smallest number");
        assert_eq!(got[5], 0.0, "{format:?}");
        assert!(got[6].is_nan(), "{format:?}: a weight of 0 does not hide NaN");
    }
}
