//! Inner products per segment: within the rounding of a sum in another order, with equal bits in every run and at every alignment.

use std::ops::Range;
use std::sync::Mutex;
use std::thread;

use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::kernels::cuda::SegmentWorkspace;
use gradsync::internal::kernels::{cpu, cuda};
use gradsync::{DType, GradientBuffer, Slice};
use half::{bf16, f16};

use crate::{assert_same, download, host, queue, uniform, upload};

/// Segments at any offset, with gaps: empty, tiny, and longer than a chunk.
fn segments() -> Vec<Range<usize>> {
    vec![0..1, 1..1, 1..257, 300..301, 301..5000, 5001..5001, 5001..70_000, 70_003..100_003]
}
const LEN: usize = 100_010;

fn vectors(dtype: DType, count: usize, len: usize) -> Vec<GradientBuffer> {
    (0..count).map(|rank| uniform(dtype, len, rank as u64 + 10)).collect()
}

/// The bound for a sum of `len` products, added in `f64` in any order: `len × 2^-53 × Σ|x||y|` on each side of the comparison (Higham,
/// Accuracy and Stability, 4.2), with `|x|, |y| ≤ 1`. f64 products are rounded themselves, which is one more unit per term.
fn bound(len: usize) -> f64 {
    2.0 * (len as f64 + 1.0) * f64::EPSILON / 2.0 * len as f64
}

#[test]
fn gram_matches_the_cpu_for_any_number_of_vectors() {
    let queue = queue();
    for dtype in DType::FLOATS {
        for ranks in [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17] {
            let hosts = vectors(dtype, ranks, LEN);
            let slices: Vec<Slice<'_>> = hosts.iter().map(|vector| vector.tensor(0).data()).collect();
            let expected = cpu::gram(&slices, &segments()).unwrap();
            let mut runs = Vec::new();
            // The same vectors are tested aligned, aligned again, and one element off.
            for shift in [0, 0, 1] {
                let devices: Vec<_> = slices.iter().map(|slice| upload(&queue, *slice, shift)).collect();
                let views: Vec<DeviceSlice<'_>> =
                    devices.iter().map(|device| device.as_slice().range(shift..shift + LEN)).collect();
                let mut layers = SegmentWorkspace::new(&queue, LEN, &segments(), ranks).unwrap();
                layers.gram(&views).unwrap();
                runs.push(layers.read_totals(ranks * (ranks + 1) / 2).unwrap());
            }
            let bits = |run: &Vec<f64>| run.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&runs[0]), bits(&runs[1]), "{dtype}, {ranks} vectors: two runs differ");
            assert_eq!(bits(&runs[0]), bits(&runs[2]), "{dtype}, {ranks} vectors: alignment changes the result");
            let per_layer = ranks * (ranks + 1) / 2;
            for (index, (actual, expected)) in runs[0].iter().zip(&expected).enumerate() {
                let bound = bound(segments()[index / per_layer].len());
                assert!((actual - expected).abs() <= bound, "{dtype}, {ranks} vectors, {index}: {actual} {expected}");
            }
        }
    }
}

#[test]
fn dots_and_norms_match_the_cpu() {
    let queue = queue();
    for dtype in DType::FLOATS {
        let hosts = vectors(dtype, 2, LEN);
        let (a, b) = (hosts[0].tensor(0).data(), hosts[1].tensor(0).data());
        let (device_a, device_b) = (upload(&queue, a, 0), upload(&queue, b, 0));
        let mut layers = SegmentWorkspace::new(&queue, LEN, &segments(), 2).unwrap();
        layers.dots(device_a.as_slice(), device_b.as_slice()).unwrap();
        let actual = layers.read_totals(3).unwrap();
        let expected = cpu::dots(a, b, &segments()).unwrap();
        layers.squared_norms(device_a.as_slice()).unwrap();
        let norms = layers.read_totals(1).unwrap();
        for (index, segment) in segments().iter().enumerate() {
            let bound = bound(segment.len());
            for product in 0..3 {
                let (actual, expected) = (actual[index * 3 + product], expected[index][product]);
                assert!((actual - expected).abs() <= bound, "{dtype}, layer {index}, {product}: {actual} {expected}");
            }
            assert!((norms[index] - expected[index][1]).abs() <= bound, "{dtype}, layer {index}: {}", norms[index]);
        }
    }
}

#[test]
fn dots_and_gram_keep_the_range_of_huge_and_tiny_values() {
    let queue = queue();
    for (value, dtype) in
        [(f64::from(f32::MAX), DType::F32), (1e-45, DType::F32), (3.3e38, DType::BF16), (6e-8, DType::F16)]
    {
        let mut vector = host(dtype, 1000);
        let wide = vec![value; 1000];
        cpu::cast(vector.tensor_mut(0).into_data(), (&wide).into()).unwrap();
        let element = vector.tensor(0).data().to_f64_vec()[0];
        assert!(element != 0.0 && element.is_finite());
        let device = upload(&queue, vector.tensor(0).data(), 0);
        let mut layers = SegmentWorkspace::new(&queue, 1000, &[0..1000], 1).unwrap();
        layers.squared_norms(device.as_slice()).unwrap();
        let norm = layers.read_totals(1).unwrap()[0];
        // A thousand equal terms are added, and each addition rounds once.
        assert!(
            (norm / (element * element) - 1000.0).abs() <= 1000.0 * 1000.0 * f64::EPSILON,
            "{dtype} {value}: {norm}"
        );
    }
}

/// Blocks recognise from its bits whether a partial sum has arrived: no NaN may be mistaken for a missing one, and none may stay in the
/// workspace.
#[test]
fn dots_of_nan_are_nan_and_leave_nothing_behind() {
    let queue = queue();
    // One vector holds NaNs with all bits set, the other one holds ones.
    let both = |dtype| {
        let of = |slice: Slice<'_>| DeviceBuffer::from_host(&queue, slice).unwrap();
        match dtype {
            DType::F64 => [f64::from_bits(u64::MAX), 1.0].map(|value| of((&vec![value; LEN]).into())),
            DType::F32 => [f32::from_bits(u32::MAX), 1.0].map(|value| of((&vec![value; LEN]).into())),
            DType::F16 => [f16::from_bits(u16::MAX), f16::ONE].map(|value| of((&vec![value; LEN]).into())),
            _ => [bf16::from_bits(u16::MAX), bf16::ONE].map(|value| of((&vec![value; LEN]).into())),
        }
    };
    for dtype in DType::FLOATS {
        let [nan, one] = both(dtype);
        let mut layers = SegmentWorkspace::new(&queue, LEN, &segments(), 3).unwrap();
        for pass in 0..2 {
            for (vector, value) in [(&nan, f64::NAN), (&one, 1.0)] {
                let view = vector.as_slice();
                layers.gram(&[view, view, view]).unwrap();
                let totals = layers.read_totals(6).unwrap();
                for (index, total) in totals.into_iter().enumerate() {
                    let len = segments()[index / 6].len();
                    let expected = if len == 0 { 0.0 } else { value * len as f64 };
                    let same = total == expected || total.is_nan() && expected.is_nan();
                    assert!(same, "{dtype}, pass {pass}, {index}: {total} and not {expected}");
                }
            }
        }
    }
}

#[test]
fn combine_matches_the_cpu_bitwise() {
    let queue = queue();
    for from in DType::FLOATS {
        for to in DType::FLOATS {
            for ranks in [1, 2, 3, 4, 5, 7, 8, 11] {
                for shift in [0, 1] {
                    let hosts = vectors(from, ranks, LEN);
                    let slices: Vec<Slice<'_>> = hosts.iter().map(|vector| vector.tensor(0).data()).collect();
                    let devices: Vec<_> = slices.iter().map(|slice| upload(&queue, *slice, shift)).collect();
                    let views: Vec<DeviceSlice<'_>> =
                        devices.iter().map(|device| device.as_slice().range(shift..shift + LEN)).collect();
                    let count = segments().len();
                    let weights: Vec<f64> = (0..count * ranks).map(|index| 0.3 + (index % 7) as f64 / 3.0).collect();
                    let coefficients = cpu::Coefficients { weights, cancelled: vec![false; count] };
                    let mut layers = SegmentWorkspace::new(&queue, LEN, &segments(), ranks).unwrap();
                    layers.write_coefficients(&coefficients).unwrap();
                    let mut expected = uniform(to, LEN, 99);
                    let mut result = upload(&queue, expected.tensor(0).data(), 0);
                    layers.combine(result.as_mut_slice(), &views).unwrap();
                    cpu::combine(expected.tensor_mut(0).into_data(), &slices, &coefficients.weights, &segments())
                        .unwrap();
                    let label = format!("combine {ranks} × {from} to {to}, shift {shift}");
                    assert_same(download(&result, 0).tensor(0).data(), expected.tensor(0).data(), &label);
                }
            }
        }
    }
}

/// Combining into one of the input vectors must leave cancelled layers intact, as the exact path reads them afterwards.
#[test]
fn combine_in_place_leaves_cancelled_layers_alone() {
    let queue = queue();
    for dtype in DType::FLOATS {
        // The replaced vector is the first, which is read in place of absent vectors, or another one; in the last case memory is not
        // aligned.
        let cases = [2, 3, 4, 6, 7, 8, 11].into_iter().flat_map(|ranks| [(ranks, 0, 0), (ranks, 1, 0), (ranks, 0, 1)]);
        for (ranks, replaced, shift) in cases {
            let hosts = vectors(dtype, ranks, LEN);
            let slices: Vec<Slice<'_>> = hosts.iter().map(|vector| vector.tensor(0).data()).collect();
            let devices: Vec<_> = slices.iter().map(|slice| upload(&queue, *slice, shift)).collect();
            let views: Vec<DeviceSlice<'_>> =
                devices.iter().map(|device| device.as_slice().range(shift..shift + LEN)).collect();
            let count = segments().len();
            let weights: Vec<f64> = (0..count * ranks).map(|index| 0.3 + (index % 7) as f64 / 3.0).collect();
            let cancelled: Vec<bool> = (0..count).map(|layer| layer % 2 == 0).collect();
            let mut layers = SegmentWorkspace::new(&queue, LEN, &segments(), ranks).unwrap();
            layers
                .write_coefficients(&cpu::Coefficients { weights: weights.clone(), cancelled: cancelled.clone() })
                .unwrap();
            // SAFETY: the buffer outlives the kernel, which reads each element of it before it writes it.
            let own = unsafe { DeviceSliceMut::from_raw_parts(&queue, views[replaced].address(), dtype, LEN) };
            layers.combine(own, &views).unwrap();

            let mut expected = uniform(dtype, LEN, replaced as u64 + 10);
            let wanted = || (0..count).filter(|&layer| !cancelled[layer]);
            let weights: Vec<f64> = wanted().flat_map(|layer| weights[layer * ranks..][..ranks].to_vec()).collect();
            let segments: Vec<Range<usize>> = wanted().map(|layer| segments()[layer].clone()).collect();
            cpu::combine(expected.tensor_mut(0).into_data(), &slices, &weights, &segments).unwrap();
            let label = format!("{ranks} × {dtype}, in place of {replaced}, shift {shift}");
            let found = download(&devices[replaced], shift);
            assert_same(found.tensor(0).data(), expected.tensor(0).data(), &label);
        }
    }
}

#[test]
fn accumulate_of_one_source_in_many_launches() {
    let queue = queue();
    let ones = vec![1.0f32; 1 << 20];
    let one = DeviceBuffer::from_host(&queue, (&ones).into()).unwrap();
    let mut sum = DeviceBuffer::zeroed(&queue, DType::F32, ones.len()).unwrap();
    for _ in 0..100 {
        cuda::accumulate(sum.as_mut_slice(), one.as_slice()).unwrap();
    }
    assert!(download(&sum, 0).tensor(0).data().to_f64_vec().iter().all(|&value| value == 100.0));
}

/// This length makes the chunks of weighted sums differ between dtypes, and differ from the chunks of reductions.
#[test]
fn gram_and_combine_of_long_vectors_match_the_cpu() {
    const LONG: usize = 40_000_003;
    let segments = [0..7, 7..20_000_011, 20_000_100..LONG];
    let queue = queue();
    // One workspace serves all dtypes.
    let mut layers = SegmentWorkspace::new(&queue, LONG, &segments, 2).unwrap();
    let weights = vec![0.25, 1.75, -1.0, 0.5, 3.0, 0.125];
    let coefficients = cpu::Coefficients { weights, cancelled: vec![false; segments.len()] };
    for dtype in DType::FLOATS {
        let hosts = vectors(dtype, 2, LONG);
        let slices: Vec<Slice<'_>> = hosts.iter().map(|vector| vector.tensor(0).data()).collect();
        let devices: Vec<_> = slices.iter().map(|slice| upload(&queue, *slice, 0)).collect();
        let views: Vec<DeviceSlice<'_>> = devices.iter().map(|device| device.as_slice()).collect();

        layers.gram(&views).unwrap();
        let products = layers.read_totals(3).unwrap();
        for (index, (actual, expected)) in products.iter().zip(cpu::gram(&slices, &segments).unwrap()).enumerate() {
            let bound = bound(segments[index / 3].len());
            assert!((actual - expected).abs() <= bound, "{dtype}, product {index}: {actual} {expected}");
        }
        layers.write_coefficients(&coefficients).unwrap();
        let mut result = DeviceBuffer::zeroed(&queue, dtype, LONG).unwrap();
        layers.combine(result.as_mut_slice(), &views).unwrap();
        let mut expected = host(dtype, LONG);
        cpu::combine(expected.tensor_mut(0).into_data(), &slices, &coefficients.weights, &segments).unwrap();
        let same = download(&result, 0).tensor(0).data().as_bytes() == expected.tensor(0).data().as_bytes();
        assert!(same, "combine of {dtype}");
    }
}

/// The legacy default stream is shared by all threads and orders their work. It cannot be recorded, and per-thread default streams are
/// refused.
#[test]
fn from_raw_stream_shares_the_legacy_default_stream() {
    const LEN: usize = 1 << 20;
    let of_handle = |handle| {
        // SAFETY: default streams live as long as the context.
        unsafe { Queue::from_raw_stream(0, std::ptr::without_provenance_mut(handle)) }
    };
    let queue = of_handle(1).unwrap();
    let ones = DeviceBuffer::from_host(&queue, (&vec![1.0f32; LEN]).into()).unwrap();
    let sum = Mutex::new(DeviceBuffer::zeroed(&queue, DType::F32, LEN).unwrap());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    cuda::accumulate(sum.lock().unwrap().as_mut_slice(), ones.as_slice()).unwrap();
                }
            });
        }
    });
    let sum = sum.into_inner().unwrap();
    assert!(download(&sum, 0).tensor(0).data().to_f64_vec().iter().all(|&value| value == 200.0));
    let error = queue.capture(|| Ok(())).unwrap_err().to_string();
    assert!(error.contains("code 900") && error.contains("default stream"), "{error}");
    let error = of_handle(2).unwrap_err().to_string();
    assert!(error.contains("per-thread default stream"), "{error}");
}

/// Kernels, copies and clearing take turns on the shared default stream; each sees the result of the one before.
#[test]
fn from_raw_stream_orders_kernels_and_copies_by_default() {
    const LEN: usize = 1 << 20;
    // SAFETY: the default stream lives as long as the context.
    let queue = unsafe { Queue::from_raw_stream(0, std::ptr::null_mut()) }.unwrap();
    let ones = DeviceBuffer::from_host(&queue, (&vec![1.0f32; LEN]).into()).unwrap();
    let mut sum = DeviceBuffer::zeroed(&queue, DType::F32, LEN).unwrap();
    let mut copy = DeviceBuffer::zeroed(&queue, DType::F32, LEN).unwrap();
    for _ in 0..50 {
        cuda::accumulate(sum.as_mut_slice(), ones.as_slice()).unwrap();
        copy.as_mut_slice().copy_from_device(sum.as_slice()).unwrap();
        cuda::zero(sum.as_mut_slice()).unwrap();
        cuda::accumulate(sum.as_mut_slice(), copy.as_slice()).unwrap();
        cuda::accumulate(sum.as_mut_slice(), ones.as_slice()).unwrap();
    }
    assert!(download(&sum, 0).tensor(0).data().to_f64_vec().iter().all(|&value| value == 100.0));
}

/// A segment's sum does not depend on the number of chunks per block either, which follows from the length of all segments.
#[test]
fn dots_of_a_segment_do_not_depend_on_the_others() {
    const LENS: [usize; 5] = [1, 700, 20_000, 300_001, 16_384];
    /// The number of zeros after the segments, large enough for blocks to take several chunks, for every chunk length.
    const BEHIND: usize = 160_000_000;
    const VECTORS: usize = 3;
    let queue = queue();
    for dtype in DType::FLOATS {
        let of_segment = |(index, &len): (usize, &usize)| -> Vec<GradientBuffer> {
            (0..VECTORS).map(|vector| uniform(dtype, len, (index * VECTORS + vector) as u64)).collect()
        };
        let hosts: Vec<Vec<GradientBuffer>> = LENS.iter().enumerate().map(of_segment).collect();
        // Returns the bits of all products of the segments with these numbers, laid out in this order and followed by `behind` elements.
        let sums = |order: &[usize], behind: usize| {
            let mut end = 0;
            let mut segments: Vec<Range<usize>> = Vec::new();
            for &index in order {
                segments.push(end..end + LENS[index]);
                end = (end + LENS[index]).next_multiple_of(128);
            }
            segments.push(end..end + behind);
            let len = end + behind;
            let upload = |vector: usize| {
                let mut device = DeviceBuffer::zeroed(&queue, dtype, len).unwrap();
                for (&index, segment) in order.iter().zip(&segments) {
                    let data = hosts[index][vector].tensor(0).data();
                    device.as_mut_slice().range_mut(segment.clone()).copy_from_host(data).unwrap();
                }
                device
            };
            let devices: Vec<DeviceBuffer> = (0..VECTORS).map(upload).collect();
            let views: Vec<DeviceSlice<'_>> = devices.iter().map(DeviceBuffer::as_slice).collect();
            let mut layers = SegmentWorkspace::new(&queue, len, &segments, VECTORS).unwrap();
            layers.gram(&views).unwrap();
            let gram = layers.read_totals(6).unwrap();
            layers.dots(views[0], views[1]).unwrap();
            let dots = layers.read_totals(3).unwrap();
            layers.squared_norms(views[0]).unwrap();
            let norms = layers.read_totals(1).unwrap();
            let of_layer = |layer: usize| {
                let all = [&gram[layer * 6..][..6], &dots[layer * 3..][..3], &norms[layer..][..1]].concat();
                all.into_iter().map(f64::to_bits).collect::<Vec<u64>>()
            };
            (0..order.len()).map(of_layer).collect::<Vec<_>>()
        };
        let order: Vec<usize> = (0..LENS.len()).collect();
        let expected: Vec<_> = order.iter().map(|&index| sums(&[index], 0).remove(0)).collect();
        let reversed: Vec<usize> = order.iter().rev().copied().collect();
        for (order, behind) in [(&order, 0), (&reversed, 0), (&order, BEHIND)] {
            for (&index, found) in order.iter().zip(sums(order, behind)) {
                let len = LENS[index];
                assert_eq!(found, expected[index], "{dtype}, {len} elements among {order:?}, {behind} behind");
            }
        }
    }
}
