//! The study's page in the documentation: tables and charts are made from the runs, and inserted between marks.
//!
//! Words are written by hand, figures never: this program writes the text from `<!-- NAME -->` to `<!-- end -->`, in the page and in
//! README.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::results::Runs;
use crate::study::{ADASUM, ADASUM_TUNED, LINES, MEAN, MEAN_TUNED, Purpose, Scale, Study};
use crate::table::thousands;

/// The files of a repository that show the study, with their texts.
pub(crate) fn files(runs: &Runs, root: &Path) -> Result<BTreeMap<PathBuf, String>> {
    let scale = Scale::full();
    let study = Study { scale: &scale, runs };
    let sgd = scale.family("sgd");
    let missing = || "No runs yet.".to_owned();
    let mut blocks = vec![("headline".to_owned(), study.headline(sgd).unwrap_or_else(missing))];
    blocks.push(("origin".to_owned(), origin(&study)));
    for family in &scale.families {
        let pairs = [[&ADASUM, &MEAN_TUNED], [&MEAN_TUNED, &MEAN], [&ADASUM_TUNED, &ADASUM]];
        blocks.extend([
            (family.name.to_owned(), study.table(family).markdown()),
            (format!("{} rates", family.name), study.rates_table(family).markdown()),
            (format!("{} differences", family.name), study.differences(family, &pairs).markdown()),
        ]);
    }
    let charts = [("sgd", Some(study.ranks_chart(sgd, &LINES))), ("weights", study.mass_chart(sgd, 16))];
    let mut files = BTreeMap::new();
    for (name, chart) in charts {
        let shown = chart.as_ref().map_or_else(missing, |chart| format!("![{}](convergence/{name}.svg)", chart.title));
        blocks.push((format!("{name} chart"), shown));
        let path = root.join(format!("host/docs/convergence/{name}.svg"));
        files.extend(chart.map(|chart| (path, chart.svg())));
    }
    for path in ["host/docs/convergence.md", "README.md"].map(|name| root.join(name)) {
        let text = std::fs::read_to_string(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
        let text = filled(text, &blocks).with_context(|| path.display().to_string())?;
        files.insert(path, text);
    }
    Ok(files)
}

/// Writes the files.
pub(crate) fn write(files: &BTreeMap<PathBuf, String>) -> Result<()> {
    for (path, text) in files {
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let written = folder.and_then(|()| std::fs::write(path, text));
        written.with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    Ok(())
}

/// The text with every block for which it has a mark.
fn filled(mut text: String, blocks: &[(String, String)]) -> Result<String> {
    for (name, block) in blocks {
        let mark = format!("<!-- {name} -->\n");
        let Some(start) = text.find(&mark).map(|start| start + mark.len()) else { continue };
        let end = text[start..].find("<!-- end -->").with_context(|| format!("{mark:?} has no end"))?;
        text.replace_range(start..start + end, &format!("{}\n", block.trim_end()));
    }
    Ok(text)
}

/// All tables, for the console.
pub(crate) fn text(study: &Study<'_>) -> String {
    let families = study.scale.families.iter();
    families.map(|family| format!("{}\n{}\n\n", family.name, study.table(family).text())).collect()
}

/// The numbers of runs, and the machines that made them.
fn origin(study: &Study<'_>) -> String {
    let records = &study.runs.records;
    let mut machines: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for record in records {
        *machines.entry((&record.machine, &record.commit)).or_default() += 1;
    }
    let of_machine = |((machine, commit), runs)| format!("{} on {machine} (commit {commit})", thousands(runs));
    format!(
        "{} runs, {} of them to choose rates: {}.",
        thousands(records.len()),
        thousands(records.iter().filter(|record| record.spec.purpose == Purpose::Search).count()),
        machines.into_iter().map(of_machine).collect::<Vec<_>>().join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filled_puts_blocks_between_their_marks_alone() {
        let blocks = [("a", "| new |\n"), ("b", "other")].map(|(name, block)| (name.to_owned(), block.to_owned()));
        let text = "words\n<!-- a -->\nold\n\nold\n<!-- end -->\nmore <!-- end -->\n".to_owned();
        let filled = filled(text, &blocks).unwrap();
        assert_eq!(filled, "words\n<!-- a -->\n| new |\n<!-- end -->\nmore <!-- end -->\n");
        let error = super::filled("<!-- b -->\n".into(), &blocks).unwrap_err();
        assert_eq!(error.to_string(), "\"<!-- b -->\\n\" has no end");
    }

    /// `cargo xtask study --publish` writes these files.
    #[test]
    fn files_have_the_figures_of_the_runs_that_are_checked_in() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let path = root.join("tests/measured/convergence/runs.jsonl");
        let runs = Runs::parse(&std::fs::read_to_string(&path).unwrap(), &path).unwrap();
        for (path, text) in files(&runs, root).unwrap() {
            assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{} is not fresh", path.display());
        }
    }
}
