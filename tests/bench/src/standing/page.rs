//! The report of `cargo xtask bench` as one self-contained HTML file.

use serde_json::Value;

use super::goals::{self, Figure, Goal};
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
code { background: #f4f6f8; padding: 0 .2rem; }
figure { margin: 0; max-width: 900px; }
figure svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
.words { white-space: normal; text-align: left; }
.met { color: #0a6b3d; }
.failed { color: #b00020; font-weight: 600; }
.quiet { color: #5b6470; }
";

/// The whole page; `invoked` is the command that created it. If `model` is `None`, the run is not finished.
pub(super) fn page(shown: &[Shown], model: Option<&str>, invoked: &str) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>gradsync: measurements</title>\n\
         <style>{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>gradsync: measurements</h1>\n\
         <p>Made by <code>{}</code>. Each part is one run of <code>cargo xtask perf</code>; its baseline was measured in the same run. \
         Ratios are the baseline's time over the operation's.</p>\n",
        escape(invoked)
    );
    if model.is_none() {
        page += "<p class=\"failed\">The run was not over when this was written: parts are missing.</p>\n";
    }
    page += &format!("<h2>Machine</h2>\n<pre>{}</pre>\n", escape(&machine(shown)));
    page += &format!("<h2>Goals</h2>\n{}", goals_table(shown));
    page += "<h2>Parts</h2>\n<div class=\"scroll\"><table>\n\
             <tr><th>part</th><th>rows</th><th>wrong elements</th><th>seconds</th><th class=\"words\">result</th></tr>\n";
    shown.iter().for_each(|part| page += &summary(part));
    page += "</table></div>\n";
    shown.iter().filter(|part| !part.text.is_empty()).for_each(|part| page += &section(part));
    if let Some(model) = model {
        page += &format!("<h2>The cost model</h2>\n<pre>{}</pre>\n", escape(model));
    }
    page + "</main>\n</body>\n</html>\n"
}

/// The lines about the machine in all parts' headers, without repetitions.
fn machine(shown: &[Shown]) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for text in shown.iter().map(|part| part.text.as_str()) {
        let head = text.lines().take_while(|line| line.starts_with("# "));
        for line in head.filter(|line| !line.contains("warm-up rounds") && !line.contains("# time")) {
            // A clock or a bandwidth differs between parts: only the first value is kept.
            let key = |line: &str| line.split([':', ',']).next().map(str::to_owned);
            if lines.iter().all(|known| key(known) != key(line)) {
                lines.push(line);
            }
        }
    }
    lines.iter().map(|line| line.trim_start_matches("# ").to_owned() + "\n").collect()
}

fn figures(shown: &[Shown]) -> Vec<Figure> {
    let documents = shown.iter().filter_map(|part| Some((part.part.name, part.json.as_ref()?)));
    // An incomplete part is not compared with goals, because its remaining rows are missing.
    let whole = documents.filter(|(_, json)| json["failure"].is_null());
    whole.flat_map(|(name, json)| goals::of_document(name, json)).collect()
}

/// The number of a goal's figures, the number that meet it, and the worst.
fn verdict(goal: Goal, figures: &[Figure]) -> (usize, usize, Option<&Figure>) {
    let of_goal = || figures.iter().filter(move |figure| figure.goal == goal);
    let worst = of_goal().max_by(|one, other| one.missed_by.total_cmp(&other.missed_by));
    (of_goal().count(), of_goal().filter(|figure| figure.is_met()).count(), worst)
}

/// The goals as text for a terminal.
pub(super) fn verdicts(shown: &[Shown]) -> String {
    let figures = figures(shown);
    let line = |goal: Goal| match verdict(goal, &figures) {
        (count, met, Some(worst)) => {
            let word = if count == met { "met" } else { "NOT MET" };
            format!("goal {word}: {} ({met} of {count}; worst: {}, {})\n", goal.title(), worst.shown, worst.what)
        }
        _ => format!("goal not measured: {}\n", goal.title()),
    };
    Goal::ALL.map(line).concat()
}

fn goals_table(shown: &[Shown]) -> String {
    let figures = figures(shown);
    let mut table = "<div class=\"scroll\"><table>\n\
                     <tr><th>goal</th><th>figures</th><th>met by</th><th>worst</th><th>of</th><th>verdict</th></tr>\n"
        .to_owned();
    for goal in Goal::ALL {
        let (count, met, worst) = verdict(goal, &figures);
        let (shown, what) = worst.map_or(("–", "–"), |worst| (&worst.shown, &worst.what));
        let word = match () {
            () if count == 0 => "<span class=\"quiet\">not measured</span>",
            () if count == met => "<span class=\"met\">met</span>",
            () => "<span class=\"failed\">not met</span>",
        };
        table += &format!(
            "<tr><td>{}</td><td>{count}</td><td>{met}</td><td>{}</td><td>{}</td><td>{word}</td></tr>\n",
            escape(&goal.title()),
            escape(shown),
            escape(what),
        );
    }
    table + "</table></div>\n"
}

fn summary(part: &Shown) -> String {
    let (name, title) = (part.part.name, escape(part.part.title));
    let count = |json: &Value| rows(&json["measurements"]).len() + rows(&json["launches"]["rows"]).len();
    let rows = part.json.as_ref().map_or(0, count);
    let wrong = part.json.as_ref().map_or("–".into(), |json| json["wrong"].to_string());
    let ended = match &part.ended {
        Ended::Measured => "measured".into(),
        Ended::NotRun(why) => format!("<span class=\"quiet\">not run: {}</span>", escape(why)),
        Ended::Failed(why) => format!("<span class=\"failed\">FAILED: {}</span>", escape(why)),
    };
    let seconds = if part.seconds > 0.0 { format!("{:.1}", part.seconds) } else { "–".into() };
    let title = if part.text.is_empty() { title } else { format!("<a href=\"#{name}\">{title}</a>") };
    format!(
        "<tr><td>{title}</td><td>{rows}</td><td>{wrong}</td><td>{seconds}</td><td class=\"words\">{ended}</td></tr>\n"
    )
}

fn section(part: &Shown) -> String {
    let mut text = format!("<h2 id=\"{}\">{}</h2>\n", part.part.name, escape(part.part.title));
    text += &format!("<p><code>{}</code></p>\n", escape(&part.command));
    if let Some(json) = &part.json {
        let (measurements, launches) = (rows(&json["measurements"]), rows(&json["launches"]["rows"]));
        if !measurements.is_empty() {
            text += &measurements_table(part.part.name, measurements, json["graph_calls"].as_u64().unwrap_or(0));
        }
        if !launches.is_empty() {
            text += &launches_table(launches);
        }
        let left_out = rows(&json["left_out"]).iter().filter_map(Value::as_str);
        left_out.for_each(|why| text += &format!("<p class=\"quiet\">Not measured: {}</p>\n", escape(why)));
    }
    if let Some(svg) = &part.svg {
        text += &format!("<figure>{svg}</figure>\n");
    }
    let printed = escape(&part.text);
    text + &format!("<details><summary>what the program printed</summary><pre>{printed}</pre></details>\n")
}

fn rows(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

fn number(value: &Value, digits: usize) -> String {
    value.as_f64().map_or("–".into(), |value| format!("{value:.digits$}"))
}

fn text(row: &Value, field: &str) -> String {
    escape(row[field].as_str().unwrap_or("–"))
}

fn types(row: &Value) -> String {
    match (text(row, "dtype"), text(row, "from_dtype")) {
        (to, from) if to == from => to,
        (to, from) => format!("{to}:{from}"),
    }
}

fn cells(cells: &[String]) -> String {
    let cells: String = cells.iter().map(|cell| format!("<td>{cell}</td>")).collect();
    format!("<tr>{cells}</tr>\n")
}

fn heading(names: &[&str]) -> String {
    let names: String = names.iter().map(|name| format!("<th>{name}</th>")).collect();
    format!("<div class=\"scroll\"><table>\n<tr>{names}</tr>\n")
}

fn judged(figure: Option<&Figure>) -> String {
    match figure {
        Some(figure) if figure.is_met() => "<span class=\"met\">met</span>".into(),
        Some(_) => "<span class=\"failed\">not met</span>".into(),
        None => String::new(),
    }
}

/// The table of a part's rows.
fn measurements_table(part: &str, rows: &[Value], graph_calls: u64) -> String {
    let names = ["operation", "ranks", "type", "redop", "MiB", "µs", "p99", "busbw GB/s", "limit", "baseline GB/s"];
    let mut table = heading(&[&names[..], &["ratio", "goal"]].concat());
    for row in rows {
        let timing = if row["in_place"].is_object() { &row["in_place"] } else { &row["out_of_place"] };
        let mebibytes = row["size_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 20);
        let goal = goals::of_row(part, row, graph_calls);
        table += &cells(&[
            text(row, "operation"),
            row["ranks"].to_string(),
            types(row),
            text(row, "redop"),
            format!("{mebibytes:.2}"),
            number(&timing["time_us"], 1),
            number(&timing["p99_us"], 1),
            number(&timing["busbw"], 2),
            number(&row["limit_busbw"], 1),
            number(&row["baseline"]["busbw"], 2),
            number(&row["baseline"]["ratio"], 3),
            judged(goal.as_ref()),
        ]);
    }
    table + "</table></div>\n"
}

fn launches_table(rows: &[Value]) -> String {
    let names = ["operation", "vectors", "type", "KiB", "first call ms", "bytes µs", "µs", "above µs"];
    let mut table = heading(&[&names[..], &["goal", "in a graph µs", "above µs", "goal"]].concat());
    for row in rows {
        let figures = goals::of_launch(row);
        let goal = |goal: Goal| judged(figures.iter().find(|figure| figure.goal == goal));
        table += &cells(&[
            text(row, "operation"),
            row["ranks"].to_string(),
            types(row),
            format!("{:.0}", row["size_bytes"].as_f64().unwrap_or(0.0) / 1024.0),
            number(&row["first_call_ms"], 2),
            number(&row["bytes_us"], 2),
            number(&row["plain"]["time_us"], 2),
            number(&row["plain"]["above_us"], 2),
            goal(Goal::Launch),
            number(&row["graph"]["time_us"], 2),
            number(&row["graph"]["above_us"], 2),
            goal(Goal::GraphLaunch),
        ]);
    }
    table + "</table></div>\n"
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
