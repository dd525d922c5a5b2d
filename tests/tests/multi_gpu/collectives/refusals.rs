//! Calls that are refused on one rank are errors on every rank, which name it. A refusal ends its communicator, so each case makes its own.

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Collectives, CommError, Communicator, ReduceOp, Scaling};
use gradsync::{Error, Result};
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;

use super::Cases;
use crate::placed::Placed;
use crate::report::Report;

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case("a factor that is not a number, on every rank", || {
        let comm = cases.context.communicator(100, &cases.context.options());
        let bad = Scaling { before: f64::NAN, after: 1.0 };
        let refused = refused_on(cases, &comm, bad);
        assert_named(refused, &["NaN before"]);
        // The failure is permanent; the rank whose refusal came first depends on timing.
        let reason = invalid_call(all_reduce(cases, &comm, Scaling::NONE).0).1;
        assert!(reason.contains("NaN"), "{reason}");
        assert!(comm.failure().is_some(), "a refusal that does not stick");
    });
    report.case("an infinite factor, on the last rank", || {
        let comm = cases.context.communicator(101, &cases.context.options());
        let last = cases.world_size() - 1;
        let bad = Scaling { before: 2.0, after: f64::NEG_INFINITY };
        if cases.rank() == last {
            assert_named(refused_on(cases, &comm, bad), &["-inf after", "2.0 before"]);
        } else {
            let good = Scaling { before: 2.0, after: 1.0 };
            let (rank, reason) = invalid_call(all_reduce(cases, &comm, good).0);
            assert_eq!(rank, last, "{reason}");
            assert!(reason.contains("-inf"), "{reason}");
        }
        let (rank, reason) = invalid_call(all_reduce(cases, &comm, Scaling::NONE).0);
        assert_eq!(rank, last, "{reason}");
    });
}

/// Runs a sum and waits for it; also returns whether this rank's data are unchanged.
fn all_reduce(cases: &Cases<'_>, comm: &NcclCommunicator, scaling: Scaling) -> (Result<()>, bool) {
    let own = Array::new(Format::F32, &cases.inputs(Format::F32, 33)[cases.rank()]);
    let mut data = Placed::new(&cases.context.queue, &own, 0);
    let called = comm.all_reduce_scaled(data.slice_mut(), ReduceOp::Sum, scaling);
    let outcome = called.and_then(|()| comm.synchronize(&cases.context.queue));
    (outcome, data.read_after_failure().patterns() == own.patterns())
}

/// The error of this rank's own refused call.
fn refused_on(cases: &Cases<'_>, comm: &NcclCommunicator, scaling: Scaling) -> String {
    let (outcome, is_unchanged) = all_reduce(cases, comm, scaling);
    assert!(is_unchanged, "the data of a refused call have changed");
    match outcome {
        Err(Error::InvalidArgument { operation: "all_reduce", reason }) => reason,
        other => panic!("factors {scaling:?} gave {other:?}"),
    }
}

fn assert_named(reason: String, parts: &[&str]) {
    for part in parts {
        assert!(reason.contains(part), "{reason} does not say {part}");
    }
}

/// The rank whose call was refused, and the reason.
fn invalid_call(outcome: Result<()>) -> (usize, String) {
    match outcome {
        Err(Error::Comm(CommError::InvalidCall { rank, reason, .. })) => (rank, reason),
        other => panic!("in place of a rank's invalid call: {other:?}"),
    }
}
