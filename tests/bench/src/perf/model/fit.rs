//! [`fit`]: parameters from measured points, by least squares; [`leave_one_out`]: the prediction error for points that were not used in the
//! fit.

use gradsync::plan::cost::{MEMORY, PARTS, PRODUCTS, Parameters, Work};

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// The amount of work.
    pub(super) work: Work,
    /// The measured time.
    pub(super) seconds: f64,
}

impl Point {
    fn is_measured(&self) -> bool {
        self.seconds > 0.0 && self.seconds.is_finite()
    }

    /// The relative error of the parameters' prediction: above zero if the predicted time is larger than the measured one.
    pub(super) fn error(&self, parameters: &Parameters) -> f64 {
        parameters.time(&self.work) / self.seconds - 1.0
    }
}

/// The result of a fit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    /// The parameters found.
    pub(super) parameters: Parameters,
    /// The root of the mean squared relative error over the points.
    pub(super) error: f64,
    /// Which parameters the points determine. The others have too small a share in every point, or are hidden in all of them, and keep
    /// their known values.
    pub(super) is_fitted: [bool; PARTS],
}

/// The initial parameters for ranks on host memory: orders of magnitude for threads that share one machine.
pub(super) const PROCESSORS: Parameters =
    Parameters { seconds: [50e-6, 5e-6, 1e-6, 1e-6, 1.0 / 5e9, 1.0 / 5e9, 1.0 / 20e9, 1.0 / 4e9, 10e-9] };

/// The regularisation weight that keeps a parameter near its known value: equal to the weight of a point in which it has a thirtieth of the
/// time.
const HOLD: f64 = 1e-3;
/// The regularisation weight of a parameter that must keep its known value.
const FIXED: f64 = 1e9;
/// The lower bound of a parameter, relative to its known value: no cost is zero.
const FLOOR: f64 = 1e-3;
const ROUNDS: usize = 20_000;
/// The descent has converged if no scale changes by more than this in a round.
const STILL: f64 = 1e-12;
/// The largest number of times that the hidden parts are determined again.
const LOOKS: usize = 30;

/// The parameters that minimise the squared relative errors of the points, starting from `known`. All of them are positive, and a
/// prediction of twice the time counts as much as one of half the time. A parameter whose part occurs in no point, or is hidden in all of
/// them, keeps its value; points without a positive time are ignored.
pub(super) fn fit(points: &[Point], known: Parameters) -> Fit {
    let points: Vec<&Point> = points.iter().filter(|point| point.is_measured()).collect();
    // Whether memory or products determine a kernel's time depends on the parameters. The fit starts from the known parameters, from memory
    // everywhere, and from products everywhere.
    let starts = [None, Some(PRODUCTS), Some(MEMORY)].map(|hidden| match hidden {
        None => counts(&points, &known),
        Some(hidden) => points.iter().map(|point| without(point.work.parts(), hidden)).collect(),
    });
    let fits = starts.into_iter().map(|counted| descend(&points, counted, known, [HOLD; PARTS]));
    let best = fits.reduce(|best, other| if other.error < best.error { other } else { best });
    let best = best.expect("there are three starts");
    // Parameters that the points hardly determine are fixed, so that they do not absorb the errors of others.
    let holds = best.is_fitted.map(|is_fitted| if is_fitted { HOLD } else { FIXED });
    let fixed = descend(&points, counts(&points, &best.parameters), known, holds);
    Fit { is_fitted: best.is_fitted, ..fixed }
}

/// Alternates between fitting and determining the hidden parts. `counted` holds the initially visible parts.
fn descend(points: &[&Point], mut counted: Vec<[f64; PARTS]>, known: Parameters, holds: [f64; PARTS]) -> Fit {
    let mut scales: Vec<f64> = points.iter().map(|point| point.seconds).collect();
    let mut parameters = known;
    for _ in 0..LOOKS {
        let before = parameters;
        parameters = solve(&counted, points, &scales, &known, holds);
        // The scale is the geometric mean of the measured and the predicted time; otherwise parameters that are too small would have
        // smaller errors than parameters that are too large.
        let middle = |point: &&Point| (point.seconds * parameters.time(&point.work).max(FLOOR * point.seconds)).sqrt();
        scales = points.iter().map(middle).collect();
        let again = counts(points, &parameters);
        let moved = parameters.seconds.iter().zip(before.seconds).map(|(now, then)| (now / then - 1.0).abs());
        if again == counted && moved.fold(0.0, f64::max) < STILL.sqrt() {
            break;
        }
        counted = again;
    }
    let squares = points.iter().map(|point| point.error(&parameters).powi(2));
    let error = (squares.sum::<f64>() / points.len().max(1) as f64).sqrt();
    // A parameter is determined if the points weigh more than its regularisation.
    let says = |part: usize| {
        let shares =
            counted.iter().zip(points).map(|(parts, point)| parts[part] * parameters.seconds[part] / point.seconds);
        shares.map(|share| share * share).sum::<f64>() > HOLD
    };
    Fit { parameters, error, is_fitted: std::array::from_fn(says) }
}

/// The parts without the hidden one, unless the part that hides it is zero.
fn without(parts: [f64; PARTS], hidden: usize) -> [f64; PARTS] {
    let other = if hidden == MEMORY { PRODUCTS } else { MEMORY };
    std::array::from_fn(|part| if part == hidden && parts[other] > 0.0 { 0.0 } else { parts[part] })
}

/// The relative error of each point, as [`Point::error`], for parameters fitted to all other points; `None` for ignored points.
pub(super) fn leave_one_out(points: &[Point], known: Parameters) -> Vec<Option<f64>> {
    let others = |index: usize| -> Vec<Point> {
        points.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, point)| *point).collect()
    };
    let error = |(index, point): (usize, &Point)| {
        point.is_measured().then(|| point.error(&fit(&others(index), known).parameters))
    };
    points.iter().enumerate().map(error).collect()
}

/// The visible parts of each point.
fn counts(points: &[&Point], parameters: &Parameters) -> Vec<[f64; PARTS]> {
    let of_point = |point: &&Point| {
        let hidden = if parameters.times(&point.work)[PRODUCTS] > 0.0 { MEMORY } else { PRODUCTS };
        without(point.work.parts(), hidden)
    };
    points.iter().map(of_point).collect()
}

/// The best parameters for points with these parts, with errors relative to `scales`; `holds` are the regularisation weights towards
/// `known`.
fn solve(
    counted: &[[f64; PARTS]],
    points: &[&Point],
    scales: &[f64],
    known: &Parameters,
    holds: [f64; PARTS],
) -> Parameters {
    // Parameters are multiples of the known ones, and times multiples of the scales, so that all numbers are about 1.
    let rows = counted.iter().zip(points).zip(scales).map(|((parts, point), scale)| -> ([f64; PARTS], f64) {
        (std::array::from_fn(|part| parts[part] * known.seconds[part] / scale), point.seconds / scale)
    });
    let mut matrix = [[0.0; PARTS]; PARTS];
    let mut right = holds;
    (0..PARTS).for_each(|i| matrix[i][i] = holds[i]);
    for (row, time) in rows {
        for (i, line) in matrix.iter_mut().enumerate() {
            right[i] += row[i] * time;
            line.iter_mut().zip(row).for_each(|(cell, other)| *cell += row[i] * other);
        }
    }
    // Coordinate descent with the lower bound of the parameters: the matrix is symmetric and positive definite.
    let mut scales = [1.0f64; PARTS];
    for _ in 0..ROUNDS {
        let mut moved = 0.0f64;
        for i in 0..PARTS {
            let others: f64 = (0..PARTS).filter(|&j| j != i).map(|j| matrix[i][j] * scales[j]).sum();
            let scale = ((right[i] - others) / matrix[i][i]).max(FLOOR);
            moved = moved.max((scale - scales[i]).abs());
            scales[i] = scale;
        }
        if moved < STILL {
            break;
        }
    }
    let mut parameters = *known;
    parameters.seconds.iter_mut().zip(scales).for_each(|(seconds, scale)| *seconds *= scale);
    parameters
}
