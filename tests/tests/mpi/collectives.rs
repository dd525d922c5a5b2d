//! Collectives × dtypes × operations × lengths, against the oracle.

use gradsync::comm::{Communicator, ReduceOp};
use gradsync_tests::array::Array;
use gradsync_tests::collectives::{LENS, assert_reduced, inputs, ours};
use gradsync_tests::inputs::edges;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::reduce::{self, Op};
use gradsync_tests::tolerance::assert_equal;

use crate::cases::{Cases, assert_agreed};

/// As for every transport, and around the 3 KiB that travel with a call here: of 16-bit numbers the last that do, and the first that do not.
fn lens() -> impl Iterator<Item = usize> {
    LENS.into_iter().chain([1536, 1537])
}

pub(crate) fn run(cases: &mut Cases) {
    for format in Format::ALL {
        for len in lens() {
            for op in Op::ALL {
                reductions(cases, format, len, op);
            }
            moves(cases, format, len);
        }
        broadcasts(cases, format);
        edge_values(cases, format);
    }
    several_windows(cases);
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
        assert_equal(&what, &output.values(), &reduce::all_to_all(&inputs, rank));
    });
}

fn broadcasts(cases: &mut Cases, format: Format) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    for root in 0..world_size {
        for len in lens() {
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

/// NaN, infinities, subnormals and the limits; and NaN on one rank alone, whose bits are the same everywhere.
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

/// Longer than what a reduction holds at a time, and no multiple of it: sums of small integers are exact.
fn several_windows(cases: &mut Cases) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let value = |rank: usize, i: usize| ((i % 1013) * (rank + 1)) as f32;
    let sum = |i: usize| ((i % 1013) * (world_size * (world_size + 1) / 2)) as f32;
    cases.check("all_reduce of 5000011 f32", |comm| {
        let mut data: Vec<f32> = (0..5_000_011).map(|i| value(rank, i)).collect();
        comm.all_reduce((&mut data).into(), ReduceOp::Sum).unwrap();
        let wrong = data.iter().enumerate().find(|&(i, &got)| got != sum(i));
        assert_eq!(wrong, None);
    });
    cases.check("reduce_scatter of several windows", |comm| {
        let len = 4_500_007 / world_size;
        let input: Vec<f32> = (0..len * world_size).map(|i| value(rank, i)).collect();
        let mut output = vec![7.0f32; len];
        comm.reduce_scatter((&input).into(), (&mut output).into(), ReduceOp::Sum).unwrap();
        let wrong = output.iter().enumerate().find(|&(i, &got)| got != sum(rank * len + i));
        assert_eq!(wrong, None);
    });
}
