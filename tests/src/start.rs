//! Test cases for equal initial parameters and for means over ranks, shared by every transport of host memory.
//!
//! All ranks of a communicator run a case, which leaves the communicator usable.

use gradsync::comm::Communicator;
use gradsync::train::{RunningMean, broadcast_numbers, broadcast_parameters, compare_parameters, mean_over_ranks};
use gradsync::{Error, Result, SliceMut};

use crate::array::Array;
use crate::inputs::vector;
use crate::oracle::Format;
use crate::tensors::Case;

/// All cases.
pub const ALL: &[Case] = &[
    Case { name: "broadcast parameters", run: broadcast },
    Case { name: "broadcasts that are refused", run: refusals },
    Case { name: "compared parameters", run: compare },
    Case { name: "compared parameters that are not finite", run: compare_not_finite },
    Case { name: "means over ranks", run: means },
    Case { name: "means at the end of the range", run: means_at_the_end_of_the_range },
];

const LENS: [usize; 5] = [3, 0, 1, 40_000, 777];

/// Tensors of every dtype, with different values on every rank.
fn tensors(rank: usize) -> Vec<(String, Array)> {
    let tensor = |(index, len): (usize, &usize)| {
        let format = Format::ALL[index % Format::ALL.len()];
        (format!("tensor.{index}"), Array::new(format, &vector(format, *len, (100 * rank + index) as u64)))
    };
    LENS.iter().enumerate().map(tensor).collect()
}

fn mutable(tensors: &mut [(String, Array)]) -> Vec<(&str, SliceMut<'_>)> {
    tensors.iter_mut().map(|(name, array)| (&name[..], array.slice_mut())).collect()
}

fn compared(comm: &dyn Communicator, tensors: &[(String, Array)]) -> Result<()> {
    let tensors: Vec<_> = tensors.iter().map(|(name, array)| (&name[..], array.slice())).collect();
    compare_parameters(comm, &tensors)
}

/// Broadcasts are bit-identical to every root's tensors, including NaN payloads and negative zeros.
fn broadcast(comm: &dyn Communicator) {
    let special =
        |rank: usize| Array::from_patterns(Format::F32, [0x7fc0_0001 + rank as u64, 0x8000_0000, 1].into_iter());
    for root in 0..comm.world_size() {
        let mut own = tensors(comm.rank());
        own.push(("special".into(), special(comm.rank())));
        broadcast_parameters(comm, &mut mutable(&mut own), root).unwrap();
        let mut expected = tensors(root);
        expected.push(("special".into(), special(root)));
        assert!(own == expected, "root {root}");
        own.pop();
        compared(comm, &own).unwrap();

        let mut numbers = [comm.rank() as u64, u64::MAX - comm.rank() as u64];
        broadcast_numbers(comm, &mut numbers, root).unwrap();
        assert_eq!(numbers, [root as u64, u64::MAX - root as u64]);
    }
    broadcast_parameters(comm, &mut [], 0).unwrap();
    broadcast_numbers(comm, &mut [], 0).unwrap();
    // These are more tensors than one group of a broadcast holds.
    let mut many: Vec<_> =
        (0..300).map(|index| (index.to_string(), Array::new(Format::F64, &[(comm.rank() + index) as f64]))).collect();
    broadcast_parameters(comm, &mut mutable(&mut many), 0).unwrap();
    assert!(many.iter().enumerate().all(|(index, (_, array))| array.values() == [index as f64]));
}

/// After an error nothing is written, and every rank has the error.
fn refusals(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut own = tensors(rank);
    for outcome in
        [broadcast_parameters(comm, &mut mutable(&mut own), world_size), broadcast_numbers(comm, &mut [1], world_size)]
    {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(&format!("the root is rank {world_size}, and there are {world_size} ranks")), "{error}");
    }
    if world_size > 1 {
        let last = world_size - 1;
        let disagreement = |outcome: Result<()>, label: &str, left: &str, right: &str| match outcome {
            Err(Error::Disagreement(found)) => {
                assert_eq!((&found.label[..], &found.left[..], &found.right[..]), (label, left, right));
                assert_eq!((found.left_rank, found.right_rank), (0, last));
            }
            other => panic!("{label}: {other:?}"),
        };
        let mut changed = tensors(rank);
        if rank == last {
            changed[2].0 = "weight".into();
        }
        disagreement(
            broadcast_parameters(comm, &mut mutable(&mut changed), 0),
            "tensor 2",
            r#""tensor.2""#,
            r#""weight""#,
        );
        disagreement(compared(comm, &changed), "tensor 2", r#""tensor.2""#, r#""weight""#);
        let mut changed = tensors(rank);
        if rank == last {
            changed[4].1 = Array::new(Format::F64, &[0.0; 776]);
        }
        let label = r#"the elements of tensor 4 "tensor.4""#;
        disagreement(broadcast_parameters(comm, &mut mutable(&mut changed), 0), label, "777", "776");
        disagreement(broadcast_parameters(comm, &mut mutable(&mut own), rank / last), "root", "0", "1");
        let mut numbers = vec![0; 2 + rank / last];
        disagreement(broadcast_numbers(comm, &mut numbers, 0), "numbers", "2", "3");
    }
    assert!(own == tensors(rank), "written");
}

/// The comparison detects a single differing bit on one rank.
fn compare(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut own = tensors(0);
    compared(comm, &own).unwrap();
    compare_parameters::<gradsync::memory::Host>(comm, &[]).unwrap();
    let last = world_size - 1;
    if rank == last {
        let (_, array) = &mut own[3];
        let mut patterns = array.patterns();
        patterns[39_999] ^= 1;
        *array = Array::from_patterns(array.format(), patterns.into_iter());
    }
    match world_size {
        1 => compared(comm, &own).unwrap(),
        _ => {
            let error = compared(comm, &own).unwrap_err().to_string();
            // With two ranks, the lower one counts as correct.
            assert!(error.contains(&format!("the parameters of rank {last} differ from those of rank")), "{error}");
            assert!(
                error.contains(&format!(r#"on rank {last} "tensor.3" is the first tensor that differs"#)),
                "{error}"
            );
        }
    }
}

/// Parameters that are NaN or infinite and equal on all ranks pass no comparison, in any dtype and place; where ranks differ, the error
/// says who has such numbers.
fn compare_not_finite(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let last = world_size - 1;
    let numbers = [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf"), (f64::NAN, "NaN")];
    // The long tensor has more than a MiB of elements in every dtype.
    let len = 600_000;
    for ((format, (value, words)), place) in Format::ALL.into_iter().zip(numbers).zip([0, 131_072, 524_288, len - 1]) {
        let with = |value: f64| {
            let mut values = vec![1.0; len];
            values[place] = value;
            [tensors(0), vec![("long".into(), Array::new(format, &values))]].concat()
        };
        let error = compared(comm, &with(value)).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error:?}");
        let expected = format!(r#"not finite: element {place} of "long" is {words}"#);
        assert!(error.to_string().contains(&expected), "{format:?}: {error}");
        if world_size > 1 {
            let error = compared(comm, &with(if rank == last { value } else { 2.0 })).unwrap_err().to_string();
            let expected = format!(
                r#"on rank {last} "long" is the first tensor that differs; "long" has NaN or infinities on rank {last}"#
            );
            assert!(error.contains(&expected), "{error}");
        }
        compared(comm, &with(2.0)).unwrap();
    }
}

/// Sums leave the range of `f64`, and their means do not; numbers that are not finite have no mean that is.
fn means_at_the_end_of_the_range(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let largest = f64::MAX;
    // Every rank has the same values, with the largest sum that one rank can pass.
    assert_eq!(mean_over_ranks(comm, largest, 1).unwrap(), Some(largest));
    assert_eq!(mean_over_ranks(comm, -largest, 4).unwrap(), Some(-largest / 4.0));
    let alternating = if rank % 2 == 0 { largest } else { -largest };
    let expected = if world_size % 2 == 0 { 0.0 } else { largest / world_size as f64 };
    assert_eq!(mean_over_ranks(comm, alternating, 1).unwrap(), Some(expected));
    for value in [f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(mean_over_ranks(comm, if rank == 0 { value } else { largest }, 1).unwrap(), Some(value));
    }
    assert!(mean_over_ranks(comm, if rank == 0 { f64::NAN } else { largest }, 1).unwrap().unwrap().is_nan());

    let mut running = RunningMean::new().unwrap();
    for _ in 0..4 {
        running.add(&[largest], 8).unwrap();
    }
    assert_eq!(running.over_ranks(comm).unwrap(), Some(largest));
    // The sum is infinite before the numbers cancel each other; powers of two do that without a rounding.
    running.reset().unwrap();
    let huge = 2.0f64.powi(1023);
    for value in [huge, huge, huge, -huge, -huge, -huge] {
        running.add(&[value], 8).unwrap();
    }
    running.add(&[2.0f64], 48).unwrap();
    assert_eq!(running.over_ranks(comm).unwrap(), Some(1.0));
    // One rank's sum leaves the range, and the others' do not.
    running.reset().unwrap();
    let own = if rank == 0 { largest } else { 1.0 };
    running.add(&[own], 2).unwrap();
    running.add(&[own / 2.0], 2).unwrap();
    let mean = running.over_ranks(comm).unwrap().unwrap();
    let expected = 0.75 * (largest / world_size as f64);
    assert!((mean - expected).abs() <= 4.0 * f64::EPSILON * expected, "{mean:e} for {expected:e}");
    running.add(&[f64::INFINITY], 1).unwrap();
    assert_eq!(running.over_ranks(comm).unwrap(), Some(f64::INFINITY));

    // The count ends in an error that adds nothing.
    running.reset().unwrap();
    running.add(&[3.0f32], u64::MAX - 1).unwrap();
    let error = running.add(&[5.0f32], 2).unwrap_err();
    assert!(error.to_string().contains("2 examples after 18446744073709551614"), "{error}");
    assert_eq!((running.count(), running.over_ranks(comm).unwrap()), (u64::MAX - 1, Some(3.0)));
}

/// Means are weighted by counts; a rank without examples is ignored, even if its sum is NaN.
fn means(comm: &dyn Communicator) {
    let (rank, world_size) = (comm.rank(), comm.world_size());
    let mut running = RunningMean::new().unwrap();
    assert_eq!(running.over_ranks(comm).unwrap(), None);
    // Rank r has r + 1 batches of 2 examples with mean r, and one batch of 1 example with mean 8: these are small integers, so that all
    // sums are exact.
    for _ in 0..=rank {
        running.add(&[rank as f32], 2).unwrap();
    }
    running.add(&[8.0f64], 1).unwrap();
    running.add(&[f32::NAN], 0).unwrap();
    assert_eq!(running.count(), 2 * rank as u64 + 3);
    let error = running.add(&[1.0f32, 2.0], 1).unwrap_err();
    assert!(matches!(error, Error::LengthMismatch { right: 2, .. }), "{error}");
    let total: usize = (0..world_size).map(|rank| 2 * (rank + 1) * rank + 8).sum();
    let count: usize = (0..world_size).map(|rank| 2 * rank + 3).sum();
    assert_eq!(running.over_ranks(comm).unwrap(), Some(total as f64 / count as f64));
    running.reset().unwrap();
    assert_eq!((running.count(), running.over_ranks(comm).unwrap()), (0, None));

    let (sum, own) = if rank == 0 { (10.0, 4) } else { (f64::NAN, 0) };
    assert_eq!(mean_over_ranks(comm, sum, own).unwrap(), Some(2.5));
    assert_eq!(mean_over_ranks(comm, 1.0, 0).unwrap(), None);
}
