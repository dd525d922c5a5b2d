//! The output of `gradsync reduce`: one JSON object with `--json`, otherwise lines.

use std::io::{self, Write};

use gradsync::DType;
use serde::{Serialize, Serializer};

use crate::checkpoint::Tensors;
use gradsync_cli::text::{PrintableJson, shown};

/// One reduced tensor.
#[derive(Debug, Serialize)]
struct TensorReport<'a> {
    name: &'a str,
    /// The dtype written.
    dtype: &'static str,
    shape: Vec<usize>,
    /// The weight of each rank's tensor in the result, scale included. JSON has no NaN: it becomes null.
    coefficients: &'a [f64],
    /// The Euclidean norm of the tensor as written.
    norm: f64,
    /// Whether every element as written is finite.
    finite: bool,
}

/// The results for the tensors, in the order in which they were written.
#[derive(Debug)]
pub(crate) struct Found<'a> {
    pub(crate) tensors: &'a Tensors,
    pub(crate) order: &'a [u32],
    pub(crate) output_dtype: Option<DType>,
    /// The weights of all ranks, tensor by tensor.
    pub(crate) coefficients: Vec<f64>,
    pub(crate) norms: Vec<f64>,
    pub(crate) finite: Vec<bool>,
}

impl Found<'_> {
    fn iter(&self) -> impl Iterator<Item = TensorReport<'_>> {
        let ranks = self.coefficients.len() / self.order.len().max(1);
        self.order.iter().enumerate().map(move |(place, &tensor)| {
            let tensor = self.tensors.get(tensor as usize);
            TensorReport {
                name: tensor.name,
                dtype: self.output_dtype.unwrap_or(tensor.dtype).name(),
                shape: tensor.shape,
                coefficients: &self.coefficients[place * ranks..][..ranks],
                norm: self.norms[place],
                finite: self.finite[place],
            }
        })
    }
}

impl Serialize for Found<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

/// One reduction.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    pub(crate) op: &'static str,
    /// The algorithm that ran; null for an operation with only one.
    pub(crate) algorithm: Option<&'static str>,
    pub(crate) backend: &'static str,
    pub(crate) ranks: usize,
    pub(crate) tensors: Found<'a>,
}

impl Report<'_> {
    /// Writes one JSON object.
    pub(crate) fn write_json(&self, writer: &mut dyn Write) -> io::Result<()> {
        self.serialize(&mut serde_json::Serializer::with_formatter(&mut *writer, PrintableJson))?;
        writeln!(writer)
    }

    /// Writes a line for each tensor and one for the whole.
    pub(crate) fn write_lines(&self, writer: &mut dyn Write) -> io::Result<()> {
        for tensor in self.tensors.iter() {
            let finite = if tensor.finite { "" } else { "  NOT FINITE" };
            let coefficients: Vec<_> = tensor.coefficients.iter().map(|weight| format!("{weight:.6}")).collect();
            let (name, dtype, shape, norm) = (shown(tensor.name), tensor.dtype, &tensor.shape, tensor.norm);
            let coefficients = coefficients.join(", ");
            writeln!(writer, "{name}: {dtype} {shape:?}  norm {norm:.6e}  coefficients [{coefficients}]{finite}")?;
        }
        let algorithm = self.algorithm.map(|name| format!(" ({name})")).unwrap_or_default();
        let (op, backend, ranks, count) = (self.op, self.backend, self.ranks, self.tensors.order.len());
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (tensors, rank_s) = (plural(count), plural(ranks));
        writeln!(writer, "{op}{algorithm} of {count} tensor{tensors} over {ranks} rank{rank_s} on {backend}")
    }

    /// The names of the first tensors that are not finite, and the number of others; `None` if all are finite.
    pub(crate) fn not_finite(&self) -> Option<String> {
        const MOST: usize = 10;
        let mut names = self.tensors.iter().filter(|tensor| !tensor.finite).map(|tensor| format!("{:?}", tensor.name));
        let first: Vec<String> = names.by_ref().take(MOST).collect();
        let others = names.count();
        let others = if others > 0 { format!(" and {others} others") } else { String::new() };
        (!first.is_empty()).then(|| format!("{}{others}", first.join(", ")))
    }
}
