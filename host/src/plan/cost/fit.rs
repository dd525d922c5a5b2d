//! [`fit`]: parameters from measured points, by least squares.

use super::work::{PARTS, Parameters, Work};

/// Something that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// What was done.
    pub work: Work,
    /// How long it took.
    pub seconds: f64,
}

/// What the points say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// The parameters found.
    pub parameters: Parameters,
    /// The root of the mean squared relative error over the points.
    pub error: f64,
    /// Which parameters the points say something about; the others are as they were.
    pub is_fitted: [bool; PARTS],
}

/// How much an unknown parameter is held where it was: as much as a point that is a hundred times less exact than the others.
const HOLD: f64 = 1e-4;
/// No parameter falls below this part of where it was: nothing is free.
const FLOOR: f64 = 1e-3;
const ROUNDS: usize = 20_000;

/// The parameters that minimise the squared relative errors of the points, none of them negative, starting from `known`. A part that
/// no point has keeps its parameter; points without a positive time are left out.
pub fn fit(points: &[Point], known: Parameters) -> Fit {
    let points: Vec<&Point> = points.iter().filter(|point| point.seconds > 0.0 && point.seconds.is_finite()).collect();
    // Parameters in multiples of the known ones, times in multiples of the measured ones: all of them are about 1.
    let rows: Vec<[f64; PARTS]> =
        points.iter().map(|point| known.times(&point.work).map(|part| part / point.seconds)).collect();
    let mut matrix = [[0.0; PARTS]; PARTS];
    let mut right = [HOLD; PARTS];
    for (i, line) in matrix.iter_mut().enumerate() {
        line[i] = HOLD;
        for row in &rows {
            right[i] += row[i];
            line.iter_mut().zip(row).for_each(|(cell, other)| *cell += row[i] * other);
        }
    }
    // Coordinate descent, which keeps to the floor: the matrix is symmetric and positive definite.
    let mut scales = [1.0; PARTS];
    for _ in 0..ROUNDS {
        for i in 0..PARTS {
            let others: f64 = (0..PARTS).filter(|&j| j != i).map(|j| matrix[i][j] * scales[j]).sum();
            scales[i] = ((right[i] - others) / matrix[i][i]).max(FLOOR);
        }
    }
    let mut parameters = known;
    parameters.seconds.iter_mut().zip(scales).for_each(|(seconds, scale)| *seconds *= scale);
    let squares = points.iter().map(|point| (parameters.time(&point.work) / point.seconds - 1.0).powi(2));
    let error = (squares.sum::<f64>() / points.len().max(1) as f64).sqrt();
    let mut is_fitted = [false; PARTS];
    for point in points {
        is_fitted.iter_mut().zip(point.work.parts()).for_each(|(fitted, part)| *fitted |= part > 0.0);
    }
    Fit { parameters, error, is_fitted }
}
