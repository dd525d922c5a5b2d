//! all_reduce with factors before and after the reduction: exact factors, and factors that some dtype cannot represent.

use std::rc::Rc;

use gradsync::comm::{Collectives, ReduceOp, Scaling};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;

use super::Cases;
use crate::checks::{Checks, Expected, reduced};
use crate::placed::Placed;
use crate::report::Report;

/// One even and one odd length, so that each factor is tried in place and out of place.
const LENS: [usize; 3] = [0, 33, 4098];

/// No dtype represents 0.1 and 1/3; f16 represents 1.0009765625 and bf16 does not; f32 represents 1.0000152587890625, and neither 16-bit
/// dtype does.
const FACTORS: [Scaling; 7] = [
    Scaling { before: 0.1, after: 1.0 },
    Scaling { before: 1.0, after: 1.0 / 3.0 },
    Scaling { before: 0.1, after: -3.0 },
    Scaling { before: -0.5, after: 4.0 },
    Scaling { before: 1.5, after: 1.0009765625 },
    Scaling { before: 1.0009765625, after: 1.0000152587890625 },
    Scaling { before: 0.0, after: 2.0 },
];

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    for &format in cases.formats {
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min] {
            let name = format!("scaled all_reduce {op} {}{}", format.name(), cases.how);
            report.case(&name, || scaled(cases, op, format));
        }
    }
}

/// For maxima, a separate pass applies the negative factor before the reduction, so the results are maxima of the products.
fn scaled(cases: &Cases<'_>, op: ReduceOp, format: Format) {
    let (comm, queue) = (cases.comm, &cases.context.queue);
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs = cases.inputs(format, len);
        let own = Array::new(format, &inputs[cases.rank()]);
        for (index, scaling) in FACTORS.into_iter().enumerate() {
            let expected = reduced(op, format, scaling, &inputs);
            let (begin, is_in_place) = (index / 2 % 2, (index + len) % 2 == 0);
            let mut input = Placed::new(queue, &own, begin);
            if is_in_place {
                comm.all_reduce_scaled(input.slice_mut(), op, scaling).unwrap();
                checks.same(format!("{len} elements, {scaling:?}, in place"), input.read(comm), &expected);
                continue;
            }
            let mut output = Placed::unwritten(queue, format, len, begin);
            comm.all_reduce_into(input.slice(), output.slice_mut(), op, scaling).unwrap();
            checks.same(format!("{len} elements, {scaling:?}"), output.read(comm), &expected);
            let untouched = Rc::new(Expected::Bits(own.clone()));
            checks.own(format!("the input of {len} elements, {scaling:?}"), input.read(comm), &untouched);
        }
    }
    checks.finish();
}
