//! A non-finite result: a warning that names it, or with `--fail-on-non-finite` an error with its own exit code and no output.

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, tensor};
use crate::program::reduce;

fn ranks() -> Ranks {
    let good = tensor("good", Format::F32, &[2], &[1.0, 2.0]);
    Ranks::new(&[
        vec![good.clone(), tensor("bad", Format::F32, &[2], &[1.0, f64::INFINITY])],
        vec![good, tensor("bad", Format::F32, &[2], &[1.0, 2.0])],
    ])
}

#[test]
fn without_the_option_it_is_a_warning() {
    let finished = ranks().reduce(&["--op", "sum"]).succeeded("a warning");
    assert!(finished.stderr.contains("warning") && finished.stderr.contains("\"bad\""), "{}", finished.stderr);
    assert!(!finished.stderr.contains("good"), "{}", finished.stderr);
    let finite = Ranks::new(&[vec![tensor("good", Format::F32, &[1], &[1.0])]]);
    assert_eq!(finite.reduce(&["--op", "sum"]).succeeded("finite").stderr, "");
}

#[test]
fn with_the_option_nothing_is_written() {
    for op in ["sum", "mean", "adasum"] {
        let ranks = ranks();
        ranks.refuses(op, &["--op", op, "--fail-on-non-finite"], &["\"bad\"", "not finite", "out.safetensors"]);
        assert_eq!(ranks.reduce(&["--op", op, "--fail-on-non-finite"]).code, Some(3));
        let finite = Ranks::new(&[vec![tensor("good", Format::F32, &[1], &[1.0])]]);
        finite.reduce(&["--op", op, "--fail-on-non-finite"]).succeeded("finite");
    }
    // The value overflows the output dtype.
    let large = Ranks::new(&[vec![tensor("large", Format::F32, &[1], &[1e6])]]);
    large.refuses("f16", &["--op", "sum", "--output-dtype", "f16", "--fail-on-non-finite"], &["\"large\""]);
}

/// Output that is written to a pipe cannot be withdrawn.
#[test]
fn the_option_needs_a_file() {
    let ranks = ranks();
    let arguments = ["--op", "sum", "--fail-on-non-finite", "--output", "-", "in0.safetensors"];
    reduce(ranks.folder.path(), arguments).refused("a pipe", &["--fail-on-non-finite"]);
}

/// The inputs to blame are named with their files, tensors and values.
#[test]
fn inputs_that_are_not_finite_are_named_with_file_and_tensor() {
    let good = tensor("good", Format::F32, &[2], &[1.0, 2.0]);
    let bad = |value: f64| tensor("bad", Format::F64, &[3], &[1.0, 2.0, value]);
    let ranks = || {
        Ranks::new(&[
            vec![good.clone(), bad(3.0)],
            vec![good.clone(), bad(f64::NAN)],
            vec![good.clone(), bad(f64::NEG_INFINITY)],
        ])
    };
    let words = ["\"bad\" of in1.safetensors is NaN at element 2", "\"bad\" of in2.safetensors is -inf at element 2"];
    for options in
        [&["--op", "sum"][..], &["--op", "mean"], &["--op", "adasum"], &["--op", "adasum", "--granularity", "whole"]]
    {
        let ranks = ranks();
        let inputs = ["in0.safetensors", "in1.safetensors", "in2.safetensors"];
        let run = |more: &[&str]| reduce(ranks.folder.path(), [options, more, &["-o", "out"], &inputs].concat());
        let finished = run(&["--json"]).succeeded("a warning");
        for word in words {
            assert!(finished.stderr.contains(word), "{options:?}: {}", finished.stderr);
        }
        let report: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
        let first = &report["not_finite_inputs"][0];
        assert_eq!(
            (&first["file"], &first["tensor"], &first["element"]),
            (&"in1.safetensors".into(), &"bad".into(), &2.into())
        );
        assert_eq!((&first["value"], report["not_finite_inputs"].as_array().unwrap().len()), (&"NaN".into(), 2));
        // Tensors that share their weights share the fault, and the one to blame is not the first that is written.
        let failed = run(&["--fail-on-non-finite"]);
        assert_eq!(failed.code, Some(3), "{options:?}: {}", failed.stderr);
        failed.refused("with the option", &words);
    }
}

/// The element is found in a later piece of a long tensor.
#[test]
fn an_element_of_a_long_tensor_is_named() {
    const LEN: usize = 1 << 21;
    let mut values = vec![1.0; LEN];
    values[LEN - 12_345] = f64::INFINITY;
    let ranks = Ranks::new(&[vec![tensor("long", Format::BF16, &[LEN], &values)]]);
    let finished = ranks.reduce(&["--op", "sum"]).succeeded("a warning");
    let words = format!("is inf at element {}", LEN - 12_345);
    assert!(finished.stderr.contains(&words), "{}", finished.stderr);
}

#[test]
fn a_result_that_overflows_while_its_inputs_are_finite_says_so() {
    let large = Ranks::new(&vec![vec![tensor("large", Format::F16, &[1], &[60000.0])]; 2]);
    let finished = large.reduce(&["--op", "sum", "--json"]).succeeded("a warning");
    assert!(finished.stderr.contains("\"large\": all inputs are finite"), "{}", finished.stderr);
    let report: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
    assert_eq!(report["not_finite_inputs"], serde_json::Value::Array(vec![]));
    large.reduce(&["--op", "sum", "--fail-on-non-finite"]).refused("fails", &["\"large\"", "all inputs are finite"]);
}
