//! Values that a caller has written between the tensors of a buffer change neither results nor weights.

use gradsync::ops::Granularity;
use gradsync_tests::array::{fill_gaps, tensor_patterns};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::device::Runner;
use super::{Case, Cases};
use crate::report::Report;

/// Tensors with arbitrary ends, one of them empty, so that most shards have gaps.
pub(super) const SHAPES: [&[usize]; 5] = [&[100], &[0], &[33], &[1], &[5, 51]];

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case(&cases.name("numbers between tensors"), || {
        for &algorithm in cases.algorithms() {
            for granularity in [Granularity::Tensor, Granularity::Whole] {
                for (format, kind) in [(Format::F32, Kind::Orthogonal), (Format::F64, Kind::NearlyOpposite(1e-6))] {
                    let case = Case::of(kind, format, cases.world_size(), &SHAPES, 8);
                    check(&cases.runner, &case.with(algorithm, granularity));
                }
            }
        }
    });
}

/// Ones and NaN in the gaps give the same outcome as zeros. One workspace serves all runs, so that each run finds the remains of the
/// previous one.
pub(super) fn check(runner: &Runner<'_>, case: &Case) {
    let (rank, what) = (runner.comm.rank(), format!("{}, {:?}", case.name(), runner.way));
    let mut buffer = runner.buffer(case);
    let mut adasum = runner.way.prepare(runner.comm, &buffer, case.options()).unwrap();
    let mut outcome = |value: f64| {
        let mut host = case.buffer(rank);
        fill_gaps(&mut host, value);
        buffer.copy_from_host(&host).unwrap();
        adasum.all_reduce(&mut buffer).unwrap();
        runner.comm.synchronize(runner.queue).unwrap();
        buffer.copy_to_host(&mut host).unwrap();
        let report = adasum.report().unwrap();
        let weights = report.weights.map(|weights| weights.into_iter().map(f64::to_bits).collect::<Vec<u64>>());
        (tensor_patterns(&host), weights, report.recomputed)
    };
    let clean = outcome(0.0);
    for value in [1.0, f64::NAN] {
        assert!(outcome(value) == clean, "{what}, {value} in the gaps");
    }
}
