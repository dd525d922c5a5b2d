//! Files that are invalid or truncated safetensors files: an error that names the file, and nothing left behind.

use gradsync_tests::oracle::Format;

use crate::files::{Ranks, entry, save_raw, tensor};

fn two() -> Ranks {
    let tensors = vec![tensor("weight", Format::F32, &[100], &[1.0; 100])];
    Ranks::new(&[tensors.clone(), tensors])
}

/// Replaces the second input and expects a refusal that names it.
#[track_caller]
fn refuses_bytes(label: &str, bytes: &[u8]) {
    let ranks = two();
    std::fs::write(&ranks.inputs[1], bytes).unwrap();
    for op in ["sum", "adasum"] {
        ranks.refuses(label, &["--op", op], &["in1.safetensors"]);
        std::fs::remove_file(ranks.output()).unwrap();
    }
}

#[test]
fn truncated_anywhere() {
    let whole = std::fs::read(&two().inputs[0]).unwrap();
    for len in [0, 1, 7, 8, 9, 20, whole.len() - 401, whole.len() - 400, whole.len() - 4, whole.len() - 1] {
        refuses_bytes(&format!("truncated to {len} of {} bytes", whole.len()), &whole[..len]);
    }
}

#[test]
fn longer_than_its_header_says() {
    let mut bytes = std::fs::read(&two().inputs[0]).unwrap();
    bytes.extend([0; 4]);
    refuses_bytes("four bytes too many", &bytes);
}

#[test]
fn a_header_length_beyond_the_file() {
    for length in [401_u64, 1 << 20, 1 << 40, u64::MAX, u64::MAX - 7] {
        let mut bytes = std::fs::read(&two().inputs[0]).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        refuses_bytes(&format!("header length {length}"), &bytes);
    }
}

#[test]
fn a_header_that_is_garbage() {
    refuses_bytes("noise", &(0..1000_u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect::<Vec<_>>());
    for (label, header) in [("not JSON", "this is not JSON"), ("a list", "[1, 2, 3]")] {
        let ranks = two();
        save_raw(&ranks.inputs[1], header, &[0; 400]);
        ranks.refuses(label, &["--op", "sum"], &["in1.safetensors"]);
    }
    refuses_bytes("not UTF-8", &[8_u64.to_le_bytes().to_vec(), vec![0xff; 8], vec![0; 400]].concat());
}

#[test]
fn no_such_file_and_no_file_at_all() {
    let ranks = two();
    std::fs::remove_file(&ranks.inputs[1]).unwrap();
    ranks.refuses("no such file", &["--op", "sum"], &["in1.safetensors"]);
    let ranks = two();
    std::fs::remove_file(&ranks.inputs[1]).unwrap();
    std::fs::create_dir(&ranks.inputs[1]).unwrap();
    ranks.refuses("a folder", &["--op", "sum"], &["in1.safetensors"]);
}

/// A file whose names and whose offsets are wrong is refused for its names, as the first file and as another one.
#[test]
fn names_are_checked_before_offsets_in_every_file() {
    let weight = |start, end| entry("weight", "F32", &[100], start, end);
    let twice = format!("{{{},{}}}", weight(8, 408), weight(0, 396));
    let extra = format!("{{{},{}}}", weight(8, 404), entry("other", "F32", &[1], 0, 4));
    let missing = format!("{{{}}}", entry("other", "F32", &[1], 4, 4));
    for input in 0..2 {
        let name = format!("in{input}.safetensors");
        let ranks = two();
        save_raw(&ranks.inputs[input], &twice, &[0; 800]);
        ranks.refuses("twice", &["--op", "sum"], &[&name, "\"weight\"", "twice"]);
    }
    for (header, words) in [(extra, ["\"other\"", "is not in"]), (missing, ["\"other\"", "is not in"])] {
        let ranks = two();
        save_raw(&ranks.inputs[1], &header, &[0; 800]);
        ranks.refuses("names", &["--op", "sum"], &[&words[..], &["in1.safetensors"]].concat());
    }
}

/// Whatever is wrong with a tensor, the error names the file and the tensor.
#[test]
fn every_refusal_of_a_tensor_names_file_and_tensor() {
    let with = |weight: &str| format!("{{{},{weight}}}", entry("first", "F32", &[1], 0, 4));
    let cases = [
        ("no dtype of the format", with(&entry("weight", "F33", &[100], 4, 404)), 404, "F33"),
        ("a negative dimension", with(r#""weight":{"dtype":"F32","shape":[-1],"data_offsets":[4,404]}"#), 404, "-1"),
        ("a shape that is no list", with(r#""weight":{"dtype":"F32","shape":7,"data_offsets":[4,404]}"#), 404, "7"),
        ("one offset", with(r#""weight":{"dtype":"F32","shape":[100],"data_offsets":[4]}"#), 404, "1"),
        ("no offsets", with(r#""weight":{"dtype":"F32","shape":[100]}"#), 404, "data_offsets"),
        ("no object", with(r#""weight":[1,2]"#), 404, "dtype, shape and data_offsets"),
        ("cut short", with(r#""weight":{"dtype":"#), 404, "expected value"),
        ("too few bytes for the shape", with(&entry("weight", "F32", &[100], 4, 400)), 400, "[100]"),
        ("a shape that overflows", with(&entry("weight", "F32", &[usize::MAX, 4], 4, 404)), 404, "4"),
        ("a gap", with(&entry("weight", "F32", &[100], 8, 408)), 408, "8"),
        ("an overlap", with(&entry("weight", "F32", &[100], 0, 400)), 400, "4"),
        ("past the end", with(&entry("weight", "F32", &[100], 4, 404)), 300, "300"),
        ("reversed", with(&entry("weight", "F32", &[100], 404, 4)), 404, "404 to 4"),
        ("huge", with(&entry("weight", "F32", &[100], usize::MAX - 400, usize::MAX)), 404, "18446744073709551215"),
        ("bytes behind", with(&entry("weight", "F32", &[100], 4, 404)), 500, "96 bytes"),
    ];
    for (label, header, data, word) in &cases {
        for input in 0..2 {
            let tensors =
                vec![tensor("first", Format::F32, &[1], &[1.0]), tensor("weight", Format::F32, &[100], &[1.0; 100])];
            let ranks = Ranks::new(&[tensors.clone(), tensors]);
            save_raw(&ranks.inputs[input], header, &vec![0; *data]);
            let name = format!("in{input}.safetensors");
            ranks.refuses(label, &["--op", "sum"], &[&name, "\"weight\"", word]);
        }
    }
    let ranks = two();
    save_raw(&ranks.inputs[1], "{\"weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},,", &[0; 4]);
    ranks.refuses("between tensors", &["--op", "sum"], &["in1.safetensors", "after tensor \"weight\""]);
}
