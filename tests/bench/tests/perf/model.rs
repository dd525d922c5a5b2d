//! `--model`: estimates for 2 to 4096 ranks, the numbers of ranks at which the choice changes, and fits to measurements.

use std::path::Path;

use serde_json::Value;

use crate::run::{self, QUICK, perf, perf_in};

fn document(arguments: &[&str]) -> Value {
    document_in(tempfile::tempdir().expect("a temporary folder").path(), arguments)
}

fn document_in(folder: &Path, arguments: &[&str]) -> Value {
    perf_in(folder, &[&["--model", "--json", "out.json"][..], arguments].concat()).succeeded("model");
    run::document(folder)
}

#[test]
fn it_prints_every_scheme_and_says_where_the_choice_switches() {
    let finished = perf(&["--model", "-b", "64M", "--layers", "398"]).succeeded("model");
    let rows: Vec<Vec<&str>> = finished
        .stdout
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty())
        .map(|line| line.split_whitespace().collect())
        .collect();
    let ranks: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    assert_eq!(ranks, ["2", "4", "8", "16", "32", "64", "128", "256", "512", "1024", "2048", "4096"]);
    for scheme in ["gram", "tree", "gram+gram", "gram+tree", "sum+gram", "sum+tree"] {
        assert!(finished.stdout.contains(&format!(" {scheme} ")), "{scheme}: {}", finished.stdout);
    }
    for words in [
        "# automatic choice: gram from 2 ranks, gram+",
        "a tenth of its time from",
        "assumed",
        "N/A",
        "simulated",
        "one Gram matrix of all ranks takes",
    ] {
        assert!(finished.stdout.contains(words), "{words}: {}", finished.stdout);
    }
}

#[test]
fn its_json_names_the_switches_and_the_reasons() {
    let document = document(&["-b", "1M", "-e", "1G", "-f", "1024", "--ranks-per-node", "4"]);
    assert_eq!((&document["schema"], &document["ranks_per_node"]), (&1.into(), &4.into()));
    assert!(document["fit"].is_null());
    let sizes = document["sizes"].as_array().expect("a list");
    assert_eq!(sizes.len(), 2);
    for size in sizes {
        let worlds = size["worlds"].as_array().expect("a list");
        assert_eq!(worlds[0]["choice"], "gram");
        assert_eq!(worlds[2]["nodes"], 2, "eight ranks, four a node");
        for switch in size["switches"].as_array().expect("a list") {
            let world = worlds.iter().find(|world| world["ranks"] == switch["ranks"]).expect("a world of that size");
            assert_eq!(world["choice"], switch["scheme"]);
            assert!(switch["reason"].as_str().is_some_and(|reason| reason.contains("one Gram matrix")), "{switch:#}");
            assert!(world["reason"].as_str().is_some_and(|reason| reason.contains(" ms")), "{world:#}");
        }
        assert!(size["switches"].as_array().is_some_and(|switches| switches.len() > 1), "{size:#}");
        for world in worlds {
            let number = |field: &str| world[field].as_f64().unwrap_or_else(|| panic!("{field}: {world:#}"));
            let of_choice = world["milliseconds"]
                .as_array()
                .and_then(|all| all.iter().find(|time| time[0] == world["choice"]).and_then(|time| time[1].as_f64()));
            // The simulated messages take about as long as the formula predicts.
            let ratio = number("simulated_milliseconds") / of_choice.expect("the time of the choice");
            assert!((0.5..1.25).contains(&ratio), "{ratio}: {world:#}");
            assert!(number("simulated_gram_milliseconds") > 0.0, "{world:#}");
        }
    }
}

/// Replaces every number of that name in a row, at any depth.
fn replace(row: &mut Value, field: &str, number: f64) {
    for (name, value) in row.as_object_mut().into_iter().flatten() {
        match value {
            Value::Number(_) if name == field && number == 0.0 => *value = 0.into(),
            Value::Number(_) if name == field => *value = number.into(),
            _ => replace(value, field, number),
        }
    }
}

/// Writes rows of four ranks to `measured.json`, in two nodes for algorithms of two levels.
fn measure(folder: &Path) {
    let sizes = ["-b", "4K", "-e", "1M", "-f", "16", "--json", "measured.json"];
    let nodes = ["--algorithm", "gram,gram+tree", "--ranks-per-node", "2"];
    let operations = [&["zero", "gram", "all_reduce", "all_to_all", "adasum", "-g", "4"], &nodes[..]].concat();
    perf_in(folder, &[&QUICK[..], &operations, &sizes].concat()).succeeded("measure");
}

#[test]
fn it_is_fitted_to_what_was_measured() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    measure(folder.path());
    // These rows are invalid.
    let measured = std::fs::read_to_string(folder.path().join("measured.json")).unwrap();
    let measured: Value = serde_json::from_str(&measured).unwrap();
    for (field, number, words) in [("ranks", 0.0, "0 ranks"), ("time_us", -1.5, "a time of -1.5 us")] {
        let mut spoilt = measured.clone();
        replace(&mut spoilt["measurements"][0], field, number);
        std::fs::write(folder.path().join("spoilt.json"), spoilt.to_string()).unwrap();
        perf_in(folder.path(), &["--model", "--fit", "spoilt.json"]).refused(field, &["spoilt.json", "zero", words]);
    }
    // Rows in nodes are used only if the fit has the same node size.
    let finished = perf_in(folder.path(), &["--model", "--fit", "measured.json", "-b", "1M"]).succeeded("other nodes");
    for words in ["fitted to 15 measured rows", "rows that the model has no formula for: 3"] {
        assert!(finished.stdout.contains(words), "{words}: {}", finished.stdout);
    }
    let fitted = ["--model", "--ranks-per-node", "2", "--fit", "measured.json", "--json", "model.json", "-b", "1M"];
    let finished = perf_in(folder.path(), &fitted).succeeded("fit");
    assert!(finished.stdout.contains("fitted to 18 measured rows"), "{}", finished.stdout);
    let model: Value =
        serde_json::from_str(&std::fs::read_to_string(folder.path().join("model.json")).unwrap()).unwrap();
    let residuals = model["fit"]["residuals"].as_array().expect("a list");
    assert_eq!(residuals.len(), 18);
    for residual in residuals {
        let number = |field: &str| residual[field].as_f64().unwrap_or_else(|| panic!("{field}: {residual:#}"));
        let off = number("model_us") / number("measured_us") - 1.0;
        assert!((number("error") - off).abs() < 1e-9 && number("left_out_error").is_finite(), "{residual:#}");
    }
    for words in [
        "zero f32, cpu, 1 ranks",
        "adasum f32 gram, cpu over local, 4 ranks",
        "gram+tree, cpu over local, 4 ranks, 2 a node",
        "rows that were left out",
    ] {
        assert!(finished.stdout.contains(words), "{words}: {}", finished.stdout);
    }
}

/// Measured times are as noisy as the machine; with times by a fixed rule, the fit's result does not depend on the noise.
#[test]
fn every_part_of_the_time_that_rows_show_is_fitted() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    measure(folder.path());
    let path = folder.path().join("measured.json");
    let mut measured: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for row in measured["measurements"].as_array_mut().expect("a list") {
        // Rows with a transport take a step; a KiB takes longer if ranks exchange it, and longest between nodes.
        let (microseconds, microseconds_per_kib) = match (row["redop"].as_str(), row["transport"].as_str()) {
            (Some("gram+tree"), _) => (400.0, 8.0),
            (_, Some(_)) => (200.0, 2.0),
            (_, None) => (1.0, 1.0),
        };
        let kib = row["size_bytes"].as_f64().expect("a size") / 1024.0;
        replace(row, "time_us", microseconds + microseconds_per_kib * kib);
    }
    std::fs::write(&path, measured.to_string()).unwrap();
    let model = document_in(folder.path(), &["--ranks-per-node", "2", "--fit", "measured.json", "-b", "1M"]);
    let parameters = model["parameters"].as_array().expect("a list");
    // Four ranks form two nodes.
    for of in ["steps", "bytes inside the node", "bytes between nodes", "bytes of memory"] {
        let parameter = parameters.iter().find(|parameter| parameter["of"] == of).unwrap_or_else(|| panic!("{of}"));
        assert_eq!(parameter["is_fitted"], true, "{of}: {parameters:#?}");
        assert!(parameter["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{of}: {parameters:#?}");
    }
}

/// For the measurements of two H200 and of four H100, the model's errors equal the errors on the performance page, and the choice by the
/// fitted parameters equals the choice by the default ones.
#[test]
fn it_is_as_exact_on_measured_gpus_as_the_performance_page_says() {
    is_as_exact_as_the_page_says("two-h200", [18.0, 19.0, 8.0]);
    is_as_exact_as_the_page_says("four-h100", [20.0, 21.0, 7.0]);
}

/// `percents` are the root mean square of the errors, the same of rows that were left out of the fit, and the median.
fn is_as_exact_as_the_page_says(machine: &str, percents: [f64; 3]) {
    let measured = Path::new(env!("CARGO_MANIFEST_DIR")).join("../measured").join(machine);
    let files =
        ["cuda-kernels", "cuda-wide", "nccl", "nccl-adasum"].map(|name| measured.join(name).with_extension("json"));
    let fit: Vec<&str> = files.iter().flat_map(|file| ["--fit", file.to_str().expect("UTF-8")]).collect();
    let sizes = ["-b", "1M", "-e", "1G", "-f", "32"];
    let fitted = document(&[&fit[..], &sizes].concat());
    assert_eq!(fitted["fit"]["residuals"].as_array().map(Vec::len), Some(131));
    // The rows are fixed, and so is the fit: these are its errors, rounded up to whole percents.
    for (field, percents) in ["error", "left_out_error", "median_error"].into_iter().zip(percents) {
        let off = 100.0 * fitted["fit"][field].as_f64().unwrap_or_else(|| panic!("{field}"));
        assert_eq!(off.ceil(), percents, "{machine}, {field}: {off} %");
    }
    let own = document(&sizes);
    for (fitted, own) in fitted["sizes"].as_array().unwrap().iter().zip(own["sizes"].as_array().unwrap()) {
        let switches = |of: &Value| -> Vec<(String, f64)> {
            let all = of["switches"].as_array().expect("a list").iter();
            all.map(|at| (at["scheme"].to_string(), at["ranks"].as_f64().expect("a number"))).collect()
        };
        let (fitted, own) = (switches(fitted), switches(own));
        assert_eq!(fitted.len(), own.len(), "{fitted:?}, {own:?}");
        for ((fitted_scheme, fitted_ranks), (scheme, ranks)) in fitted.iter().zip(&own) {
            assert_eq!(fitted_scheme, scheme, "{fitted:?}, {own:?}");
            assert!((0.5..=2.0).contains(&(fitted_ranks / ranks)), "{fitted:?}, {own:?}");
        }
    }
}

#[test]
fn files_that_are_no_measurements_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("text.json", "no JSON");
    write("other.json", "{\"schema\": 1}");
    let future = "{\"schema\": 2, \"program\": \"\", \"machine\": {}, \"warm_ups\": 0, \"iterations\": 1, \
                  \"measurements\": [], \"left_out\": [], \"wrong\": 0}";
    write("future.json", future);
    write("empty.json", &future.replace("2", "1"));
    let cases = [
        ("missing.json", "missing.json"),
        ("text.json", "text.json"),
        ("other.json", "cargo xtask perf --json"),
        ("future.json", "schema 2"),
        ("empty.json", "no row"),
    ];
    for (name, words) in cases {
        perf_in(folder.path(), &["--model", "--fit", name]).refused(name, &[words]);
    }
}
