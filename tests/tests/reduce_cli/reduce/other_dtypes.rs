//! Tensors that are no floating-point numbers, such as the counters of batch normalisation: refused, copied or skipped, as the user says.

use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use safetensors::tensor::SafeTensors;
use serde_json::Value;

use crate::files::{Ranks, entry, save_raw};

/// The bytes of one tensor in the result: its dtype, its shape and its data.
fn written(ranks: &Ranks, name: &str) -> Option<(String, Vec<usize>, Vec<u8>)> {
    let bytes = std::fs::read(ranks.output()).unwrap();
    let file = SafeTensors::deserialize(&bytes).expect("the output is a safetensors file");
    let view = file.tensor(name).ok()?;
    Some((view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec()))
}

/// Name, dtype, shape, and the data of each rank in turn.
type Other = (&'static str, &'static str, &'static [usize], Vec<Vec<u8>>);

/// Each rank's file: a weight of f32 and `others`, whose data begin at a place that is misaligned for some of them.
fn with(others: &[Other], ranks: usize) -> Ranks {
    let files = Ranks::new(&vec![vec![]; ranks]);
    for (rank, path) in files.inputs.iter().enumerate() {
        let mut data = Array::new(Format::F32, &[1.0 + rank as f64, 2.0]).to_bytes();
        let mut entries = vec![entry("weight", "F32", &[2], 0, data.len())];
        for (name, dtype, shape, of_ranks) in others {
            let begin = data.len();
            data.extend(&of_ranks[rank % of_ranks.len()]);
            entries.push(entry(name, dtype, shape, begin, data.len()));
        }
        save_raw(path, &format!("{{{}}}", entries.join(",")), &data);
    }
    files
}

fn counter(steps: &[i64]) -> Other {
    ("bn.num_batches_tracked", "I64", &[], steps.iter().map(|step| step.to_le_bytes().to_vec()).collect())
}

#[test]
fn by_default_they_are_refused_with_the_options() {
    let ranks = with(&[counter(&[7])], 2);
    for options in [&["--op", "sum"][..], &["--op", "adasum", "--other-dtypes", "refuse"]] {
        let words =
            ["in0.safetensors", "\"bn.num_batches_tracked\"", "I64", "--other-dtypes copy", "--other-dtypes skip"];
        ranks.refuses("a counter", options, &words);
    }
}

#[test]
fn copied_tensors_are_the_bytes_of_all_ranks() {
    let others = [
        ("mask", "BOOL", &[3][..], vec![vec![1, 0, 1]]),
        counter(&[-7]),
        ("ids", "U8", &[0, 5], vec![vec![]]),
        ("packed", "F4", &[2, 3], vec![vec![0x12, 0x34, 0x56]]),
        ("eighths", "F8_E4M3", &[5], vec![vec![1, 2, 3, 4, 5]]),
        ("waves", "C64", &[2], vec![(0..16).collect()]),
    ];
    for op in ["sum", "mean", "adasum"] {
        for granularity in ["tensor", "whole"] {
            let ranks = with(&others, 3);
            let options = ["--op", op, "--granularity", granularity, "--other-dtypes", "copy"];
            let report = ranks.reduce(&[&options[..], &["--json"]].concat()).succeeded(op);
            let report: Value = serde_json::from_str(&report.stdout).unwrap();
            for (name, dtype, shape, bytes) in &others {
                let expected = (dtype.to_string(), shape.to_vec(), bytes[0].clone());
                assert_eq!(written(&ranks, name), Some(expected), "{op}");
                let copied =
                    report["copied"].as_array().unwrap().iter().find(|tensor| tensor["name"] == *name).unwrap();
                assert_eq!(copied["dtype"], dtype.to_lowercase());
            }
            assert_eq!((&report["tensors"].as_array().unwrap().len(), &report["skipped"]), (&1, &Value::Array(vec![])));
            // The weight is what it is without the others.
            let alone = with(&[], 3);
            alone.reduce(&options).succeeded(op);
            assert_eq!(written(&ranks, "weight"), written(&alone, "weight"), "{op}, {granularity}");
        }
    }
    // A dtype for the result is of no matter to them.
    let ranks = with(&others, 2);
    ranks.reduce(&["--op", "sum", "--other-dtypes", "copy", "--output-dtype", "f64"]).succeeded("f64");
    assert_eq!(written(&ranks, "mask").unwrap().0, "BOOL");
    assert_eq!(written(&ranks, "weight").unwrap().0, "F64");
    let lines = ranks.reduce(&["--op", "sum", "--other-dtypes", "copy"]).succeeded("lines").stdout;
    assert!(lines.contains("bn.num_batches_tracked: i64 []  copied"), "{lines}");
}

#[test]
fn copied_tensors_that_differ_are_refused_with_both_values() {
    let refuses = |other, words: &[&str]| {
        let words = [words, &["in2.safetensors", "in0.safetensors"]].concat();
        with(&[other], 3).refuses("differs", &["--op", "mean", "--other-dtypes", "copy"], &words);
    };
    refuses(counter(&[100, 100, -101]), &["\"bn.num_batches_tracked\"", "I64 -101 at element 0", "100:"]);
    let masks = vec![vec![1, 0, 1], vec![1, 0, 1], vec![1, 1, 1]];
    refuses(("mask", "BOOL", &[3], masks), &["\"mask\"", "element 1", "true", "false"]);
    let counts = vec![vec![1, 0, 2, 0], vec![1, 0, 2, 0], vec![1, 0, 2, 1]];
    refuses(("counts", "U16", &[2], counts), &["\"counts\"", "element 1", "U16 258", "2:"]);
    let eighths = vec![vec![1, 2], vec![1, 2], vec![1, 0x7f]];
    refuses(("eighths", "F8_E5M2", &[2], eighths), &["\"eighths\"", "element 1", "0x7f", "0x02"]);
    let packed = vec![vec![0x12, 0x34], vec![0x12, 0x34], vec![0x12, 0x35]];
    refuses(("packed", "F4", &[4], packed), &["\"packed\"", "0x35", "0x34"]);
}

#[test]
fn skipped_tensors_are_not_in_the_result_and_may_differ() {
    let ranks = with(&[counter(&[1, 2]), ("mask", "BOOL", &[1], vec![vec![1]])], 2);
    // One rank has a counter that the other lacks, of another shape.
    let weight = Array::new(Format::F32, &[2.0, 2.0]).to_bytes();
    let header = format!("{{{},{}}}", entry("steps", "I32", &[2], 0, 8), entry("weight", "F32", &[2], 8, 16));
    save_raw(&ranks.inputs[1], &header, &[vec![0; 8], weight].concat());
    let report = ranks.reduce(&["--op", "sum", "--other-dtypes", "skip", "--json"]).succeeded("skip");
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(report["skipped"][0]["name"], "bn.num_batches_tracked");
    assert_eq!((&report["skipped"][1]["name"], &report["skipped"][1]["dtype"]), (&"mask".into(), &"bool".into()));
    assert_eq!(report["copied"], Value::Array(vec![]));
    assert_eq!((written(&ranks, "mask"), written(&ranks, "steps")), (None, None));
    assert_eq!(written(&ranks, "weight").unwrap().2, Array::new(Format::F32, &[3.0, 4.0]).to_bytes());
    let lines = ranks.reduce(&["--op", "sum", "--other-dtypes", "skip"]).succeeded("lines").stdout;
    assert!(lines.contains("mask: bool [1]  skipped"), "{lines}");
}

/// A name must have the same dtype everywhere, also where one of the dtypes is skipped.
#[test]
fn a_name_with_another_dtype_in_another_file_is_refused() {
    for mode in ["copy", "skip"] {
        for odd in [0, 1] {
            let ranks = with(&[], 2);
            let header = format!("{{{}}}", entry("weight", "I32", &[2], 0, 8));
            save_raw(&ranks.inputs[odd], &header, &[0; 8]);
            let words = ["in1.safetensors", "\"weight\"", "I32", "F32"];
            ranks.refuses(mode, &["--op", "sum", "--other-dtypes", mode], &words);
        }
    }
}
