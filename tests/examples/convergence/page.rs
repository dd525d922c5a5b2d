//! The study's page in the documentation: its tables and charts are made from the runs, and inserted between marks.
//!
//! Words are written by hand, figures never: this program writes the text from `<!-- NAME -->` to `<!-- end -->`, in the page and in
//! README.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::charts;
use crate::figures::{ADASUM, ADASUM_TUNED, Figure, LINES, MEAN, MEAN_TUNED, SUM, TREE, WAYS, cell};
use crate::plan::{Purpose, Task};
use crate::results::Results;
use crate::study::{Family, Scale, Study};
use crate::table::thousands;

/// The accuracy up to which steps are counted.
const TARGET: f64 = 0.7;

/// The reason why the page could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PageError {
    #[error("{}: cannot be read or written", path.display())]
    File { path: PathBuf, source: std::io::Error },
    #[error("{}: there is no {mark:?} with an end", path.display())]
    Mark { path: PathBuf, mark: String },
    #[error("{title}: the chart cannot be drawn: {reason}")]
    Chart { title: String, reason: String },
}

/// A study's files in a repository, with their texts.
pub(crate) fn files(results: &Results, root: &Path) -> Result<BTreeMap<PathBuf, String>, PageError> {
    let study = Study { scale: &Scale::full(), results };
    let folder = root.join("host/docs/convergence");
    let mut files = BTreeMap::new();
    let (sgd, momentum) = (Family::IMAGES_SGD, Family::IMAGES_MOMENTUM);
    let charts = [
        ("sgd", Some(study.ranks_chart(sgd, &LINES))),
        ("momentum", Some(study.ranks_chart(momentum, &LINES))),
        ("weights", study.mass_chart(sgd, 16)),
    ];
    let mut blocks = blocks(&study);
    for (name, chart) in charts {
        let Some(chart) = chart.filter(|chart| chart.lines.iter().any(|line| line.points.len() > 1)) else {
            blocks.push((format!("{name} chart"), String::new()));
            continue;
        };
        let drawn = charts::svg(&chart);
        blocks.push((format!("{name} chart"), format!("![{}](convergence/{name}.svg)", chart.title)));
        let title = chart.title;
        let svg = drawn.map_err(|error| PageError::Chart { title, reason: error.to_string() })?;
        files.insert(folder.join(format!("{name}.svg")), svg);
    }
    for path in ["host/docs/convergence.md", "README.md"].map(|name| root.join(name)) {
        let text = std::fs::read_to_string(&path).map_err(|source| PageError::File { path: path.clone(), source })?;
        let text = filled(text, &blocks, &path)?;
        files.insert(path, text);
    }
    Ok(files)
}

/// Writes the files.
pub(crate) fn write(files: &BTreeMap<PathBuf, String>) -> Result<(), PageError> {
    for (path, text) in files {
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = folder.and_then(|()| std::fs::write(path, text));
        written.map_err(|source| PageError::File { path: path.clone(), source })?;
    }
    Ok(())
}

/// The text with every block for which it has a mark.
fn filled(mut text: String, blocks: &[(String, String)], path: &Path) -> Result<String, PageError> {
    const END: &str = "<!-- end -->";
    for (name, block) in blocks {
        let mark = format!("<!-- {name} -->\n");
        let Some(start) = text.find(&mark).map(|start| start + mark.len()) else { continue };
        let end = text[start..].find(END).ok_or(PageError::Mark { path: path.to_owned(), mark })?;
        text.replace_range(start..start + end, &format!("{}\n", block.trim_end()));
    }
    Ok(text)
}

/// The words in lines of at most 100 characters, because pages are read as plain text too; a longer word has a line of its own.
fn wrapped(text: &str) -> String {
    const WIDTH: usize = 100;
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is a line from the start");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= WIDTH {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n")
}

fn blocks(study: &Study<'_>) -> Vec<(String, String)> {
    let (sgd, momentum, text) = (Family::IMAGES_SGD, Family::IMAGES_MOMENTUM, Family::TEXT_ADAM);
    let pairs = [(ADASUM, MEAN_TUNED), (ADASUM, MEAN), (ADASUM_TUNED, ADASUM), (TREE, ADASUM)];
    let blocks = [
        ("headline", wrapped(&headline(study, sgd))),
        ("sgd", study.table(sgd, &WAYS).markdown()),
        ("sgd differences", study.differences(sgd, &pairs).markdown()),
        ("sgd rates", study.rates_table(sgd).markdown()),
        ("sgd steps", study.steps_table(sgd, &[ADASUM, MEAN_TUNED, MEAN, SUM], TARGET).markdown()),
        ("sgd variants", study.variants_table(sgd).markdown()),
        ("momentum", study.table(momentum, &WAYS).markdown()),
        ("momentum differences", study.differences(momentum, &pairs).markdown()),
        ("momentum rates", study.rates_table(momentum).markdown()),
        ("momentum variants", study.variants_table(momentum).markdown()),
        ("text variants", study.variants_table(text).markdown()),
        ("origin", origin(study)),
    ];
    blocks.map(|(name, block)| (name.to_owned(), block)).into()
}

/// All tables that have figures, for the console.
pub(crate) fn text(study: &Study<'_>) -> String {
    let families = [
        ("Images, plain gradient descent: per cent right", Family::IMAGES_SGD),
        ("Images, momentum: per cent right", Family::IMAGES_MOMENTUM),
        ("Text, Adam: nats a character", Family::TEXT_ADAM),
    ];
    let mut text = String::new();
    for (title, family) in families {
        let tables = [study.table(family, &WAYS), study.rates_table(family), study.variants_table(family)];
        for table in tables.iter().filter(|table| table.has_figures()) {
            text += &format!("{title}\n{}\n\n", table.text());
        }
    }
    text
}

/// The study's result in one sentence, at the largest number of ranks with figures.
pub(crate) fn headline(study: &Study<'_>, family: Family) -> String {
    let figure = |way, ranks| study.figure(study.place(family, way, ranks));
    let has_all = |&ranks: &usize| [ADASUM, MEAN, SUM].iter().all(|&way| figure(way, ranks) != Figure::Missing);
    let Some(ranks) = study.all_ranks().into_iter().rev().filter(|&ranks| ranks > 1).find(has_all) else {
        return "The study has no figures yet.".into();
    };
    let ends = |figure| match figure {
        Figure::Score(_) => format!("gets {} %", cell(Task::Images, figure)),
        Figure::Diverged { runs, of } if runs == of => "diverges".into(),
        Figure::Diverged { runs, of } => format!("diverges in {runs} of {of} runs"),
        Figure::Missing => "has no figure".into(),
    };
    let tuned = match figure(MEAN_TUNED, ranks) {
        Figure::Missing => String::new(),
        tuned => format!(" (and {} at the rate that a search for {ranks} ranks chose)", ends(tuned)),
    };
    format!(
        "One rank {} of the test images right. At the same learning rate on {ranks} ranks, with as many images seen: Adasum {}, the mean of the gradients \
         {}{tuned}, and their sum {}.",
        ends(figure(ADASUM, 1)),
        ends(figure(ADASUM, ranks)),
        ends(figure(MEAN, ranks)),
        ends(figure(SUM, ranks)),
    )
}

/// The numbers of runs, and the machines that made them.
fn origin(study: &Study<'_>) -> String {
    let records = &study.results.records;
    let count = |purpose| records.iter().filter(|record| record.spec.purpose == purpose).count();
    let mut machines: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for record in records {
        *machines.entry((&record.machine, &record.commit)).or_default() += 1;
    }
    let machines: Vec<String> = machines
        .into_iter()
        .map(|((machine, commit), runs)| format!("{} on {machine} (commit {commit})", thousands(runs)))
        .collect();
    let list = |seeds: &[u64]| seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    format!(
        "{} runs: {} to choose rates (seeds {}), {} for figures (seeds {}). {}.",
        thousands(records.len()),
        thousands(count(Purpose::Search)),
        list(&study.scale.search_seeds),
        thousands(count(Purpose::Figure)),
        list(&study.scale.figure_seeds),
        machines.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_stand_between_their_marks_and_nowhere_else() {
        let blocks = [("a", "| new |\n"), ("b", "other")].map(|(name, block)| (name.to_owned(), block.to_owned()));
        let text = "words\n<!-- a -->\nold\n\nold\n<!-- end -->\nmore <!-- end -->\n".to_owned();
        let filled = filled(text, &blocks, Path::new("page.md")).unwrap();
        assert_eq!(filled, "words\n<!-- a -->\n| new |\n<!-- end -->\nmore <!-- end -->\n");
        let error = super::filled("<!-- b -->\n".into(), &blocks, Path::new("page.md")).unwrap_err();
        assert!(matches!(error, PageError::Mark { .. }), "{error}");
    }

    #[test]
    fn long_texts_break_at_words_and_lose_none() {
        let text = ["gets", "±", "61.2", "%"].repeat(40).join(" ");
        let wrapped = wrapped(&text);
        assert_eq!(wrapped.replace('\n', " "), text);
        let widths: Vec<usize> = wrapped.lines().map(|line| line.chars().count()).collect();
        assert!(widths.len() > 1 && widths.iter().all(|width| (1..=100).contains(width)), "{widths:?}");
        let long = "x".repeat(120);
        assert_eq!(super::wrapped(&format!("a {long} b")), format!("a\n{long}\nb"));
    }

    /// `cargo xtask study --publish` writes these files.
    #[test]
    fn the_documentation_has_the_figures_of_the_runs_that_are_checked_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for (path, text) in files(&crate::published().unwrap(), root).unwrap() {
            assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{} is not fresh", path.display());
        }
    }
}
