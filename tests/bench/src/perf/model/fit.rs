//! [`fit`]: parameters from measured points, by least squares; [`leave_one_out`]: how well they tell what they have not seen.

use gradsync::plan::cost::{MEMORY, PARTS, PRODUCTS, Parameters, Work};

/// Something that was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    /// What was done.
    pub(super) work: Work,
    /// How long it took.
    pub(super) seconds: f64,
}

impl Point {
    fn is_measured(&self) -> bool {
        self.seconds > 0.0 && self.seconds.is_finite()
    }

    /// How far parameters are off, as a part of what was measured: above zero where they say more.
    pub(super) fn error(&self, parameters: &Parameters) -> f64 {
        parameters.time(&self.work) / self.seconds - 1.0
    }
}

/// What the points say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    /// The parameters found.
    pub(super) parameters: Parameters,
    /// The root of the mean squared relative error over the points.
    pub(super) error: f64,
    /// Which parameters the points say something about. The others have too little part in any of them, or are hidden in all, and are as
    /// they were.
    pub(super) is_fitted: [bool; PARTS],
}

/// Where a fit to ranks on host memory starts: orders of magnitude of threads that share one machine.
pub(super) const PROCESSORS: Parameters =
    Parameters { seconds: [50e-6, 5e-6, 1e-6, 1e-6, 1.0 / 5e9, 1.0 / 5e9, 1.0 / 20e9, 1.0 / 4e9, 10e-9] };

/// How much a parameter is held where it was: as much as by a point in which it has a thirtieth of the time.
const HOLD: f64 = 1e-3;
/// How much one is held that stays where it was.
const FIXED: f64 = 1e9;
/// No parameter falls below this part of where it was: nothing is free.
const FLOOR: f64 = 1e-3;
const ROUNDS: usize = 20_000;
/// Scales that move less than this in a round are found.
const STILL: f64 = 1e-12;
/// How often what hides behind what is looked at anew, at most.
const LOOKS: usize = 30;

/// The parameters, none of them negative, that minimise the squared relative errors of the points, twice too much being as bad as half,
/// starting from `known`. A part that no point has, or that something else hides in all of them, keeps its parameter; points without a
/// positive time are left out.
pub(super) fn fit(points: &[Point], known: Parameters) -> Fit {
    let points: Vec<&Point> = points.iter().filter(|point| point.is_measured()).collect();
    // Which of memory and products counts depends on what is sought: from what is known, or from one of the two everywhere.
    let starts = [None, Some(PRODUCTS), Some(MEMORY)].map(|hidden| match hidden {
        None => counts(&points, &known),
        Some(hidden) => points.iter().map(|point| without(point.work.parts(), hidden)).collect(),
    });
    let fits = starts.into_iter().map(|counted| descend(&points, counted, known, [HOLD; PARTS]));
    let best = fits.reduce(|best, other| if other.error < best.error { other } else { best });
    let best = best.expect("there are three starts");
    // What the points hardly speak of is no place to put their errors.
    let holds = best.is_fitted.map(|is_fitted| if is_fitted { HOLD } else { FIXED });
    let fixed = descend(&points, counts(&points, &best.parameters), known, holds);
    Fit { is_fitted: best.is_fitted, ..fixed }
}

/// Fits, looks at what hides now, and fits again. `counted` is what counts at first.
fn descend(points: &[&Point], mut counted: Vec<[f64; PARTS]>, known: Parameters, holds: [f64; PARTS]) -> Fit {
    let mut scales: Vec<f64> = points.iter().map(|point| point.seconds).collect();
    let mut parameters = known;
    for _ in 0..LOOKS {
        let before = parameters;
        parameters = solve(&counted, points, &scales, &known, holds);
        // Between what was measured and what the model says: else small models would seem better than large ones.
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
    // Where the points say more than what holds a parameter.
    let says = |part: usize| {
        let shares =
            counted.iter().zip(points).map(|(parts, point)| parts[part] * parameters.seconds[part] / point.seconds);
        shares.map(|share| share * share).sum::<f64>() > HOLD
    };
    Fit { parameters, error, is_fitted: std::array::from_fn(says) }
}

/// Parts of which one hides behind another, unless there is no other.
fn without(parts: [f64; PARTS], hidden: usize) -> [f64; PARTS] {
    let other = if hidden == MEMORY { PRODUCTS } else { MEMORY };
    std::array::from_fn(|part| if part == hidden && parts[other] > 0.0 { 0.0 } else { parts[part] })
}

/// For each point, how far off the parameters are that all other points give, as [`Point::error`]; `None` for points that were left out.
pub(super) fn leave_one_out(points: &[Point], known: Parameters) -> Vec<Option<f64>> {
    let others = |index: usize| -> Vec<Point> {
        points.iter().enumerate().filter(|(other, _)| *other != index).map(|(_, point)| *point).collect()
    };
    let error = |(index, point): (usize, &Point)| {
        point.is_measured().then(|| point.error(&fit(&others(index), known).parameters))
    };
    points.iter().enumerate().map(error).collect()
}

/// The parts of each point, without what hides.
fn counts(points: &[&Point], parameters: &Parameters) -> Vec<[f64; PARTS]> {
    let of_point = |point: &&Point| {
        let hidden = if parameters.times(&point.work)[PRODUCTS] > 0.0 { MEMORY } else { PRODUCTS };
        without(point.work.parts(), hidden)
    };
    points.iter().map(of_point).collect()
}

/// The best parameters for points of these parts whose errors count in multiples of `scales`; `holds` keep them near `known`.
fn solve(
    counted: &[[f64; PARTS]],
    points: &[&Point],
    scales: &[f64],
    known: &Parameters,
    holds: [f64; PARTS],
) -> Parameters {
    // Parameters in multiples of the known ones, times in multiples of the scales: all of them are about 1.
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
    // Coordinate descent, which keeps to the floor: the matrix is symmetric and positive definite.
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
