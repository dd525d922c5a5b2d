//! Reductions on device memory give the bits of reductions on host memory, over the same MPI; with factors, they give the bits of a single
//! rounding.

use gradsync::comm::{Collectives, Communicator, ReduceOp, Scaling};
use gradsync_tests::array::Array;
use gradsync_tests::collectives::ours;
use gradsync_tests::inputs::edges;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::reduce::Op;

use super::{Cases, LENS, SHORT, part};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for format in Format::ALL {
        for op in Op::ALL {
            let op = ours(op);
            report.case(&cases.name(&format!("all_reduce {op} {}", format.name())), || {
                let longest = (format == Format::BF16 && op == ReduceOp::Sum).then_some(LENS[5]);
                SHORT.iter().copied().chain(longest).for_each(|len| all_reduce(cases, format, op, len));
            });
            report.case(&cases.name(&format!("reduce_scatter {op} {}", format.name())), || {
                let longest = (format == Format::F32 && op == ReduceOp::Mean).then_some(LENS[4]);
                SHORT.iter().copied().chain(longest).for_each(|len| reduce_scatter(cases, format, op, len));
            });
        }
        report.case(&cases.name(&format!("all_reduce of {} edges", format.name())), || edge_values(cases, format));
        report.case(&cases.name(&format!("all_reduce with factors {}", format.name())), || scaled(cases, format));
        report.case(&cases.name(&format!("all_reduce with weights {}", format.name())), || weighted(cases, format));
    }
    report.case(&cases.name("all_reduce of more windows than blocks"), || many_windows(cases));
}

/// The bits of the host transport.
fn on_host(cases: &Cases<'_>, own: &Array, op: ReduceOp) -> Array {
    let mut expected = own.clone();
    cases.context.job().all_reduce(expected.slice_mut(), op).unwrap();
    expected
}

fn all_reduce(cases: &Cases<'_>, format: Format, op: ReduceOp, len: usize) {
    let own = Array::new(format, &cases.inputs(format, len)[cases.rank()]);
    let expected = on_host(cases, &own, op);
    let mut data = cases.placed(&own);
    cases.comm.all_reduce(data.slice_mut(), op).unwrap();
    cases.assert_holds(&format!("{len} in place"), &data, &expected);

    let (input, mut output) = (cases.placed(&own), cases.room(format, len));
    cases.comm.all_reduce_into(input.slice(), output.slice_mut(), op, Scaling::NONE).unwrap();
    cases.assert_holds(&format!("{len}"), &output, &expected);
    cases.assert_holds(&format!("the input of {len}"), &input, &own);
}

fn reduce_scatter(cases: &Cases<'_>, format: Format, op: ReduceOp, len: usize) {
    let (rank, world_size) = (cases.rank(), cases.world_size());
    let own = Array::new(format, &cases.inputs(format, len * world_size)[rank]);
    let mut expected = Array::unwritten(format, len);
    cases.context.job().reduce_scatter(own.slice(), expected.slice_mut(), op).unwrap();
    let (input, mut output) = (cases.placed(&own), cases.room(format, len));
    cases.comm.reduce_scatter(input.slice(), output.slice_mut(), op).unwrap();
    cases.assert_holds(&format!("shards of {len}"), &output, &expected);
    cases.assert_holds(&format!("the input of shards of {len}"), &input, &own);

    let mut data = cases.placed(&own);
    cases.comm.reduce_scatter_in_place(data.slice_mut(), op).unwrap();
    cases.comm.synchronize(&cases.context.queue).unwrap();
    let shard = part(&data.read_after_failure(), rank * len..(rank + 1) * len);
    assert!(shard == expected, "shards of {len} in place: other bits than expected");
}

/// NaN, infinities, subnormals and the limits, rotated differently on each rank.
fn edge_values(cases: &Cases<'_>, format: Format) {
    for op in Op::ALL.map(ours) {
        let mut values = edges(format);
        let shift = cases.rank() * 5 % values.len();
        values.rotate_left(shift);
        let own = Array::new(format, &values);
        let expected = on_host(cases, &own, op);
        let mut data = cases.placed(&own);
        cases.comm.all_reduce(data.slice_mut(), op).unwrap();
        cases.assert_holds(&format!("{op}"), &data, &expected);
    }
}

/// Factors multiply the elements and the total in f64, and there is one rounding.
fn scaled(cases: &Cases<'_>, format: Format) {
    let world_size = cases.world_size() as f64;
    for (before, after) in [(0.5, 1.0), (1.0, 3.0), (0.1, -7.25), (-1e-3, 1e3)] {
        for op in Op::ALL.map(ours) {
            for len in [1, 4097] {
                let inputs = cases.inputs(format, len);
                let total = |index: usize| {
                    let scaled = inputs.iter().map(|input| input[index] * before);
                    let total = match op {
                        ReduceOp::Sum => scaled.reduce(|left, right| left + right),
                        ReduceOp::Mean => scaled.reduce(|left, right| left + right).map(|sum| sum / world_size),
                        ReduceOp::Max => scaled.reduce(f64::max),
                        ReduceOp::Min => scaled.reduce(f64::min),
                        _ => unreachable!("{op} is not tested here"),
                    };
                    format.round(total.expect("a rank") * after)
                };
                let expected = Array::new(format, &(0..len).map(total).collect::<Vec<_>>());
                let what = format!("{op} of {len} with {before} and {after}");
                let own = Array::new(format, &inputs[cases.rank()]);
                let (input, mut output) = (cases.placed(&own), cases.room(format, len));
                let scaling = Scaling { before, after };
                cases.comm.all_reduce_into(input.slice(), output.slice_mut(), op, scaling).unwrap();
                cases.assert_holds(&what, &output, &expected);
                let mut data = cases.placed(&own);
                cases.comm.all_reduce_scaled(data.slice_mut(), op, scaling).unwrap();
                cases.assert_holds(&format!("{what}, in place"), &data, &expected);
            }
        }
    }
}

/// A mean with weights has the bits of the host transport, also of numbers of which no two can be added within the range of the dtype.
fn weighted(cases: &Cases<'_>, format: Format) {
    let weights: Vec<f64> = (0..cases.world_size()).map(|rank| [97.0, 1.0, 0.0, 2.0][rank % 4]).collect();
    for len in [1, 4097] {
        for values in [cases.inputs(format, len).swap_remove(cases.rank()), vec![format.max_finite(); len]] {
            let own = Array::new(format, &values);
            let (mut expected, mut data) = (own.clone(), cases.placed(&own));
            cases.context.job().all_reduce_weighted(expected.slice_mut(), &weights).unwrap();
            cases.comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
            cases.assert_holds(&format!("{len} with weights"), &data, &expected);
        }
    }
}

/// Numbers are integers, so the sum is exact.
fn many_windows(cases: &Cases<'_>) {
    let number = |rank: usize, index: usize| ((index % 10_007) * (rank + 1)) as f32;
    let own = Array::F32((0..LENS[5]).map(|index| number(cases.rank(), index)).collect());
    let sum = |index: usize| (0..cases.world_size()).map(|rank| number(rank, index)).sum();
    let expected = Array::F32((0..LENS[5]).map(sum).collect());
    let mut data = cases.placed(&own);
    cases.comm.all_reduce(data.slice_mut(), ReduceOp::Sum).unwrap();
    cases.assert_holds("the sum", &data, &expected);
}
