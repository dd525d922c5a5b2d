//! Calls that Adasum refuses on every rank, by name; the communicator stays usable.

use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity};
use gradsync::{DType, Error, GradientBuffer, Result};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::device::Way;
use super::{Case, Cases};
use crate::report::Report;

/// Names and lengths of tensors, and their dtype.
type Tensors = (DType, &'static [(&'static str, usize)]);

const COMMON: Tensors = (DType::F32, &[("a", 60), ("b", 64)]);

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let world_size = cases.world_size();
    report.case("a buffer for another world size", || {
        // The plan is wrong on every rank, and then on one rank alone.
        let reason = reason(prepare(cases, COMMON, world_size + 1, AdasumOptions::default()));
        let (planned, found) =
            (format!("a world size of {}", world_size + 1), format!("the world size is {world_size}"));
        assert!(reason.contains(&planned) && reason.contains(&found), "{reason}");
        let odd = if is_odd(cases) { world_size + 1 } else { world_size };
        let text = self::reason(prepare(cases, COMMON, odd, AdasumOptions::default()));
        assert!(text.contains(&planned) && text.contains(&found), "{text}");
        assert!(is_odd(cases) || text.contains(&format!("rank {} refuses", world_size - 1)), "{text}");
    });
    report.case("other tensors", || {
        let others: [(Tensors, &str); 5] = [
            (
                (DType::F32, &[("a", 60), ("b", 640)]),
                "tensor 1 \"b\": rank 0 has shape [64], rank LAST has shape [640]",
            ),
            ((DType::F32, &[("a", 64), ("b", 60)]), "tensor 0 \"a\": rank 0 has shape [60], rank LAST has shape [64]"),
            ((DType::F32, &[("b", 60), ("a", 64)]), "tensor 0: rank 0 has \"a\", rank LAST has \"b\""),
            ((DType::F32, &[("a", 128)]), "tensor 0 \"a\": rank 0 has shape [60], rank LAST has shape [128]"),
            ((DType::F64, &[("a", 60), ("b", 64)]), "dtype: rank 0 has f32, rank LAST has f64"),
        ];
        for (tensors, difference) in others {
            let own = if is_odd(cases) { tensors } else { COMMON };
            let expected = format!("adasum_all_reduce(Auto, per tensor): ranks disagree on {difference}");
            assert_differs(cases, prepare(cases, own, world_size, AdasumOptions::default()), &expected);
        }
    });
    report.case("other options", || {
        let common = AdasumOptions::default().with_algorithm(Algorithm::Gram).with_granularity(Granularity::Tensor);
        let whole = common.with_granularity(Granularity::Whole);
        let tree = common.with_algorithm(Algorithm::Tree);
        // Where the world size excludes the tree, the last rank refuses it, which is another case.
        let (whole, tree) = ((whole, "Gram, all tensors as one"), (tree, "Tree, per tensor"));
        for (options, called) in if world_size.is_power_of_two() { vec![whole, tree] } else { vec![whole] } {
            let own = if is_odd(cases) { options } else { common };
            let expected = format!(
                "ranks disagree: rank 0 called adasum_all_reduce(Gram, per tensor), rank LAST called adasum_all_reduce({called})"
            );
            assert_differs(cases, prepare(cases, COMMON, world_size, own), &expected);
        }
    });
    if !world_size.is_power_of_two() {
        report.case("the tree", || {
            let options = AdasumOptions::default().with_algorithm(Algorithm::Tree);
            let error = prepare(cases, COMMON, world_size, options).expect_err("no power of two");
            let is_named = matches!(
                error,
                Error::UnsupportedWorldSize { algorithm: "tree", world_size: found, .. } if found == world_size
            );
            assert!(is_named, "{error}");
        });
    }
    report.case("a buffer that it was not made for", || {
        let own = buffer(cases, COMMON, world_size);
        let mut other = buffer(cases, (DType::F32, &[("a", 60), ("c", 64)]), world_size);
        for &way in Way::all(world_size) {
            let mut adasum = way.prepare(cases.runner.comm, &own, AdasumOptions::default()).unwrap();
            let reason = reason(adasum.all_reduce(&mut other));
            assert!(reason.contains("other tensors"), "{reason}");
        }
    });
    if world_size > 1 && cases.context.layout.reaches_peers() {
        report.case("another buffer than peers have mapped", || {
            let mut own = buffer(cases, COMMON, world_size);
            let mut other = buffer(cases, COMMON, world_size);
            let mut adasum = Way::Peers.prepare(cases.runner.comm, &own, AdasumOptions::default()).unwrap();
            assert!(adasum.uses_peers(), "GPUs of one machine reach each other");
            let reason = reason(adasum.all_reduce(&mut other));
            assert!(reason.contains("another buffer"), "{reason}");
            adasum.all_reduce(&mut own).unwrap();
            cases.runner.comm.synchronize(cases.runner.queue).unwrap();
        });
    }
    if world_size > 1 {
        report.case("other sizes up to which packets and one shot are taken", || {
            let own = buffer(cases, COMMON, world_size);
            let bytes = Some(100 + usize::from(is_odd(cases)));
            for [low_latency, one_shot] in [[bytes, None], [None, bytes]] {
                let options = AdasumOptions::default();
                let made = Adasum::with_low_latency(cases.runner.comm, &own, options, low_latency, one_shot);
                assert!(matches!(made, Err(Error::Disagreement { .. })), "{made:?}");
            }
        });
    }
    report.case("the communicator goes on", || {
        let case = Case::of(Kind::Random, Format::F32, world_size, &[&[60], &[64]], 1);
        cases.runner.check(&case, "after refusals");
    });
}

/// The rank that differs from the others: the last.
fn is_odd(cases: &Cases<'_>) -> bool {
    cases.context.rank == cases.world_size() - 1
}

fn buffer(cases: &Cases<'_>, (dtype, tensors): Tensors, planned: usize) -> GradientBuffer<Cuda> {
    let tensors = tensors.iter().map(|(name, len)| (*name, vec![*len]));
    GradientBuffer::on_queue(&cases.context.queue, dtype, planned, tensors).unwrap()
}

fn prepare<'c>(
    cases: &Cases<'c>,
    tensors: Tensors,
    planned: usize,
    options: AdasumOptions,
) -> Result<Adasum<'c, Cuda>> {
    Adasum::new(cases.runner.comm, &buffer(cases, tensors, planned), options)
}

#[track_caller]
fn reason<T: std::fmt::Debug>(outcome: Result<T>) -> String {
    match outcome {
        Err(Error::InvalidArgument { operation: "adasum_all_reduce", reason }) => reason,
        other => panic!("in place of an invalid argument: {other:?}"),
    }
}

/// Asserts an error with this text, where `LAST` stands for the odd rank, unless that is rank 0.
#[track_caller]
fn assert_differs(cases: &Cases<'_>, outcome: Result<Adasum<'_, Cuda>>, expected: &str) {
    let last = cases.world_size() - 1;
    if last > 0 {
        let Err(Error::Disagreement(difference)) = &outcome else { panic!("in place of a disagreement: {outcome:?}") };
        assert_eq!((difference.left_rank, difference.right_rank), (0, last), "{difference}");
        assert_eq!(difference.to_string(), expected.replace("LAST", &last.to_string()));
    }
}
