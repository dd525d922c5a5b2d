//! Results of every operation, dtype and option against the oracle.

use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::exact::dot_f64;
use gradsync_tests::tolerance::adasum::{Method, expect};
use gradsync_tests::tolerance::{assert_within, combine};

use crate::files::{Ranks, Tensor, load, tensor};

/// Shapes with shard and block boundaries inside tensors, among them scalars and empty tensors.
pub(crate) const SHAPES: [(&str, &[usize]); 7] = [
    ("model.embed.weight", &[65, 33]),
    ("model.bias", &[37]),
    ("scale", &[]),
    ("empty", &[0]),
    ("empty.too", &[3, 0, 2]),
    ("one", &[1]),
    ("zz.conv", &[3, 5, 7, 11]),
];

/// ranks × tensors, each tensor with its own seed; the formats are assigned in turn.
pub(crate) fn inputs(kind: Kind, formats: &[Format], world_size: usize) -> Vec<Vec<Tensor>> {
    let layers: Vec<(Format, Vec<Vec<f64>>)> = SHAPES
        .iter()
        .enumerate()
        .map(|(i, (_, shape))| {
            let format = formats[i % formats.len()];
            (format, generate(kind, format, world_size, shape.iter().product(), 40 + i as u64))
        })
        .collect();
    (0..world_size)
        .map(|rank| {
            let each = SHAPES.iter().zip(&layers);
            each.map(|((name, shape), (format, ranks))| tensor(name, *format, shape, &ranks[rank])).collect()
        })
        .collect()
}

/// Compares `out.safetensors` with `Σ weights[r] · input r`, tensor by tensor, rounded once to the output format.
#[track_caller]
fn assert_weighted(what: &str, ranks: &Ranks, inputs: &[Vec<Tensor>], weight: f64, output: Option<Format>) {
    let got = load(&ranks.output());
    assert_eq!(got.len(), inputs[0].len(), "{what}: names {:?}", got.keys());
    let weights = vec![weight; inputs.len()];
    for (i, first) in inputs[0].iter().enumerate() {
        let result = &got[&first.name];
        let format = output.unwrap_or(first.data.format());
        assert_eq!((&result.shape, result.data.format()), (&first.shape, format), "{what}: {}", first.name);
        let columns: Vec<Vec<f64>> = inputs.iter().map(|tensors| tensors[i].data.values()).collect();
        let column = |k: usize| columns.iter().map(|values| values[k]).collect::<Vec<f64>>();
        let exact: Vec<f64> = (0..result.data.len()).map(|k| dot_f64(&weights, &column(k))).collect();
        let bounds: Vec<f64> = (0..result.data.len()).map(|k| combine(format, &weights, &column(k))).collect();
        assert_within(&format!("{what}: {}", first.name), format, &result.data.values(), &exact, &bounds);
    }
}

#[test]
fn sum_and_mean_of_every_dtype_and_rank_count() {
    for format in Format::ALL {
        for world_size in [1, 2, 3, 4, 8] {
            let inputs = inputs(Kind::Random, &[format], world_size);
            let ranks = Ranks::new(&inputs);
            for (op, weight) in [("sum", 1.0), ("mean", 1.0 / world_size as f64)] {
                let what = format!("{op} of {format:?} over {world_size}");
                ranks.reduce(&["--op", op]).succeeded(&what);
                assert_weighted(&what, &ranks, &inputs, weight, None);
            }
        }
    }
}

/// Compares with the oracle's Adasum: each tensor is a layer, or, if `whole`, all tensors of the file are one layer, in any order (the
/// norms do not depend on it).
#[track_caller]
fn assert_adasum(what: &str, ranks: &Ranks, inputs: &[Vec<Tensor>], method: Method, whole: bool) {
    let got = load(&ranks.output());
    assert_eq!(got.len(), inputs[0].len(), "{what}: names {:?}", got.keys());
    let flat: Vec<Vec<f64>> =
        inputs.iter().map(|tensors| tensors.iter().flat_map(|tensor| tensor.data.values()).collect()).collect();
    let mut end = 0;
    let mut segments: Vec<_> = inputs[0]
        .iter()
        .map(|tensor| {
            end += tensor.data.len();
            end - tensor.data.len()..end
        })
        .collect();
    let tensors = segments.clone();
    if whole {
        segments = std::iter::once(0..end).collect();
    }
    for (first, segment) in inputs[0].iter().zip(tensors) {
        let format = first.data.format();
        // In files of mixed dtypes, the exact result is the same, and the bound follows from the tensor's own dtype.
        let expected = expect(method, format, &flat, &segments);
        let result = &got[&first.name];
        assert_eq!((&result.shape, result.data.format()), (&first.shape, format), "{what}: {}", first.name);
        let (exact, bounds) = (&expected.exact[segment.clone()], &expected.bounds[segment]);
        assert_within(&format!("{what}: {}", first.name), format, &result.data.values(), exact, bounds);
    }
}

#[test]
fn adasum_of_every_dtype_and_rank_count() {
    for format in Format::ALL {
        for world_size in [1, 2, 3, 4, 5, 7, 8, 16] {
            let inputs = inputs(Kind::Random, &[format], world_size);
            let ranks = Ranks::new(&inputs);
            let what = format!("adasum of {format:?} over {world_size}");
            ranks.reduce(&["--op", "adasum"]).succeeded(&what);
            assert_adasum(&what, &ranks, &inputs, Method::Gram, false);
        }
    }
}

#[test]
fn adasum_of_every_kind_of_input() {
    for kind in Kind::ADASUM {
        let inputs = inputs(kind, &[Format::F32], 4);
        let ranks = Ranks::new(&inputs);
        for (name, method) in [("gram", Method::Gram), ("tree", Method::Tree)] {
            let what = format!("adasum, {name}, of {kind:?}");
            ranks.reduce(&["--op", "adasum", "--algorithm", name]).succeeded(&what);
            assert_adasum(&what, &ranks, &inputs, method, false);
        }
    }
}

#[test]
fn granularity_whole_and_algorithm_tree() {
    for format in Format::ALL {
        for (algorithm, method, world_size) in
            [("gram", Method::Gram, 3), ("tree", Method::Tree, 4), ("tree", Method::Tree, 8)]
        {
            for granularity in ["tensor", "whole"] {
                let inputs = inputs(Kind::Random, &[format], world_size);
                let ranks = Ranks::new(&inputs);
                let what = format!("{algorithm}, {granularity}, {format:?} over {world_size}");
                ranks
                    .reduce(&["--op", "adasum", "--algorithm", algorithm, "--granularity", granularity])
                    .succeeded(&what);
                assert_adasum(&what, &ranks, &inputs, method, granularity == "whole");
            }
        }
    }
}

/// A checkpoint in mixed precision: every tensor keeps its own dtype.
#[test]
fn files_of_mixed_dtypes() {
    let inputs = inputs(Kind::Random, &Format::ALL, 3);
    let ranks = Ranks::new(&inputs);
    ranks.reduce(&["--op", "sum"]).succeeded("mixed sum");
    assert_weighted("mixed sum", &ranks, &inputs, 1.0, None);
    ranks.reduce(&["--op", "adasum"]).succeeded("mixed adasum");
    assert_adasum("mixed adasum", &ranks, &inputs, Method::Gram, false);
    ranks.reduce(&["--op", "adasum", "--granularity", "whole"]).succeeded("mixed adasum, whole");
    assert_adasum("mixed adasum, whole", &ranks, &inputs, Method::Gram, true);
}

/// The output is rounded once, to the requested dtype: f64 inputs that are a tie for f32 and not for f16 would reveal a second rounding.
#[test]
fn output_dtype_rounds_once() {
    for from in Format::ALL {
        let inputs = inputs(Kind::Random, &[from], 3);
        let ranks = Ranks::new(&inputs);
        for to in Format::ALL {
            let what = format!("mean of {from:?} as {to:?}");
            ranks.reduce(&["--op", "mean", "--output-dtype", to.name()]).succeeded(&what);
            assert_weighted(&what, &ranks, &inputs, 1.0 / 3.0, Some(to));
        }
    }
    let tie = 1.0 + 2.0_f64.powi(-11);
    let above = tie + 2.0_f64.powi(-30);
    let ranks = Ranks::new(&[vec![tensor("x", Format::F64, &[2], &[tie, above])]]);
    ranks.reduce(&["--op", "sum", "--output-dtype", "f16"]).succeeded("a tie and one above");
    assert_eq!(load(&ranks.output())["x"].data.values(), [1.0, 1.0 + 2.0_f64.powi(-10)]);
}

#[test]
fn scale_multiplies_the_result_with_one_rounding() {
    for format in Format::ALL {
        let inputs = inputs(Kind::Random, &[format], 3);
        let ranks = Ranks::new(&inputs);
        for (text, factor) in [("0.5", 0.5), ("0.3", 0.3), ("-4", -4.0), ("1e-3", 1e-3)] {
            let option = format!("--scale={text}");
            let what = format!("sum of {format:?} times {text}");
            ranks.reduce(&["--op", "sum", &option]).succeeded(&what);
            assert_weighted(&what, &ranks, &inputs, factor, None);
        }
    }
}

/// Adasum is homogeneous of degree 1, so scaling by a power of two is exact.
#[test]
fn scale_of_an_adasum() {
    let inputs = inputs(Kind::Random, &[Format::F32], 4);
    let ranks = Ranks::new(&inputs);
    ranks.reduce(&["--op", "adasum"]).succeeded("plain");
    let plain = load(&ranks.output());
    ranks.reduce(&["--op", "adasum", "--scale", "0.25"]).succeeded("scaled");
    for (name, scaled) in load(&ranks.output()) {
        let expected: Vec<f64> = plain[&name].data.values().iter().map(|x| x * 0.25).collect();
        assert_eq!(scaled.data.values(), expected, "{name}");
    }
}

/// The tensor is larger than any buffer that a streaming program would use for one piece, and its length is no round number.
#[test]
fn a_tensor_of_many_pieces() {
    let len = 1_500_007;
    for format in [Format::F32, Format::BF16] {
        let inputs: Vec<Vec<Tensor>> = generate(Kind::Random, format, 3, len, 50)
            .iter()
            .map(|values| vec![tensor("big", format, &[len], values), tensor("small", format, &[3], &values[..3])])
            .collect();
        let ranks = Ranks::new(&inputs);
        ranks.reduce(&["--op", "sum"]).succeeded("big sum");
        assert_weighted("big sum", &ranks, &inputs, 1.0, None);
        ranks.reduce(&["--op", "adasum"]).succeeded("big adasum");
        assert_adasum("big adasum", &ranks, &inputs, Method::Gram, false);
    }
}

#[test]
fn two_runs_write_the_same_bytes() {
    let ranks = Ranks::new(&inputs(Kind::Random, &Format::ALL, 5));
    ranks.reduce(&["--op", "adasum"]).succeeded("first");
    let first = std::fs::read(ranks.output()).unwrap();
    ranks.reduce(&["--op", "adasum"]).succeeded("second");
    assert!(std::fs::read(ranks.output()).unwrap() == first);
}
