//! Inputs that do not match each other, or that cannot be reduced: refused by file and tensor name.

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, Tensor, entry, save_raw, tensor};

const OPS: [&str; 3] = ["sum", "mean", "adasum"];

fn good() -> Vec<Tensor> {
    vec![tensor("first", Format::F32, &[4], &[1.0; 4]), tensor("second", Format::F32, &[2, 3], &[2.0; 6])]
}

/// The inputs of three ranks; rank 2 holds `odd`.
fn with_odd(odd: Vec<Tensor>) -> Ranks {
    Ranks::new(&[good(), good(), odd])
}

#[test]
fn a_missing_tensor() {
    for op in OPS {
        with_odd(good()[..1].to_vec()).refuses("missing", &["--op", op], &["in2.safetensors", "second"]);
    }
}

#[test]
fn an_extra_tensor() {
    for op in OPS {
        let mut odd = good();
        odd.push(tensor("third", Format::F32, &[1], &[0.0]));
        with_odd(odd).refuses("extra", &["--op", op], &["in2.safetensors", "third"]);
    }
}

#[test]
fn another_shape() {
    for op in OPS {
        for shape in [&[3, 2][..], &[6], &[2, 4], &[1, 2, 3]] {
            let mut odd = good();
            odd[1] = tensor("second", Format::F32, shape, &vec![2.0; shape.iter().product()]);
            with_odd(odd).refuses("shape", &["--op", op], &["in2.safetensors", "second", "[2, 3]"]);
        }
    }
}

#[test]
fn another_dtype() {
    for op in OPS {
        for format in [Format::F64, Format::F16, Format::BF16] {
            let mut odd = good();
            odd[1] = tensor("second", format, &[2, 3], &[2.0; 6]);
            with_odd(odd).refuses("dtype", &["--op", op], &["in2.safetensors", "second"]);
        }
    }
}

/// Integers cannot be gradients, and even an integer dtype that all ranks share is refused by name.
#[test]
fn a_dtype_that_is_not_supported() {
    for dtype in ["I64", "I32", "U8", "BOOL"] {
        let size = if dtype == "I64" {
            8
        } else if dtype == "I32" {
            4
        } else {
            1
        };
        let ranks = Ranks::new(&[vec![], vec![]]);
        let header = format!("{{{}}}", entry("steps", dtype, &[2], 0, 2 * size));
        for path in &ranks.inputs {
            save_raw(path, &header, &vec![0; 2 * size]);
        }
        ranks.refuses(dtype, &["--op", "sum"], &["in0.safetensors", "steps", dtype]);
    }
}

#[test]
fn tree_over_three_files() {
    let ranks = with_odd(good());
    ranks.refuses("tree of 3", &["--op", "adasum", "--algorithm", "tree"], &["3", "power"]);
}
