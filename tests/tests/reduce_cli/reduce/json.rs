//! `--json`: one object with the right coefficients, norms and flags.

use gradsync_tests::array::Array;
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::oracle::exact::dot_f64;
use gradsync_tests::tolerance::adasum::{Method, expect};
use gradsync_tests::tolerance::{dot, within};
use serde_json::Value;

use crate::files::{Ranks, Tensor, load, tensor};
use crate::reduce::results::inputs;

fn report(ranks: &Ranks, options: &[&str]) -> Value {
    let finished = ranks.reduce(&[options, &["--json"]].concat()).succeeded("json");
    serde_json::from_str(&finished.stdout)
        .unwrap_or_else(|error| panic!("stdout is not one JSON object ({error}): {}", finished.stdout))
}

fn numbers(value: &Value) -> Vec<f64> {
    // JSON represents NaN by null.
    value.as_array().expect("a list").iter().map(|x| x.as_f64().unwrap_or(f64::NAN)).collect()
}

/// Checks everything that does not depend on the operation, and returns the coefficients of each tensor.
fn check(json: &Value, ranks: &Ranks, inputs: &[Vec<Tensor>], op: &str) -> Vec<(String, Vec<f64>)> {
    assert_eq!(json["op"], op);
    assert_eq!(json["ranks"], inputs.len());
    assert_eq!(json["backend"], "cpu");
    let output = load(&ranks.output());
    let tensors = json["tensors"].as_array().expect("a list of tensors");
    assert_eq!(tensors.len(), inputs[0].len());
    tensors
        .iter()
        .map(|entry| {
            let name = entry["name"].as_str().expect("a name");
            let written = &output[name];
            assert_eq!(entry["dtype"].as_str().unwrap().to_lowercase(), written.data.format().name(), "{name}");
            let shape: Vec<usize> = serde_json::from_value(entry["shape"].clone()).unwrap();
            assert_eq!(shape, written.shape, "{name}");
            let values = written.data.values();
            assert_eq!(entry["finite"], values.iter().all(|x| x.is_finite()), "{name}");
            assert_norm(name, &entry["norm"], &written.data);
            (name.to_owned(), numbers(&entry["coefficients"]))
        })
        .collect()
}

/// The norm is the norm of the written tensor, or of the result before its one rounding: the two differ by at most the norm of the rounding
/// errors.
fn assert_norm(name: &str, norm: &Value, written: &Array) {
    let values = written.values();
    if values.iter().any(|x| !x.is_finite()) {
        assert!(norm.as_f64().is_none_or(|x| !x.is_finite()), "{name}: norm {norm} of a tensor that is not finite");
        return;
    }
    let exact = dot_f64(&values, &values).sqrt();
    let rounding: f64 = values.iter().map(|&x| written.format().rounding_error(x).powi(2)).sum::<f64>().sqrt();
    // The error of the root is d√q = dq / 2√q, plus one rounding.
    let sum = if exact > 0.0 { dot(&values, &values) / (2.0 * exact) + exact * 2.3e-16 } else { 0.0 };
    let got = norm.as_f64().unwrap_or(f64::NAN);
    assert!(within(Format::F64, got, exact, rounding * 1.01 + sum), "{name}: norm {got:e}, exact {exact:e}");
}

#[test]
fn sum_and_mean() {
    let inputs = inputs(Kind::Random, &Format::ALL, 3);
    let ranks = Ranks::new(&inputs);
    for (options, weight) in
        [(&["--op", "sum"][..], 1.0), (&["--op", "mean"], 1.0 / 3.0), (&["--op", "sum", "--scale", "0.5"], 0.5)]
    {
        let json = report(&ranks, options);
        for (name, coefficients) in check(&json, &ranks, &inputs, options[1]) {
            assert_eq!(coefficients.len(), 3, "{name}");
            for got in coefficients {
                assert!(within(Format::F64, got, weight, weight * 2.3e-16), "{options:?}, {name}: {got:e}");
            }
        }
    }
}

#[test]
fn adasum_coefficients_are_the_weights() {
    let gram = [1, 2, 3, 4, 8].map(|world_size| (Method::Gram, Format::F32, world_size));
    for (method, format, world_size) in gram.into_iter().chain([(Method::Tree, Format::F64, 4)]) {
        let (inputs, name) = (inputs(Kind::Random, &[format], world_size), format!("{method:?}").to_lowercase());
        let ranks = Ranks::new(&inputs);
        for (scale, factor) in [("1", 1.0), ("0.5", 0.5)] {
            let json = report(&ranks, &["--op", "adasum", "--algorithm", &name, "--scale", scale]);
            assert_eq!(json["algorithm"], name);
            for (name, coefficients) in check(&json, &ranks, &inputs, "adasum") {
                let layer = inputs[0].iter().position(|tensor| tensor.name == name).unwrap();
                let vectors: Vec<Vec<f64>> = inputs.iter().map(|tensors| tensors[layer].data.values()).collect();
                let whole = 0..vectors[0].len();
                let expected = expect(method, format, &vectors, std::slice::from_ref(&whole));
                assert_eq!(coefficients.len(), world_size, "{name}");
                for (rank, got) in coefficients.into_iter().enumerate() {
                    let (exact, bound) = (factor * expected.weights[rank], expected.weight_bounds[rank]);
                    let right = within(Format::F64, got, exact, bound + exact.abs() * 2.3e-16);
                    assert!(right, "{name}, rank {rank} of {world_size}: {got:e}, exact {exact:e}, allowed {bound:e}");
                }
            }
        }
    }
    let ranks = Ranks::new(&inputs(Kind::Random, &[Format::F32], 2));
    assert_eq!(report(&ranks, &["--op", "adasum"])["algorithm"], "gram");
}

#[test]
fn whole_gives_every_tensor_the_same_coefficients() {
    let inputs = inputs(Kind::Random, &[Format::F32], 3);
    let ranks = Ranks::new(&inputs);
    let json = report(&ranks, &["--op", "adasum", "--granularity", "whole"]);
    let coefficients = check(&json, &ranks, &inputs, "adasum");
    assert!(coefficients.iter().all(|(_, weights)| *weights == coefficients[0].1), "{coefficients:?}");
}

#[test]
fn tensors_that_are_not_finite_alone_are_flagged() {
    let good = |seed: f64| tensor("good", Format::F32, &[2], &[seed, 2.0]);
    for bad in [f64::NAN, f64::INFINITY] {
        let inputs = [
            vec![good(1.0), tensor("bad", Format::F32, &[2], &[1.0, bad])],
            vec![good(3.0), tensor("bad", Format::F32, &[2], &[1.0, 2.0])],
        ];
        for op in ["sum", "mean", "adasum"] {
            let ranks = Ranks::new(&inputs);
            let json = report(&ranks, &["--op", op]);
            check(&json, &ranks, &inputs, op);
            let finite = |name: &str| {
                let tensors = json["tensors"].as_array().unwrap();
                tensors.iter().find(|entry| entry["name"] == name).unwrap()["finite"].as_bool().unwrap()
            };
            assert!(finite("good") && !finite("bad"), "{op} with {bad}: {json}");
        }
    }
}

#[test]
fn without_json_stdout_holds_no_object() {
    let ranks = Ranks::new(&inputs(Kind::Random, &[Format::F32], 2));
    let finished = ranks.reduce(&["--op", "sum"]).succeeded("plain");
    assert!(serde_json::from_str::<Value>(&finished.stdout).map_or(true, |value| !value.is_object()));
}
