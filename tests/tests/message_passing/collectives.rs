//! Collectives × dtypes × operations × lengths, against the oracle.

use gradsync::comm::{Collectives, Ranks, ReduceOp};
use gradsync_tests::array::Array;
use gradsync_tests::collectives::{LENS, all_to_all_mixed, assert_reduced, inputs, ours};
use gradsync_tests::inputs::edges;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::reduce::{self, Op};
use gradsync_tests::tolerance::assert_equal;

use super::cases::{Cases, assert_agreed};

/// The lengths of every transport, and the border of the 3 KiB that travel eagerly with a call here: the longest eager payload of 16-bit
/// numbers, and one element more.
fn lens() -> impl Iterator<Item = usize> {
    LENS.into_iter().chain([1536, 1537])
}

pub(crate) fn run(cases: &mut Cases) {
    run_up_to(cases, usize::MAX);
    several_windows(cases);
    back_to_back(cases);
    cases.done("long collectives");
}

/// Runs the cases in which no call has more than `most_bytes` bytes.
pub(crate) fn run_up_to(cases: &mut Cases, most_bytes: usize) {
    // Results are compared by gathering them as f64.
    let longest = most_bytes / size_of::<f64>() / cases.world_size();
    for format in Format::ALL {
        for len in lens().filter(|&len| len <= longest) {
            for op in Op::ALL {
                reductions(cases, format, len, op);
            }
            moves(cases, format, len);
        }
        broadcasts(cases, format, longest);
        edge_values(cases, format);
    }
    cases.check("barriers", |comm| (0..50).for_each(|_| comm.barrier().unwrap()));
    cases.done("collectives");
}

fn reductions(cases: &mut Cases, format: Format, len: usize, op: Op) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let what = format!("all_reduce {op:?} of {len} {format:?}");
    cases.check(&what, |comm| {
        let inputs = inputs(format, world_size, len);
        let mut data = Array::new(format, &inputs[rank]);
        comm.all_reduce(data.slice_mut(), ours(op)).unwrap();
        assert_agreed(comm, &what, &data);
        assert_reduced(&what, op, format, &data.values(), &inputs);
    });
    let what = format!("reduce_scatter {op:?} of {len} {format:?} each");
    cases.check(&what, |comm| {
        let inputs = inputs(format, world_size, len * world_size);
        let input = Array::new(format, &inputs[rank]);
        let mut output = Array::unwritten(format, len);
        comm.reduce_scatter(input.slice(), output.slice_mut(), ours(op)).unwrap();
        let shards: Vec<Vec<f64>> = inputs.iter().map(|input| input[rank * len..][..len].to_vec()).collect();
        assert_reduced(&what, op, format, &output.values(), &shards);
    });
}

fn moves(cases: &mut Cases, format: Format, len: usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let what = format!("all_gather of {len} {format:?}");
    cases.check(&what, |comm| {
        let inputs = inputs(format, world_size, len);
        let input = Array::new(format, &inputs[rank]);
        let mut output = Array::unwritten(format, len * world_size);
        comm.all_gather(input.slice(), output.slice_mut()).unwrap();
        assert_equal(&what, &output.values(), &inputs.concat());
        let mut whole = vec![7.0; len * world_size];
        whole[rank * len..][..len].copy_from_slice(&inputs[rank]);
        let mut data = Array::new(format, &whole);
        comm.all_gather_in_place(data.slice_mut()).unwrap();
        assert_equal(&format!("{what} in place"), &data.values(), &inputs.concat());
    });
    let what = format!("all_to_all of {len} {format:?}");
    cases.check(&what, |comm| {
        let inputs = inputs(format, world_size, len * world_size);
        let input = Array::new(format, &inputs[rank]);
        let mut output = Array::unwritten(format, len * world_size);
        comm.all_to_all(input.slice(), output.slice_mut()).unwrap();
        let expected = reduce::all_to_all(&inputs, rank);
        assert_equal(&what, &output.values(), &expected);
        let mut data = Array::new(format, &inputs[rank]);
        comm.all_to_all_in_place(data.slice_mut()).unwrap();
        assert_equal(&format!("{what} in place"), &data.values(), &expected);
        let mut data = Array::new(format, &inputs[rank]);
        all_to_all_mixed(comm, input.slice(), data.slice_mut());
        assert_equal(&format!("{what} in place on every second rank"), &data.values(), &expected);
    });
}

fn broadcasts(cases: &mut Cases, format: Format, longest: usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    for root in 0..world_size {
        for len in lens().filter(|&len| len <= longest) {
            let what = format!("broadcast of {len} {format:?} from {root}");
            cases.check(&what, |comm| {
                let inputs = inputs(format, world_size, len);
                let mut data = Array::new(format, &inputs[rank]);
                comm.broadcast(data.slice_mut(), root).unwrap();
                assert_equal(&what, &data.values(), &inputs[root]);
            });
        }
    }
}

/// NaN, infinities, subnormals and the limits; also a NaN on one rank alone, which gives the same bits on every rank.
fn edge_values(cases: &mut Cases, format: Format) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    for op in [Op::Sum, Op::Max, Op::Min] {
        let what = format!("{op:?} of {format:?} edges");
        cases.check(&what, |comm| {
            let mut inputs = vec![edges(format); world_size];
            let len = inputs[0].len();
            inputs.iter_mut().enumerate().for_each(|(rank, input)| input.rotate_left(rank * 5 % len));
            let mut data = Array::new(format, &inputs[rank]);
            comm.all_reduce(data.slice_mut(), ours(op)).unwrap();
            assert_agreed(comm, &what, &data);
            assert_equal(&what, &data.values(), &reduce::all_reduce(op, format, &inputs));
        });
    }
    for op in Op::ALL {
        let what = format!("{op:?} of {format:?} with NaN on the last rank");
        cases.check(&what, |comm| {
            let mut data = Array::new(format, &[if rank + 1 == world_size { f64::NAN } else { 1.0 }, 2.0]);
            comm.all_reduce(data.slice_mut(), ours(op)).unwrap();
            assert_agreed(comm, &what, &data);
            assert!(data.values()[0].is_nan() && !data.values()[1].is_nan(), "{data:?}");
        });
    }
}

/// The length exceeds the window that a reduction holds at a time, and is no multiple of it. Sums of small integers are exact.
fn several_windows(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let value = |rank: usize, i: usize| ((i % 1013) * (rank + 1)) as f32;
    let sum = |i: usize| ((i % 1013) * (world_size * (world_size + 1) / 2)) as f32;
    cases.check("all_reduce of 5000011 f32", |comm| {
        let mut data: Vec<f32> = (0..5_000_011).map(|i| value(rank, i)).collect();
        comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
        let wrong = data.iter().enumerate().find(|&(i, &got)| got != sum(i));
        assert_eq!(wrong, None);
    });
    cases.check("broadcast of 5000011 f32", |comm| {
        let mut data: Vec<f32> = (0..5_000_011).map(|i| value(rank, i)).collect();
        comm.broadcast(&mut data, world_size - 1).unwrap();
        let wrong = data.iter().enumerate().find(|&(i, &got)| got != value(world_size - 1, i));
        assert_eq!(wrong, None);
    });
    cases.check("reduce_scatter of several windows", |comm| {
        let len = 4_500_007 / world_size;
        let input: Vec<f32> = (0..len * world_size).map(|i| value(rank, i)).collect();
        let mut output = vec![7.0f32; len];
        comm.reduce_scatter(&input, &mut output, ReduceOp::Sum).unwrap();
        let wrong = output.iter().enumerate().find(|&(i, &got)| got != sum(rank * len + i));
        assert_eq!(wrong, None);
    });
    cases.check("all_to_all and all_gather of several windows", |comm| {
        let len = 4_500_007 / world_size;
        let input: Vec<f32> = (0..len * world_size).map(|i| value(rank, i)).collect();
        let expected = |i: usize| value(i / len, rank * len + i % len);
        let (mut apart, mut in_place, mut mixed) = (vec![7.0f32; len * world_size], input.clone(), input.clone());
        comm.all_to_all(&input, &mut apart).unwrap();
        comm.all_to_all_in_place(&mut in_place).unwrap();
        all_to_all_mixed(comm, &input, &mut mixed);
        for output in [&apart, &in_place, &mixed] {
            let wrong = output.iter().enumerate().find(|&(i, &got)| got != expected(i));
            assert_eq!(wrong, None);
        }
        comm.all_gather(&input[..len], &mut apart).unwrap();
        let wrong = apart.iter().enumerate().find(|&(i, &got)| got != value(i / len, i % len));
        assert_eq!(wrong, None);
    });
}

/// Collectives in direct succession, with ranks that are late in turn. The lengths are around the largest payload that travels eagerly with
/// a call in shared memory, and around payloads of whole chunks. No call may touch data of the call before that a slower rank still reads.
fn back_to_back(cases: &mut Cases) {
    const ON_A_BOARD: usize = (256 << 10) / size_of::<f64>();
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let with_a_call = ON_A_BOARD / world_size;
    let in_chunks = |parts: usize| ON_A_BOARD / parts / 64 * 64;
    let lens = [with_a_call, in_chunks(world_size + 1) * world_size, 2 * in_chunks(world_size), 7, 3 * with_a_call];
    cases.check("collectives back to back", |comm| {
        for round in 0..60 {
            let len = lens[round % lens.len()] + [0, 1, 0, 5][round % 4] - [0, 0, 1, 0][round % 4];
            let value = |rank: usize, i: usize| ((i % 1013 + round) * (rank + 1)) as f64;
            let total = (world_size * (world_size + 1) / 2) as f64;
            if round % world_size == rank {
                std::thread::sleep(std::time::Duration::from_micros(50 * (round as u64 % 7)));
            }
            let mut data: Vec<f64> = (0..len).map(|i| value(rank, i)).collect();
            comm.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            let wrong = data.iter().enumerate().find(|&(i, &got)| got != value(0, i) * total);
            assert_eq!(wrong, None, "all_reduce of {len} in round {round}");
            let mut data: Vec<f64> = (0..len).map(|i| value(rank, i)).collect();
            comm.broadcast(&mut data, round % world_size).unwrap();
            let wrong = data.iter().enumerate().find(|&(i, &got)| got != value(round % world_size, i));
            assert_eq!(wrong, None, "broadcast of {len} in round {round}");
            let input: Vec<f64> = (0..len * world_size).map(|i| value(rank, i)).collect();
            let mut output = vec![-1.0f64; len];
            comm.reduce_scatter(&input, &mut output, ReduceOp::Sum).unwrap();
            let wrong = output.iter().enumerate().find(|&(i, &got)| got != value(0, rank * len + i) * total);
            assert_eq!(wrong, None, "reduce_scatter of {len} in round {round}");
            let mut all = vec![-1.0f64; len * world_size];
            comm.all_gather(&output, &mut all).unwrap();
            let wrong = all.iter().enumerate().find(|&(i, &got)| got != value(0, i) * total);
            assert_eq!(wrong, None, "all_gather of {len} in round {round}");
            let mut exchanged = vec![-1.0f64; len * world_size];
            comm.all_to_all(&input, &mut exchanged).unwrap();
            let expected = |i: usize| value(i / len.max(1), rank * len + i % len.max(1));
            let wrong = exchanged.iter().enumerate().find(|&(i, &got)| got != expected(i));
            assert_eq!(wrong, None, "all_to_all of {len} in round {round}");
            comm.all_to_all_in_place(&mut exchanged).unwrap();
            assert!(exchanged == input, "a second all_to_all of {len} in round {round} is the inverse");
        }
    });
}
