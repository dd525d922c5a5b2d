//! The interface of timing: a [`Subject`] with up to three sides, and rounds in which the sides alternate.

use std::time::Instant;

use super::PerfError;
use super::arguments::Counts;
use super::watch;

/// A way to run the operation of a row, or its baseline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    OutOfPlace,
    InPlace,
    Baseline,
}

impl Side {
    pub(crate) const ALL: [Side; 3] = [Side::OutOfPlace, Side::InPlace, Side::Baseline];
}

/// One rank's part of one row.
pub(crate) trait Subject {
    /// Whether it has this side.
    fn has(&self, side: Side) -> bool;

    /// Runs a side once, on the buffers of that round.
    fn call(&mut self, side: Side, round: usize) -> Result<(), PerfError>;

    /// Fills the operands again, runs a side once, and counts wrong elements of the result. It is never called for the baseline.
    fn wrong(&mut self, side: Side) -> Result<u64, PerfError>;
}

/// Seconds of each counted iteration, by side; empty for missing sides.
pub(crate) type Seconds = [Vec<f64>; 3];

/// The sides to time.
pub(crate) fn sides(subject: &dyn Subject, counts: Counts) -> Vec<Side> {
    let wanted = |side: &Side| subject.has(*side) && (counts.baseline || *side != Side::Baseline);
    Side::ALL.into_iter().filter(wanted).collect()
}

/// Times a subject by the host's clock. `meet` synchronises the ranks before each call.
pub(crate) fn time(
    subject: &mut dyn Subject,
    counts: Counts,
    mut meet: impl FnMut() -> Result<(), PerfError>,
) -> Result<Seconds, PerfError> {
    let sides = sides(subject, counts);
    let mut seconds = Seconds::default();
    for round in 0..counts.warm_ups + counts.iterations {
        for &side in &sides {
            watch::side(side);
            meet()?;
            let start = Instant::now();
            subject.call(side, round)?;
            let elapsed = start.elapsed().as_secs_f64();
            if round >= counts.warm_ups {
                seconds[side as usize].push(elapsed);
            }
        }
    }
    Ok(seconds)
}

/// The number of wrong elements by side; `None` if results are not checked.
pub(crate) type Wrong = [Option<u64>; 3];

/// Checks the results of all sides except the baseline.
pub(crate) fn check(subject: &mut dyn Subject, counts: Counts) -> Result<Wrong, PerfError> {
    let mut wrong = Wrong::default();
    if counts.check {
        for side in [Side::OutOfPlace, Side::InPlace].into_iter().filter(|&side| subject.has(side)) {
            wrong[side as usize] = Some(0);
        }
        for side in [Side::OutOfPlace, Side::InPlace] {
            if let Some(count) = &mut wrong[side as usize] {
                *count = subject.wrong(side)?;
            }
        }
    }
    Ok(wrong)
}

/// One rank's results for one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Found {
    pub(crate) seconds: Seconds,
    pub(crate) wrong: Wrong,
}

impl Found {
    /// The results as plain numbers that any transport can send; their count is equal on all ranks.
    pub(crate) fn to_numbers(&self) -> Vec<f64> {
        let wrong = self.wrong.map(|count| count.map_or(-1.0, |count| count as f64));
        self.seconds.iter().flatten().copied().chain(wrong).collect()
    }

    /// The slowest rank's time of each iteration, and the total number of wrong elements.
    pub(crate) fn merge<'a>(mut self, ranks: impl Iterator<Item = &'a [f64]>) -> Self {
        for numbers in ranks {
            let (times, wrong) = numbers.split_at(numbers.len() - self.wrong.len());
            self.seconds.iter_mut().flatten().zip(times).for_each(|(most, &time)| *most = most.max(time));
            for (total, &count) in self.wrong.iter_mut().zip(wrong) {
                *total = (*total).map(|total| total + count.max(0.0) as u64);
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_takes_the_slowest_rank_and_adds_wrong_elements() {
        let found = |times: [f64; 2], wrong| Found {
            seconds: [times.to_vec(), vec![], vec![1.0, 1.0]],
            wrong: [wrong, None, None],
        };
        let others = [found([1.0, 5.0], Some(2)).to_numbers(), found([3.0, 1.0], Some(0)).to_numbers()];
        let merged = found([2.0, 2.0], Some(1)).merge(others.iter().map(Vec::as_slice));
        assert_eq!(merged, found([3.0, 5.0], Some(3)));
    }
}
