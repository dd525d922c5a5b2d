//! Every collective over MPI on device memory, means with weights, reductions of many windows, and operations without data.

use gradsync::comm::{Collectives, Ranks, ReduceOp};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::collectives::{Grid, OPS, edge_values, inputs, reductions, scaled};
use gradsync_tests::suite::data_movement;

use super::{Cases, LENS, SHORT};
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let how = cases.name("");
    let grid = Grid { how: &how, formats: &Format::ALL, ops: &OPS, lens: SHORT, shards: SHORT };
    reductions(cases, grid, report);
    edge_values(cases, grid, report);
    scaled(cases, Grid { lens: &[1, 4097], ..grid }, report);
    data_movement::collectives(cases, grid, report);
    // Each long length is tried with one format.
    let how = cases.name(", long");
    let long = Grid { how: &how, lens: &[], shards: &[], ..grid };
    reductions(cases, Grid { formats: &[Format::BF16], ops: &[ReduceOp::Sum], lens: &LENS[5..], ..long }, report);
    reductions(cases, Grid { formats: &[Format::F32], ops: &[ReduceOp::Mean], shards: &LENS[4..5], ..long }, report);
    data_movement::collectives(
        cases,
        Grid { formats: &[Format::F32], lens: &LENS[4..5], shards: &LENS[4..5], ..long },
        report,
    );
    data_movement::collectives(cases, Grid { formats: &[Format::BF16], lens: &LENS[5..], ..long }, report);
    for format in Format::ALL {
        report.case(&cases.name(&format!("all_reduce with weights {}", format.name())), || weighted(cases, format));
    }
    report.case(&cases.name("all_reduce of more windows than blocks"), || many_windows(cases));
    report.case(&cases.name("values that ranks agree on, or not"), || agreement(cases));
}

/// A mean with weights has the bits of the host transport, also of numbers of which no two can be added within the range of the dtype.
fn weighted(cases: &Cases<'_>, format: Format) {
    let weights: Vec<f64> = (0..cases.world_size()).map(|rank| [97.0, 1.0, 0.0, 2.0][rank % 4]).collect();
    for len in [1, 4097] {
        for values in
            [inputs(format, cases.world_size(), len).swap_remove(cases.rank()), vec![format.max_finite(); len]]
        {
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

fn agreement(cases: &Cases<'_>) {
    let (comm, rank, world_size) = (cases.comm, cases.rank() as u64, cases.world_size());
    let words = comm.gather_words(&[rank, rank * rank + 5]).unwrap();
    assert_eq!(words, (0..world_size as u64).flat_map(|rank| [rank, rank * rank + 5]).collect::<Vec<_>>());
    comm.barrier().unwrap();
}
