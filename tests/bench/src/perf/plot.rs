//! `--plot`: bandwidth over size, each series with its baseline and the limit, as one SVG.
//!
//! There is one chart for each operation, place and number of ranks. plotters draws it; no font is measured or embedded.

use plotters::prelude::*;

use super::record::Measurement;
use super::sizes;

const CHART: (u32, u32) = (1000, 420);
/// The width of a chart's plot area; the rest is for the legend.
const LINES_WIDTH: u32 = 760;
const INK: RGBColor = RGBColor(0x44, 0x44, 0x44);
const LIMIT: RGBColor = RGBColor(0x99, 0x99, 0x99);
/// Okabe and Ito's palette, whose colours are distinguishable with any kind of colour vision.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

/// The common properties of a chart's rows.
type Title<'a> = (&'a str, &'a str, Option<&'a str>, usize);

fn title(row: &Measurement) -> Title<'_> {
    (&row.operation, &row.backend, row.transport.as_deref(), row.ranks)
}

/// Draws all rows.
pub(crate) fn svg(rows: &[Measurement]) -> Result<String, String> {
    let mut titles: Vec<Title<'_>> = Vec::new();
    for row in rows {
        if !titles.contains(&title(row)) {
            titles.push(title(row));
        }
    }
    let mut svg = String::new();
    let height = CHART.1 * titles.len().max(1) as u32;
    let area = SVGBackend::with_string(&mut svg, (CHART.0, height)).into_drawing_area();
    let failed = |error: &dyn std::fmt::Display| error.to_string();
    area.fill(&WHITE).map_err(|error| failed(&error))?;
    for (part, wanted) in area.split_evenly((titles.len().max(1), 1)).iter().zip(&titles) {
        let rows: Vec<&Measurement> = rows.iter().filter(|row| title(row) == *wanted).collect();
        chart(part, *wanted, &rows).map_err(|error| failed(&error))?;
    }
    area.present().map_err(|error| failed(&error))?;
    drop(area);
    Ok(svg)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn chart(
    area: &Area<'_>,
    (operation, backend, transport, ranks): Title<'_>,
    rows: &[&Measurement],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let place = transport.map_or(backend.to_owned(), |transport| format!("{backend} over {transport}, {ranks} ranks"));
    let rates = rows.iter().flat_map(|row| {
        [row.timing().map(|timing| timing.busbw), row.baseline.as_ref().map(|baseline| baseline.busbw), row.limit_busbw]
    });
    let most = rates.flatten().fold(1e-3, f64::max) * 1.08;
    // The axis is logarithmic to base 2; a chart of a single size has a margin around it.
    let place_of = |row: &Measurement| (row.size_bytes.max(1) as f64).log2();
    let least = rows.iter().map(|row| place_of(row)).fold(f64::INFINITY, f64::min).floor() - 0.5;
    let last = rows.iter().map(|row| place_of(row)).fold(0.0, f64::max).ceil() + 0.5;
    let (lines, legend) = area.split_horizontally(LINES_WIDTH);
    let mut context = ChartBuilder::on(&lines)
        .margin(12)
        .caption(format!("{operation} on {place}"), ("sans-serif", 18).into_font().color(&INK))
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(least..last, 0.0..most)?;
    context
        .configure_mesh()
        .x_desc("size")
        .y_desc("busbw in GB/s")
        .x_labels(((last - least) as usize).clamp(2, 16))
        .x_label_formatter(&|place| sizes::shown(place.round().exp2() as usize))
        .light_line_style(TRANSPARENT)
        .bold_line_style(INK.mix(0.15))
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .draw()?;
    let mut names: Vec<String> = Vec::new();
    for row in rows {
        let name = name(row);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let colour = |index: usize| match COLOURS.get(index) {
        Some(RGBColor(red, green, blue)) if names.len() <= COLOURS.len() => RGBColor(*red, *green, *blue),
        _ => {
            let (red, green, blue) = HSLColor(index as f64 / names.len() as f64, 0.75, 0.4).rgb();
            RGBColor(red, green, blue)
        }
    };
    let mut entries: Vec<(String, RGBColor, bool)> = Vec::new();
    for (index, wanted) in names.iter().enumerate() {
        let colour = colour(index);
        let of_series = || rows.iter().filter(|row| name(row) == *wanted);
        let own: Vec<(f64, f64)> = of_series().filter_map(|row| Some((place_of(row), row.timing()?.busbw))).collect();
        let baseline: Vec<(f64, f64)> =
            of_series().filter_map(|row| Some((place_of(row), row.baseline.as_ref()?.busbw))).collect();
        context.draw_series(LineSeries::new(own.iter().copied(), colour.stroke_width(2)))?;
        context.draw_series(own.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
        let line = DashedLineSeries::new(baseline.iter().copied(), 6, 4, colour.mix(0.6).stroke_width(1));
        context.draw_series(line)?;
        context.draw_series(baseline.iter().map(|&point| Circle::new(point, 3, colour.mix(0.6))))?;
        entries.push((wanted.clone(), colour, false));
    }
    if let Some(baseline) = rows.iter().find_map(|row| row.baseline.as_ref()) {
        entries.push((format!("dashed: {}", baseline.name), INK, true));
    }
    let limits = rows.iter().filter_map(|row| row.limit_busbw);
    if let Some(limit) = limits.reduce(f64::max) {
        context.draw_series(LineSeries::new([(least, limit), (last, limit)], LIMIT.stroke_width(2)))?;
        entries.push(("limit".into(), LIMIT, false));
    }
    draw_legend(&legend, &entries)
}

/// Characters per line of the legend.
const LEGEND_LINE: usize = 32;

/// Draws the legend: each name beside a sample of its line.
fn draw_legend(
    area: &Area<'_>,
    entries: &[(String, RGBColor, bool)],
) -> Result<(), DrawingAreaErrorKind<std::io::Error>> {
    let font = ("sans-serif", 12).into_font().color(&INK);
    let mut y = 40;
    for (name, colour, is_dashed) in entries {
        let ends: &[(i32, i32)] = if *is_dashed { &[(0, 5), (8, 13), (16, 20)] } else { &[(0, 20)] };
        for (begin, end) in ends {
            area.draw(&PathElement::new([(4 + begin, y + 6), (4 + end, y + 6)], colour.stroke_width(2)))?;
        }
        for line in wrapped(name) {
            area.draw(&Text::new(line, (30, y), font.clone()))?;
            y += 15;
        }
        y += 3;
    }
    Ok(())
}

/// A name, wrapped into lines that fit beside the chart.
fn wrapped(name: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in name.split(' ') {
        let last = lines.last_mut().expect("there is always a line");
        if last.is_empty() {
            word.clone_into(last);
        } else if last.len() + word.len() < LEGEND_LINE {
            *last += &format!(" {word}");
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// The name of a row's series within its chart.
fn name(row: &Measurement) -> String {
    if row.redop == "none" { row.types() } else { format!("{} {}", row.types(), row.redop) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::record::{Baseline, Timing};

    fn measurement(operation: &str, size_bytes: usize, busbw: f64) -> Measurement {
        let timing = Timing { time_us: 1.0, p99_us: 1.0, algbw: busbw, busbw, wrong: Some(0) };
        let name = "a parallel memcpy".to_owned();
        Measurement {
            operation: operation.into(),
            backend: "cpu".into(),
            transport: None,
            ranks: 1,
            dtype: "f32".into(),
            from_dtype: "bf16".into(),
            redop: "none".into(),
            size_bytes,
            count: size_bytes / 4,
            layers: 1,
            ranks_per_node: None,
            out_of_place: Some(timing),
            in_place: None,
            baseline: Some(Baseline { name, time_us: 1.0, p99_us: 1.0, busbw: 12.0, ratio: 1.0, ratio_range: None }),
            limit_busbw: Some(20.0),
        }
    }

    #[test]
    fn a_chart_has_its_series_its_baseline_and_its_limit() {
        let rows = [measurement("cast", 1 << 20, 5.0), measurement("cast", 1 << 22, 9.0), measurement("zero", 8, 1.0)];
        let svg = svg(&rows).unwrap();
        for text in
            ["cast on cpu", "zero on cpu", "f32:bf16", "dashed: a parallel memcpy", "limit", "busbw in GB/s", "1 MiB"]
        {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains(&format!("height=\"{}\"", 2 * CHART.1)));
    }
}
