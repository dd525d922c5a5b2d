//! all_reduce, all_reduce_into, reduce_scatter and reduce_scatter_in_place, against derived bounds.

use std::rc::Rc;

use gradsync::comm::{Collectives, ReduceOp, Scaling};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;

use super::{BEGINS, Cases};
use crate::checks::{Checks, Expected, reduced};
use crate::placed::Placed;
use crate::report::Report;

const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min];

/// The ranks' vectors, and their reduction.
struct Problem {
    len: usize,
    inputs: Rc<Vec<Vec<f64>>>,
}

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for &format in cases.formats {
        let problem = |len: usize| Problem { len, inputs: Rc::new(cases.inputs(format, len)) };
        let whole: Vec<Problem> = cases.lens.iter().map(|&len| problem(len)).collect();
        let shards: Vec<Problem> = cases.shards.iter().map(|&len| problem(len * cases.world_size())).collect();
        for op in OPS {
            let name = format!("{}{}", format.name(), cases.how);
            report.case(&format!("all_reduce {op} {name}"), || all_reduce(cases, op, format, &whole));
            if !shards.is_empty() {
                report.case(&format!("reduce_scatter {op} {name}"), || reduce_scatter(cases, op, format, &shards));
            }
        }
    }
}

fn all_reduce(cases: &Cases<'_>, op: ReduceOp, format: Format, problems: &[Problem]) {
    let (comm, queue) = (cases.comm, &cases.context.queue);
    let mut checks = Checks::new(comm);
    for Problem { len, inputs } in problems {
        let expected = reduced(op, format, Scaling::NONE, inputs);
        let own = Array::new(format, &inputs[cases.rank()]);
        for begin in BEGINS {
            let mut data = Placed::new(queue, &own, begin);
            comm.all_reduce(data.slice_mut(), op).unwrap();
            checks.same(format!("{len} elements from {begin} on, in place"), data.read(comm), &expected);

            let input = Placed::new(queue, &own, begin);
            let mut output = Placed::unwritten(queue, format, *len, 1 - begin);
            comm.all_reduce_into(input.slice(), output.slice_mut(), op, Scaling::NONE).unwrap();
            checks.same(format!("{len} elements from {begin} on"), output.read(comm), &expected);
            let untouched = Rc::new(Expected::Bits(own.clone()));
            checks.own(format!("the input of {len} elements from {begin} on"), input.read(comm), &untouched);
        }
    }
    checks.finish();
}

fn reduce_scatter(cases: &Cases<'_>, op: ReduceOp, format: Format, problems: &[Problem]) {
    let (comm, queue, rank) = (cases.comm, &cases.context.queue, cases.rank());
    let mut checks = Checks::new(comm);
    for Problem { len, inputs } in problems {
        let shard = len / cases.world_size();
        let expected = Rc::new(reduced(op, format, Scaling::NONE, inputs).shard(rank, shard));
        let own = Array::new(format, &inputs[rank]);
        for begin in BEGINS {
            let input = Placed::new(queue, &own, begin);
            let mut output = Placed::unwritten(queue, format, shard, 1 - begin);
            comm.reduce_scatter(input.slice(), output.slice_mut(), op).unwrap();
            checks.own(format!("shards of {shard} from {begin} on"), output.read(comm), &expected);
            let untouched = Rc::new(Expected::Bits(own.clone()));
            checks.own(format!("the input with shards of {shard} from {begin} on"), input.read(comm), &untouched);

            let mut data = Placed::new(queue, &own, begin);
            comm.reduce_scatter_in_place(data.slice_mut(), op).unwrap();
            // The contents of the other shards are unspecified.
            let result = super::part(&data.read(comm), rank * shard..(rank + 1) * shard);
            checks.own(format!("shards of {shard} from {begin} on, in place"), result, &expected);
        }
    }
    checks.finish();
}
