//! Names that could control a terminal are escaped wherever they are printed, and kept in files.

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, load, tensor};
use crate::program::reduce;

/// The name sets a terminal's title, starts a line of its own, uses the one-character form of the escape, and switches to right-to-left
/// text.
const EVIL: &str = "a\x1b]0;owned\x07\nsecond line\u{9b}31m\u{7f}\u{202e}b";

#[track_caller]
fn is_harmless(what: &str, text: &str) {
    let is_bad = |character: char| character != '\n' && (character.is_control() || character == '\u{202e}');
    assert!(!text.contains(is_bad), "{what}: {text:?}");
    assert!(!text.lines().any(|line| line.starts_with("second line")), "{what}: {text:?}");
}

#[test]
fn names_of_tensors_in_reports_and_errors() {
    let good = vec![tensor("läuft.勾配", Format::F32, &[1], &[1.0]), tensor(EVIL, Format::F32, &[1], &[f64::NAN])];
    let ranks = Ranks::new(&[good.clone(), good.clone()]);
    for options in [&["--op", "sum"][..], &["--op", "sum", "--json"]] {
        let finished = ranks.reduce(options).succeeded("names");
        is_harmless("stdout", &finished.stdout);
        is_harmless("stderr", &finished.stderr);
        assert!(finished.stdout.contains("läuft.勾配"), "{}", finished.stdout);
        if options.contains(&"--json") {
            let report: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
            assert!(report["tensors"].as_array().unwrap().iter().any(|tensor| tensor["name"] == EVIL));
        }
        assert!(load(&ranks.output()).contains_key(EVIL), "the file has another name");
    }
    let failed = ranks.reduce(&["--op", "sum", "--fail-on-non-finite"]);
    assert!(failed.stderr.contains("\\u{1b}]0;owned"), "{}", failed.stderr);
    is_harmless("not finite", &failed.stderr);
    let other = vec![good[0].clone(), tensor("b", Format::F32, &[1], &[1.0])];
    for inputs in [[good.clone(), other.clone()], [other, good]] {
        let finished = Ranks::new(&inputs).reduce(&["--op", "sum"]);
        is_harmless("a mismatch", &finished.stderr);
        finished.refused("a mismatch", &["in1.safetensors"]);
    }
}

#[test]
fn paths_in_errors() {
    let ranks = Ranks::new(&[vec![tensor("a", Format::F32, &[1], &[1.0])]]);
    let folder = ranks.folder.path();
    std::fs::write(folder.join(EVIL), b"no checkpoint").unwrap();
    for (output, input) in [("out", EVIL), ("out", "none\x1b[1m"), (EVIL, EVIL), ("none\x1b[1m/out", "in0.safetensors")]
    {
        let finished = reduce(folder, ["--op", "sum", "--output", output, input]);
        is_harmless("a path", &finished.stderr);
        finished.refused("a path", &["\\u{1b}"]);
    }
}
