//! Collectives between threads on tensors in separate memory, and the kernels on many tensors.

use gradsync::comm::{CommError, Ranks, local};
use gradsync::internal::kernels::cpu;
use gradsync::{DType, Error, GradientBuffer, SliceMut};
use gradsync_tests::array::Array;
use gradsync_tests::inputs::vector;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::guarded;

/// The results have the bits of one call per tensor, in every pair of dtypes, for few and for many elements.
#[test]
fn accumulate_all_and_cast_all_equal_updates_one_by_one() {
    for to in Format::ALL {
        for from in Format::ALL {
            for lens in [&[][..], &[5], &[0, 1, 700, 3], &[300_000, 9, 41_000]] {
                let arrays = |format: Format, seed: u64| -> Vec<Array> {
                    lens.iter().map(|&len| Array::new(format, &vector(format, len, seed + len as u64))).collect()
                };
                let (sums, values) = (arrays(to, 1), arrays(from, 2));
                let sources: Vec<_> = values.iter().map(Array::slice).collect();
                let all = |update: fn(&mut [SliceMut<'_>], &[gradsync::Slice<'_>]) -> gradsync::Result<()>| {
                    let mut got = sums.clone();
                    update(&mut got.iter_mut().map(Array::slice_mut).collect::<Vec<_>>(), &sources).unwrap();
                    got.iter().map(Array::patterns).collect::<Vec<_>>()
                };
                let one = |update: fn(SliceMut<'_>, gradsync::Slice<'_>) -> gradsync::Result<()>| {
                    let mut got = sums.clone();
                    got.iter_mut().zip(&sources).for_each(|(sum, value)| update(sum.slice_mut(), *value).unwrap());
                    got.iter().map(Array::patterns).collect::<Vec<_>>()
                };
                assert_eq!(all(cpu::accumulate_all), one(cpu::accumulate), "{from:?} onto {to:?} of {lens:?}");
                assert_eq!(all(cpu::cast_all), one(cpu::cast), "{from:?} to {to:?} of {lens:?}");
                let mut zeroed = sums.clone();
                cpu::zero_all(&mut zeroed.iter_mut().map(Array::slice_mut).collect::<Vec<_>>());
                assert!(zeroed.iter().flat_map(Array::patterns).all(|pattern| pattern == 0));
            }
        }
    }
}

#[test]
fn accumulate_all_and_cast_all_name_a_tensor_of_another_length() {
    let (mut one, mut two) = ([1.0f32; 3], [1.0f32; 4]);
    let mut sums: [SliceMut<'_>; 2] = [(&mut one).into(), (&mut two).into()];
    let value = [1.0f32; 3];
    let message = cpu::accumulate_all(&mut sums, &[(&value).into(), (&value).into()]).unwrap_err().to_string();
    assert!(message.contains("sum 1") && message.contains("value 1"), "{message}");
    let message = cpu::cast_all(&mut sums, &[(&value).into()]).unwrap_err().to_string();
    assert!(message.contains("destinations") && message.contains("sources"), "{message}");
    assert_eq!((one, two), ([1.0; 3], [1.0; 4]));
}

#[test]
fn tensors_mut_gives_tensors_by_name_and_two_at_once() {
    let mut buffer = GradientBuffer::new(DType::F32, 2, [("a", vec![2, 2]), ("b", vec![0]), ("c", vec![3])]).unwrap();
    for (index, (name, mut tensor)) in buffer.tensors_mut().enumerate() {
        assert_eq!(name, ["a", "b", "c"][index]);
        let len = tensor.data().len();
        tensor.copy_from_slice(&vec![index as f32 + 1.0; len]).unwrap();
    }
    let (mut last, first) = buffer.two_tensors_mut(2, 0);
    assert_eq!((last.shape(), first.shape()), (&[3][..], &[2, 2][..]));
    last.copy_from_slice(&first.data().to_vec::<f32>().unwrap()[..3]).unwrap();
    let names: Vec<(&str, Vec<f32>)> =
        buffer.tensors().map(|(name, tensor)| (name, tensor.to_vec().unwrap())).collect();
    assert_eq!(names, [("a", vec![1.0; 4]), ("b", vec![]), ("c", vec![1.0; 3])]);
    let wrong = buffer.tensor(0).to_vec::<f64>().unwrap_err();
    assert!(matches!(wrong, Error::DTypeMismatch { left: DType::F32, right: DType::F64, .. }), "{wrong}");
    let wrong = buffer.tensor_mut(0).copy_from_slice(&[0.0f64; 4]).unwrap_err();
    assert!(matches!(wrong, Error::DTypeMismatch { .. }), "{wrong}");
    buffer.zero().unwrap();
    assert!(buffer.as_slice().to_f64_vec().iter().all(|&value| value == 0.0));
}

/// The error of the rank that fails by itself is returned, not the errors of the ranks that wait for it.
#[test]
fn run_gives_results_in_order_or_the_first_error() {
    guarded(60, || {
        assert_eq!(local::run(3, |comm| Ok::<_, Error>(comm.rank() * 10)).unwrap(), [0, 10, 20]);
        for failing in 0..4 {
            let outcome = local::run(4, |comm| {
                if comm.rank() == failing {
                    return Err(Error::InvalidArgument { operation: "test", reason: format!("rank {failing}") });
                }
                comm.barrier()
            });
            match outcome {
                Err(Error::InvalidArgument { reason, .. }) => assert_eq!(reason, format!("rank {failing}")),
                other => panic!("{other:?}"),
            }
        }
        assert!(local::run(0, |_| Ok::<_, Error>(())).is_err());
        let panicked = std::panic::catch_unwind(|| {
            local::run(2, |comm| {
                assert!(comm.rank() > 0, "rank 0 panics");
                match comm.barrier() {
                    Err(Error::Comm(CommError::PeerGone { .. })) => Ok::<_, Error>(()),
                    other => panic!("{other:?}"),
                }
            })
        });
        let message = panicked.expect_err("a rank panicked");
        assert_eq!(message.downcast_ref::<&str>(), Some(&"rank 0 panics"));
    });
}
