//! `report.html`: one file, no script, nothing fetched; reads well in light and dark and on paper.
//!
//! Holds no path, host name or date of the machine, so that it can be passed on. Written beside its place and then
//! renamed: a report is whole or not there.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::charts::{self, Chart};
use crate::data;
use crate::figures;
use crate::model::{Network, WIDTHS};
use crate::plan::Mode;
use crate::search::Search;
use crate::table::{self, HEADINGS, MARK};
use crate::train::Run;

const STYLE: &str = include_str!("report.css");
const LOCK_FILE: &str = include_str!("../../../Cargo.lock");

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReportError {
    #[error("{}: cannot be written", path.display())]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{title}: the chart cannot be drawn: {reason}")]
    Chart { title: &'static str, reason: String },
}

/// Writes `report.html` into `folder`, which exists.
pub(crate) fn write(outcome: &Outcome, folder: &Path) -> Result<PathBuf, ReportError> {
    let text = page(outcome)?;
    let path = folder.join("report.html");
    let partial = folder.join(format!(".report.html.{}", std::process::id()));
    let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, &path));
    written.map_err(|source| {
        // Best effort: the error that matters is the one above.
        let _ = std::fs::remove_file(&partial);
        ReportError::Write { path: path.clone(), source }
    })?;
    Ok(path)
}

/// What a reader should know before believing the table. Computed from the runs; said on the console too.
pub(crate) fn remarks(outcome: &Outcome) -> Vec<String> {
    let mut remarks = Vec::new();
    let best = |mode| outcome.searches.iter().find(|search| search.mode == mode).map(Search::best);
    if let Some((mean, adasum)) = best(Mode::Mean).zip(best(Mode::Adasum)) {
        let (mean, adasum) = (mean.last().test, adasum.last().test);
        let difference = adasum.correct as i64 - mean.correct as i64;
        let comparison = match difference {
            0 => format!("as many of the {} test images right as mean", mean.total),
            1.. => format!("{difference} more of the {} test images right than mean", mean.total),
            _ => format!("{} fewer of the {} test images right than mean", -difference, mean.total),
        };
        remarks.push(format!(
            "Adasum got {comparison}. An accuracy measured on so few images has a standard error of about {}, or {:.0} \
             images, and this is one seed.",
            table::percent(mean.standard_error()),
            mean.standard_error() * mean.total as f64
        ));
    }
    let same = |(mean, sum): &(&Run, &Run)| mean.curve == sum.curve;
    if let Some((mean, sum)) = best(Mode::Mean).zip(best(Mode::Sum)).filter(same) {
        remarks.push(format!(
            "Mean at {} and sum at {} are the same run to the last bit: sum is mean times the number of ranks, and a \
             rate {} times lower takes that back. Their lines lie on each other.",
            table::rate(mean.rate),
            table::rate(sum.rate),
            mean.rate / sum.rate
        ));
    }
    for search in outcome.searches.iter().filter(|search| search.at_the_edge()) {
        remarks.push(format!(
            "The rate of {} is at the edge of the list; a better one may lie outside.",
            search.mode.name()
        ));
    }
    let recomputed: usize = outcome.searches.iter().flat_map(|search| &search.runs).map(|run| run.recomputed).sum();
    if recomputed > 0 {
        remarks.push(format!("{recomputed} times a layer's Adasum coefficients took the exact path."));
    }
    remarks.push(
        "All ranks held the same weights to the last bit at the end of every epoch of every run (checked).".into(),
    );
    remarks
}

fn page(outcome: &Outcome) -> Result<String, ReportError> {
    let plan = &outcome.plan;
    let [train, validation, test] = outcome.rows;
    let mut page = String::new();
    let mut line = |text: &str| {
        page.push_str(text);
        page.push('\n');
    };
    line("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">");
    line("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">");
    line("<meta name=\"color-scheme\" content=\"light dark\">");
    line("<title>gradsync: digits by mean, sum and Adasum</title>");
    line(&format!("<style>\n{STYLE}{}</style>\n</head>\n<body>\n<main>", line_styles()));
    line("<h1>Three ways to reduce a gradient</h1>");
    line(&format!(
        "<p class=\"lead\">{} ranks, threads of one process, taught a small network ({} perceptron, {} parameters) to \
         read handwritten digits. In every step each rank ran {} micro-batches of {} images through candle, accumulated \
         their gradients in a gradsync <code>GradientBuffer</code>, and the ranks reduced the buffers by mean, by sum, or \
         by Adasum: {} images a step, {}&nbsp;% of the training images. All runs start from the same \
         weights and see the same images in the same order; the optimiser is SGD with momentum {} throughout.</p>",
        plan.ranks,
        WIDTHS.map(|width| width.to_string()).join("–"),
        table::thousands(Network::size()),
        plan.micro_batches,
        plan.micro_batch,
        plan.batch(),
        100 * plan.batch() / train,
        plan.momentum
    ));

    line("<h2>Results</h2>");
    line(&results(&outcome.searches));
    line(&format!(
        "<p class=\"note\">Train loss: mean cross-entropy over all {} training images after the last step. Test \
         accuracy: of {test} images that were never trained on and chose nothing. Steps to {MARK} %: the first step after \
         which {MARK} % of them were right. Seconds: the run with the chosen rate; gradients, reduction and optimiser, scoring left out. In reduction: \
         the gradient's all-reduce alone, on the slowest rank, after a barrier; the ranks are threads that share the \
         processor's cores.</p>",
        table::thousands(train)
    ));
    line("<ul>");
    for remark in remarks(outcome) {
        line(&format!("<li>{}</li>", escape(&remark)));
    }
    line("</ul>");

    line("<h2>Over the steps</h2>");
    line(&legend(&Mode::ALL));
    line("<div class=\"charts\">");
    line(&figure(figures::loss_chart(outcome), "Loss of each step's batch, before its update.")?);
    line(&figure(
        figures::accuracy_chart(outcome),
        "Share of the test images that are right. The thin line is at 90 %.",
    )?);
    line("</div>");

    line("<h2>Learning rates</h2>");
    line(&format!(
        "<p>Every mode ran with every rate of one list, {} steps each. It got the rate with the smallest mean loss on {} \
         validation images after the last step. Those images are neither trained on nor part of the test. Nothing was \
         tuned for one mode alone.</p>",
        plan.steps, validation
    ));
    line(&legend(&Mode::ALL));
    line("<div class=\"charts\">");
    line(&figure(
        figures::rate_chart(outcome),
        "Validation loss after the last step, rate by rate. Points at the top edge are above it or diverged.",
    )?);
    line(&format!("<div class=\"scroll\">{}</div>", grid(&outcome.searches)));
    line("</div>");

    if let Some(chart) = figures::scale_chart(outcome) {
        line("<h2>What Adasum did</h2>");
        line(&format!(
            "<p>Adasum's result is a weighted sum of the ranks' gradients, layer by layer. The weights are those of a mean \
             where the gradients are equal, those of a sum where they are orthogonal, and larger where they point against \
             each other. Here: the weights, each counted by the length of the gradient that it scales, so that a mean is \
             1 and a sum is the number of ranks, {}.</p>",
            plan.ranks
        ));
        line("<div class=\"charts\">");
        line(&figure(
            chart,
            "Adasum at its chosen rate. The thin lines are at 1, a mean, and at the number of ranks, a sum.",
        )?);
        line("</div>");
    }

    line("<h2>Data</h2>");
    line(&format!(
        "<p>{}. Licence of the data: {}. {} images of 8 × 8 pixels: {} to train on, {validation} to choose the rate \
         by, {test} for the test; a fixed shuffle, the same for every seed.</p>",
        data::SOURCE,
        data::LICENCE,
        table::thousands(train + validation + test),
        table::thousands(train)
    ));
    line("<h2>Made with</h2>");
    line(&facts(outcome));
    line("</main>\n</body>\n</html>");
    Ok(page)
}

fn results(searches: &[Search]) -> String {
    let mut text = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
    for heading in HEADINGS {
        let _ = write!(text, "<th scope=\"col\">{heading}</th>");
    }
    text += "</tr></thead>\n<tbody>\n";
    for search in searches {
        let cells = table::cells(search);
        let _ = write!(text, "<tr><th scope=\"row\">{}{}</th>", swatch(search.mode), cells[0]);
        for cell in &cells[1..] {
            let _ = write!(text, "<td>{cell}</td>");
        }
        text += "</tr>\n";
    }
    text + "</tbody></table></div>"
}

/// Validation loss of every run.
fn grid(searches: &[Search]) -> String {
    let mut text = String::from("<table class=\"grid\">\n<thead><tr><th scope=\"col\">rate</th>");
    for search in searches {
        let _ = write!(text, "<th scope=\"col\">{}{}</th>", swatch(search.mode), search.mode.name());
    }
    text += "</tr></thead>\n<tbody>\n";
    for (index, run) in searches[0].runs.iter().enumerate() {
        let _ = write!(text, "<tr><th scope=\"row\">{}</th>", table::rate(run.rate));
        for search in searches {
            let run = &search.runs[index];
            let cell = match (run.diverged, run.validation_loss()) {
                (None, Some(loss)) => table::loss(loss),
                (step, _) => format!("diverged, step {}", step.unwrap_or_default()),
            };
            if search.is_best(index) {
                let _ = write!(text, "<td class=\"chosen\"><strong>{cell}</strong> chosen</td>");
            } else {
                let _ = write!(text, "<td>{cell}</td>");
            }
        }
        text += "</tr>\n";
    }
    text + "</tbody></table>"
}

fn facts(outcome: &Outcome) -> String {
    let cores = std::thread::available_parallelism().map_or("an unknown number of".into(), |cores| cores.to_string());
    let processor = processor().map_or(String::new(), |name| format!(", {name}"));
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let rows = [
        ("gradsync", format!("{}, CPU kernels, ranks as threads ({build} build)", env!("CARGO_PKG_VERSION"))),
        ("candle", format!("{}, CPU, f32", locked("candle-core"))),
        ("charts", format!("plotters {}", locked("plotters"))),
        ("machine", format!("{} {}, {cores} cores{processor}", std::env::consts::OS, std::env::consts::ARCH)),
        ("threads", format!("{} ranks", outcome.plan.ranks)),
        (
            "work",
            format!(
                "{} runs of {} steps, {} steps an epoch, seed {}, {:.1} s in all, scoring included",
                outcome.searches.iter().map(|search| search.runs.len()).sum::<usize>(),
                outcome.plan.steps,
                outcome.steps_per_epoch,
                outcome.plan.seed,
                outcome.seconds
            ),
        ),
    ];
    let rows: String =
        rows.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>\n", escape(value))).collect();
    format!("<dl>\n{rows}</dl>")
}

/// The version of a dependency that this program was built with.
fn locked(name: &str) -> &'static str {
    let entry = format!("name = \"{name}\"\nversion = \"");
    let version = LOCK_FILE.split(entry.as_str()).nth(1).and_then(|rest| rest.split('"').next());
    version.unwrap_or("of an unknown version")
}

/// Where Linux says it.
fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split(':').nth(1)?.trim().to_owned())
}

fn legend(modes: &[Mode]) -> String {
    let items: String = modes.iter().map(|&mode| format!("<span>{}{}</span>", swatch(mode), mode.name())).collect();
    format!("<p class=\"legend\">{items}</p>")
}

/// A piece of the mode's line, as the charts draw it.
fn swatch(mode: Mode) -> String {
    format!(
        "<svg class=\"swatch\" viewBox=\"0 0 28 10\" aria-hidden=\"true\"><polyline fill=\"none\" stroke=\"{}\" \
         stroke-width=\"2\" points=\"0,5 28,5\"/></svg>",
        charts::stroke(mode)
    )
}

/// Gives the lines that plotters drew the colours of the page's theme, and sum its dashes: it may lie exactly on mean,
/// and is drawn after it.
fn line_styles() -> String {
    let mut text = String::new();
    for (mode, variable) in [(Mode::Mean, "--mean"), (Mode::Sum, "--sum"), (Mode::Adasum, "--adasum")] {
        let stroke = charts::stroke(mode);
        let _ = writeln!(text, "polyline[stroke=\"{stroke}\"] {{ stroke: var({variable}); }}");
        let _ = writeln!(text, "circle[fill=\"{stroke}\"] {{ fill: var({variable}); }}");
    }
    let _ = writeln!(text, "polyline[stroke=\"{}\"] {{ stroke-dasharray: 6 6; }}", charts::stroke(Mode::Sum));
    text
}

fn figure(chart: Chart<'static>, caption: &str) -> Result<String, ReportError> {
    let svg =
        charts::svg(&chart).map_err(|error| ReportError::Chart { title: chart.title, reason: error.to_string() })?;
    Ok(format!("<figure>\n{svg}<figcaption>{caption}</figcaption>\n</figure>"))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Digits;
    use crate::plan::Plan;

    fn outcome() -> Outcome {
        let (digits, split) = Digits::random_problem();
        let plan = Plan { ranks: 8, micro_batches: 4, micro_batch: 10, steps: 2, momentum: 0.9, seed: 1 };
        let rates = [1.0 / 64.0, 1.0 / 8.0, 1e30];
        let search = |mode| Search::run(&plan, mode, &rates, &digits, &split, &|| ()).unwrap();
        let searches = Mode::ALL.map(search).into();
        Outcome { plan, steps_per_epoch: 1, rows: [320, 40, 40], searches, seconds: 1.0 }
    }

    #[test]
    fn the_page_stands_alone_and_says_what_the_table_says() {
        let outcome = outcome();
        let page = page(&outcome).unwrap();
        for outside in ["<script", "<link", "<img", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert_eq!(page.matches("<figure>").count(), 4);
        assert_eq!(page.matches("</figure>").count(), 4);
        assert_eq!(page.matches(" chosen</td>").count(), 3);
        assert!(page.contains("diverged, step "), "a diverged run is named");
        for cell in outcome.searches.iter().flat_map(table::cells).skip(1) {
            assert!(page.contains(&cell), "{cell}");
        }
        assert!(page.contains(data::SOURCE) && page.contains(data::LICENCE));
        assert!(page.ends_with("</html>\n") && !page.contains("NaN") && !page.contains(">inf"));
    }

    #[test]
    fn versions_are_those_of_the_lock_file() {
        assert!(locked("candle-core").starts_with("0."));
        assert_eq!(locked("no such crate"), "of an unknown version");
    }

    #[test]
    fn a_report_is_whole_or_not_there() {
        let folder = std::env::temp_dir().join(format!("gradsync-digits-{}", std::process::id()));
        let outcome = outcome();
        let error = write(&outcome, &folder).unwrap_err();
        assert!(error.to_string().contains("report.html"), "{error}");
        std::fs::create_dir(&folder).unwrap();
        let path = write(&outcome, &folder).unwrap();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        assert!(std::fs::read_to_string(path).unwrap().ends_with("</html>\n"));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
