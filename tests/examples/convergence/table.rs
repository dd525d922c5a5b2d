//! A table of texts, which the console, the documentation and the report show alike.

use std::fmt::Write as _;

/// The text in place of a missing figure.
pub(crate) const NONE: &str = "–";

/// A table whose first column is text, and whose other columns are figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Table {
    pub(crate) headings: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<T: ToString>(headings: impl IntoIterator<Item = T>) -> Self {
        Self { headings: headings.into_iter().map(|heading| heading.to_string()).collect(), rows: Vec::new() }
    }

    /// Whether the table has at least one figure.
    pub(crate) fn has_figures(&self) -> bool {
        self.rows.iter().flat_map(|row| &row[1..]).any(|cell| cell != NONE)
    }

    pub(crate) fn markdown(&self) -> String {
        if !self.has_figures() {
            return "No runs yet.\n".into();
        }
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule = format!("|---|{}\n", "---:|".repeat(self.headings.len() - 1));
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        line(&self.headings) + &rule + &rows
    }

    pub(crate) fn html(&self) -> String {
        let mut text = String::from("<div class=\"scroll\"><table>\n<thead><tr>");
        for heading in &self.headings {
            let _ = write!(text, "<th scope=\"col\">{}</th>", escape(heading));
        }
        text += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            let _ = write!(text, "<tr><th scope=\"row\">{}</th>", escape(&row[0]));
            row[1..].iter().for_each(|cell| text += &format!("<td>{}</td>", escape(cell)));
            text += "</tr>\n";
        }
        text + "</tbody></table></div>"
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
        lines.insert(1, "-".repeat(lines[0].chars().count()));
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
    fn one_table_three_ways() {
        let mut table = Table::new(["way", "1", "16"]);
        table.rows.push(["a < b", "88.9 ± 0.3", "–"].map(String::from).into());
        assert_eq!(table.markdown(), "| way | 1 | 16 |\n|---|---:|---:|\n| a < b | 88.9 ± 0.3 | – |\n");
        assert_eq!(table.text(), "way             1  16\n---------------------\na < b  88.9 ± 0.3   –");
        table.rows[0][1] = NONE.into();
        assert_eq!(table.markdown(), "No runs yet.\n");
        table.rows[0][1] = "88.9 ± 0.3".into();
        let html = table.html();
        assert!(html.contains("<th scope=\"row\">a &lt; b</th><td>88.9 ± 0.3</td><td>–</td>"), "{html}");
    }

    #[test]
    fn numbers_are_written_as_people_write_them() {
        assert_eq!([7, 317, 1797, 1_000_000].map(thousands).join(" "), "7 317 1,797 1,000,000");
    }
}
