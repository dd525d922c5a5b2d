//! The output of `gradsync reduce`: one JSON object with `--json`, otherwise lines.

use std::io::{self, Write};

use gradsync::DType;
use serde::ser::{Serialize, SerializeMap as _, Serializer};

use super::non_finite::{self, NotFinite};
use crate::checkpoint::{Tensor, Tensors, reducible};
use gradsync_cli::text::{PrintableJson, shown};

/// One reduced tensor.
#[derive(Debug, serde::Serialize)]
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

/// The results for the tensors, in the order in which they were written, among tensors that were copied.
#[derive(Debug)]
pub(super) struct Found<'a> {
    tensors: &'a Tensors,
    order: &'a [u32],
    output_dtype: Option<DType>,
    /// The weights of all ranks, reduced tensor by reduced tensor.
    coefficients: Vec<f64>,
    norms: Vec<f64>,
    finite: Vec<bool>,
}

impl<'a> Found<'a> {
    pub(super) fn new(tensors: &'a Tensors, order: &'a [u32], output_dtype: Option<DType>) -> Self {
        let (coefficients, norms, finite) = Default::default();
        Self { tensors, order, output_dtype, coefficients, norms, finite }
    }

    /// Adds the result of the next tensor that is reduced.
    pub(super) fn push(&mut self, coefficients: Vec<f64>, norm: f64, is_finite: bool) {
        self.coefficients.extend(coefficients);
        self.norms.push(norm);
        self.finite.push(is_finite);
    }

    fn reduced(&self) -> impl Iterator<Item = usize> + '_ {
        let order = self.order.iter().map(|&tensor| tensor as usize);
        order.filter(|&tensor| reducible(self.tensors.dtype(tensor)).is_some())
    }

    /// The tensors whose result is not finite.
    pub(super) fn not_finite(&self) -> impl Iterator<Item = usize> + '_ {
        self.reduced().zip(&self.finite).filter(|(_, finite)| !**finite).map(|(tensor, _)| tensor)
    }

    fn iter(&self) -> impl Iterator<Item = TensorReport<'_>> {
        let ranks = self.coefficients.len() / self.norms.len().max(1);
        self.reduced().enumerate().map(move |(index, tensor)| {
            let tensor = self.tensors.get(tensor);
            TensorReport {
                name: tensor.name,
                dtype: self.output_dtype.or(reducible(tensor.dtype)).map_or("", DType::name),
                shape: tensor.shape,
                coefficients: &self.coefficients[index * ranks..][..ranks],
                norm: self.norms[index],
                finite: self.finite[index],
            }
        })
    }

    fn copied(&self) -> impl Iterator<Item = Tensor<'_>> {
        let tensors = self.order.iter().map(|&tensor| self.tensors.get(tensor as usize));
        tensors.filter(|tensor| reducible(tensor.dtype).is_none())
    }
}

impl Serialize for Found<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter())
    }
}

/// A tensor that is not reduced.
#[derive(Debug, serde::Serialize)]
struct OtherReport<'a> {
    name: &'a str,
    dtype: String,
    shape: Vec<usize>,
}

impl<'a> OtherReport<'a> {
    fn of(tensor: Tensor<'a>) -> Self {
        Self { name: tensor.name, dtype: tensor.dtype.to_string().to_lowercase(), shape: tensor.shape }
    }
}

/// One reduction.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) op: &'static str,
    /// The algorithm that ran; null for an operation with only one.
    pub(super) algorithm: Option<&'static str>,
    pub(super) backend: &'static str,
    pub(super) ranks: usize,
    /// The path that was written, as the user named it.
    pub(super) output: String,
    pub(super) tensors: Found<'a>,
    /// The tensors that the result does not have.
    pub(super) skipped: &'a Tensors,
    /// The first elements that are not finite of the inputs of results that are not finite.
    pub(super) not_finite_inputs: Vec<NotFinite>,
}

impl Serialize for Report<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("op", self.op)?;
        map.serialize_entry("algorithm", &self.algorithm)?;
        map.serialize_entry("backend", self.backend)?;
        map.serialize_entry("ranks", &self.ranks)?;
        map.serialize_entry("output", &self.output)?;
        map.serialize_entry("tensors", &self.tensors)?;
        map.serialize_entry("copied", &self.copied().collect::<Vec<_>>())?;
        map.serialize_entry("skipped", &self.skipped().collect::<Vec<_>>())?;
        map.serialize_entry("not_finite_inputs", &self.not_finite_inputs)?;
        map.end()
    }
}

impl Report<'_> {
    fn copied(&self) -> impl Iterator<Item = OtherReport<'_>> {
        self.tensors.copied().map(OtherReport::of)
    }

    fn skipped(&self) -> impl Iterator<Item = OtherReport<'_>> {
        self.skipped.iter().map(OtherReport::of)
    }

    /// Writes one JSON object.
    pub(super) fn write_json(&self, writer: &mut dyn Write) -> io::Result<()> {
        self.serialize(&mut serde_json::Serializer::with_formatter(&mut *writer, PrintableJson))?;
        writeln!(writer)
    }

    /// Writes a line for each tensor and one for the whole.
    pub(super) fn write_lines(&self, writer: &mut dyn Write) -> io::Result<()> {
        for tensor in self.tensors.iter() {
            let finite = if tensor.finite { "" } else { "  NOT FINITE" };
            let coefficients: Vec<_> = tensor.coefficients.iter().map(|&weight| number(weight)).collect();
            let (name, dtype, shape, norm) = (shown(tensor.name), tensor.dtype, &tensor.shape, tensor.norm);
            let coefficients = coefficients.join(", ");
            writeln!(writer, "{name}: {dtype} {shape:?}  norm {norm:.6e}  coefficients [{coefficients}]{finite}")?;
        }
        for tensor in self.copied() {
            writeln!(
                writer,
                "{}: {} {:?}  copied, equal in all files",
                shown(tensor.name),
                tensor.dtype,
                tensor.shape
            )?;
        }
        for tensor in self.skipped() {
            writeln!(writer, "{}: {} {:?}  skipped", shown(tensor.name), tensor.dtype, tensor.shape)?;
        }
        let algorithm = self.algorithm.map(|name| format!(" ({name})")).unwrap_or_default();
        let (op, backend, ranks, output) = (self.op, self.backend, self.ranks, &self.output);
        let count = self.tensors.norms.len();
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (tensors, rank_s) = (plural(count), plural(ranks));
        writeln!(
            writer,
            "{op}{algorithm} of {count} tensor{tensors} over {ranks} rank{rank_s} on {backend}, written to {output}"
        )
    }

    /// Names the first tensors that are not finite, and the inputs to blame; `None` if all are finite.
    pub(super) fn warning(&self) -> Option<String> {
        const MOST: usize = 10;
        let mut names = self.tensors.not_finite().map(|tensor| format!("{:?}", self.tensors.tensors.name(tensor)));
        let first: Vec<String> = names.by_ref().take(MOST).collect();
        let others = names.count();
        let others = if others > 0 { format!(" and {others} others") } else { String::new() };
        let cause = non_finite::cause(&self.not_finite_inputs);
        (!first.is_empty()).then(|| format!("the result is not finite in {}{others}: {cause}", first.join(", ")))
    }
}

/// A coefficient for readers: with an exponent where decimal places would show nothing, or digits without end.
fn number(coefficient: f64) -> String {
    let size = coefficient.abs();
    if size == 0.0 || !size.is_finite() || (1e-3..1e7).contains(&size) {
        format!("{coefficient:.6}")
    } else {
        format!("{coefficient:.6e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_short_and_shows_its_digits() {
        let shown = [0.0, 1.0, -0.5, 1e6, 1e-9, -2.5e-4, 1e308, f64::NAN].map(number);
        let expected = [
            "0.000000",
            "1.000000",
            "-0.500000",
            "1000000.000000",
            "1.000000e-9",
            "-2.500000e-4",
            "1.000000e308",
            "NaN",
        ];
        assert_eq!(shown, expected);
    }
}
