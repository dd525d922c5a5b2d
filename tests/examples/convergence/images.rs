//! Image data for classification: reads Fashion-MNIST, or the digits if Fashion-MNIST is not available, checks every value, and splits
//! the images.
//!
//! **Fashion-MNIST** (H. Xiao, K. Rasul, R. Vollgraf, Zalando Research, 2017; licence MIT): 60,000 + 10,000 images of 28 × 28 pixels of
//! clothes of ten kinds, as four gzipped IDX files. Debian's package `dataset-fashion-mnist` contains them.
//!
//! **The digits**: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, licence
//! CC BY 4.0; the 1,797 images of 8 × 8 pixels that scikit-learn (BSD-3-Clause) ships in its wheel. They are enlarged to fit the network.
//!
//! The module never downloads anything, and never repairs a value: a value that violates the format is an error that names the file and the
//! position.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;

use crate::lanes::{BATCH, Row};
use crate::random::SplitMix64;

/// Pixels per edge of an image.
pub(crate) const SIDE: usize = 28;
/// The number of classes.
pub(crate) const CLASSES: usize = 10;
const PIXELS: usize = SIDE * SIDE;

/// For the digits: pixels per edge, the largest pixel value, and the factor that, with a border, enlarges an image to [`SIDE`] pixels.
const DIGIT_SIDE: usize = 8;
const DIGIT_BRIGHTEST: u8 = 16;
const DIGIT_SCALE: usize = 3;

/// The reason why files do not contain the images. Rows and columns count from 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImageError {
    #[error("{}: cannot be read", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: is not an IDX file of bytes with {expected} in its header: starts with {found:?}", path.display())]
    Header { path: PathBuf, expected: String, found: Vec<u8> },
    #[error("{}: has {found} bytes after the header, which says {expected}", path.display())]
    Length { path: PathBuf, expected: usize, found: usize },
    #[error("{}: row {row} cannot be read: {reason}", path.display())]
    Row { path: PathBuf, row: usize, reason: csv::Error },
    #[error("{}: row {row} has {found} columns, expected {} pixels and a label", path.display(), DIGIT_SIDE * DIGIT_SIDE)]
    RowWidth { path: PathBuf, row: usize, found: usize },
    #[error("{}: row {row}, column {column}: {value:?} is not a whole number from 0 to {largest}", path.display())]
    Value { path: PathBuf, row: usize, column: usize, value: String, largest: u8 },
    #[error("{}: label {index} is {value}, and there are {CLASSES} classes", path.display())]
    Label { path: PathBuf, index: usize, value: u8 },
    #[error("{}: only {found} images; {needed} are held back for choosing and testing", path.display())]
    TooFew { path: PathBuf, found: usize, needed: usize },
}

/// The origin of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    FashionMnist,
    Digits,
}

/// The use of a set of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Train,
    /// Chooses learning rates; never used for training.
    Validation,
    /// Only scored; never used for training or for any choice.
    Test,
}

/// Images, their labels, and their division into parts.
pub(crate) struct Images {
    pub(crate) source: Source,
    pixels: Vec<u8>,
    labels: Vec<u8>,
    train: Vec<u32>,
    validation: Vec<u32>,
    test: Vec<u32>,
    /// The network's input for each pixel value: normalised to mean 0 and variance 1 over the training images.
    values: [f32; 256],
}

impl Images {
    /// Reads the four files of a folder.
    pub(crate) fn fashion_mnist(folder: &Path) -> Result<Self, ImageError> {
        const HELD_OUT: usize = 5_000;
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        let mut counts = [0; 2];
        for (part, count) in ["train", "t10k"].into_iter().zip(&mut counts) {
            let path = folder.join(format!("{part}-labels-idx1-ubyte.gz"));
            let own = idx(&path, &[])?;
            if let Some(index) = own.iter().position(|&label| usize::from(label) >= CLASSES) {
                return Err(ImageError::Label { path, index, value: own[index] });
            }
            let path = folder.join(format!("{part}-images-idx3-ubyte.gz"));
            let images = idx(&path, &[SIDE, SIDE])?;
            if images.len() != own.len() * PIXELS {
                return Err(ImageError::Length { path, expected: own.len() * PIXELS, found: images.len() });
            }
            *count = own.len();
            pixels.extend(images);
            labels.extend(own);
        }
        let mut train: Vec<u32> = (0..counts[0] as u32).collect();
        shuffle(&mut train);
        let enough = |found: usize| {
            let path = folder.to_owned();
            if found > HELD_OUT { Ok(()) } else { Err(ImageError::TooFew { path, found, needed: HELD_OUT }) }
        };
        enough(counts[0])?;
        enough(counts[1] + HELD_OUT)?;
        let validation = train.split_off(train.len() - HELD_OUT);
        let test = (counts[0] as u32..(counts[0] + counts[1]) as u32).collect();
        Ok(Self::new(Source::FashionMnist, pixels, labels, [train, validation, test]))
    }

    /// Reads the gzipped CSV of scikit-learn.
    pub(crate) fn digits(path: &Path) -> Result<Self, ImageError> {
        const HELD_OUT: [usize; 2] = [200, 317];
        let (pixels, labels) = digits(path)?;
        let needed = HELD_OUT.iter().sum();
        if labels.len() <= needed {
            return Err(ImageError::TooFew { path: path.to_owned(), found: labels.len(), needed });
        }
        let mut train: Vec<u32> = (0..labels.len() as u32).collect();
        shuffle(&mut train);
        let test = train.split_off(train.len() - HELD_OUT[1]);
        let validation = train.split_off(train.len() - HELD_OUT[0]);
        Ok(Self::new(Source::Digits, pixels, labels, [train, validation, test]))
    }

    fn new(source: Source, pixels: Vec<u8>, labels: Vec<u8>, [train, validation, test]: [Vec<u32>; 3]) -> Self {
        let of_training = || train.iter().flat_map(|&row| image(&pixels, row));
        let count = (train.len() * PIXELS) as f64;
        let mean = of_training().map(|&pixel| f64::from(pixel)).sum::<f64>() / count;
        let square = of_training().map(|&pixel| f64::from(pixel) * f64::from(pixel)).sum::<f64>() / count;
        let deviation = (square - mean * mean).sqrt();
        let values = std::array::from_fn(|pixel| ((pixel as f64 - mean) / deviation) as f32);
        Self { source, pixels, labels, train, validation, test, values }
    }

    /// Random images, for checks of arithmetic, not of learning.
    #[cfg(test)]
    pub(crate) fn random(train: u32) -> Self {
        let mut random = SplitMix64::new(0, 99);
        let count = train + 80;
        let pixels = (0..count as usize * PIXELS).map(|_| random.next_u64() as u8).collect();
        let labels = (0..count).map(|_| (random.next_u64() % CLASSES as u64) as u8).collect();
        let parts = [(0..train).collect(), (train..train + 40).collect(), (train + 40..count).collect()];
        Self::new(Source::Digits, pixels, labels, parts)
    }

    /// The rows of a part, in a fixed order.
    pub(crate) fn rows(&self, part: Part) -> &[u32] {
        match part {
            Part::Train => &self.train,
            Part::Validation => &self.validation,
            Part::Test => &self.test,
        }
    }

    /// The pixels of up to a batch of images, and their labels.
    pub(crate) fn gather(&self, rows: &[u32], into: &mut [Row], labels: &mut [u8; BATCH]) {
        for (index, &row) in rows.iter().enumerate() {
            for (into, &pixel) in into.iter_mut().zip(image(&self.pixels, row)) {
                into[index] = self.values[usize::from(pixel)];
            }
            labels[index] = self.labels[row as usize];
        }
    }
}

fn image(pixels: &[u8], row: u32) -> &[u8] {
    &pixels[row as usize * PIXELS..][..PIXELS]
}

/// The order depends on the number of rows alone, so that an image belongs to the same part in all runs.
fn shuffle(rows: &mut [u32]) {
    SplitMix64::new(0, 0).shuffle(rows);
}

/// The bytes of an IDX file with items of these sizes.
fn idx(path: &Path, sizes: &[usize]) -> Result<Vec<u8>, ImageError> {
    let read = |source| ImageError::Read { path: path.to_owned(), source };
    let mut bytes = Vec::new();
    MultiGzDecoder::new(File::open(path).map_err(read)?).read_to_end(&mut bytes).map_err(read)?;
    let word = |index: usize| Some(u32::from_be_bytes(bytes.get(4 * index..4 * index + 4)?.try_into().ok()?) as usize);
    // The header consists of two zeros, the type (bytes), the number of sizes, and the sizes.
    let header: Option<Vec<usize>> = (0..2 + sizes.len()).map(word).collect();
    let expected = [&[0x800 + 1 + sizes.len()], sizes].concat();
    let (count, data) = match header {
        Some(header) if header[0] == expected[0] && header[2..] == expected[1..] => (header[1], 4 * header.len()),
        _ => {
            let found = bytes[..bytes.len().min(16)].to_vec();
            return Err(ImageError::Header { path: path.to_owned(), expected: format!("{expected:?}"), found });
        }
    };
    let expected = count * sizes.iter().product::<usize>();
    if bytes.len() - data != expected {
        return Err(ImageError::Length { path: path.to_owned(), expected, found: bytes.len() - data });
    }
    Ok(bytes.split_off(data))
}

/// The digits, enlarged.
fn digits(path: &Path) -> Result<(Vec<u8>, Vec<u8>), ImageError> {
    const SMALL: usize = DIGIT_SIDE * DIGIT_SIDE;
    let named = || path.to_owned();
    let file = File::open(path).map_err(|source| ImageError::Read { path: named(), source })?;
    // With `flexible`, rows of a wrong length reach our own check, whose error states the expected format.
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(MultiGzDecoder::new(file));
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for (index, record) in reader.records().enumerate() {
        let row = index + 1;
        let record = record.map_err(|reason| ImageError::Row { path: named(), row, reason })?;
        if record.len() != SMALL + 1 {
            return Err(ImageError::RowWidth { path: named(), row, found: record.len() });
        }
        let value = |index: usize, largest: u8| {
            let text = &record[index];
            text.trim().parse().ok().filter(|value| *value <= largest).ok_or_else(|| ImageError::Value {
                path: named(),
                row,
                column: index + 1,
                value: text.to_owned(),
                largest,
            })
        };
        let small = (0..SMALL).map(|index| value(index, DIGIT_BRIGHTEST)).collect::<Result<Vec<_>, _>>()?;
        labels.push(value(SMALL, CLASSES as u8 - 1)?);
        let border = (SIDE - DIGIT_SCALE * DIGIT_SIDE) / 2;
        let inside = |place: usize| Some(place.checked_sub(border)? / DIGIT_SCALE).filter(|place| *place < DIGIT_SIDE);
        let pixel = |y: usize, x: usize| Some(small[inside(y)? * DIGIT_SIDE + inside(x)?]);
        let brightness = |pixel: u8| (u16::from(pixel) * 255 / u16::from(DIGIT_BRIGHTEST)) as u8;
        pixels.extend((0..PIXELS).map(|place| pixel(place / SIDE, place % SIDE).map_or(0, brightness)));
    }
    Ok((pixels, labels))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut encoder = GzEncoder::new(&mut file, Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap();
        file
    }

    #[test]
    fn an_idx_file_is_what_its_header_says() {
        let good = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6];
        assert_eq!(idx(file(&good).path(), &[3]).unwrap(), [1, 2, 3, 4, 5, 6]);
        let error = idx(file(&good[..17]).path(), &[3]).unwrap_err();
        assert!(matches!(error, ImageError::Length { expected: 6, found: 5, .. }), "{error}");
        for (bytes, sizes) in [(&good[..], &[4][..]), (&good[..], &[]), (&good[..6], &[3]), (&[], &[3])] {
            let error = idx(file(bytes).path(), sizes).unwrap_err();
            assert!(matches!(error, ImageError::Header { .. }), "{sizes:?}: {error}");
        }
        let error = idx(Path::new("no/such/file.gz"), &[]).unwrap_err();
        assert!(matches!(&error, ImageError::Read { .. }) && error.to_string().contains("no/such/file.gz"), "{error}");
    }

    /// A valid file of `rows` rows, in which `edit` may change fields.
    fn csv(rows: usize, edit: impl Fn(usize, &mut Vec<String>)) -> tempfile::NamedTempFile {
        let row = |row: usize| {
            let mut fields: Vec<String> = (0..64).map(|column| ((row + column) % 17).to_string()).collect();
            fields.push((row % 10).to_string());
            edit(row, &mut fields);
            fields.join(",") + "\n"
        };
        file((1..=rows).map(row).collect::<String>().as_bytes())
    }

    #[test]
    fn a_digit_is_made_larger_inside_a_border() {
        let (pixels, labels) = digits(csv(20, |_, _| {}).path()).unwrap();
        assert_eq!((pixels.len(), labels.len()), (20 * PIXELS, 20));
        let (image, at) = (&pixels[15 * PIXELS..16 * PIXELS], |y: usize, x: usize| y * SIDE + x);
        assert_eq!(labels[15], 6);
        assert!(image[..2 * SIDE].iter().all(|pixel| *pixel == 0));
        // Row 16 begins with the values 16, 0, 1.
        assert_eq!(
            [at(2, 1), at(2, 2), at(4, 4), at(2, 5), at(2, 8), at(4, 10)].map(|at| image[at]),
            [0, 255, 255, 0, 15, 15]
        );
    }

    #[test]
    fn bad_rows_of_digits_are_named() {
        let error = digits(csv(9, |row, fields| fields.truncate(if row == 7 { 64 } else { 65 })).path()).unwrap_err();
        assert!(matches!(error, ImageError::RowWidth { row: 7, found: 64, .. }), "{error}");
        for (column, bad) in [(63, "17"), (0, "-1"), (5, "3.5"), (5, ""), (64, "10")] {
            let file = csv(9, |row, fields| {
                if row == 3 {
                    fields[column] = bad.into();
                }
            });
            let error = digits(file.path()).unwrap_err();
            let ImageError::Value { row: 3, column: found, value, .. } = &error else { panic!("{bad}: {error}") };
            assert_eq!((*found, value.as_str()), (column + 1, bad));
        }
        let Err(error) = Images::digits(csv(517, |_, _| {}).path()) else { panic!("517 are too few") };
        assert!(matches!(error, ImageError::TooFew { found: 517, .. }), "{error}");
    }

    #[test]
    fn every_image_is_for_one_thing() {
        let images = Images::digits(csv(1797, |_, _| {}).path()).unwrap();
        let parts = [Part::Train, Part::Validation, Part::Test].map(|part| images.rows(part));
        assert_eq!(parts.map(<[u32]>::len), [1280, 200, 317]);
        let mut rows = parts.concat();
        assert!(!rows.is_sorted());
        rows.sort_unstable();
        assert_eq!(rows, (0..1797).collect::<Vec<u32>>());
    }
}
