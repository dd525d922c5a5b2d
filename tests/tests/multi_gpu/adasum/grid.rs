//! Algorithms × dtypes × granularities × kinds of input.

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::{Case, Cases, algorithms};
use crate::report::Report;

/// Those of the CPU's grid: odd sizes, empty ones, scalars, and tensors larger than a shard, so that shard boundaries fall inside
/// layers. With its seeds too, bounds are finite everywhere.
pub(super) const SHAPES: [&[usize]; 9] = [&[1], &[0], &[37], &[5, 51], &[], &[64], &[2, 0, 3], &[700], &[3]];

/// Layers of several chunks, which end beside the borders of vectors and of blocks.
const LARGER: [&[usize]; 4] = [&[65_537], &[255, 257], &[4095], &[4097]];

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    let world_size = cases.world_size();
    for &format in cases.formats {
        for &algorithm in algorithms(world_size) {
            for granularity in [Granularity::Tensor, Granularity::Whole] {
                report.case(&name(format, algorithm, &format!("{granularity:?}")), || {
                    for &kind in cases.kinds {
                        let case = Case::of(kind, format, world_size, &SHAPES, world_size as u64);
                        cases.check(&case.with(algorithm, granularity), &format!("{kind:?}"));
                    }
                });
            }
        }
    }
    for format in [Format::F32, Format::BF16] {
        for &algorithm in algorithms(world_size) {
            report.case(&name(format, algorithm, "larger layers"), || {
                let case = Case::of(Kind::Random, format, world_size, &LARGER, 6);
                cases.check(&case.with(algorithm, Granularity::Tensor), "larger layers");
            });
        }
    }
    report.case("the default algorithm", || {
        let case = Case::of(Kind::Random, Format::F32, world_size, &SHAPES, world_size as u64);
        cases.check(&case.with(Algorithm::Auto, Granularity::Tensor), "auto");
    });
    report.case("layers without elements", || {
        for shapes in [&[&[0_usize][..]][..], &[&[0], &[3, 0]]] {
            for &algorithm in algorithms(world_size) {
                let case = Case::of(Kind::Random, Format::F32, world_size, shapes, 1);
                cases.check(&case.with(algorithm, Granularity::Tensor), "nothing");
            }
        }
    });
}

fn name(format: Format, algorithm: Algorithm, what: &str) -> String {
    format!("{} {algorithm:?} {what}", format.name()).to_lowercase()
}
