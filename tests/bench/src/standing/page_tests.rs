//! Report pages of invented measurements.

use serde_json::json;

use super::*;
use crate::standing::PARTS;

fn measured(json: Value) -> Shown {
    Shown {
        part: &PARTS[0],
        ended: Ended::Measured,
        command: "cargo xtask perf cast --json cast.json".into(),
        seconds: 3.25,
        text: "# gradsync 9.8.7\n# CPU: some <fast> one\n# 5 warm-up rounds, 20 counted\n\n# cast <on> cpu\n".into(),
        svg: Some("<svg></svg>".into()),
        json: Some(json),
    }
}

#[test]
fn a_page_shows_what_was_measured_and_what_was_not() {
    let row = |size: u64, ratio: f64| {
        json!({"operation": "cast", "transport": null, "ranks": 1, "dtype": "f32", "from_dtype": "bf16", "redop": "none",
               "size_bytes": size, "in_place": null, "limit_busbw": 40.0, "baseline": {"ratio": ratio},
               "out_of_place": {"time_us": 10.0, "p99_us": 11.0, "busbw": 30.0}})
    };
    let document = json!({"wrong": 0, "graph_calls": 0, "left_out": ["a <reason>"],
                          "measurements": [row(1 << 20, 0.5), row(1 << 24, 0.95)]});
    let shown = [measured(document), Shown::not_run(&PARTS[1], "no GPU".into())];
    let page = page(&shown, Some("gram & tree"), "cargo xtask bench --quick");
    for text in [
        "f32:bf16",
        "0.950",
        "0.500",
        "16.00",
        "not run: no GPU",
        "<svg></svg>",
        "&lt;on&gt;",
        "gram &amp; tree",
        "3.2",
        "cargo xtask perf cast --json cast.json",
        "cargo xtask bench --quick",
        "some &lt;fast&gt; one",
        "a &lt;reason&gt;",
        "gradsync 9.8.7\n",
        "not measured",
    ] {
        assert!(page.contains(text), "{text} is not in {page}");
    }
    assert!(!page.contains("parts are missing"), "{page}");
    // The page refers to no other files.
    for text in ["http:", "https:", "src=", "<link", "@import"] {
        assert!(!page.contains(text), "{text} is in {page}");
    }
}

#[test]
fn goals_stand_beside_their_figures() {
    let row = |operation: &str, ratio: f64| {
        json!({"operation": operation, "backend": "cuda", "ranks": 2, "dtype": "f32", "from_dtype": "f32", "redop": "none",
               "size_bytes": 1u64 << 30, "baseline": {"ratio": ratio}, "out_of_place": {"time_us": 10.0}})
    };
    let launch = json!({"operation": "zero", "ranks": 1, "dtype": "f32", "from_dtype": "f32", "size_bytes": 1 << 20,
                        "first_call_ms": 20.0, "bytes_us": 0.25, "plain": {"time_us": 3.0, "above_us": 0.5},
                        "graph": {"time_us": 2.0, "above_us": 0.25}});
    let document = json!({"wrong": 0, "graph_calls": 0, "measurements": [row("dots", 0.99), row("gram", 0.9)],
                          "launches": {"rows": [launch]}});
    let shown = [measured(document)];
    let page = page(&shown, None, "cargo xtask bench");
    assert!(page.contains("parts are missing"), "{page}");
    assert_eq!(page.matches("<span class=\"failed\">not met</span>").count(), 2, "in the row, and in the list: {page}");
    assert_eq!(page.matches("<span class=\"met\">met</span>").count(), 3 + 4, "in three rows, and in the list: {page}");
    let verdicts = verdicts(&shown);
    for text in ["goal NOT MET: dots and gram", "(1 of 2; worst: 0.900, gram f32 of 2", "goal met: a launch on 1 MiB"] {
        assert!(verdicts.contains(text), "{text}: {verdicts}");
    }
    assert!(super::verdicts(&[]).lines().all(|line| line.starts_with("goal not measured: ")));
}
