//! Float-wise kernels: bitwise equal to the CPU backend, for every pair of dtypes, border length and alignment.

use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut, Queue};
use gradsync::internal::kernels::{cpu, cuda};
use gradsync::memory::{TensorView, TensorViewMut};
use gradsync::onnx::{in_place_accumulator, in_place_accumulator_v2};
use gradsync::ops::zero_gradient;
use gradsync::{DType, Error, Slice, SliceMut, bf16, f16};

use crate::{LENS, any_bits, assert_same, download, host, queue, uniform, upload};

/// Runs `body` for every pair of dtypes, length, and shift of the two operands.
fn for_each_case(mut body: impl FnMut(&Queue, DType, DType, usize, usize, usize)) {
    let queue = queue();
    for first in DType::FLOATS {
        for second in DType::FLOATS {
            for len in LENS {
                let shifts: &[(usize, usize)] =
                    if len > 5000 { &[(0, 0), (1, 0)] } else { &[(0, 0), (1, 0), (0, 1), (3, 3)] };
                for &(one, other) in shifts {
                    body(&queue, first, second, len, one, other);
                }
            }
        }
    }
}

#[test]
fn cast_matches_the_cpu() {
    for_each_case(|queue, from, to, len, shift_from, shift_to| {
        let source = any_bits(from, len, len as u64);
        let device = upload(queue, source.tensor(0).data(), shift_from);
        let mut result = upload(queue, any_bits(to, len, 7).tensor(0).data(), shift_to);
        let destination = result.as_mut_slice().range_mut(shift_to..shift_to + len);
        cuda::cast(destination, device.as_slice().range(shift_from..shift_from + len)).unwrap();
        let mut expected = host(to, len);
        cpu::cast(expected.tensor_mut(0).into_data(), source.tensor(0).data()).unwrap();
        let what = format!("cast {from} to {to}, {len} elements, shifts {shift_from} and {shift_to}");
        assert_same(download(&result, shift_to).tensor(0).data(), expected.tensor(0).data(), &what);
    });
}

#[test]
fn accumulate_matches_the_cpu() {
    for_each_case(|queue, sum, value, len, shift_sum, shift_value| {
        let (mut expected, values) = (any_bits(sum, len, 1), any_bits(value, len, 2));
        let mut device = upload(queue, expected.tensor(0).data(), shift_sum);
        let other = upload(queue, values.tensor(0).data(), shift_value);
        let destination = device.as_mut_slice().range_mut(shift_sum..shift_sum + len);
        cuda::accumulate(destination, other.as_slice().range(shift_value..shift_value + len)).unwrap();
        cpu::accumulate(expected.tensor_mut(0).into_data(), values.tensor(0).data()).unwrap();
        let what = format!("accumulate {sum} += {value}, {len} elements, shifts {shift_sum} and {shift_value}");
        assert_same(download(&device, shift_sum).tensor(0).data(), expected.tensor(0).data(), &what);
    });
}

#[test]
fn scale_matches_the_cpu() {
    for_each_case(|queue, from, to, len, shift_from, shift_to| {
        let source = any_bits(from, len, 3);
        let device = upload(queue, source.tensor(0).data(), shift_from);
        let mut result = upload(queue, host(to, len).tensor(0).data(), shift_to);
        let destination = result.as_mut_slice().range_mut(shift_to..shift_to + len);
        cuda::scale(destination, device.as_slice().range(shift_from..shift_from + len), 1.0 / 3.0).unwrap();
        let mut expected = host(to, len);
        cpu::scale(expected.tensor_mut(0).into_data(), source.tensor(0).data(), 1.0 / 3.0).unwrap();
        let what = format!("scale {from} to {to}, {len} elements, shifts {shift_from} and {shift_to}");
        assert_same(download(&result, shift_to).tensor(0).data(), expected.tensor(0).data(), &what);
    });
}

/// `f32` values at every 16-bit value and every midpoint between two neighbours, and one unit on either side.
fn around_halves(to_f32: impl Fn(u16) -> f32) -> Vec<f32> {
    (0..=u16::MAX)
        .flat_map(|bits| {
            let (value, next) = (to_f32(bits), to_f32(bits.wrapping_add(1)));
            let middle = ((f64::from(value) + f64::from(next)) / 2.0) as f32;
            [value, middle].map(f32::to_bits)
        })
        .flat_map(|bits| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)])
        .map(f32::from_bits)
        .collect()
}

#[test]
fn cast_of_16_bit_floats_equals_crate_half() {
    let queue = queue();
    let run = |source: Slice<'_>, to: DType| {
        let device = upload(&queue, source, 0);
        let mut result = DeviceBuffer::zeroed(&queue, to, source.len()).unwrap();
        cuda::cast(result.as_mut_slice(), device.as_slice()).unwrap();
        download(&result, 0)
    };
    let f16s: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
    let wide: Vec<f32> = f16s.iter().map(|value| value.to_f32()).collect();
    assert_same(run((&f16s).into(), DType::F32).tensor(0).data(), (&wide).into(), "f16 to f32");
    let bf16s: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let wide: Vec<f32> = bf16s.iter().map(|value| value.to_f32()).collect();
    assert_same(run((&bf16s).into(), DType::F32).tensor(0).data(), (&wide).into(), "bf16 to f32");

    let values = around_halves(|bits| f16::from_bits(bits).to_f32());
    let narrow: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
    assert_same(run((&values).into(), DType::F16).tensor(0).data(), (&narrow).into(), "f32 to f16");
    let values = around_halves(|bits| bf16::from_bits(bits).to_f32());
    let narrow: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
    assert_same(run((&values).into(), DType::BF16).tensor(0).data(), (&narrow).into(), "f32 to bf16");
}

#[test]
fn zero_clears_exactly_its_range() {
    let queue = queue();
    for dtype in DType::FLOATS {
        for len in LENS {
            for shift in [0, 1, 3] {
                let mut buffer = upload(&queue, uniform(dtype, len + shift + 5, 1).tensor(0).data(), 0);
                cuda::zero(buffer.as_mut_slice().range_mut(shift..shift + len)).unwrap();
                let values = download(&buffer, 0).tensor(0).data().to_f64_vec();
                let (before, rest) = values.split_at(shift);
                let (cleared, after) = rest.split_at(len);
                let what = format!("{dtype}, {len} elements behind {shift}");
                assert!(cleared.iter().all(|value| value.to_bits() == 0), "{what}: not cleared");
                assert!(before.iter().chain(after).all(|&value| value != 0.0), "{what}: cleared too much");
            }
        }
    }
}

/// Gradient control on memory outside a gradient buffer, as the results of a framework's backward pass are.
#[test]
fn accumulate_of_loose_memory_matches_the_cpu() {
    for_each_case(|queue, sum, value, len, shift_sum, shift_value| {
        let (before, values) = (any_bits(sum, len, 4), any_bits(value, len, 5));
        let source = upload(queue, values.tensor(0).data(), shift_value);
        let source = source.as_slice().range(shift_value..shift_value + len);
        for (step, do_update) in [Some(true), None, Some(false)].into_iter().enumerate() {
            let mut device = upload(queue, before.tensor(0).data(), shift_sum);
            let mut expected = any_bits(sum, len, 4);
            let destination = device.as_mut_slice().range_mut(shift_sum..shift_sum + len);
            in_place_accumulator(destination, source, do_update).unwrap();
            in_place_accumulator(expected.tensor_mut(0), values.tensor(0), do_update).unwrap();
            let case = format!("step {step}: {sum} += {value}, {len} elements, shifts {shift_sum} and {shift_value}");
            assert_same(download(&device, shift_sum).tensor(0).data(), expected.tensor(0).data(), &case);
        }
        for overwrite in [false, true] {
            let mut device = upload(queue, before.tensor(0).data(), shift_sum);
            let mut expected = any_bits(sum, len, 4);
            let destination = device.as_mut_slice().range_mut(shift_sum..shift_sum + len);
            assert!(in_place_accumulator_v2(destination, source, overwrite).unwrap());
            in_place_accumulator_v2(expected.tensor_mut(0), values.tensor(0), overwrite).unwrap();
            let case = format!("{sum}, {value}, {len} elements, shifts {shift_sum}, {shift_value}, {overwrite}");
            assert_same(download(&device, shift_sum).tensor(0).data(), expected.tensor(0).data(), &case);
        }
    });
}

#[test]
fn zero_gradient_and_accumulate_check_shapes_of_buffers() {
    let queue = queue();
    for dtype in DType::FLOATS {
        let mut sum = upload(&queue, uniform(dtype, 6, 1).tensor(0).data(), 0);
        let value = upload(&queue, uniform(DType::F32, 6, 2).tensor(0).data(), 0);
        let before = download(&sum, 0);
        for do_update in [Some(true), Some(false), None] {
            let wide = TensorView::on_device(&value, &[2, 3]).unwrap();
            let refused = in_place_accumulator(&mut sum, wide, do_update).unwrap_err();
            assert!(matches!(&refused, Error::ShapeMismatch { left, right, .. } if left == &[6] && right == &[2, 3]));
        }
        for overwrite in [false, true] {
            let tall = TensorViewMut::on_device(&mut sum, &[3, 2]).unwrap();
            let refused = in_place_accumulator_v2(tall, &value, overwrite).unwrap_err();
            assert!(matches!(&refused, Error::ShapeMismatch { left, right, .. } if left == &[3, 2] && right == &[6]));
        }
        assert_same(download(&sum, 0).tensor(0).data(), before.tensor(0).data(), "nothing is written");
        let (tall, same) = (TensorViewMut::on_device(&mut sum, &[3, 2]), TensorView::on_device(&value, &[3, 2]));
        in_place_accumulator_v2(tall.unwrap(), same.unwrap(), true).unwrap();
        let mut expected = host(dtype, 6);
        cpu::cast(expected.tensor_mut(0).into_data(), uniform(DType::F32, 6, 2).tensor(0).data()).unwrap();
        assert_same(download(&sum, 0).tensor(0).data(), expected.tensor(0).data(), "overwritten");
        zero_gradient(&mut sum).unwrap();
        assert!(download(&sum, 0).tensor(0).data().to_f64_vec().iter().all(|value| value.to_bits() == 0), "{dtype}");
    }
    let value = DeviceBuffer::zeroed(&queue, DType::F32, 6).unwrap();
    let refused = TensorView::on_device(&value, &[4, 2]).unwrap_err().to_string();
    assert!(refused.contains("[4, 2]") && refused.contains('6'), "{refused}");
}

#[test]
fn tensor_view_mut_on_device_is_copied_from_and_to_the_host() {
    let queue = queue();
    let mut buffer = DeviceBuffer::zeroed(&queue, DType::F32, 3).unwrap();
    let mut view = TensorViewMut::on_device(&mut buffer, &[3, 1]).unwrap();
    view.copy_from_slice(&[1.0f32, 2.0, 3.0]).unwrap();
    let wrong = view.copy_from_slice(&[0.0f64; 3]).unwrap_err();
    assert!(matches!(wrong, Error::DTypeMismatch { left: DType::F32, right: DType::F64, .. }), "{wrong}");
    let wrong = view.copy_from_slice(&[0.0f32; 2]).unwrap_err().to_string();
    assert!(wrong.contains('3') && wrong.contains('2'), "{wrong}");
    let view = TensorView::from(&buffer);
    assert_eq!((view.shape(), view.to_vec::<f32>().unwrap()), (&[3][..], vec![1.0, 2.0, 3.0]));
    let wrong = view.to_vec::<bf16>().unwrap_err();
    assert!(matches!(wrong, Error::DTypeMismatch { left: DType::F32, right: DType::BF16, .. }), "{wrong}");
}

#[test]
fn all_finite_finds_a_single_bad_element_anywhere() {
    let queue = queue();
    for dtype in DType::FLOATS {
        for len in LENS.into_iter().filter(|&len| len > 0) {
            for shift in [0, 1] {
                let good = upload(&queue, uniform(dtype, len, 5).tensor(0).data(), shift);
                assert!(cuda::all_finite(good.as_slice()).unwrap(), "{dtype}, {len} elements");
                for (place, bad) in [(0, f64::NAN), (len / 2, f64::INFINITY), (len - 1, f64::NEG_INFINITY)] {
                    let mut values = uniform(dtype, len, 5);
                    let one = [bad];
                    let spot = values.tensor_mut(0).into_data().range_mut(place..place + 1);
                    cpu::cast(spot, (&one[..]).into()).unwrap();
                    let device = upload(&queue, values.tensor(0).data(), shift);
                    assert!(!cuda::all_finite(device.as_slice()).unwrap(), "{dtype}, {bad} at {place} of {len}");
                }
            }
        }
    }
    let none = DeviceBuffer::zeroed(&queue, DType::F32, 0).unwrap();
    assert!(cuda::all_finite(none.as_slice()).unwrap());
}

#[test]
fn pack_unpack_and_zero_all_in_one_launch() {
    let queue = queue();
    let lens = [5, 0, 1, 4097, 100_003, 2, 256, 0];
    let kinds = DType::FLOATS;
    for arena_dtype in DType::FLOATS {
        let tensors: Vec<_> =
            lens.iter().enumerate().map(|(index, &len)| any_bits(kinds[index % 4], len, index as u64)).collect();
        // The offsets leave gaps, and some are not aligned.
        let mut end = 0;
        let offsets: Vec<usize> = lens
            .iter()
            .map(|&len| {
                let begin = end + 3;
                end = begin + len;
                begin
            })
            .collect();
        let devices: Vec<_> = tensors.iter().map(|tensor| upload(&queue, tensor.tensor(0).data(), 0)).collect();
        let mut arena = upload(&queue, any_bits(arena_dtype, end + 9, 77).tensor(0).data(), 0);
        let mut expected = any_bits(arena_dtype, end + 9, 77);
        let views: Vec<_> = devices.iter().map(DeviceBuffer::as_slice).collect();
        cuda::pack(arena.as_mut_slice(), &offsets, &views).unwrap();
        let sources: Vec<_> = tensors.iter().map(|tensor| tensor.tensor(0).data()).collect();
        cpu::pack(expected.tensor_mut(0).into_data(), &offsets, &sources).unwrap();
        assert_same(download(&arena, 0).tensor(0).data(), expected.tensor(0).data(), &format!("pack to {arena_dtype}"));

        let mut backs: Vec<_> = tensors
            .iter()
            .map(|tensor| upload(&queue, host(tensor.dtype(), tensor.tensor(0).data().len()).tensor(0).data(), 0))
            .collect();
        let mut destinations: Vec<DeviceSliceMut<'_>> = backs.iter_mut().map(DeviceBuffer::as_mut_slice).collect();
        cuda::unpack(&mut destinations, arena.as_slice(), &offsets).unwrap();
        for ((back, tensor), &offset) in backs.iter().zip(&tensors).zip(&offsets) {
            let len = tensor.tensor(0).data().len();
            let mut expected_back = host(tensor.dtype(), len);
            let packed = expected.tensor(0).data().range(offset..offset + len);
            cpu::cast(expected_back.tensor_mut(0).into_data(), packed).unwrap();
            let what = format!("unpack from {arena_dtype} to {}", tensor.dtype());
            assert_same(download(back, 0).tensor(0).data(), expected_back.tensor(0).data(), &what);
        }

        let mut cleared: Vec<DeviceSliceMut<'_>> = backs.iter_mut().map(DeviceBuffer::as_mut_slice).collect();
        cuda::zero_all(&mut cleared).unwrap();
        for back in &backs {
            assert!(download(back, 0).tensor(0).data().to_f64_vec().iter().all(|value| value.to_bits() == 0));
        }
    }
}

/// Runs `all` over tensors of many lengths and pairs of dtypes, and compares it with `one` on each tensor on the host.
fn many_in_one_launch(
    all: impl Fn(&mut [DeviceSliceMut<'_>], &[DeviceSlice<'_>]) -> gradsync::Result<()>,
    one: impl Fn(SliceMut<'_>, Slice<'_>) -> gradsync::Result<()>,
) {
    let queue = queue();
    let lens = [5, 0, 1, 4097, 100_003, 2, 256, 0, 33];
    let dtype = |index: usize| (DType::FLOATS[index % 4], DType::FLOATS[index / 2 % 4]);
    let mut expected: Vec<_> =
        lens.iter().enumerate().map(|(index, &len)| any_bits(dtype(index).0, len, index as u64)).collect();
    let values: Vec<_> =
        lens.iter().enumerate().map(|(index, &len)| any_bits(dtype(index).1, len, index as u64 + 50)).collect();
    let mut results: Vec<_> = expected.iter().map(|to| upload(&queue, to.tensor(0).data(), 0)).collect();
    let devices: Vec<_> = values.iter().map(|value| upload(&queue, value.tensor(0).data(), 0)).collect();
    let mut destinations: Vec<DeviceSliceMut<'_>> = results.iter_mut().map(DeviceBuffer::as_mut_slice).collect();
    let sources: Vec<_> = devices.iter().map(DeviceBuffer::as_slice).collect();
    all(&mut destinations, &sources).unwrap();
    for (index, (to, value)) in expected.iter_mut().zip(&values).enumerate() {
        one(to.tensor_mut(0).into_data(), value.tensor(0).data()).unwrap();
        let what = format!("tensor {index}, {:?}", dtype(index));
        assert_same(download(&results[index], 0).tensor(0).data(), to.tensor(0).data(), &what);
    }
}

#[test]
fn accumulate_all_in_one_launch() {
    many_in_one_launch(cuda::accumulate_all, cpu::accumulate);
}

#[test]
fn cast_all_in_one_launch() {
    many_in_one_launch(cuda::cast_all, cpu::cast);
}

#[test]
fn sweep_reads_every_word_once() {
    let queue = queue();
    for len in [0, 1, 8191, 8192, 100_003] {
        let source = any_bits(DType::F32, len, 3);
        for shift in [0, 1] {
            let device = upload(&queue, source.tensor(0).data(), shift);
            let mut sums = DeviceBuffer::zeroed(&queue, DType::F32, cuda::baseline::sweep_sums(4 * len)).unwrap();
            cuda::baseline::sweep(sums.as_mut_slice(), device.as_slice().range(shift..shift + len)).unwrap();
            let mut of_warps = vec![0.0f32; sums.as_slice().len()];
            sums.as_slice().copy_to_host((&mut of_warps[..]).into()).unwrap();
            let words = source.tensor(0).to_vec::<f32>().unwrap();
            let xor = |values: &[f32]| values.iter().fold(0, |sum, value| sum ^ value.to_bits());
            assert_eq!(xor(&of_warps), xor(&words), "{len} words, shift {shift}");
        }
    }
    let mut none = DeviceBuffer::zeroed(&queue, DType::F32, 0).unwrap();
    let odd = DeviceBuffer::zeroed(&queue, DType::BF16, 3).unwrap();
    let message = cuda::baseline::sweep(none.as_mut_slice(), odd.as_slice()).unwrap_err().to_string();
    assert!(message.contains("0 f32, and 4 f32 are needed"), "{message}");
    cuda::baseline::empty(&queue).unwrap();
    queue.synchronize().unwrap();
}

#[test]
fn kernels_refuse_mismatches_before_any_launch() {
    let queue = queue();
    let mut three = DeviceBuffer::zeroed(&queue, DType::F32, 3).unwrap();
    let four = DeviceBuffer::zeroed(&queue, DType::F16, 4).unwrap();
    let message = cuda::accumulate(three.as_mut_slice(), four.as_slice()).unwrap_err().to_string();
    assert!(message.contains('3') && message.contains('4') && message.contains("accumulate"), "{message}");
    let other = Queue::new(0).unwrap();
    let elsewhere = DeviceBuffer::zeroed(&other, DType::F32, 3).unwrap();
    let message = cuda::cast(three.as_mut_slice(), elsewhere.as_slice()).unwrap_err().to_string();
    assert!(message.contains("different queues"), "{message}");
    let message = three.as_mut_slice().copy_from_device(elsewhere.as_slice()).unwrap_err().to_string();
    assert!(message.contains("different queues"), "{message}");
    let message =
        cuda::pack(three.as_mut_slice(), &[0, 1], &[elsewhere.as_slice().range(0..2); 2]).unwrap_err().to_string();
    assert!(message.contains("tensor 1 begins at 1"), "{message}");
    let message = Queue::new(99).unwrap_err().to_string();
    assert!(message.contains("device 99") && message.contains("101"), "{message}");
}
