//! all_reduce with factors, with weights, and means of numbers near the largest.

use std::rc::Rc;

use gradsync::comm::{Collectives, ReduceOp, Scaling};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::elementwise::scale;
use gradsync_tests::suite::checks::{Checks, Expected};
use gradsync_tests::suite::collectives::{Grid, scaled};
use gradsync_tests::tolerance::transport::{Factor, ScaledSum};

use super::Cases;
use crate::checks::reduced;
use crate::placed::Placed;
use crate::report::Report;

/// One even and one odd length, so that each factor is tried in place and out of place.
const LENS: [usize; 3] = [0, 33, 4098];

pub(super) fn run(cases: &Cases<'_>, grid: Grid<'_>, report: &mut Report) {
    for &format in grid.formats {
        report.case(&format!("weighted all_reduce {}{}", format.name(), grid.how), || weighted(cases, format));
        report.case(&format!("mean of large {}{}", format.name(), grid.how), || large(cases, format));
    }
    scaled(&cases.operands(), Grid { lens: &LENS, ..grid }, report);
}

/// Numbers of which no two can be added within the range of the dtype.
fn large_inputs(cases: &Cases<'_>, format: Format, len: usize) -> Vec<Vec<f64>> {
    vec![vec![format.round(0.9 * format.max_finite()); len]; cases.world_size()]
}

fn large(cases: &Cases<'_>, format: Format) {
    let (comm, queue) = (cases.comm, &cases.context.queue);
    let mut checks = Checks::new(comm);
    for len in LENS {
        let inputs = large_inputs(cases, format, len);
        let expected = reduced(ReduceOp::Mean, format, Scaling::NONE, &inputs);
        let mut data = Placed::new(queue, &Array::new(format, &inputs[cases.rank()]), 0);
        comm.all_reduce(data.slice_mut(), ReduceOp::Mean).unwrap();
        checks.same(format!("{len} elements"), data.read(comm), &expected);
    }
    checks.finish();
}

/// Every rank's share of the weights multiplies its input by the `scale` kernel; the sum of the products is within its bound.
fn weighted(cases: &Cases<'_>, format: Format) {
    let (comm, queue, world_size) = (cases.comm, &cases.context.queue, cases.world_size());
    let weights: Vec<f64> = (0..world_size).map(|rank| [97.0, 1.0, 0.0, 2.0][rank % 4]).collect();
    let one = Factor { numerator: 1.0, divisor: 1.0 };
    let rule = ScaledSum::new(format, world_size, one, one);
    let mut checks = Checks::new(comm);
    for len in LENS {
        for (name, inputs) in [("numbers", cases.inputs(format, len)), ("large", large_inputs(cases, format, len))] {
            let products = |index: usize| {
                let shares = weights.iter().map(|weight| weight / weights.iter().sum::<f64>());
                let products = inputs.iter().zip(shares).filter(|(_, share)| *share != 0.0);
                rule.expect(products.map(|(input, share)| scale(format, format, input[index], share)))
            };
            let (exact, bounds) = (0..len).map(products).unzip();
            let mut own = inputs[cases.rank()].clone();
            if weights[cases.rank()] == 0.0 {
                own.fill(f64::NAN);
            }
            let mut data = Placed::new(queue, &Array::new(format, &own), len % 2);
            comm.all_reduce_weighted(data.slice_mut(), &weights).unwrap();
            let expected = Rc::new(Expected::Within { exact, bounds });
            checks.same(format!("{len} {name} with {weights:?}"), data.read(comm), &expected);
        }
    }
    checks.finish();
}
