//! Means with 95 % confidence intervals, by Student's t distribution.

/// The smallest number of values for a comparison.
pub(crate) const LEAST: usize = 3;

/// A mean, with half the width of its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Interval {
    pub(crate) mean: f64,
    pub(crate) half: f64,
}

impl Interval {
    /// `None` for fewer than [`LEAST`] values.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        if values.len() < LEAST {
            return None;
        }
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0);
        Some(Self { mean, half: quantile(values.len() - 1) * (variance / count).sqrt() })
    }

    /// Whether the interval contains 0.
    pub(crate) fn has_zero(&self) -> bool {
        self.mean.abs() <= self.half
    }
}

/// The 97.5 % quantile of Student's t distribution.
fn quantile(freedom: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
    ];
    // Beyond the table, the last entry is too large by at most 4 %.
    TABLE[freedom.clamp(1, TABLE.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_by_hand() {
        let interval = Interval::of(&[88.0, 89.0, 90.0]).unwrap();
        // The standard deviation is 1, and of the mean 1 / √3; the quantile is 4.303.
        assert_eq!(interval.mean, 89.0);
        assert!((interval.half - 4.303 / 3f64.sqrt()).abs() < 1e-12, "{interval:?}");
        assert!(!interval.has_zero());
        assert!(Interval::of(&[-0.1, 0.1, 0.2]).unwrap().has_zero());
        assert_eq!(Interval::of(&[5.0; 5]), Some(Interval { mean: 5.0, half: 0.0 }));
    }

    #[test]
    fn two_values_are_no_figure() {
        assert_eq!(Interval::of(&[88.0, 89.0]), None);
        assert_eq!(Interval::of(&[]), None);
    }
}
