//! What a run looks like from outside: its scores step by step, and what they are judged by.
//!
//! Numbers only; never draws or prints.

/// Loss and hits on one set of images.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scores {
    /// Mean cross-entropy.
    pub(crate) loss: f64,
    pub(crate) correct: usize,
    pub(crate) total: usize,
}

impl Scores {
    pub(crate) fn accuracy(&self) -> f64 {
        self.correct as f64 / self.total as f64
    }

    /// Of an accuracy that was measured on `total` images drawn by chance: the binomial √(p (1 - p) / n).
    pub(crate) fn standard_error(&self) -> f64 {
        (self.accuracy() * (1.0 - self.accuracy()) / self.total as f64).sqrt()
    }

    /// In whole numbers, so that exactly `percent` per cent counts as reached.
    fn reaches(&self, percent: usize) -> bool {
        self.correct * 100 >= self.total * percent
    }
}

/// After one step; step 0 is the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) step: usize,
    /// Mean loss over the batch of this step, before its update. None at the start.
    pub(crate) batch_loss: Option<f64>,
    pub(crate) validation: Scores,
    pub(crate) test: Scores,
    /// Where Adasum stood between a mean (1) and a sum (the number of ranks).
    pub(crate) adasum_scale: Option<f64>,
}

impl Point {
    pub(crate) fn start(validation: Scores, test: Scores) -> Self {
        Self { step: 0, batch_loss: None, validation, test, adasum_scale: None }
    }
}

/// The first step after which at least `percent` per cent of the test images are right. Later steps may fall below it
/// again; None if no step gets there.
pub(crate) fn steps_to(curve: &[Point], percent: usize) -> Option<usize> {
    curve.iter().find(|point| point.test.reaches(percent)).map(|point| point.step)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(correct: &[usize]) -> Vec<Point> {
        let scores = |correct| Scores { loss: 1.0, correct, total: 200 };
        let points = correct.iter().enumerate();
        points.map(|(step, &correct)| Point { step, ..Point::start(scores(0), scores(correct)) }).collect()
    }

    #[test]
    fn the_first_step_that_reaches_the_mark_counts() {
        assert_eq!(steps_to(&curve(&[20, 100, 179, 185, 190]), 90), Some(3));
    }

    #[test]
    fn exactly_the_mark_is_reached_and_one_image_less_is_not() {
        assert_eq!(steps_to(&curve(&[20, 179, 180]), 90), Some(2));
        assert_eq!(steps_to(&curve(&[20, 179, 179]), 90), None);
    }

    #[test]
    fn falling_back_does_not_undo_it_and_a_good_start_is_step_0() {
        assert_eq!(steps_to(&curve(&[20, 181, 20]), 90), Some(1));
        assert_eq!(steps_to(&curve(&[181, 20]), 90), Some(0));
        assert_eq!(steps_to(&[], 90), None);
    }

    #[test]
    fn a_mark_between_two_images_needs_the_upper_one() {
        let scores = |correct| Scores { loss: 0.0, correct, total: 317 };
        // 90 % of 317 is 285.3.
        assert!(!scores(285).reaches(90));
        assert!(scores(286).reaches(90));
    }

    #[test]
    fn the_standard_error_is_the_binomial_one() {
        let scores = Scores { loss: 0.0, correct: 90, total: 100 };
        assert!((scores.standard_error() - 0.03).abs() < 1e-12);
    }
}
