//! Sizes in bytes in nccl-tests' notation (`8`, `1K`, `64M`, `1G`), and the series of sizes from `-b` to `-e`.

use std::str::FromStr;

/// A number of bytes on the command line; K, M and G are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bytes(pub(crate) usize);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("`{text}` is no size: expected a number of bytes such as 8, 1K, 64M or 1G");
        let upper = text.trim().to_ascii_uppercase();
        let upper = upper.strip_suffix("IB").or_else(|| upper.strip_suffix('B')).unwrap_or(&upper);
        let (digits, shift) = match upper.char_indices().last() {
            Some((at, 'K')) => (&upper[..at], 10),
            Some((at, 'M')) => (&upper[..at], 20),
            Some((at, 'G')) => (&upper[..at], 30),
            Some((at, 'T')) => (&upper[..at], 40),
            _ => (upper, 0),
        };
        let number: f64 = digits.parse().map_err(|_| refused())?;
        let bytes = number * (1u64 << shift) as f64;
        // The number must be exact in f64, and within the address space.
        if !(bytes >= 0.0 && bytes < 2f64.powi(53) && bytes.fract() == 0.0) {
            return Err(refused());
        }
        usize::try_from(bytes as u64).map(Bytes).map_err(|_| refused())
    }
}

/// The increment between sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Stride {
    /// Each size is this many times the previous one.
    Factor(f64),
    /// Each size is this many bytes larger than the previous one.
    Step(usize),
}

/// The sizes from `begin` to `end`; `end` is included if the stride meets it.
pub(crate) fn series(begin: usize, end: usize, stride: Stride) -> Vec<usize> {
    let mut sizes = vec![begin];
    let mut last = begin;
    loop {
        let next = match stride {
            Stride::Factor(factor) => (last as f64 * factor) as usize,
            Stride::Step(step) => last.saturating_add(step),
        };
        if next <= last || next > end {
            return sizes;
        }
        sizes.push(next);
        last = next;
    }
}

/// A readable number of bytes: `64 MiB`, or the plain number if it is not a multiple of a unit.
pub(crate) fn shown(bytes: usize) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes >= 1 << shift && bytes % (1 << shift) == 0 {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    format!("{bytes} B")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_as_nccl_tests_reads_them() {
        let read = |text: &str| text.parse::<Bytes>().map(|bytes| bytes.0);
        assert_eq!(read("8"), Ok(8));
        assert_eq!(read("1K"), Ok(1 << 10));
        assert_eq!(read("64m"), Ok(64 << 20));
        assert_eq!(read("1GB"), Ok(1 << 30));
        assert_eq!(read("1.5GiB"), Ok(3 << 29));
        for bad in ["", "G", "-1", "1X", "nan", "inf", "1e30", "0.5", "1 M x"] {
            assert!(read(bad).is_err_and(|error| error.contains(bad)), "{bad}");
        }
    }

    #[test]
    fn series_end_where_they_should() {
        assert_eq!(series(8, 128, Stride::Factor(2.0)), [8, 16, 32, 64, 128]);
        assert_eq!(series(8, 100, Stride::Factor(4.0)), [8, 32]);
        assert_eq!(series(10, 40, Stride::Step(10)), [10, 20, 30, 40]);
        assert_eq!(series(64, 64, Stride::Factor(2.0)), [64]);
        // The series ends if the factor yields no larger size after rounding down.
        assert_eq!(series(1, 100, Stride::Factor(1.2)), [1]);
        assert_eq!(series(usize::MAX - 1, usize::MAX, Stride::Step(usize::MAX)), [usize::MAX - 1, usize::MAX]);
    }

    #[test]
    fn shown_is_round_or_exact() {
        assert_eq!([8, 1024, 64 << 20, (1 << 20) + 4].map(shown), ["8 B", "1 KiB", "64 MiB", "1048580 B"]);
    }
}
