//! Algorithms × dtypes × granularities × kinds of input.

use std::iter;

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::device::{Runner, Way};
use super::{Case, Cases};
use crate::report::Report;

/// The shapes of the CPU's grid: odd sizes, empty tensors, scalars, and tensors larger than a shard, so that shard boundaries fall inside
/// layers. The seeds are the CPU's too, which makes all bounds finite.
pub(super) const SHAPES: [&[usize]; 9] = [&[1], &[0], &[37], &[5, 51], &[], &[64], &[2, 0, 3], &[700], &[3]];

/// Layers of several chunks, which end near the borders of vectors and of blocks.
const LARGER: [&[usize]; 4] = [&[65_537], &[255, 257], &[4095], &[4097]];

/// One layer each, with so few chunks that most grids have one for each block: kernels stage those of f32 in one round and in two, and
/// those of bf16 not at all and in one.
const LONG: [&[&[usize]]; 2] = [&[&[65_537]], &[&[262_145]]];

/// Several chunks for each block, most of which have far fewer packets than the longest. Eight lanes add the sums of the long layer's 33, 127
/// and 74 chunks in two, four and three passes.
fn mixed() -> [Vec<&'static [usize]>; 2] {
    let short = |count| iter::repeat_n(&[700][..], count);
    [
        iter::once(&[65_537][..]).chain(short(150)).collect(),
        iter::once(&[260_000][..]).chain(short(30)).chain([&[300_001][..]]).chain(short(30)).collect(),
    ]
}

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let world_size = cases.world_size();
    if world_size > 1 {
        report.case(&cases.name("reach"), || {
            let case = Case::of(Kind::Random, Format::F32, world_size, &SHAPES, 1);
            let Runner { comm, way, .. } = cases.runner;
            let adasum = way.prepare(comm, &cases.runner.buffer(&case), case.options()).unwrap();
            let can = way != Way::Transport && cases.context.layout.reaches_peers();
            assert_eq!(adasum.uses_peers(), can, "GPUs of one machine reach each other, and others do not");
        });
    }
    for &format in cases.formats {
        for &algorithm in cases.algorithms() {
            for granularity in [Granularity::Tensor, Granularity::Whole] {
                report.case(&name(cases, format, algorithm, &format!("{granularity:?}")), || {
                    for &kind in cases.kinds {
                        let case = Case::of(kind, format, world_size, &SHAPES, world_size as u64);
                        cases.runner.check(&case.with(algorithm, granularity), &format!("{kind:?}"));
                    }
                });
            }
        }
    }
    for format in [Format::F32, Format::BF16] {
        for &algorithm in cases.algorithms() {
            report.case(&name(cases, format, algorithm, "larger layers"), || {
                let case = Case::of(Kind::Random, format, world_size, &LARGER, 6);
                cases.runner.check(&case.with(algorithm, Granularity::Tensor), "larger layers");
            });
            report.case(&name(cases, format, algorithm, "one long layer and many short ones"), || {
                for shapes in mixed() {
                    let case = Case::of(Kind::Random, format, world_size, &shapes, 6);
                    let layers = format!("{} layers", shapes.len());
                    cases.runner.check(&case.with(algorithm, Granularity::Tensor), &layers);
                }
            });
            report.case(&name(cases, format, algorithm, "one long layer"), || {
                for shapes in LONG {
                    let case = Case::of(Kind::Random, format, world_size, shapes, 6);
                    cases.runner.check(&case.with(algorithm, Granularity::Tensor), &format!("{shapes:?}"));
                }
            });
        }
    }
    report.case(&cases.name("the default algorithm"), || {
        let case = Case::of(Kind::Random, Format::F32, world_size, &SHAPES, world_size as u64);
        cases.runner.check(&case.with(Algorithm::Auto, Granularity::Tensor), "auto");
    });
    report.case(&cases.name("layers without elements"), || {
        for shapes in [&[&[0_usize][..]][..], &[&[0], &[3, 0]]] {
            for &algorithm in cases.algorithms() {
                let case = Case::of(Kind::Random, Format::F32, world_size, shapes, 1);
                cases.runner.check(&case.with(algorithm, Granularity::Tensor), "nothing");
            }
        }
    });
}

fn name(cases: &Cases<'_>, format: Format, algorithm: Algorithm, what: &str) -> String {
    cases.name(&format!("{} {algorithm:?} {what}", format.name()))
}
