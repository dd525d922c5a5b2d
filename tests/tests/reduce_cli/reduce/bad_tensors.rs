//! Inputs that do not match each other, or that cannot be reduced: refused by file and tensor name.

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, Tensor, entry, save_raw, tensor};

fn good() -> Vec<Tensor> {
    vec![tensor("first", Format::F32, &[4], &[1.0; 4]), tensor("second", Format::F32, &[2, 3], &[2.0; 6])]
}

/// The inputs of three ranks; rank 2 holds `odd`.
fn with_odd(odd: Vec<Tensor>) -> Ranks {
    Ranks::new(&[good(), good(), odd])
}

#[test]
fn tensors_that_differ_between_files() {
    let second = |format, shape: &[usize]| {
        let len = shape.iter().product();
        vec![good().remove(0), tensor("second", format, shape, &vec![2.0; len])]
    };
    let mut cases = vec![
        ("missing", good()[..1].to_vec(), "second"),
        ("extra", [good(), vec![tensor("third", Format::F32, &[1], &[0.0])]].concat(), "third"),
    ];
    for shape in [&[3, 2][..], &[6], &[2, 4], &[1, 2, 3]] {
        cases.push(("shape", second(Format::F32, shape), "[2, 3]"));
    }
    for format in [Format::F64, Format::F16, Format::BF16] {
        cases.push(("dtype", second(format, &[2, 3]), "second"));
    }
    for (label, odd, word) in cases {
        for op in ["sum", "mean", "adasum"] {
            with_odd(odd.clone()).refuses(label, &["--op", op], &["in2.safetensors", word]);
        }
    }
}

/// Integers cannot be gradients, and even an integer dtype that all ranks share is refused by name.
#[test]
fn a_dtype_that_is_not_supported() {
    for (dtype, size) in [("I64", 8), ("I32", 4), ("U8", 1), ("BOOL", 1)] {
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
