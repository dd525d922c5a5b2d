//! Permitted and forbidden places of the output, and invalid arguments.

use std::ffi::OsStr;

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, load, tensor};
use crate::program::{Finished, reduce};

fn two() -> Ranks {
    let tensors = vec![tensor("weight", Format::F32, &[4], &[1.0; 4])];
    Ranks::new(&[tensors.clone(), tensors])
}

/// Sums the first input to this output, from the inputs' folder.
fn sum_to(ranks: &Ranks, output: &str) -> Finished {
    reduce(ranks.folder.path(), ["--op", "sum", "--output", output, "in0.safetensors"])
}

/// The output is refused under every name of an input: the same path, a relative one, one with detours, a symbolic link on either side.
#[test]
fn an_output_that_is_an_input() {
    let ranks = two();
    let (folder, absolute) = (ranks.folder.path(), ranks.inputs[1].clone());
    std::fs::create_dir(folder.join("sub")).unwrap();
    let mut outputs =
        vec![absolute.clone(), "in1.safetensors".into(), "./in1.safetensors".into(), "sub/../in1.safetensors".into()];
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&absolute, folder.join("link.safetensors")).unwrap();
        std::os::unix::fs::symlink(folder, folder.join("here")).unwrap();
        outputs.extend(["link.safetensors".into(), "here/in1.safetensors".into()]);
    }
    let before = ranks.contents();
    for output in outputs {
        let what = format!("output {}", output.display());
        let arguments = ["--op", "sum", "--output"].map(OsStr::new).into_iter();
        let paths = [&output, &ranks.inputs[0], &absolute].map(|path| path.as_os_str());
        let finished = reduce(folder, arguments.chain(paths));
        let name = output.file_name().expect("an output has a name").to_string_lossy().into_owned();
        finished.refused(&what, &[&name]);
        assert!(ranks.contents() == before, "{what}: the folder changed: {:?}", ranks.contents().keys());
    }
    #[cfg(unix)]
    {
        let arguments = ["--op", "sum", "--output", "in1.safetensors", "in0.safetensors", "link.safetensors"];
        reduce(folder, arguments).refused("an input through a link", &["in1.safetensors"]);
        assert!(ranks.contents() == before, "an input through a link: the folder changed");
    }
}

#[test]
fn success_replaces_an_older_output_and_leaves_nothing_else() {
    let ranks = two();
    std::fs::write(ranks.output(), b"an older result").unwrap();
    ranks.reduce(&["--op", "sum"]).succeeded("replace");
    assert_eq!(load(&ranks.output())["weight"].data.values(), [2.0; 4]);
    let names: Vec<String> = ranks.contents().into_keys().collect();
    assert_eq!(names, ["in0.safetensors", "in1.safetensors", "out.safetensors"]);
}

#[test]
fn a_relative_output_in_the_current_folder() {
    let ranks = two();
    sum_to(&ranks, "o.safetensors").succeeded("relative");
    assert_eq!(load(&ranks.folder.path().join("o.safetensors"))["weight"].data.values(), [1.0; 4]);
}

/// Renaming a file onto a folder would fail late, so it is refused before anything is computed.
#[test]
fn an_output_that_cannot_be_written() {
    let ranks = two();
    std::fs::create_dir(ranks.folder.path().join("folder")).unwrap();
    let before = ranks.contents();
    for (output, word) in [("folder", "folder"), ("folder/", "folder/"), ("new/", "new/"), ("none/out", "none")] {
        sum_to(&ranks, output).refused(output, &[word]);
        assert!(ranks.contents() == before, "{output}: the folder now holds {:?}", ranks.contents().keys());
    }
}

#[test]
fn no_inputs() {
    let ranks = Ranks::new(&[]);
    for op in ["sum", "mean", "adasum"] {
        ranks.reduce(&["--op", op]).refused("no inputs", &[]);
        assert!(ranks.contents().is_empty());
    }
}

#[test]
fn arguments_that_make_no_sense() {
    for options in [
        &["--op", "product"][..],
        &[],
        &["--op", "sum", "--output-dtype", "i8"],
        &["--op", "sum", "--scale", "much"],
        &["--op", "adasum", "--algorithm", "ring"],
        &["--op", "adasum", "--granularity", "element"],
        &["--op", "sum", "--backend", "tpu"],
        &["--op", "sum", "--no-such-flag"],
    ] {
        two().refuses(&format!("{options:?}"), options, &[]);
    }
}

/// In a build without CUDA, or on a machine without a driver, asking for CUDA is an error and no silent fall-back; on a machine with a GPU
/// it gives a result.
#[test]
fn the_cuda_backend_is_never_silently_the_cpu() {
    let ranks = two();
    let finished = ranks.reduce(&["--op", "sum", "--backend", "cuda", "--json"]);
    if finished.code == Some(0) {
        assert!(finished.stdout.replace(' ', "").contains("\"backend\":\"cuda\""), "{}", finished.stdout);
    } else {
        finished.refused("cuda", &["cuda"]);
        assert_eq!(ranks.contents().len(), 2, "{:?}", ranks.contents().keys());
    }
}

#[cfg(unix)]
#[test]
fn a_link_to_a_file_has_the_file_replaced_and_its_mode_kept() {
    use std::os::unix::fs::{PermissionsExt, symlink};

    let ranks = two();
    let folder = ranks.folder.path();
    std::fs::write(folder.join("real.safetensors"), b"older").unwrap();
    std::fs::set_permissions(folder.join("real.safetensors"), std::fs::Permissions::from_mode(0o640)).unwrap();
    symlink("real.safetensors", folder.join("link.safetensors")).unwrap();
    sum_to(&ranks, "link.safetensors").succeeded("through a link");
    assert!(folder.join("link.safetensors").symlink_metadata().unwrap().is_symlink(), "the link was replaced");
    assert_eq!(load(&folder.join("real.safetensors"))["weight"].data.values(), [1.0; 4]);
    let mode = std::fs::metadata(folder.join("real.safetensors")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
}

/// A mean is the sum in rank order, divided once, to the bit: it is not a sum of scaled terms.
#[test]
fn a_mean_is_the_sum_divided() {
    let values = [1.0, 0.7, 3.3, -1e300, 5e-324];
    let ranks = Ranks::new(&vec![vec![tensor("a", Format::F64, &[5], &values)]; 10]);
    ranks.reduce(&["--op", "mean"]).succeeded("mean");
    let expected = values.map(|value| (0..10).fold(0.0, |sum, _| sum + value) / 10.0);
    assert_eq!(load(&ranks.output())["a"].data.values(), expected);
}

/// Squares that overflow do not make the norm of a finite tensor infinite.
#[test]
fn the_norm_of_huge_values_is_finite() {
    let ranks = Ranks::new(&[vec![tensor("a", Format::F64, &[2], &[3e200, -4e200])]]);
    let finished = ranks.reduce(&["--op", "sum", "--json"]).succeeded("huge");
    let report: serde_json::Value = serde_json::from_str(&finished.stdout).unwrap();
    let norm = report["tensors"][0]["norm"].as_f64().expect("a number");
    // The norm has the roundings of two squares, a sum and a root; the two scalings are exact.
    assert!((norm / 5e200 - 1.0).abs() <= 4.0 * f64::EPSILON, "{norm}");
    assert_eq!(report["tensors"][0]["finite"], true);
}

#[test]
fn the_report_says_which_path_was_written() {
    let ranks = two();
    let folder = ranks.folder.path();
    std::os::unix::fs::symlink("real.safetensors", folder.join("link.safetensors")).unwrap();
    for output in ["o.safetensors", "./o.safetensors", "link.safetensors"] {
        let lines = sum_to(&ranks, output).succeeded(output).stdout;
        assert!(lines.ends_with(&format!("written to {output}\n")), "{lines}");
        let arguments = ["--op", "sum", "--output", output, "in0.safetensors", "--json"];
        let json = reduce(folder, arguments).succeeded(output).stdout;
        let report: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(report["output"], output);
    }
    let piped = sum_to(&ranks, "/dev/stdout");
    assert!(piped.stderr.contains("written to /dev/stdout"), "{}", piped.stderr);
}
