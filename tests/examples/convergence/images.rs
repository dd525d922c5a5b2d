//! Images for classification: reads Fashion-MNIST, or the digits if Fashion-MNIST is not available, checks every value, and splits the
//! images. Never downloads anything, and never repairs a value: an error names the file and the position.
//!
//! **Fashion-MNIST** (H. Xiao, K. Rasul, R. Vollgraf, Zalando Research, 2017; licence MIT): 60,000 + 10,000 images of 28 × 28 pixels of
//! clothes of ten kinds, as four gzipped IDX files. Debian's package `dataset-fashion-mnist` contains them.
//!
//! **The digits**: "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, licence
//! CC BY 4.0; the 1,797 images of 8 × 8 pixels that scikit-learn (BSD-3-Clause) ships in its wheel. They are enlarged to fit the network.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use flate2::read::MultiGzDecoder;

use crate::lanes::Row;
use crate::random::SplitMix64;

/// Pixels per edge of an image.
pub(crate) const SIDE: usize = 28;
/// The number of classes.
pub(crate) const CLASSES: usize = 10;
const PIXELS: usize = SIDE * SIDE;

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
    parts: [Vec<u32>; 3],
    /// The network's input for each pixel value: normalised to mean 0 and variance 1 over the training images.
    values: [f32; 256],
}

impl Images {
    /// Reads the four files of a folder.
    pub(crate) fn fashion_mnist(folder: &Path) -> Result<Self> {
        const HELD_OUT: usize = 5_000;
        let read = |name: &str, sizes: &[usize]| idx(&folder.join(format!("{name}-ubyte.gz")), sizes);
        let (mut labels, mut pixels) = (read("train-labels-idx1", &[])?, read("train-images-idx3", &[SIDE, SIDE])?);
        let count = labels.len();
        labels.extend(read("t10k-labels-idx1", &[])?);
        pixels.extend(read("t10k-images-idx3", &[SIDE, SIDE])?);
        let folder = folder.display();
        ensure!(count > HELD_OUT, "{folder}: {count} images to train on are too few; {HELD_OUT} choose learning rates");
        ensure!(
            pixels.len() == labels.len() * PIXELS,
            "{folder}: {} images and {} labels",
            pixels.len() / PIXELS,
            labels.len()
        );
        let bad = labels.iter().position(|&label| usize::from(label) >= CLASSES);
        if let Some(index) = bad {
            bail!("{folder}: label {index} is {}, and there are {CLASSES} classes", labels[index]);
        }
        let mut train = shuffled(count);
        let validation = train.split_off(count - HELD_OUT);
        let test = (count as u32..labels.len() as u32).collect();
        Ok(Self::new(Source::FashionMnist, pixels, labels, [train, validation, test]))
    }

    /// Reads the gzipped CSV of scikit-learn.
    pub(crate) fn digits(path: &Path) -> Result<Self> {
        const HELD_OUT: [usize; 2] = [200, 317];
        let (pixels, labels) = digits(&unzipped(path)?).with_context(|| path.display().to_string())?;
        let needed = HELD_OUT[0] + HELD_OUT[1];
        ensure!(
            labels.len() > needed,
            "{}: {} images are too few; {needed} are held out",
            path.display(),
            labels.len()
        );
        let mut train = shuffled(labels.len());
        let test = train.split_off(train.len() - HELD_OUT[1]);
        let validation = train.split_off(train.len() - HELD_OUT[0]);
        Ok(Self::new(Source::Digits, pixels, labels, [train, validation, test]))
    }

    fn new(source: Source, pixels: Vec<u8>, labels: Vec<u8>, parts: [Vec<u32>; 3]) -> Self {
        let of_training = || parts[0].iter().flat_map(|&row| image(&pixels, row)).map(|&pixel| f64::from(pixel));
        let count = (parts[0].len() * PIXELS) as f64;
        let mean = of_training().sum::<f64>() / count;
        let square = of_training().map(|pixel| pixel * pixel).sum::<f64>() / count;
        let deviation = (square - mean * mean).sqrt();
        let values = std::array::from_fn(|pixel| ((pixel as f64 - mean) / deviation) as f32);
        Self { source, pixels, labels, parts, values }
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
        &self.parts[part as usize]
    }

    /// Writes the pixels of up to a batch of images, and returns their labels.
    pub(crate) fn load(&self, rows: &[u32], into: &mut [Row]) -> Vec<u8> {
        for (index, &row) in rows.iter().enumerate() {
            for (into, &pixel) in into.iter_mut().zip(image(&self.pixels, row)) {
                into[index] = self.values[usize::from(pixel)];
            }
        }
        rows.iter().map(|&row| self.labels[row as usize]).collect()
    }
}

fn image(pixels: &[u8], row: u32) -> &[u8] {
    &pixels[row as usize * PIXELS..][..PIXELS]
}

/// All rows in an order that depends on their number alone, so that an image belongs to the same part in all runs.
fn shuffled(count: usize) -> Vec<u32> {
    let mut rows: Vec<u32> = (0..count as u32).collect();
    SplitMix64::new(0, 0).shuffle(&mut rows);
    rows
}

fn unzipped(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| MultiGzDecoder::new(file).read_to_end(&mut bytes));
    read.with_context(|| format!("{}: cannot be read", path.display()))?;
    Ok(bytes)
}

/// The bytes of an IDX file with items of these sizes. Its header consists of two zeros, the type (bytes), the number of sizes, and the sizes.
fn idx(path: &Path, sizes: &[usize]) -> Result<Vec<u8>> {
    let mut bytes = unzipped(path)?;
    let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four bytes")) as usize;
    let words: Vec<usize> = bytes.chunks_exact(4).take(2 + sizes.len()).map(word).collect();
    let data = 4 * (2 + sizes.len());
    let is_header = bytes.len() >= data && words[0] == 0x801 + sizes.len() && words[2..] == *sizes;
    ensure!(is_header, "{}: is no IDX file of bytes with items of {sizes:?}", path.display());
    let expected = words[1] * sizes.iter().product::<usize>();
    let found = bytes.len() - data;
    ensure!(found == expected, "{}: has {found} bytes after the header, which says {expected}", path.display());
    Ok(bytes.split_off(data))
}

/// Pixels and labels of the digits, enlarged threefold inside a border. A line has 64 pixels from 0 to 16, and a label.
fn digits(text: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    const SMALL_SIDE: usize = 8;
    const SCALE: usize = 3;
    const BORDER: usize = (SIDE - SCALE * SMALL_SIDE) / 2;
    const COLUMNS: usize = SMALL_SIDE * SMALL_SIDE + 1;
    const BRIGHTEST: u16 = 16;
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for (row, line) in (1..).zip(std::str::from_utf8(text)?.lines()) {
        let fields: Vec<&str> = line.split(',').collect();
        ensure!(fields.len() == COLUMNS, "row {row} has {} columns, not {COLUMNS}", fields.len());
        let mut values = [0u16; COLUMNS];
        for (index, field) in fields.into_iter().enumerate() {
            let largest = if index + 1 < COLUMNS { BRIGHTEST } else { CLASSES as u16 - 1 };
            let value = field.trim().parse().ok().filter(|value| *value <= largest);
            values[index] = value.with_context(|| {
                format!("row {row}, column {}: {field:?} is not a whole number from 0 to {largest}", index + 1)
            })?;
        }
        let inside = |place: usize| Some(place.checked_sub(BORDER)? / SCALE).filter(|place| *place < SMALL_SIDE);
        let pixel = |y: usize, x: usize| Some(values[inside(y)? * SMALL_SIDE + inside(x)?]);
        let bright = |pixel: u16| (pixel * 255 / BRIGHTEST) as u8;
        pixels.extend((0..PIXELS).map(|place| pixel(place / SIDE, place % SIDE).map_or(0, bright)));
        labels.push(values[COLUMNS - 1] as u8);
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
    fn idx_takes_a_file_that_fits_its_header() {
        let good = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6];
        assert_eq!(idx(file(&good).path(), &[3]).unwrap(), [1, 2, 3, 4, 5, 6]);
        for (bytes, sizes, expected) in [
            (&good[..17], &[3][..], "has 5 bytes after the header, which says 6"),
            (&good[..], &[4], "is no IDX file of bytes with items of [4]"),
            (&good[..], &[], "is no IDX file"),
            (&good[..6], &[3], "is no IDX file"),
            (&[], &[3], "is no IDX file"),
        ] {
            let error = idx(file(bytes).path(), sizes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let error = idx(Path::new("no/such/file.gz"), &[]).unwrap_err().to_string();
        assert_eq!(error, "no/such/file.gz: cannot be read");
    }

    /// A valid text of `rows` rows, in which `edit` may change fields.
    fn csv(rows: usize, edit: impl Fn(usize, &mut Vec<String>)) -> Vec<u8> {
        let row = |row: usize| {
            let mut fields: Vec<String> = (0..64).map(|column| ((row + column) % 17).to_string()).collect();
            fields.push((row % 10).to_string());
            edit(row, &mut fields);
            fields.join(",") + "\n"
        };
        (1..=rows).map(row).collect::<String>().into_bytes()
    }

    #[test]
    fn digits_are_made_larger_inside_a_border() {
        let (pixels, labels) = digits(&csv(20, |_, _| {})).unwrap();
        assert_eq!((pixels.len(), labels.len()), (20 * PIXELS, 20));
        let (image, at) = (&pixels[15 * PIXELS..16 * PIXELS], |y: usize, x: usize| y * SIDE + x);
        assert_eq!(labels[15], 6);
        assert!(image[..2 * SIDE].iter().all(|pixel| *pixel == 0));
        // Row 16 begins with the values 16, 0, 1.
        let places = [at(2, 1), at(2, 2), at(4, 4), at(2, 5), at(2, 8), at(4, 10)];
        assert_eq!(places.map(|at| image[at]), [0, 255, 255, 0, 15, 15]);
    }

    #[test]
    fn digits_name_bad_rows() {
        let error = digits(&csv(9, |row, fields| fields.truncate(if row == 7 { 64 } else { 65 }))).unwrap_err();
        assert_eq!(error.to_string(), "row 7 has 64 columns, not 65");
        for (column, bad) in [(63, "17"), (0, "-1"), (5, "3.5"), (5, ""), (64, "10")] {
            let text = csv(9, |row, fields| {
                if row == 3 {
                    fields[column] = bad.into()
                }
            });
            let error = digits(&text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("row 3, column {}: {bad:?} is not", column + 1)), "{error}");
        }
        let path = file(&csv(517, |_, _| {}));
        let error = Images::digits(path.path()).map(|_| ()).unwrap_err().to_string();
        assert!(error.ends_with("517 images are too few; 517 are held out"), "{error}");
    }

    #[test]
    fn images_are_each_of_one_part() {
        let images = Images::digits(file(&csv(1797, |_, _| {})).path()).unwrap();
        let parts = [Part::Train, Part::Validation, Part::Test].map(|part| images.rows(part));
        assert_eq!(parts.map(<[u32]>::len), [1280, 200, 317]);
        let mut all = parts.concat();
        all.sort_unstable();
        assert_eq!(all, (0..1797).collect::<Vec<u32>>());
    }
}
