//! Counts beyond 2^24 and 2^31 elements, where 32-bit and float arithmetic on indices would fail.

use gradsync::DType;
use gradsync::driver::DeviceBuffer;
use gradsync::internal::kernels::cuda;
use gradsync::internal::kernels::cuda::SegmentWorkspace;

use crate::queue;

/// Ones in the last elements of a large buffer of zeros.
fn with_tail(queue: &gradsync::driver::Queue, dtype: DType, len: usize, tail: usize) -> DeviceBuffer {
    let mut buffer = DeviceBuffer::zeroed(queue, dtype, len).unwrap();
    let ones = DeviceBuffer::from_host(queue, (&vec![1.0f32; tail]).into()).unwrap();
    cuda::cast(buffer.as_mut_slice().range_mut(len - tail..len), ones.as_slice()).unwrap();
    buffer
}

fn last(buffer: &DeviceBuffer, count: usize) -> Vec<f64> {
    let view = buffer.as_slice();
    let mut tail = crate::host(view.dtype(), count);
    view.range(view.len() - count..view.len()).copy_to_host(tail.tensor_mut(0).into_data()).unwrap();
    tail.tensor(0).data().to_f64_vec()
}

fn check(len: usize) {
    let queue = queue();
    let tail = 3;
    let value = with_tail(&queue, DType::BF16, len, tail);
    let mut sum = with_tail(&queue, DType::F16, len, tail);
    cuda::accumulate(sum.as_mut_slice(), value.as_slice()).unwrap();
    assert_eq!(last(&sum, 5), [0.0, 0.0, 2.0, 2.0, 2.0], "accumulate over {len}");
    assert!(cuda::all_finite(sum.as_slice()).unwrap());

    let mut layers = SegmentWorkspace::new(&queue, len, &[0..len - 1, len - 1..len], 2).unwrap();
    let ones = with_tail(&queue, DType::F16, len, tail);
    layers.dots(sum.as_slice(), ones.as_slice()).unwrap();
    assert_eq!(layers.read_totals(3).unwrap(), [4.0, 8.0, 2.0, 2.0, 4.0, 1.0], "dots over {len}");
    layers.gram(&[sum.as_slice(), ones.as_slice()]).unwrap();
    assert_eq!(layers.read_totals(3).unwrap(), [8.0, 4.0, 2.0, 4.0, 2.0, 1.0], "gram over {len}");
    layers.coefficients().unwrap();
    drop(value);
    let mut result = DeviceBuffer::zeroed(&queue, DType::BF16, len).unwrap();
    layers.combine(result.as_mut_slice(), &[sum.as_slice(), ones.as_slice()]).unwrap();
    // The vectors are parallel, so the result is their mean.
    assert_eq!(last(&result, 4), [0.0, 1.5, 1.5, 1.5], "combine over {len}");
    cuda::zero(result.as_mut_slice()).unwrap();
    assert_eq!(last(&result, 4), [0.0; 4], "zero over {len}");
}

#[test]
fn all_kernels_count_beyond_2_to_the_24() {
    check((1 << 24) + 1);
}

#[test]
fn all_kernels_count_beyond_2_to_the_31() {
    check((1 << 31) + 5);
}
