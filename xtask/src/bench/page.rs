//! The report of `cargo xtask bench` as one HTML file, without anything from elsewhere.

use serde_json::Value;

use super::{Ended, Shown};

const STYLE: &str = "
:root { color-scheme: light; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: #1c2024; }
main { max-width: 1200px; margin: 0 auto; padding: 2rem 1.25rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #d9dee4; padding-top: 1rem; font-size: 1.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #d9dee4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
pre { overflow-x: auto; font-size: 12px; background: #f4f6f8; padding: .75rem; }
figure { margin: 0; max-width: 900px; }
figure svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
.failed { color: #b00020; font-weight: 600; }
.quiet { color: #5b6470; }
";

/// The whole page.
pub(super) fn page(shown: &[Shown<'_>], model: &str) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>gradsync: measurements</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>gradsync: measurements</h1>\n\
         <p>Each part is one run of <code>gradsync perf</code>; its baseline was measured in the same run. \
         Ratios are the baseline's time over the operation's.</p>\n"
    );
    page += "<table>\n<tr><th>part</th><th>rows</th><th>wrong elements</th><th>result</th></tr>\n";
    for part in shown {
        let (name, title) = (part.part.name, escape(part.part.title));
        let rows = part.json.as_ref().map_or(0, |json| rows(json).len());
        let wrong = part.json.as_ref().map_or("–".into(), |json| json["wrong"].to_string());
        let ended = match &part.ended {
            Ended::Measured => "measured".into(),
            Ended::NotRun(why) => format!("<span class=\"quiet\">not run: {}</span>", escape(why)),
            Ended::Failed(why) => format!("<span class=\"failed\">FAILED: {}</span>", escape(why)),
        };
        page += &format!(
            "<tr><td><a href=\"#{name}\">{title}</a></td><td>{rows}</td><td>{wrong}</td><td>{ended}</td></tr>\n"
        );
    }
    page += "</table>\n";
    for part in shown.iter().filter(|part| !part.text.is_empty()) {
        page += &format!("<h2 id=\"{}\">{}</h2>\n", part.part.name, escape(part.part.title));
        page += &part.json.as_ref().map_or(String::new(), table);
        if let Some(svg) = &part.svg {
            page += &format!("<figure>{svg}</figure>\n");
        }
        page += &format!(
            "<details><summary>what the program printed</summary><pre>{}</pre></details>\n",
            escape(&part.text)
        );
    }
    page += &format!("<h2>The cost model</h2>\n<pre>{}</pre>\n</main>\n</body>\n</html>\n", escape(model));
    page
}

fn rows(json: &Value) -> Vec<&Value> {
    json["measurements"].as_array().map(|rows| rows.iter().collect()).unwrap_or_default()
}

/// The largest size of each series.
fn table(json: &Value) -> String {
    let key = |row: &Value| {
        ["operation", "transport", "ranks", "dtype", "from_dtype", "redop"].map(|field| row[field].to_string())
    };
    let mut last: Vec<&Value> = Vec::new();
    for row in rows(json) {
        match last.iter_mut().find(|known| key(known) == key(row)) {
            Some(known) if known["size_bytes"].as_u64() <= row["size_bytes"].as_u64() => *known = row,
            Some(_) => {}
            None => last.push(row),
        }
    }
    let mut table =
        "<div class=\"scroll\"><table>\n<tr><th>operation</th><th>ranks</th><th>type</th><th>redop</th><th>MiB</th>\
                     <th>µs</th><th>p99</th><th>busbw GB/s</th><th>limit</th><th>ratio</th></tr>\n"
            .to_owned();
    for row in last {
        let text = |field: &str| escape(row[field].as_str().unwrap_or("–"));
        let timing = if row["in_place"].is_object() { &row["in_place"] } else { &row["out_of_place"] };
        let number =
            |value: &Value, digits: usize| value.as_f64().map_or("–".into(), |value| format!("{value:.digits$}"));
        let types = match (text("dtype"), text("from_dtype")) {
            (to, from) if to == from => to,
            (to, from) => format!("{to}:{from}"),
        };
        let mebibytes = row["size_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 20);
        table += &format!(
            "<tr><td>{}</td><td>{}</td><td>{types}</td><td>{}</td><td>{mebibytes:.2}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{}</td><td>{}</td></tr>\n",
            text("operation"),
            row["ranks"],
            text("redop"),
            number(&timing["time_us"], 1),
            number(&timing["p99_us"], 1),
            number(&timing["busbw"], 2),
            number(&row["limit_busbw"], 1),
            number(&row["baseline"]["ratio"], 3),
        );
    }
    table + "</table></div>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::bench::PARTS;

    #[test]
    fn a_page_shows_what_was_measured_and_what_was_not() {
        let row = |size: u64, ratio: f64| {
            json!({"operation": "cast", "transport": null, "ranks": 1, "dtype": "f32", "from_dtype": "bf16", "redop": "none",
                   "size_bytes": size, "in_place": null, "limit_busbw": 40.0, "baseline": {"ratio": ratio},
                   "out_of_place": {"time_us": 10.0, "p99_us": 11.0, "busbw": 30.0}})
        };
        let json = json!({"wrong": 0, "measurements": [row(1 << 20, 0.5), row(1 << 24, 0.95)]});
        let measured = Shown {
            part: &PARTS[0],
            ended: Ended::Measured,
            text: "# cast <on> cpu\n".into(),
            svg: Some("<svg></svg>".into()),
            json: Some(json),
        };
        let missing = Shown {
            part: &PARTS[1],
            ended: Ended::NotRun("no GPU".into()),
            text: String::new(),
            svg: None,
            json: None,
        };
        let page = page(&[measured, missing], "gram & tree");
        for text in ["f32:bf16", "0.950", "16.00", "not run: no GPU", "<svg></svg>", "&lt;on&gt;", "gram &amp; tree"] {
            assert!(page.contains(text), "{text} is not in {page}");
        }
        // The smaller size is in the chart and in the text alone.
        assert!(!page.contains("0.500"));
    }
}
