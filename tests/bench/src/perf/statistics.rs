//! Statistics of the times of many iterations: the median and the 99th percentile.

/// Times of one side of a row, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Times {
    pub(crate) median: f64,
    pub(crate) p99: f64,
}

impl Times {
    /// `None` if there are no times.
    pub(crate) fn of(seconds: &[f64]) -> Option<Self> {
        let mut sorted = seconds.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Self { median: rank(&sorted, 0.5)?, p99: rank(&sorted, 0.99)? })
    }
}

/// The quantile: the smallest value that is at least as large as the share `part` of all values.
fn rank(sorted: &[f64], part: f64) -> Option<f64> {
    let place = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(place.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_ranks_are_values_that_were_measured() {
        let all: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(Times::of(&all), Some(Times { median: 100.0, p99: 198.0 }));
        assert_eq!(Times::of(&[3.0, 1.0, 2.0]), Some(Times { median: 2.0, p99: 3.0 }));
        assert_eq!(Times::of(&[7.0]), Some(Times { median: 7.0, p99: 7.0 }));
        assert_eq!(Times::of(&[]), None);
    }
}
