//! What `gradsync reduce --json` prints, and the lines that it prints otherwise.

use serde::Serialize;

/// One reduced tensor.
#[derive(Debug, Serialize)]
pub(crate) struct TensorReport {
    pub(crate) name: String,
    /// The dtype written.
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    /// The weight of each rank's tensor in the result, scale included. JSON has no NaN: it becomes null.
    pub(crate) coefficients: Vec<f64>,
    /// The Euclidean norm of the tensor as written.
    pub(crate) norm: f64,
    /// Whether every element as written is finite.
    pub(crate) finite: bool,
}

/// One reduction.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) op: &'static str,
    /// The algorithm that ran; null where the operation has only one.
    pub(crate) algorithm: Option<&'static str>,
    pub(crate) backend: &'static str,
    pub(crate) ranks: usize,
    pub(crate) tensors: Vec<TensorReport>,
}

impl Report {
    /// A line for each tensor and one for the whole.
    pub(crate) fn lines(&self) -> String {
        let mut lines = String::new();
        for tensor in &self.tensors {
            let finite = if tensor.finite { "" } else { "  NOT FINITE" };
            let coefficients: Vec<_> = tensor.coefficients.iter().map(|weight| format!("{weight:.6}")).collect();
            let (name, dtype, shape, norm) = (&tensor.name, tensor.dtype, &tensor.shape, tensor.norm);
            let coefficients = coefficients.join(", ");
            lines += &format!("{name}: {dtype} {shape:?}  norm {norm:.6e}  coefficients [{coefficients}]{finite}\n");
        }
        let algorithm = self.algorithm.map(|name| format!(" ({name})")).unwrap_or_default();
        let (op, backend, ranks, count) = (self.op, self.backend, self.ranks, self.tensors.len());
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (tensors, rank_s) = (plural(count), plural(ranks));
        lines + &format!("{op}{algorithm} of {count} tensor{tensors} over {ranks} rank{rank_s} on {backend}\n")
    }
}
