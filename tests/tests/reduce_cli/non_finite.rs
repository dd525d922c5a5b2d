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
    let arguments: [&dyn AsRef<std::ffi::OsStr>; 6] =
        [&"--op", &"sum", &"--fail-on-non-finite", &"--output", &"-", &"in0.safetensors"];
    reduce(ranks.folder.path(), &arguments).refused("a pipe", &["--fail-on-non-finite"]);
}
