//! A chart of lines as self-contained SVG text, for the report or a page of the documentation, legible on a light or a dark background.

use std::fmt::Write as _;

/// One line, with its name in the legend.
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) colour: &'static str,
    pub(crate) is_dashed: bool,
    pub(crate) points: Vec<Point>,
}

/// A point, and half the height of its bar.
#[derive(Clone, Copy)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) half: f64,
}

/// An axis from the first tick to the last one.
pub(crate) struct Axis {
    pub(crate) title: &'static str,
    pub(crate) ticks: Vec<(f64, String)>,
}

pub(crate) struct Chart {
    /// The accessible name, which screen readers read aloud.
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) lines: Vec<Line>,
    /// The left end and the lower end of the legend, as parts of the area of the lines.
    pub(crate) legend: [f64; 2],
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 400.0;
/// The area of the lines, in pixels.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 700.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 345.0;

impl Axis {
    /// The position of a value as a part of the axis. A value outside is moved to the end, like a curve that leaves the chart.
    fn part(&self, value: f64) -> f64 {
        let (first, last) = (self.ticks[0].0, self.ticks[self.ticks.len() - 1].0);
        ((value - first) / (last - first)).clamp(0.0, 1.0)
    }
}

impl Chart {
    pub(crate) fn svg(&self) -> String {
        let across = |part: f64| LEFT + part * (RIGHT - LEFT);
        let up = |part: f64| BOTTOM - part * (BOTTOM - TOP);
        let (x, y) = (|value| across(self.x.part(value)), |value| up(self.y.part(value)));
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
             viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"14\" fill=\"#7f7f7f\" stroke-width=\"2\">\n",
            self.title
        );
        let rule = "stroke=\"#7f7f7f\" stroke-width=\"1\" stroke-opacity=\"0.3\"";
        for (value, label) in &self.x.ticks {
            let x = x(*value);
            let _ = writeln!(svg, "<path d=\"M{x:.1} {TOP}V{BOTTOM}\" {rule}/>");
            let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", BOTTOM + 20.0);
        }
        for (value, label) in &self.y.ticks {
            let y = y(*value);
            let _ = writeln!(svg, "<path d=\"M{LEFT} {y:.1}H{RIGHT}\" {rule}/>");
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", LEFT - 8.0, y + 5.0);
        }
        let (middle, centre) = (across(0.5), up(0.5));
        let _ = writeln!(
            svg,
            "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - 12.0,
            self.x.title
        );
        let turned = format!("transform=\"rotate(-90 18 {centre})\"");
        let _ = writeln!(svg, "<text x=\"18\" y=\"{centre}\" text-anchor=\"middle\" {turned}>{}</text>", self.y.title);
        for (index, line) in self.lines.iter().enumerate() {
            let dashes = if line.is_dashed { " stroke-dasharray=\"6 4\"" } else { "" };
            let stroke = format!("stroke=\"{}\"", line.colour);
            let points: Vec<String> =
                line.points.iter().map(|point| format!("{:.1} {:.1}", x(point.x), y(point.y))).collect();
            let _ = writeln!(svg, "<path d=\"M{}\" fill=\"none\" {stroke}{dashes}/>", points.join("L"));
            for &Point { x: at, y: mean, half } in &line.points {
                let (low, high, x) = (y(mean - half), y(mean + half), x(at));
                let _ = writeln!(svg, "<path d=\"M{x:.1} {low:.1}V{high:.1}\" stroke-width=\"1\" {stroke}/>");
                let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{}\"/>", y(mean), line.colour);
            }
            let (left, y) = (across(self.legend[0]), up(self.legend[1]) - 20.0 * (self.lines.len() - index) as f64);
            let _ = writeln!(svg, "<path d=\"M{left:.1} {y:.1}h24\" {stroke}{dashes}/>");
            let _ = writeln!(svg, "<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", left + 32.0, y + 5.0, line.name);
        }
        svg + "</svg>\n"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chart_has_its_labels_its_legend_and_its_bars() {
        let axis =
            |title| Axis { title, ticks: (0..3).map(|tick| (f64::from(tick), format!("{tick} units"))).collect() };
        let points = vec![Point { x: 0.0, y: 1.0, half: 0.5 }, Point { x: 1.0, y: 7.0, half: 0.0 }];
        let line =
            |name: &str, is_dashed| Line { name: name.into(), colour: "#009e73", is_dashed, points: points.clone() };
        let lines = vec![line("one way", false), line("another", true)];
        let chart = Chart { title: "a title".into(), x: axis("across"), y: axis("up"), lines, legend: [0.0, 0.0] };
        let svg = chart.svg();
        for text in ["aria-label=\"a title\"", "one way", "another", "across", "up", "2 units", "#009e73"] {
            assert!(svg.contains(text), "{text}");
        }
        // From the middle of the left edge to the middle of the upper edge: the value 7 is outside.
        assert!(svg.contains("d=\"M70.0 178.5L385.0 12.0\""), "{svg}");
        assert!(svg.contains("d=\"M70.0 261.8V95.2\""), "a bar from 0.5 to 1.5: {svg}");
        assert_eq!((svg.matches("6 4").count(), svg.matches("<circle").count()), (2, 4));
    }
}
