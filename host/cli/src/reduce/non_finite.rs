//! The inputs that are to blame for a result that is not finite.

use std::fmt;

use gradsync::Slice;
use gradsync::internal::kernels::cpu;
use serde::Serialize;

use super::source::Source;
use crate::checkpoint::{FileError, reducible};
use gradsync_cli::text::shown;

/// The number of elements of each rank that are searched at a time.
const PIECE_LEN: usize = 1 << 20;
/// The number of inputs that a message names.
const NAMED: usize = 3;

/// The first element of a tensor of an input that is a NaN or an infinity.
#[derive(Debug, Serialize)]
pub(super) struct NotFinite {
    file: String,
    tensor: String,
    element: usize,
    value: String,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, tensor, element, value } = self;
        write!(f, "tensor {tensor:?} of {} is {value} at element {element}", shown(file))
    }
}

/// Finds the first such element of each rank's tensor.
pub(super) fn inputs(source: &Source<'_>, tensor: usize) -> Result<Vec<NotFinite>, FileError> {
    let ranks = source.ranks;
    let description = ranks.tensors.get(tensor);
    let Some(dtype) = reducible(description.dtype) else { return Ok(Vec::new()) };
    let mut found: Vec<Option<NotFinite>> = (0..ranks.len()).map(|_| None).collect();
    for begin in (0..description.len).step_by(PIECE_LEN) {
        let piece = begin..description.len.min(begin + PIECE_LEN);
        let mut pieces = source.pieces();
        let vectors = ranks.elements(tensor, dtype, piece, &mut pieces)?;
        for (rank, (found, vector)) in found.iter_mut().zip(vectors).enumerate() {
            if found.is_none() && !cpu::all_finite(vector) {
                let (index, value) = first(vector);
                let (file, tensor) = (ranks.path(rank).to_string_lossy().into_owned(), description.name.to_owned());
                *found = Some(NotFinite { file, tensor, element: begin + index, value: value.to_string() });
            }
        }
    }
    Ok(found.into_iter().flatten().collect())
}

/// The first element that is not finite, of a vector that has one.
fn first(vector: Slice<'_>) -> (usize, f64) {
    let (mut begin, mut end) = (0, vector.len());
    while end - begin > 1 {
        let middle = begin + (end - begin) / 2;
        if cpu::all_finite(vector.range(begin..middle)) { begin = middle } else { end = middle }
    }
    (begin, vector.range(begin..end).to_f64_vec()[0])
}

/// The cause of a result that is not finite, by these elements of the inputs.
pub(super) fn cause(inputs: &[NotFinite]) -> String {
    let named: Vec<String> = inputs.iter().take(NAMED).map(NotFinite::to_string).collect();
    match inputs.len() {
        0 => "all inputs are finite there, so that the result leaves the range of its dtype".into(),
        len if len > NAMED => format!("{}, and {} more inputs are not finite", named.join(", "), len - NAMED),
        _ => named.join(", "),
    }
}
