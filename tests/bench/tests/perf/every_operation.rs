//! The results of every operation on the CPU are correct, with every dtype, reduction and algorithm, on several numbers of ranks.

use serde_json::Value;

use crate::run::{measured, rows};

const DTYPES: [&str; 4] = ["f64", "f32", "f16", "bf16"];

/// Checks that the results of all rows were checked and correct.
fn assert_right(document: &Value) {
    assert_eq!(document["wrong"], 0, "{document:#}");
    for row in rows(document) {
        let sides = [&row["out_of_place"], &row["in_place"]];
        assert!(sides.iter().any(|side| side.is_object()), "{row:#}");
        for side in sides.into_iter().filter(|side| side.is_object()) {
            assert_eq!(side["wrong"], 0, "{row:#}");
        }
    }
}

fn count(document: &Value, matches: impl Fn(&Value) -> bool) -> usize {
    rows(document).iter().filter(|row| matches(row)).count()
}

#[test]
fn kernels() {
    // Sizes include odd numbers of elements, and more than one chunk.
    let sizes = ["-b", "120", "-e", "600000", "-f", "5000"];
    let document = measured(
        &[&["zero", "squared_norms", "dots", "gram", "combine", "-d", "all", "-g", "3,9"][..], &sizes].concat(),
    );
    assert_right(&document);
    for (operation, series) in [("zero", 1), ("squared_norms", 1), ("dots", 1), ("gram", 2), ("combine", 2)] {
        let found = count(&document, |row| row["operation"] == operation);
        assert_eq!(found, series * DTYPES.len() * 2, "{operation}: {document:#}");
    }
}

#[test]
fn casts_and_sums_of_every_pair() {
    let document = measured(&["cast", "scale", "accumulate", "-d", "all", "-b", "600000"]);
    assert_right(&document);
    for operation in ["cast", "scale", "accumulate"] {
        for to in DTYPES {
            for from in DTYPES {
                let is_pair =
                    |row: &Value| row["operation"] == operation && row["dtype"] == to && row["from_dtype"] == from;
                assert_eq!(count(&document, is_pair), 1, "{operation} {to}:{from}");
            }
        }
    }
}

#[test]
fn collectives() {
    let operations = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"];
    let options = ["-d", "all", "-o", "all", "-g", "2,3,8", "-b", "5000", "--working-set", "100K"];
    let document = measured(&[&operations[..], &options].concat());
    assert_right(&document);
    for operation in operations {
        let redops = if ["all_reduce", "reduce_scatter"].contains(&operation) { 4 } else { 1 };
        let found = count(&document, |row| row["operation"] == operation);
        assert_eq!(found, redops * DTYPES.len() * 3, "{operation}");
    }
    assert!(rows(&document).iter().all(|row| row["transport"] == "local" && row["backend"] == "cpu"));
}

#[test]
fn adasum() {
    let options = ["--algorithm", "gram,tree,auto", "-d", "all", "-g", "2,3,4,8", "-b", "20000", "--layers", "7"];
    let document = measured(&[&["adasum"][..], &options].concat());
    assert_right(&document);
    // The tree runs on powers of two; a choice by the library is shown under the name of the chosen algorithm.
    assert_eq!(count(&document, |row| row["redop"] == "gram"), 2 * 4 * DTYPES.len(), "{document:#}");
    assert_eq!(count(&document, |row| row["redop"] == "tree"), 3 * DTYPES.len(), "{document:#}");
    let left_out = document["left_out"].as_array().expect("a list");
    assert!(left_out.iter().any(|why| why.as_str().is_some_and(|why| why.contains("not 3 ranks"))), "{left_out:?}");
}

#[test]
fn adasum_of_a_models_tensors() {
    let document = measured(&["adasum", "-g", "2", "-b", "4K", "-e", "64K", "-f", "16", "--layers", "bert-large"]);
    assert_right(&document);
    // A vector that is too short for a model's proportions is divided into as many equal tensors.
    assert_eq!(rows(&document).iter().map(|row| &row["layers"]).collect::<Vec<_>>(), [398, 398]);
}

#[test]
fn adasum_in_nodes() {
    let schemes = ["gram+gram", "gram+tree", "sum+gram", "sum+tree"];
    let algorithms = schemes.join(",");
    let of = |ranks: &str, per_node: u64| {
        let nodes = per_node.to_string();
        let options = ["--algorithm", &algorithms, "--ranks-per-node", &nodes, "-g", ranks, "-d", "all"];
        let document = measured(&[&["adasum"][..], &options, &["-b", "20000", "--layers", "7"]].concat());
        assert_right(&document);
        assert!(rows(&document).iter().all(|row| row["ranks_per_node"] == per_node), "{document:#}");
        schemes.map(|scheme| count(&document, |row| row["redop"] == scheme) / DTYPES.len())
    };
    assert_eq!(of("2,4,8", 2), [3; 4]);
    assert_eq!(of("4", 1), [1; 4]);
    assert_eq!(of("4", 4), [1; 4]);
    // Three nodes have no tree.
    assert_eq!(of("6", 2), [1, 0, 1, 0]);
    assert_eq!(of("6", 3), [1; 4]);
    let flat = measured(&["adasum", "-b", "1K", "-g", "2"]);
    assert!(rows(&flat)[0]["ranks_per_node"].is_null());
}

#[test]
fn operation_all_means_all() {
    let document = measured(&["all", "-b", "1K", "-g", "2"]);
    assert_right(&document);
    let names = [
        "zero",
        "cast",
        "scale",
        "accumulate",
        "squared_norms",
        "dots",
        "gram",
        "combine",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send_recv",
        "adasum",
        "reducer",
    ];
    let found: Vec<&str> = rows(&document).iter().filter_map(|row| row["operation"].as_str()).collect();
    assert_eq!(found, names);
}
