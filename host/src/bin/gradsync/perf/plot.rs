//! `--plot`: bandwidth over size, each series beside its baseline and the limit, as one SVG.
//!
//! One chart for each operation, place and number of ranks. plotters draws; no font is measured or embedded.

use plotters::prelude::*;

use super::record::Measurement;
use super::sizes;

const CHART: (u32, u32) = (900, 420);
const INK: RGBColor = RGBColor(0x44, 0x44, 0x44);
const LIMIT: RGBColor = RGBColor(0x99, 0x99, 0x99);
/// Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

/// What rows of one chart have in common.
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
    // Places along the axis are doublings; a chart of one size has room around it.
    let place_of = |row: &Measurement| (row.size_bytes.max(1) as f64).log2();
    let least = rows.iter().map(|row| place_of(row)).fold(f64::INFINITY, f64::min).floor() - 0.5;
    let last = rows.iter().map(|row| place_of(row)).fold(0.0, f64::max).ceil() + 0.5;
    let mut context = ChartBuilder::on(area)
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
    for (index, wanted) in names.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let of_series = || rows.iter().filter(|row| name(row) == *wanted);
        let own: Vec<(f64, f64)> = of_series().filter_map(|row| Some((place_of(row), row.timing()?.busbw))).collect();
        let baseline: Vec<(f64, f64)> =
            of_series().filter_map(|row| Some((place_of(row), row.baseline.as_ref()?.busbw))).collect();
        let legend = move |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2));
        context.draw_series(LineSeries::new(own.iter().copied(), colour.stroke_width(2)))?.label(wanted).legend(legend);
        context.draw_series(own.iter().map(|&point| Circle::new(point, 3, colour.filled())))?;
        if let Some(found) = of_series().find_map(|row| row.baseline.as_ref()) {
            let legend = move |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 18, y)], colour.mix(0.4));
            let line = DashedLineSeries::new(baseline.iter().copied(), 6, 4, colour.mix(0.6).stroke_width(1));
            context.draw_series(line)?.label(format!("{wanted}: {}", found.name)).legend(legend);
            context.draw_series(baseline.iter().map(|&point| Circle::new(point, 2, colour.mix(0.6))))?;
        }
    }
    let limits: Vec<f64> = rows.iter().filter_map(|row| row.limit_busbw).collect();
    if let Some(limit) = limits.iter().copied().reduce(f64::max) {
        let legend = |(x, y): (i32, i32)| PathElement::new([(x, y), (x + 18, y)], LIMIT.stroke_width(2));
        let ends = [(least, limit), (last, limit)];
        context.draw_series(LineSeries::new(ends, LIMIT.stroke_width(2)))?.label("limit").legend(legend);
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerRight)
        .background_style(WHITE.mix(0.85))
        .border_style(INK.mix(0.3))
        .label_font(("sans-serif", 12).into_font().color(&INK))
        .draw()
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
            out_of_place: Some(timing),
            in_place: None,
            baseline: Some(Baseline { name, time_us: 1.0, p99_us: 1.0, busbw: 12.0, ratio: 1.0 }),
            limit_busbw: Some(20.0),
        }
    }

    #[test]
    fn a_chart_has_its_series_its_baseline_and_its_limit() {
        let rows = [measurement("cast", 1 << 20, 5.0), measurement("cast", 1 << 22, 9.0), measurement("zero", 8, 1.0)];
        let svg = svg(&rows).unwrap();
        for text in ["cast on cpu", "zero on cpu", "f32:bf16", "a parallel memcpy", "limit", "busbw in GB/s", "1 MiB"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains(&format!("height=\"{}\"", 2 * CHART.1)));
    }
}
