//! The report's charts, as SVG text.
//!
//! plotters draws them; colours, dashes and text colour are the report's style sheet's, which finds the lines by the
//! stroke colours named here. No font is measured or embedded: SVG text is set by the browser.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;

use crate::plan::Mode;

const SIZE: (u32, u32) = (560, 350);
/// Stroke of everything that is not data. The style sheet gives it the text's colour.
const INK: RGBColor = RGBColor(0x55, 0x55, 0x55);
/// Stroke of a horizontal mark.
const MARK: RGBColor = RGBColor(0x77, 0x77, 0x77);

/// A line of one mode.
pub(crate) struct Line {
    pub(crate) mode: Mode,
    pub(crate) points: Vec<(f64, f64)>,
}

/// How values are spread along an axis.
#[derive(Clone, Copy)]
pub(crate) enum Scale {
    Linear,
    /// Decades.
    Log10,
    /// Doublings, written as fractions.
    Log2,
}

/// One chart.
pub(crate) struct Chart<'a> {
    /// What a screen reader says.
    pub(crate) title: &'a str,
    pub(crate) x: Axis<'a>,
    pub(crate) y: Axis<'a>,
    /// Values of y to draw a thin line at.
    pub(crate) marks: Vec<f64>,
    /// Whether each point gets a dot.
    pub(crate) dots: bool,
    pub(crate) lines: Vec<Line>,
}

/// One axis of a chart. `range` is in the axis' own values.
pub(crate) struct Axis<'a> {
    pub(crate) title: &'a str,
    pub(crate) scale: Scale,
    pub(crate) range: Range<f64>,
    /// Whether labels are per cent.
    pub(crate) percent: bool,
}

/// The colour that the style sheet looks for, and that a viewer without it shows: from Okabe and Ito's palette, which
/// people with any kind of colour vision can tell apart.
fn colour(mode: Mode) -> RGBColor {
    match mode {
        Mode::Mean => RGBColor(0x00, 0x72, 0xb2),
        Mode::Sum => RGBColor(0xd5, 0x5e, 0x00),
        Mode::Adasum => RGBColor(0x00, 0x9e, 0x73),
    }
}

/// That colour as the style sheet must write it.
pub(crate) fn stroke(mode: Mode) -> String {
    let RGBColor(red, green, blue) = colour(mode);
    format!("#{red:02X}{green:02X}{blue:02X}")
}

type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Draws a chart.
pub(crate) fn svg(chart: &Chart<'_>) -> Result<String, DrawingAreaErrorKind<std::io::Error>> {
    let mut svg = String::new();
    draw(chart, &mut svg)?;
    // plotters writes a fixed size; the page decides instead, and screen readers get a name.
    let opening = format!("<svg role=\"img\" aria-label=\"{}\" ", chart.title);
    Ok(svg.replacen("<svg ", &opening, 1))
}

fn draw(chart: &Chart<'_>, svg: &mut String) -> DrawResult {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut context = ChartBuilder::on(&area)
        .margin(8)
        .margin_right(20)
        .x_label_area_size(48)
        .y_label_area_size(66)
        .build_cartesian_2d(Places::of(&chart.x), Places::of(&chart.y))?;
    context
        .configure_mesh()
        .x_desc(chart.x.title)
        .y_desc(chart.y.title)
        .axis_style(INK)
        .bold_line_style(INK.mix(0.25))
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 14).into_font().color(&INK))
        .axis_desc_style(("sans-serif", 15).into_font().color(&INK))
        .x_label_formatter(&|tick| chart.x.label(*tick))
        .y_label_formatter(&|tick| chart.y.label(*tick))
        .draw()?;
    for &mark in &chart.marks {
        let ends = [chart.x.range.start, chart.x.range.end].map(|x| (chart.x.spread(x), chart.y.spread(mark)));
        context.draw_series(LineSeries::new(ends, MARK))?;
    }
    for line in &chart.lines {
        let colour = colour(line.mode);
        // A value outside the chart is clipped to its border, as a curve that leaves it would be.
        let place = |&(x, y): &(f64, f64)| {
            let y = y.clamp(chart.y.range.start, chart.y.range.end);
            (chart.x.spread(x), chart.y.spread(y))
        };
        context.draw_series(LineSeries::new(line.points.iter().map(place), colour.stroke_width(2)))?;
        if chart.dots {
            context.draw_series(line.points.iter().map(|point| Circle::new(place(point), 4, colour.filled())))?;
        }
    }
    area.present()
}

impl Axis<'_> {
    /// From a value to its place along the axis.
    fn spread(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Log10 => value.log10(),
            Scale::Log2 => value.log2(),
        }
    }

    /// Where labels stand, in places along the axis: whole decades or doublings, or 5 to 10 round numbers. plotters' own
    /// logarithmic axis puts its labels between the decades.
    fn ticks(&self) -> Vec<f64> {
        let (start, end) = (self.spread(self.range.start), self.spread(self.range.end));
        let step = match self.scale {
            Scale::Log10 | Scale::Log2 => 1.0,
            Scale::Linear => round_step((end - start) / 10.0),
        };
        let count = ((end / step + 1e-9).floor() - (start / step - 1e-9).ceil()) as usize;
        let first = (start / step - 1e-9).ceil();
        (0..=count).map(|index| (first + index as f64) * step).collect()
    }

    fn label(&self, place: f64) -> String {
        match self.scale {
            Scale::Linear if self.percent => format!("{:.0} %", 100.0 * place),
            // Away with the last digits of 3 × 0.1.
            Scale::Linear => ((place * 1e6).round() / 1e6).to_string(),
            Scale::Log10 => 10f64.powf(place.round()).to_string(),
            Scale::Log2 => crate::table::rate(2f32.powf(place.round() as f32)),
        }
    }
}

/// An axis as plotters wants it. Its own kinds of axis choose the ticks themselves.
struct Places {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Places {
    fn of(axis: &Axis<'_>) -> Self {
        Self { range: axis.spread(axis.range.start)..axis.spread(axis.range.end), ticks: axis.ticks() }
    }
}

impl Ranged for Places {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, place: &f64, (first, last): (i32, i32)) -> i32 {
        let part = (place - self.range.start) / (self.range.end - self.range.start);
        first + (f64::from(last - first) * part).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _hint: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

/// The smallest of 1, 2, 5, 10, 20, … (or a tenth, a hundredth … of them) that is at least `least`.
fn round_step(least: f64) -> f64 {
    let decade = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0]
        .into_iter()
        .map(|digit| digit * decade)
        .find(|step| *step >= least * (1.0 - 1e-9))
        .unwrap_or(10.0 * decade)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn axis(scale: Scale, range: Range<f64>) -> Axis<'static> {
        Axis { title: "some axis", scale, range, percent: false }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let labels = |axis: &Axis<'_>| axis.ticks().into_iter().map(|tick| axis.label(tick)).collect::<Vec<_>>();
        assert_eq!(labels(&axis(Scale::Linear, 0.0..0.3)).join(" "), "0 0.05 0.1 0.15 0.2 0.25 0.3");
        assert_eq!(labels(&axis(Scale::Linear, 1.0..8.0)).join(" "), "1 2 3 4 5 6 7 8");
        assert_eq!(labels(&axis(Scale::Log10, 0.005..20.0)).join(" "), "0.01 0.1 1 10");
        assert_eq!(labels(&axis(Scale::Log2, 0.25..2.0)).join(" "), "1/4 1/2 1 2");
    }

    #[test]
    fn a_chart_carries_its_labels_and_one_line_a_mode() {
        let lines = Mode::ALL.map(|mode| Line { mode, points: vec![(1.0, 1.0), (2.0, 3.0)] });
        let chart = Chart {
            title: "a title",
            x: axis(Scale::Linear, 0.0..4.0),
            y: axis(Scale::Linear, 0.0..2.0),
            marks: Vec::new(),
            dots: false,
            lines: lines.into(),
        };
        let svg = svg(&chart).unwrap();
        assert_eq!(svg.matches("some axis").count(), 2);
        assert!(svg.contains("aria-label=\"a title\"") && svg.contains("1.5") && svg.trim_end().ends_with("</svg>"));
        for mode in Mode::ALL {
            assert_eq!(svg.matches(&format!("stroke=\"{}\"", stroke(mode))).count(), 1);
        }
    }
}
