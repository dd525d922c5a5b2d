//! Means with 95 % intervals, and tables of texts, which the console, the documentation and the report show alike.

use std::fmt::Write as _;

/// The text in place of a missing figure.
pub(crate) const NONE: &str = "–";

/// A mean, with half the width of its 95 % confidence interval by Student's t distribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) mean: f64,
    pub(crate) half: f64,
}

impl Interval {
    /// `None` for fewer than 3 values.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        /// The 97.5 % quantiles for 2 degrees of freedom and more. Beyond the table, the last one is too large by at most 8 %.
        const QUANTILES: [f64; 14] =
            [4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131];
        let quantile = QUANTILES[values.len().checked_sub(3)?.min(QUANTILES.len() - 1)];
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Self { mean, half: quantile * (variance / count).sqrt() })
    }

    /// In per cent, or in points.
    pub(crate) fn percent(self) -> String {
        format!("{:.1} ± {:.1}", 100.0 * self.mean, 100.0 * self.half)
    }

    /// A difference in points, in parentheses if it may be 0.
    pub(crate) fn difference(self) -> String {
        let text = format!("{:+.1} ± {:.1}", 100.0 * self.mean, 100.0 * self.half).replace('-', "−");
        if self.mean.abs() <= self.half { format!("({text})") } else { text }
    }
}

/// A table whose first column is text, and whose other columns are figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Table {
    pub(crate) headings: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|---|{}\n", "---:|".repeat(self.headings.len() - 1));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        line(&self.headings) + &rule + &rows
    }

    pub(crate) fn html(&self) -> String {
        let mut text = String::from("<table>\n<thead><tr>");
        for heading in &self.headings {
            let _ = write!(text, "<th scope=\"col\">{}</th>", escape(heading));
        }
        text += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            let _ = write!(text, "<tr><th scope=\"row\">{}</th>", escape(&row[0]));
            row[1..].iter().for_each(|cell| text += &format!("<td>{}</td>", escape(cell)));
            text += "</tr>\n";
        }
        text + "</tbody></table>"
    }

    pub(crate) fn text(&self) -> String {
        let mut lines = vec![String::new(); self.rows.len() + 1];
        for (column, heading) in self.headings.iter().enumerate() {
            let texts = || std::iter::once(heading).chain(self.rows.iter().map(|row| &row[column]));
            let width = texts().map(|text| text.chars().count()).max().unwrap_or(0);
            for (line, text) in lines.iter_mut().zip(texts()) {
                *line += &if column == 0 { format!("{text:<width$}") } else { format!("  {text:>width$}") };
            }
        }
        lines.join("\n")
    }
}

pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

pub(crate) fn thousands(count: usize) -> String {
    let digits = count.to_string();
    let groups = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy);
    groups.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_equals_one_by_hand() {
        let interval = Interval::of(&[0.88, 0.89, 0.90]).unwrap();
        // The standard deviation is 0.01, and of the mean 0.01 / √3; the quantile is 4.303.
        assert!((interval.half - 0.04303 / 3f64.sqrt()).abs() < 1e-12, "{interval:?}");
        assert_eq!((interval.percent(), interval.difference()), ("89.0 ± 2.5".into(), "+89.0 ± 2.5".into()));
        assert_eq!(Interval::of(&[-0.1, 0.1, -0.2]).unwrap().difference(), "(−6.7 ± 37.9)");
        assert_eq!(Interval::of(&[5.0; 40]), Some(Interval { mean: 5.0, half: 0.0 }));
        assert_eq!(Interval::of(&[0.88, 0.89]), None);
    }

    #[test]
    fn table_is_markdown_text_and_html() {
        let texts = |texts: [&str; 3]| texts.map(String::from).into();
        let table = Table { headings: texts(["way", "1", "16"]), rows: vec![texts(["a < b", "88.9 ± 0.3", NONE])] };
        assert_eq!(table.markdown(), "| way | 1 | 16 |\n|---|---:|---:|\n| a < b | 88.9 ± 0.3 | – |\n");
        assert_eq!(table.text(), "way             1  16\na < b  88.9 ± 0.3   –");
        let html = table.html();
        assert!(html.contains("<th scope=\"row\">a &lt; b</th><td>88.9 ± 0.3</td><td>–</td>"), "{html}");
        assert_eq!([7, 317, 1797, 1_000_000].map(thousands).join(" "), "7 317 1,797 1,000,000");
    }
}
