//! The handwritten digits: reads them, checks every value, splits them.
//!
//! **Source.** "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository,
//! 1998 (<https://archive.ics.uci.edu/dataset/80>), licence CC BY 4.0. The file read here is the copy of that set's test
//! part that scikit-learn (BSD-3-Clause) carries in its wheel as `sklearn/datasets/data/digits.csv.gz`: 1,797 rows, each
//! 64 pixels of an 8 × 8 image, 0 to 16, and the digit.
//!
//! Never fetches anything, and never repairs a value: a row that is not what the format says is an error that names file
//! and row.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::random::SplitMix64;

/// Pixels of one image, 8 × 8.
pub(crate) const PIXELS: usize = 64;
/// The largest value that a pixel can have.
const BRIGHTEST: u8 = 16;
/// Digits 0 to 9.
pub(crate) const CLASSES: usize = 10;
/// Images that choose the learning rate. Never trained on.
const VALIDATION: usize = 200;
/// Images that are only counted. Never trained on, and never used to choose anything.
const TEST: usize = 317;

/// One line for the console and the report.
pub(crate) const SOURCE: &str = "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), \
     UCI Machine Learning Repository; the copy of its test part that scikit-learn carries (BSD-3-Clause)";
/// The data's own licence.
pub(crate) const LICENCE: &str = "CC BY 4.0";

/// Why a file is not the digits. Rows and columns count from 1. csv says its own source in its message, so that one is
/// not chained.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DataError {
    #[error("{}: cannot be opened", path.display())]
    Open { path: PathBuf, source: std::io::Error },
    #[error("{}: row {row} cannot be read: {reason}", path.display())]
    Read { path: PathBuf, row: usize, reason: csv::Error },
    #[error("{}: row {row} has {found} columns, expected {PIXELS} pixels and a label", path.display())]
    RowWidth { path: PathBuf, row: usize, found: usize },
    #[error("{}: row {row}, column {column}: pixel {value:?} is not a whole number from 0 to {BRIGHTEST}", path.display())]
    Pixel { path: PathBuf, row: usize, column: usize, value: String },
    #[error("{}: row {row}: label {value:?} is not a digit from 0 to 9", path.display())]
    Label { path: PathBuf, row: usize, value: String },
    #[error("{}: only {found} rows; {VALIDATION} for validation, {TEST} for the test and some to train on are needed", path.display())]
    TooFew { path: PathBuf, found: usize },
}

/// Images row by row, pixels scaled to 0..=1, and what they show.
#[derive(Debug, PartialEq)]
pub(crate) struct Digits {
    pixels: Vec<f32>,
    labels: Vec<u32>,
}

impl Digits {
    /// Reads the gzipped CSV.
    pub(crate) fn read(path: &Path) -> Result<Self, DataError> {
        let file = File::open(path).map_err(|source| DataError::Open { path: path.to_owned(), source })?;
        Self::parse(MultiGzDecoder::new(file), path)
    }

    /// `path` is for messages only.
    fn parse(text: impl Read, path: &Path) -> Result<Self, DataError> {
        let path = || path.to_owned();
        // `flexible`: a short or long row is reported by our own error, which knows what the row should look like.
        let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(text);
        let mut digits = Self { pixels: Vec::new(), labels: Vec::new() };
        for (index, record) in reader.records().enumerate() {
            let row = index + 1;
            let record = record.map_err(|reason| DataError::Read { path: path(), row, reason })?;
            if record.len() != PIXELS + 1 {
                return Err(DataError::RowWidth { path: path(), row, found: record.len() });
            }
            for (index, value) in record.iter().take(PIXELS).enumerate() {
                let pixel = whole_number(value, BRIGHTEST).ok_or_else(|| DataError::Pixel {
                    path: path(),
                    row,
                    column: index + 1,
                    value: value.to_owned(),
                })?;
                digits.pixels.push(f32::from(pixel) / f32::from(BRIGHTEST));
            }
            let value = &record[PIXELS];
            let label = whole_number(value, CLASSES as u8 - 1).ok_or_else(|| DataError::Label {
                path: path(),
                row,
                value: value.to_owned(),
            })?;
            digits.labels.push(u32::from(label));
        }
        if digits.len() <= VALIDATION + TEST {
            return Err(DataError::TooFew { path: path(), found: digits.len() });
        }
        Ok(digits)
    }

    /// 320 images of noise to train on, 40 for validation and 40 for the test: for checks of arithmetic, not of
    /// learning.
    #[cfg(test)]
    pub(crate) fn random_problem() -> (Self, Split) {
        let mut random = SplitMix64::new(0, 99);
        let pixels = (0..400 * PIXELS).map(|_| random.uniform(1.0)).collect();
        let labels = (0..400).map(|_| (random.next_u64() % CLASSES as u64) as u32).collect();
        let split = Split { train: (0..320).collect(), validation: (320..360).collect(), test: (360..400).collect() };
        (Self { pixels, labels }, split)
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    /// The images and labels of `rows`, in that order, back to back.
    pub(crate) fn gather(&self, rows: &[usize]) -> (Vec<f32>, Vec<u32>) {
        let pixels = rows.iter().flat_map(|&row| &self.pixels[row * PIXELS..(row + 1) * PIXELS]).copied().collect();
        let labels = rows.iter().map(|&row| self.labels[row]).collect();
        (pixels, labels)
    }
}

fn whole_number(text: &str, largest: u8) -> Option<u8> {
    text.trim().parse().ok().filter(|number| *number <= largest)
}

/// Which rows are for what. Every row is in exactly one of the three.
pub(crate) struct Split {
    pub(crate) train: Vec<usize>,
    pub(crate) validation: Vec<usize>,
    pub(crate) test: Vec<usize>,
}

impl Split {
    /// A shuffle that depends on the number of rows alone, not on the run's seed: whatever else is tried, the test
    /// images are always the same ones.
    pub(crate) fn of(digits: &Digits) -> Self {
        let mut rows: Vec<usize> = (0..digits.len()).collect();
        SplitMix64::new(0, 0).shuffle(&mut rows);
        let test = rows.split_off(rows.len() - TEST);
        let validation = rows.split_off(rows.len() - VALIDATION);
        Self { train: rows, validation, test }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A good file of `rows` rows, with the fields that `edit` changes.
    fn file(rows: usize, edit: impl Fn(usize, &mut Vec<String>)) -> String {
        let mut text = String::new();
        for row in 1..=rows {
            let mut fields: Vec<String> = (0..PIXELS).map(|column| ((row + column) % 17).to_string()).collect();
            fields.push((row % 10).to_string());
            edit(row, &mut fields);
            text += &fields.join(",");
            text.push('\n');
        }
        text
    }

    fn parse(text: &str) -> Result<Digits, DataError> {
        Digits::parse(text.as_bytes(), Path::new("some.csv.gz"))
    }

    #[test]
    fn values_are_scaled_and_stay_in_their_rows() {
        let digits = parse(&file(600, |_, _| {})).unwrap();
        assert_eq!(digits.len(), 600);
        let (pixels, labels) = digits.gather(&[15, 2]);
        assert_eq!(labels, [6, 3]);
        assert_eq!(pixels.len(), 2 * PIXELS);
        assert_eq!(pixels[..3], [1.0, 0.0, 1.0 / 16.0]);
        assert_eq!(pixels[PIXELS], 3.0 / 16.0);
    }

    #[test]
    fn a_short_row_is_named() {
        let error = parse(&file(600, |row, fields| {
            if row == 7 {
                fields.pop();
            }
        }))
        .unwrap_err();
        assert!(matches!(error, DataError::RowWidth { row: 7, found: 64, .. }), "{error}");
        assert!(error.to_string().contains("some.csv.gz"), "{error}");
    }

    #[test]
    fn a_long_row_is_named() {
        let error = parse(&file(600, |row, fields| {
            if row == 1 {
                fields.push("0".into());
            }
        }))
        .unwrap_err();
        assert!(matches!(error, DataError::RowWidth { row: 1, found: 66, .. }), "{error}");
    }

    #[test]
    fn a_pixel_out_of_range_is_named() {
        for bad in ["17", "-1", "3.5", "", "x"] {
            let error = parse(&file(600, |row, fields| {
                if row == 600 {
                    fields[63] = bad.into();
                }
            }))
            .unwrap_err();
            let DataError::Pixel { row: 600, column: 64, value, .. } = &error else { panic!("{bad}: {error}") };
            assert_eq!(value, bad);
        }
    }

    #[test]
    fn a_label_out_of_range_is_named() {
        let error = parse(&file(600, |row, fields| {
            if row == 3 {
                fields[PIXELS] = "10".into();
            }
        }))
        .unwrap_err();
        assert!(matches!(&error, DataError::Label { row: 3, value, .. } if value == "10"), "{error}");
    }

    #[test]
    fn too_few_rows_are_an_error() {
        let error = parse(&file(VALIDATION + TEST, |_, _| {})).unwrap_err();
        assert!(matches!(error, DataError::TooFew { found: 517, .. }), "{error}");
        assert!(matches!(parse("").unwrap_err(), DataError::TooFew { found: 0, .. }));
    }

    #[test]
    fn a_file_that_is_not_there_or_not_gzip_is_named() {
        let error = Digits::read(Path::new("no/such/digits.csv.gz")).unwrap_err();
        assert!(matches!(error, DataError::Open { .. }), "{error}");
        assert!(error.to_string().contains("digits.csv.gz"), "{error}");
        let error = Digits::parse(MultiGzDecoder::new(&b"plain text"[..]), Path::new("plain.csv")).unwrap_err();
        assert!(matches!(error, DataError::Read { row: 1, .. }), "{error}");
    }

    #[test]
    fn the_split_uses_every_row_once() {
        let digits = parse(&file(1797, |_, _| {})).unwrap();
        let split = Split::of(&digits);
        assert_eq!((split.train.len(), split.validation.len(), split.test.len()), (1280, 200, 317));
        let mut rows = [split.train, split.validation, split.test].concat();
        assert!(!rows.is_sorted());
        rows.sort_unstable();
        assert_eq!(rows, (0..1797).collect::<Vec<_>>());
    }
}
