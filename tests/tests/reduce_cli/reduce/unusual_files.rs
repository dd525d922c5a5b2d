//! Files that are valid but unusual: misaligned data, another order, metadata, no tensors.

use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;

use crate::files::{Ranks, entry, load, save_raw, tensor};

/// The header has an odd number of bytes, and an f16 precedes an f64: no tensor lies at a multiple of its element's size.
#[test]
fn data_misaligned_for_its_dtype() {
    let ranks = Ranks::new(&[vec![], vec![]]);
    for (rank, path) in ranks.inputs.iter().enumerate() {
        let half = Array::new(Format::F16, &[1.0 + rank as f64]);
        let double = Array::new(Format::F64, &[0.5, 2.0 + rank as f64]);
        let single = Array::new(Format::F32, &[3.0, 4.0, 5.0 * rank as f64]);
        let mut header = format!(
            "{{{},{},{}}}",
            entry("half", "F16", &[1], 0, 2),
            entry("double", "F64", &[2], 2, 18),
            entry("single", "F32", &[3], 18, 30)
        );
        // Spaces may follow the object; the data then start at an odd byte on one rank and an even one on the other.
        while (8 + header.len()) % 8 != 1 + rank {
            header.push(' ');
        }
        save_raw(path, &header, &[half.to_bytes(), double.to_bytes(), single.to_bytes()].concat());
    }
    ranks.reduce(&["--op", "sum"]).succeeded("misaligned sum");
    let got = load(&ranks.output());
    assert_eq!(got["half"].data.values(), [3.0]);
    assert_eq!(got["double"].data.values(), [1.0, 5.0]);
    assert_eq!(got["single"].data.values(), [6.0, 8.0, 5.0]);
    ranks.reduce(&["--op", "adasum"]).succeeded("misaligned adasum");
    // The vectors (1) and (2) are parallel, so the result is their mean.
    assert_eq!(load(&ranks.output())["half"].data.values(), [1.5]);
}

/// Ranks may have written the same tensors in another order.
#[test]
fn tensors_in_another_order_on_another_rank() {
    let ranks = Ranks::new(&[vec![], vec![]]);
    let (a, b) = (Array::new(Format::F32, &[1.0, 2.0]), Array::new(Format::F32, &[3.0]));
    let first = format!("{{{},{}}}", entry("a", "F32", &[2], 0, 8), entry("b", "F32", &[1], 8, 12));
    let second = format!("{{{},{}}}", entry("b", "F32", &[1], 0, 4), entry("a", "F32", &[2], 4, 12));
    save_raw(&ranks.inputs[0], &first, &[a.to_bytes(), b.to_bytes()].concat());
    save_raw(&ranks.inputs[1], &second, &[b.to_bytes(), a.to_bytes()].concat());
    ranks.reduce(&["--op", "sum"]).succeeded("another order");
    let got = load(&ranks.output());
    assert_eq!((got["a"].data.values(), got["b"].data.values()), (vec![2.0, 4.0], vec![6.0]));
}

#[test]
fn metadata_is_no_tensor() {
    let ranks = Ranks::new(&[vec![], vec![]]);
    let data = Array::new(Format::BF16, &[1.0, 2.0]);
    let header = format!("{{\"__metadata__\":{{\"format\":\"pt\"}},{}}}", entry("a", "BF16", &[2], 0, 4));
    for path in &ranks.inputs {
        save_raw(path, &header, &data.to_bytes());
    }
    ranks.reduce(&["--op", "mean"]).succeeded("metadata");
    let got = load(&ranks.output());
    assert_eq!((got.len(), got["a"].data.values()), (1, vec![1.0, 2.0]));
}

/// The metadata of the first file are kept, in a fixed order: equal inputs give equal files.
#[test]
fn metadata_of_the_first_file_are_kept_and_outputs_repeat() {
    let ranks = Ranks::new(&[vec![], vec![]]);
    let keys = ["zeta", "alpha", "format", "step", "mid", "omega"];
    let data = Array::new(Format::F32, &[1.5]);
    for (rank, path) in ranks.inputs.iter().enumerate() {
        let pairs: Vec<String> = keys.iter().map(|key| format!("\"{key}\":\"{key} of {rank}\"")).collect();
        let header = format!("{{\"__metadata__\":{{{}}},{}}}", pairs.join(","), entry("a", "F32", &[1], 0, 4));
        save_raw(path, &header, &data.to_bytes());
    }
    let runs: Vec<Vec<u8>> = (0..5)
        .map(|_| {
            ranks.reduce(&["--op", "sum"]).succeeded("metadata");
            std::fs::read(ranks.output()).unwrap()
        })
        .collect();
    assert!(runs.iter().all(|run| *run == runs[0]), "five runs gave different files");
    let header_len = u64::from_le_bytes(runs[0][..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&runs[0][8..8 + header_len]).unwrap();
    for key in keys {
        assert_eq!(header["__metadata__"][key], format!("{key} of 0"));
    }
}

#[test]
fn files_without_tensors() {
    let ranks = Ranks::new(&[vec![], vec![]]);
    for op in ["sum", "mean", "adasum"] {
        ranks.reduce(&["--op", op]).succeeded("no tensors");
        assert!(load(&ranks.output()).is_empty(), "{op}");
    }
}

#[test]
fn one_input_is_one_rank() {
    let values = [1.0, -2.5, 65504.0, 6e-8];
    for format in Format::ALL {
        let values = values.map(|x| format.round(x));
        let ranks = Ranks::new(&[vec![tensor("a", format, &[2, 2], &values)]]);
        for op in ["sum", "mean", "adasum"] {
            ranks.reduce(&["--op", op]).succeeded(op);
            assert_eq!(load(&ranks.output())["a"].data.values(), values, "{op} of {format:?}");
        }
    }
}

/// Names that could break a path, a format string or JSON are kept unchanged.
#[test]
fn unusual_names() {
    let names = ["a/b", "ä ∂", "{}", "quote\"d", "back\\slash", " leading", "new\nline"];
    let tensors: Vec<_> = names.iter().map(|name| tensor(name, Format::F32, &[1], &[1.0])).collect();
    let ranks = Ranks::new(&[tensors.clone(), tensors]);
    ranks.reduce(&["--op", "sum", "--json"]).succeeded("names");
    let got = load(&ranks.output());
    for name in names {
        assert_eq!(got[name].data.values(), [2.0], "{name:?}");
    }
}
