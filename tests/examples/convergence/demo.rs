//! The demo: a study small enough for a few minutes, and a page that explains it to a reader who does not know Adasum.
//!
//! The page is one file without scripts and external resources, and contains no path, host name or date of the machine.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::images::{Images, Part, Source};
use crate::study::{LINES, Study};
use crate::table::{escape, thousands};
use crate::train::steps;

const TEMPLATE: &str = include_str!("report.html");

/// The result for the console.
pub(crate) fn summary(study: &Study<'_>) -> String {
    let family = study.scale.family("sgd");
    format!("{}\n\n{}", study.table(family).text(), study.headline(family).unwrap_or_default())
}

/// The description and the origin of the training data.
pub(crate) fn about(source: Source) -> &'static str {
    match source {
        Source::FashionMnist => {
            "Fashion-MNIST: small pictures of clothes of ten kinds (H. Xiao, K. Rasul, R. Vollgraf, Zalando Research, 2017; MIT)"
        }
        Source::Digits => {
            "Handwritten digits, made larger, because Fashion-MNIST could not be had here (Optical Recognition of Handwritten Digits, E. Alpaydin and \
             C. Kaynak, UCI, 1998; CC BY 4.0; the copy that scikit-learn carries)"
        }
    }
}

/// Writes `report.html` into a folder, atomically. A run that is too short to show anything says so.
pub(crate) fn write(
    study: &Study<'_>,
    images: &Images,
    facts: [String; 2],
    is_quick: bool,
    folder: &Path,
) -> Result<PathBuf> {
    let path = folder.join("report.html");
    let partial = folder.join(format!(".report.html.{}", std::process::id()));
    let written = std::fs::write(&partial, html(study, images, facts, is_quick));
    written.and_then(|()| std::fs::rename(&partial, &path)).with_context(|| {
        // Removal is best effort: the error is reported.
        let _ = std::fs::remove_file(&partial);
        format!("{}: cannot be written", path.display())
    })?;
    Ok(path)
}

fn html(study: &Study<'_>, images: &Images, [seconds, machine]: [String; 2], is_quick: bool) -> String {
    let (scale, family) = (study.scale, study.scale.family("sgd"));
    let most = *family.all_ranks().last().expect("there is 1");
    let count = |part| thousands(images.rows(part).len());
    let steps = |ranks| thousands(steps(scale.samples, ranks));
    let notice = "<p><strong>A short run to check that everything works: too short to show anything.</strong></p>";
    let values = [
        ("notice", if is_quick { notice.into() } else { String::new() }),
        ("chart", study.ranks_chart(family, &LINES).svg()),
        ("headline", escape(&study.headline(family).unwrap_or_default())),
        ("table", study.table(family).html()),
        ("rates", study.rates_table(family).html()),
        ("seeds", scale.figures.len().to_string()),
        ("first", scale.first.clone().count().to_string()),
        ("further", scale.further.clone().count().to_string()),
        ("samples", thousands(scale.samples)),
        ("ranks", most.to_string()),
        ("steps", steps(most)),
        ("steps_of_one", steps(1)),
        ("about", escape(about(images.source))),
        ("train", count(Part::Train)),
        ("validation", count(Part::Validation)),
        ("test", count(Part::Test)),
        ("version", env!("CARGO_PKG_VERSION").into()),
        ("runs", study.runs.records.len().to_string()),
        ("seconds", seconds),
        ("machine", escape(&machine)),
    ];
    values.iter().fold(TEMPLATE.to_owned(), |page, (name, value)| page.replace(&format!("{{{name}}}"), value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::Scale;
    use crate::study::tests::{best_at, simulated};

    #[test]
    fn html_stands_alone_and_has_the_numbers_of_the_table() {
        let scale = Scale::demo();
        let runs = simulated(&scale, best_at(0.2));
        let study = Study { scale: &scale, runs: &runs };
        let page = html(&study, &Images::random(160), ["12".into(), "some machine".into()], true);
        for outside in ["<script", "<link", "<img", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
        for inside in ["too short to show anything", "<td>80.5 ± 0.4</td>", "in 12 s on some machine"] {
            assert!(page.contains(inside), "{inside}");
        }
        let names = page.split('{').skip(1).filter_map(|rest| rest.split_once('}'));
        let left: Vec<&str> = names.map(|(name, _)| name).filter(|name| !name.contains([':', ' '])).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}
