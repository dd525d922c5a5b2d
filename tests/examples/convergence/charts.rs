//! Charts as self-contained SVG text, for a report or a page of the documentation, legible on a light or a dark background.
//!
//! plotters draws the charts. No font is measured or embedded: the viewer chooses the font of SVG text.

use std::ops::Range;

use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::prelude::*;

const SIZE: (u32, u32) = (720, 400);
/// The colour of everything except data: legible on white and on black.
const INK: RGBColor = RGBColor(0x7f, 0x7f, 0x7f);

/// Okabe and Ito's palette, whose colours are distinguishable with any kind of colour vision.
pub(crate) const GREEN: RGBColor = RGBColor(0x00, 0x9e, 0x73);
pub(crate) const BLUE: RGBColor = RGBColor(0x1f, 0x83, 0xc8);
pub(crate) const SKY: RGBColor = RGBColor(0x56, 0xb4, 0xe9);
pub(crate) const VERMILION: RGBColor = RGBColor(0xd5, 0x5e, 0x00);
pub(crate) const ORANGE: RGBColor = RGBColor(0xe6, 0x9f, 0x00);
pub(crate) const PINK: RGBColor = RGBColor(0xcc, 0x79, 0xa7);

/// One line, with its name in the legend.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) colour: RGBColor,
    pub(crate) is_dashed: bool,
    pub(crate) points: Vec<Point>,
}

/// A value, and half the width of its interval.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) half: f64,
}

/// The scale of an axis.
#[derive(Clone, Copy)]
pub(crate) enum Scale {
    Linear,
    /// Logarithmic to base 2; labels show the values themselves.
    Log2,
}

/// One chart.
pub(crate) struct Chart {
    /// The accessible name, which screen readers read aloud.
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
    /// The position of the legend.
    pub(crate) legend: SeriesLabelPosition,
}

/// One axis of a chart. `range` is in values, before the scale is applied.
pub(crate) struct Axis {
    pub(crate) title: String,
    pub(crate) scale: Scale,
    pub(crate) range: Range<f64>,
    /// Whether labels are percentages.
    pub(crate) percent: bool,
}

type DrawResult = Result<(), DrawingAreaErrorKind<std::io::Error>>;

/// Draws a chart.
pub(crate) fn svg(chart: &Chart) -> Result<String, DrawingAreaErrorKind<std::io::Error>> {
    let mut svg = String::new();
    draw(chart, &mut svg)?;
    // The page determines the size, and screen readers get a name.
    let opening = format!("<svg role=\"img\" aria-label=\"{}\" ", chart.title);
    Ok(svg.replacen("<svg ", &opening, 1).trim_end().to_owned() + "\n")
}

fn draw(chart: &Chart, svg: &mut String) -> DrawResult {
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    let mut context = ChartBuilder::on(&area)
        .margin(8)
        .margin_right(20)
        .x_label_area_size(48)
        .y_label_area_size(66)
        .build_cartesian_2d(Places::of(&chart.x), Places::of(&chart.y))?;
    context
        .configure_mesh()
        .x_desc(&chart.x.title)
        .y_desc(&chart.y.title)
        .axis_style(INK)
        .bold_line_style(INK.mix(0.25))
        .light_line_style(TRANSPARENT)
        .label_style(("sans-serif", 14).into_font().color(&INK))
        .axis_desc_style(("sans-serif", 15).into_font().color(&INK))
        .x_label_formatter(&|tick| chart.x.label(*tick))
        .y_label_formatter(&|tick| chart.y.label(*tick))
        .draw()?;
    for line in &chart.lines {
        let colour = line.colour;
        // A value outside the chart is clipped to the chart's border, like a curve that leaves the chart.
        let place =
            |x: f64, y: f64| (chart.x.spread(x), chart.y.spread(y.clamp(chart.y.range.start, chart.y.range.end)));
        let places = || line.points.iter().map(|point| place(point.x, point.y));
        let style = colour.stroke_width(2);
        let legend = move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style);
        if line.is_dashed {
            context.draw_series(DashedLineSeries::new(places(), 6, 4, style))?.label(&line.name).legend(legend);
        } else {
            context.draw_series(LineSeries::new(places(), style))?.label(&line.name).legend(legend);
        }
        context.draw_series(places().map(|place| Circle::new(place, 3, colour.filled())))?;
        let bars = line.points.iter().filter(|point| point.half > 0.0);
        let ends = bars.map(|point| [place(point.x, point.y - point.half), place(point.x, point.y + point.half)]);
        context.draw_series(ends.map(|ends| PathElement::new(ends, colour.stroke_width(1))))?;
    }
    context
        .configure_series_labels()
        .position(chart.legend.clone())
        .label_font(("sans-serif", 14).into_font().color(&INK))
        .draw()?;
    area.present()
}

impl Axis {
    /// The position of a value along the axis.
    fn spread(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => value,
            Scale::Log2 => value.log2(),
        }
    }

    /// The positions of labels along the axis: whole powers of two, or 5 to 10 round numbers. plotters' own logarithmic axis puts its
    /// labels between the decades.
    fn ticks(&self) -> Vec<f64> {
        let (start, end) = (self.spread(self.range.start), self.spread(self.range.end));
        let step = match self.scale {
            Scale::Log2 => 1.0,
            Scale::Linear => round_step((end - start) / 10.0),
        };
        let count = ((end / step + 1e-9).floor() - (start / step - 1e-9).ceil()) as usize;
        let first = (start / step - 1e-9).ceil();
        (0..=count).map(|index| (first + index as f64) * step).collect()
    }

    fn label(&self, place: f64) -> String {
        match self.scale {
            Scale::Linear if self.percent => format!("{:.0} %", 100.0 * place),
            // Rounding removes the last digits of 3 × 0.1.
            Scale::Linear => ((place * 1e6).round() / 1e6).to_string(),
            Scale::Log2 => 2f64.powf(place.round()).to_string(),
        }
    }
}

/// An axis for plotters with given ticks; plotters' own kinds of axis choose the ticks themselves.
struct Places {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Places {
    fn of(axis: &Axis) -> Self {
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

/// The smallest of 1, 2, 5, 10, 20, … (or a tenth, a hundredth, … of these) that is at least `least`.
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

    fn axis(scale: Scale, range: Range<f64>) -> Axis {
        Axis { title: "some axis".into(), scale, range, percent: false }
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let labels = |axis: &Axis| axis.ticks().into_iter().map(|tick| axis.label(tick)).collect::<Vec<_>>();
        assert_eq!(labels(&axis(Scale::Linear, 0.0..0.3)).join(" "), "0 0.05 0.1 0.15 0.2 0.25 0.3");
        assert_eq!(labels(&axis(Scale::Linear, 1.0..8.0)).join(" "), "1 2 3 4 5 6 7 8");
        assert_eq!(labels(&axis(Scale::Log2, 1.0..64.0)).join(" "), "1 2 4 8 16 32 64");
    }

    #[test]
    fn a_chart_carries_its_labels_its_legend_and_its_bars() {
        let point = |x, y| Point { x, y, half: 0.25 };
        let line = |name: &str, colour, is_dashed| {
            let points = vec![point(1.0, 1.0), point(2.0, 3.0)];
            Line { name: name.into(), colour, is_dashed, points }
        };
        let chart = Chart {
            title: "a title".into(),
            x: axis(Scale::Linear, 0.0..4.0),
            y: axis(Scale::Linear, 0.0..2.0),
            lines: vec![line("one way", GREEN, false), line("another", BLUE, true)],
            legend: SeriesLabelPosition::LowerLeft,
        };
        let svg = svg(&chart).unwrap();
        assert_eq!(svg.matches("some axis").count(), 2);
        for text in ["aria-label=\"a title\"", "one way", "another", "1.5", "#009E73", "#1F83C8"] {
            assert!(svg.contains(text), "{text}");
        }
        assert!(svg.ends_with("</svg>\n"));
    }
}
