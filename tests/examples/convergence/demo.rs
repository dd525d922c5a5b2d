//! The demo: repeats a few runs of the study, and writes a page that explains them to a reader who does not know Adasum.
//!
//! The page is one file without scripts and external resources, and contains no path, host name or date of the machine.

use std::path::{Path, PathBuf};

use crate::charts;
use crate::figures::{ADASUM, LINES, MEAN, MEAN_TUNED, SUM, Way};
use crate::images::{Images, Part, Source};
use crate::learner::Data;
use crate::page::{self, PageError};
use crate::plan::{Purpose, Spec};
use crate::results::Results;
use crate::study::{Family, Scale, Study};
use crate::table::{Table, escape, thousands};

const STYLE: &str = include_str!("report.css");
const LOCK_FILE: &str = include_str!("../../../Cargo.lock");
const FAMILY: Family = Family::IMAGES_SGD;
const WAYS: [Way; 4] = LINES;

/// The published study's searches of learning rates, relabelled with the demo's numbers of samples.
pub(crate) fn searches(published: Results, scale: &Scale) -> Results {
    let mut records = published.records;
    records.retain(|record| record.spec.purpose == Purpose::Search && record.spec.arm.method == FAMILY.method);
    let samples = scale.samples(FAMILY);
    records.iter_mut().for_each(|record| record.spec.samples = samples);
    Results { records }
}

/// All runs of the demo.
pub(crate) fn specs(study: &Study<'_>) -> Vec<Spec> {
    let mut specs: Vec<Spec> = Vec::new();
    for ranks in study.all_ranks() {
        for place in WAYS.iter().filter_map(|&way| study.place(FAMILY, way, ranks)) {
            for &seed in &study.scale.figure_seeds {
                let samples = study.samples(place.arm);
                let spec = Spec { purpose: Purpose::Figure, arm: place.arm, rate: place.rate, seed, samples };
                if !specs.contains(&spec) {
                    specs.push(spec);
                }
            }
        }
    }
    specs
}

/// The summary for the console.
pub(crate) fn summary(study: &Study<'_>) -> String {
    let table = study.table(FAMILY, &WAYS).text();
    let words = if is_short(study) { TOO_SHORT.into() } else { page::headline(study, FAMILY) };
    format!("{table}\n\n{words}")
}

const TOO_SHORT: &str = "A short run to check that everything works: too short to show anything.";

fn is_short(study: &Study<'_>) -> bool {
    study.scale.samples(FAMILY) < Scale::full().samples(FAMILY)
}

/// Writes `report.html` into a folder, atomically.
pub(crate) fn write(study: &Study<'_>, images: &Images, seconds: f64, folder: &Path) -> Result<PathBuf, PageError> {
    let text = html(study, images, seconds)?;
    let path = folder.join("report.html");
    let partial = folder.join(format!(".report.html.{}", std::process::id()));
    let written = std::fs::write(&partial, text).and_then(|()| std::fs::rename(&partial, &path));
    written.map_err(|source| {
        // Removal is best effort: the error above is reported.
        let _ = std::fs::remove_file(&partial);
        PageError::File { path: path.clone(), source }
    })?;
    Ok(path)
}

/// The description and the origin of the training data.
pub(crate) fn about(source: Source) -> &'static str {
    match source {
        Source::FashionMnist => {
            "Fashion-MNIST: small pictures of clothes of ten kinds (H. Xiao, K. Rasul, R. Vollgraf, Zalando Research, 2017; MIT)"
        }
        Source::Digits => {
            "handwritten digits, made larger, because Fashion-MNIST could not be had here (Optical Recognition of Handwritten Digits, E. Alpaydin and \
             C. Kaynak, UCI, 1998; CC BY 4.0; the copy that scikit-learn carries)"
        }
    }
}

fn html(study: &Study<'_>, images: &Images, seconds: f64) -> Result<String, PageError> {
    let chart = study.ranks_chart(FAMILY, &WAYS);
    let svg = charts::svg(&chart)
        .map_err(|error| PageError::Chart { title: chart.title.clone(), reason: error.to_string() })?;
    let samples = study.scale.samples(FAMILY);
    let ranks = study.all_ranks();
    let most = *ranks.last().expect("there is 1");
    let steps = |ranks: usize| thousands((samples / (ranks * images.batch())).max(1));
    let seeds = study.scale.figure_seeds.len();
    let rate = study.rate_of_one(FAMILY).map_or("unknown".into(), |rate| rate.to_string());
    let other_data = match images.source {
        Source::FashionMnist => "",
        Source::Digits => " The study used Fashion-MNIST, so that these rates are not the best ones for the digits.",
    };
    let quick = if is_short(study) { format!("<p><strong>{TOO_SHORT}</strong></p>\n") } else { String::new() };
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>gradsync: one learning rate for any number of workers</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>One learning rate, more and more workers</h1>\n\
         <p class=\"lead\">A network learns in steps. To go faster, several workers (<em>ranks</em>) share each step: every rank computes from its own \
         images in which direction the network should move (a <em>gradient</em>), the gradients are combined into one, and the network moves. \
         <strong>How they are combined decides whether it still learns when there are many ranks.</strong></p>\n{quick}\
         <figure>\n{svg}<figcaption>Every point: {seeds} trainings from different starts; bars are 95 % intervals (none where only some diverged). All trainings see the same number of \
         images, {samples}. A training that diverged counts as a guess, 10 %.</figcaption>\n</figure>\n\
         <p><strong>{headline}</strong></p>\n\
         <h2>What the lines are</h2>\n<ul>\n\
         <li><strong>Mean</strong>: the average of all gradients. A step is as long as one rank's, but {most} ranks make {most} times fewer of them \
         ({of_most} instead of {of_one}), so that the network does not get far. A larger learning rate helps little: the dashed line has the best of \
         eight, which somebody has to find anew for every number of ranks.</li>\n\
         <li><strong>Sum</strong>: all gradients added up, which is the usual rule that the learning rate grows with the ranks. Where they point the same \
         way, the step is far too long, and the training breaks down.</li>\n\
         <li><strong>Adasum</strong> looks at how far gradients agree. What they have in common is counted once, as in a mean; what is each rank's own is \
         added, as in a sum. So the learning rate that was found with one rank can stay.</li>\n</ul>\n\
         <h2>The figures</h2>\n{table}\n\
         <p class=\"note\">Per cent of the test images that are right after the last step, with 95 % intervals over {seeds} seeds; these images were neither \
         trained on nor used to choose anything. “Diverged”: the numbers overflowed, or the network ended no better than a guess.</p>\n\
         <h2>Where the learning rates come from</h2>\n\
         <p>{rate}, the best rate of one rank, and the best rates of the mean were found by the study whose runs are checked in \
         (<code>tests/measured/convergence</code>; <code>cargo xtask study</code> makes it, <code>host/docs/convergence.md</code> tells of it): a few minutes allow \
         no search.{other_data} Rates rise for a tenth of the steps and then fall to 0; the optimizer is plain gradient descent.</p>\n\
         <h2>What was checked</h2>\n\
         <p>Each rank is a thread with its own copy of the network, and gradsync's collectives are all that connects them. At 16 moments of every \
         training the ranks compared their weights: the same to the last bit, on all ranks, every time. (One different bit ends the demo with an error.)</p>\n\
         <h2>Data and network</h2>\n\
         <p>{about}. {train} images to train on, {held_out}{test} for the test. LeNet-5: two convolutions and three dense layers, \
         {batch} images a rank in every step.</p>\n\
         <h2>Made with</h2>\n<dl>\n{facts}</dl>\n</main>\n</body>\n</html>\n",
        headline = escape(&page::headline(study, FAMILY)),
        table = table(study).html(),
        samples = thousands(samples),
        of_most = steps(most),
        of_one = steps(1),
        about = escape(about(images.source)),
        train = thousands(images.rows(Part::Train).len()),
        held_out = match images.source {
            Source::FashionMnist =>
                format!("{} that chose the rates, ", thousands(images.rows(Part::Validation).len())),
            Source::Digits => String::new(),
        },
        test = thousands(images.rows(Part::Test).len()),
        batch = images.batch(),
        facts = facts(study, seconds),
    ))
}

fn table(study: &Study<'_>) -> Table {
    study.table(FAMILY, &[ADASUM, MEAN_TUNED, MEAN, SUM])
}

fn facts(study: &Study<'_>, seconds: f64) -> String {
    let runs = study.results.records.iter().filter(|record| record.spec.purpose == Purpose::Figure).count();
    let build = if cfg!(debug_assertions) { "debug" } else { "release" };
    let rows = [
        ("gradsync", format!("{}, CPU kernels, ranks as threads ({build} build)", env!("CARGO_PKG_VERSION"))),
        ("charts", format!("plotters {}", locked("plotters"))),
        ("machine", format!("{} {}, {}", std::env::consts::OS, std::env::consts::ARCH, crate::machine())),
        ("work", format!("{runs} trainings in {seconds:.0} s")),
    ];
    rows.iter().map(|(name, value)| format!("<dt>{name}</dt><dd>{}</dd>\n", escape(value))).collect()
}

/// The version of a dependency that this program was built with.
fn locked(name: &str) -> &'static str {
    let entry = format!("name = \"{name}\"\nversion = \"");
    let version = LOCK_FILE.split(entry.as_str()).nth(1).and_then(|rest| rest.split('"').next());
    version.unwrap_or("of an unknown version")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::study::tests::{record, simulated};

    #[test]
    fn the_page_stands_alone_and_says_what_the_table_says() {
        let scale = Scale::demo(true);
        let searches = searches(simulated(&Scale::full(), 0.1), &scale);
        let specs = specs(&Study { scale: &scale, results: &searches });
        // One rank, and three distinct ways on four ranks, because the retuned rate of the mean equals the transferred one here: three
        // seeds each.
        assert_eq!(specs.len(), 3 * (1 + 3));
        let mut results = searches;
        results.records.extend(specs.into_iter().map(|spec| {
            record(spec, (spec.arm.reduction != crate::plan::Reduction::Sum).then_some(0.5 + spec.seed as f64 / 100.0))
        }));
        let study = Study { scale: &scale, results: &results };
        let page = html(&study, &Images::random(160), 1.0).unwrap();
        for outside in ["<script", "<link", "<img", "src=", "href=", "url(", "@import"] {
            assert!(!page.contains(outside), "{outside}");
        }
        for inside in ["too short to show anything", "52.0 ± 2.5", "<td>diverged</td>", "Mean", "Sum", "Adasum"] {
            assert!(page.contains(inside), "{inside}");
        }
    }
}
