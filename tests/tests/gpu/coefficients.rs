//! Adasum's weights on the device: for equal inner products bitwise equal to the CPU's, and computed by the exact path where norms cancel.

use gradsync::driver::{DeviceBuffer, DeviceSlice, Queue};
use gradsync::internal::kernels::cpu::{self, Coefficients, Trees};
use gradsync::internal::kernels::cuda::SegmentWorkspace;
use gradsync::{DType, Slice};
use gradsync_device::math::adasum::{self, Criterion};
use gradsync_tests::double::{Family, OUT_OF_RANGE, UNITS, UNITS_OUT_OF_RANGE, of_magnitudes};
use gradsync_tests::oracle::rational;

use crate::{Bits, queue, uniform, upload};

#[test]
fn coefficients_are_bitwise_those_of_the_cpu() {
    let queue = queue();
    for ranks in [1, 2, 3, 4, 5, 6, 7, 8, 13, 16] {
        let (len, segments) = (4096, [0..1, 1..1000, 1000..1000, 1000..4096]);
        let hosts: Vec<_> = (0..ranks).map(|rank| uniform(DType::F32, len, rank as u64)).collect();
        let devices: Vec<_> = hosts.iter().map(|host| upload(&queue, host.tensor(0).data(), 0)).collect();
        let views: Vec<DeviceSlice<'_>> = devices.iter().map(DeviceBuffer::as_slice).collect();
        let mut layers = SegmentWorkspace::new(&queue, len, &segments, ranks).unwrap();
        layers.gram(&views).unwrap();
        let gram = layers.read_totals(ranks * (ranks + 1) / 2).unwrap();
        layers.coefficients().unwrap();
        let actual = layers.read_coefficients().unwrap();
        let expected = cpu::coefficients(&gram, ranks).unwrap();
        assert_eq!(actual.cancelled, expected.cancelled, "{ranks} ranks");
        let bits = |found: &Coefficients| found.weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&actual), bits(&expected), "{ranks} ranks");
    }
}

/// There are four ranks; their vectors nearly cancel in pairs in one layer and not in the other.
#[test]
fn coefficients_of_cancelled_layers_take_the_exact_path() {
    let queue = queue();
    for dtype in DType::FLOATS {
        let (len, segments) = (5000, [0..2500, 2500..5000]);
        let mut bits = Bits(3);
        let base: Vec<f64> = (0..len).map(|_| bits.unit() + 2.0).collect();
        let ranks: Vec<Vec<f64>> = (0..4)
            .map(|rank| {
                let sign = if rank % 2 == 0 { 1.0 } else { -1.0 };
                let layer = |index: usize| if index < 2500 { sign * base[index] } else { bits.unit() };
                let mut values: Vec<f64> = (0..len).map(layer).collect();
                // The perturbation is representable in every dtype, and the norm of the difference is about 1 % of the vectors' norms.
                values.iter_mut().step_by(100).for_each(|value| *value *= 1.0 + 0.0625 * f64::from(rank));
                values
            })
            .collect();
        let hosts: Vec<_> = ranks
            .iter()
            .map(|values| {
                let mut vector = crate::host(dtype, len);
                cpu::cast(vector.tensor_mut(0).into_data(), values.into()).unwrap();
                vector
            })
            .collect();
        let slices: Vec<Slice<'_>> = hosts.iter().map(|host| host.tensor(0).data()).collect();

        let is_double = dtype == DType::F64;
        let gram = cpu::gram(&slices, &segments).unwrap();
        let found = cpu::coefficients_by(&gram, 4, |_| Criterion::of(is_double, 2500)).unwrap();
        assert_eq!(found.cancelled, [true, false], "{dtype}: the inputs must cancel in the first layer alone");
        let mut expected = found.weights.clone();
        expected[..4].fill(1.0);
        let mut trees = match is_double {
            true => Trees::precise(4, found.cancelled.clone(), &gram).unwrap(),
            false => Trees::new(4, found.cancelled.clone()).unwrap(),
        };
        for pair in adasum::pairs(4) {
            let sums = cpu::tree_dots(&slices, &segments, &trees, pair).unwrap();
            trees.set_pair(pair, &sums, &mut expected).unwrap();
        }
        let mut expected_result = crate::host(dtype, len);
        cpu::combine(expected_result.tensor_mut(0).into_data(), &slices, &expected, &segments).unwrap();
        cpu::tree_combine(expected_result.tensor_mut(0).into_data(), &slices, &segments, &trees, 1.0).unwrap();

        let devices: Vec<_> = slices.iter().map(|slice| upload(&queue, *slice, 0)).collect();
        let views: Vec<DeviceSlice<'_>> = devices.iter().map(DeviceBuffer::as_slice).collect();
        let mut layers = SegmentWorkspace::new(&queue, len, &segments, 4).unwrap();
        let mut result = DeviceBuffer::zeroed(&queue, dtype, len).unwrap();
        layers.adasum(result.as_mut_slice(), &views).unwrap();
        let actual = layers.read_coefficients().unwrap();
        assert_eq!(actual.cancelled, found.cancelled, "{dtype}");
        // Both backends form the same values at every element and add 2500 of them in another order, which changes a sum of squares by at
        // most 2500 units, and a dot product of two vectors by at most 2500 units of the product of their norms. The norms of the vectors
        // are within a factor of 4 of each other here, so a coefficient 1 - dot / 2 norm² changes by at most 3 × 4 × 2500 units. Two
        // coefficients make a weight; their own roundings are negligible.
        let bound = 2.0 * 3.0 * 4.0 * 2500.0 * f64::EPSILON;
        for (index, (actual, expected)) in actual.weights.iter().zip(&expected).enumerate() {
            let close = (actual - expected).abs() <= bound * expected.abs().max(1.0);
            assert!(close, "{dtype} weight {index}: {actual} {expected}");
        }
        // A result changes with the weights, which multiply vectors below 3.5 in magnitude, and then by one unit of its dtype.
        let unit = match dtype {
            DType::F64 => f64::EPSILON,
            DType::F32 => f64::from(f32::EPSILON),
            DType::F16 => 2f64.powi(-10),
            _ => 2f64.powi(-7),
        };
        let result = crate::download(&result, 0);
        let pairs = result.tensor(0).data().to_f64_vec().into_iter().zip(expected_result.tensor(0).data().to_f64_vec());
        for (index, (actual, expected)) in pairs.enumerate() {
            let close = (actual - expected).abs() <= 4.0 * 3.5 * bound + unit * expected.abs();
            assert!(close, "{dtype} element {index}: {actual} {expected}");
        }
    }
}

/// The Adasum of layers of `f64`, given as layers × ranks × elements, on the device.
fn adasum_of(queue: &Queue, layers: &[Vec<Vec<f64>>]) -> Vec<Vec<f64>> {
    let (ranks, mut end) = (layers[0].len(), 0);
    let segments = layers.iter().map(|layer| {
        end += layer[0].len();
        end - layer[0].len()..end
    });
    let segments: Vec<_> = segments.collect();
    let flat = |rank: usize| layers.iter().flat_map(|layer| layer[rank].clone()).collect::<Vec<f64>>();
    let devices: Vec<_> = (0..ranks).map(|rank| upload(queue, (&flat(rank)).into(), 0)).collect();
    let views: Vec<DeviceSlice<'_>> = devices.iter().map(DeviceBuffer::as_slice).collect();
    let mut result = DeviceBuffer::zeroed(queue, DType::F64, end).unwrap();
    SegmentWorkspace::new(queue, end, &segments, ranks).unwrap().adasum(result.as_mut_slice(), &views).unwrap();
    let result = crate::download(&result, 0).tensor(0).data().to_f64_vec();
    segments.into_iter().map(|segment| result[segment].to_vec()).collect()
}

/// Products, or their products with weights, leave the range of `f64`, though the result does not.
#[test]
fn combine_of_products_out_of_range_is_exact() {
    let queue = queue();
    for magnitudes in OUT_OF_RANGE {
        for ranks in [2, 3, 4, 5, 8, 16] {
            let lens: &[usize] = if ranks < 8 { &[1, 2, 128, 129, 1000] } else { &[1, 33, 129] };
            let layers: Vec<_> =
                lens.iter().zip(1..).map(|(&len, seed)| of_magnitudes(magnitudes, ranks, len, seed)).collect();
            for (inputs, found) in layers.iter().zip(adasum_of(&queue, &layers)) {
                let error = rational::adasum(inputs).error_of(&found, rational::unit(inputs));
                let what = format!("{magnitudes:?}, {ranks} ranks, {} elements", found.len());
                assert!(error <= UNITS_OUT_OF_RANGE, "{what}: {error} units");
            }
        }
    }
    for largest in [1e160, f64::MAX] {
        let layer = vec![vec![largest; 129]; 8];
        assert!(adasum_of(&queue, std::slice::from_ref(&layer))[0] == layer[0], "equal vectors of {largest:e}");
    }
}

/// Short layers of `f64` against exact rational arithmetic, as on the CPU: the error is at most 8 units of `2^-52` of the largest input.
#[test]
fn combine_of_short_layers_of_f64_is_exact_to_eight_units() {
    let queue = queue();
    for family in Family::ALL {
        let mut worst = 0.0_f64;
        for ranks in 1..=16 {
            // The rational numbers of many ranks have many digits, so larger groups get fewer and shorter vectors.
            let lens: &[usize] = match ranks {
                1..=4 => &[1, 1, 2, 3, 5, 33, 100],
                5..=8 => &[1, 1, 2, 17, 100],
                12 | 16 => &[1, 1, 2, 7, 33, 100],
                _ => &[1, 1, 2, 7],
            };
            let layers: Vec<Vec<Vec<f64>>> =
                lens.iter().zip(1000 * ranks as u64..).map(|(&len, seed)| family.vectors(ranks, len, seed)).collect();
            for (inputs, found) in layers.iter().zip(adasum_of(&queue, &layers)) {
                let unit = rational::unit(inputs);
                let unit = if unit < f64::MIN_POSITIVE { f64::MIN_POSITIVE } else { unit };
                let error = rational::adasum(inputs).error_of(&found, unit);
                assert!(error <= UNITS, "{family:?}, {ranks} ranks, {} elements: {error} units", found.len());
                worst = worst.max(error);
            }
        }
        println!("{family:?}: {worst} units");
    }
}
