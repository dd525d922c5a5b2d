//! `gradsync reduce`: sum, mean or Adasum of the checkpoints of several ranks.
//!
//! The arithmetic is the library's ([`gradsync::ops::offline`]). Inputs are read piece by piece, so that memory use does not grow with
//! their size. All checks of the inputs precede the creation of the output, but one: an input that was changed while it was read.

mod non_finite;
mod report;
mod source;

use std::cmp::Reverse;
use std::iter;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use gradsync::internal::kernels::cpu;
use gradsync::ops::offline::{OfflineOp, OfflineReduction};
use gradsync::ops::{AdasumOptions, Algorithm, Granularity};
use gradsync::{DType, GradientBuffer, Slice};
use indicatif::{ProgressBar, ProgressStyle};
use safetensors::Dtype;

use self::non_finite::NotFinite;
use self::report::{Found, Report};
use self::source::Source;
use crate::backend::BackendChoice;
use crate::checkpoint::{
    Checkpoints, FileError, HeaderLimits, OtherDTypes, Tensor, file_dtype, reducible, write_header,
};
use gradsync_cli::messages::{self, Listener};
use gradsync_cli::output::{Destination, OutputError, OutputFile};
use gradsync_cli::text::shown;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    /// The sum over ranks.
    Sum,
    /// The sum over ranks divided by their number.
    Mean,
    /// The adaptive sum: the mean of parallel gradients, the sum of orthogonal ones.
    Adasum,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AlgorithmChoice {
    /// Gram, which reads the files twice.
    Auto,
    /// Weights from the inner products of all ranks' tensors; any number of ranks.
    Gram,
    /// Weights level by level from the combined tensors themselves, which are rounded to their dtype at each level; powers of two.
    Tree,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GranularityChoice {
    /// Each tensor has its own weights.
    Tensor,
    /// All tensors share one set of weights, as if they were one vector.
    Whole,
}

/// The arguments of `gradsync reduce`.
#[derive(Args)]
pub(crate) struct Reduce {
    /// How to combine the ranks.
    #[arg(long, value_enum)]
    op: Op,
    /// How to find Adasum's weights; of no matter to other operations.
    #[arg(long, value_enum, default_value_t = AlgorithmChoice::Auto)]
    algorithm: AlgorithmChoice,
    /// What shares one set of Adasum's weights; of no matter to other operations.
    #[arg(long, value_enum, default_value_t = GranularityChoice::Tensor)]
    granularity: GranularityChoice,
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    backend: BackendChoice,
    /// Multiply the result by this.
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    scale: f64,
    /// Write this floating-point dtype, such as bf16, instead of each tensor's own.
    #[arg(long, value_name = "DTYPE", value_parser = float_dtype)]
    output_dtype: Option<DType>,
    /// Write nothing, and exit with code 3, if an element of the result is a NaN or an infinity. Otherwise such a result is written, a
    /// warning names its tensors, and the exit code is 0.
    #[arg(long)]
    fail_on_non_finite: bool,
    /// What to do with tensors that cannot be reduced, such as the counters of batch normalisation.
    #[arg(long, value_enum, default_value_t = OtherDTypes::Refuse)]
    other_dtypes: OtherDTypes,
    #[command(flatten)]
    limits: HeaderLimits,
    /// Print one JSON object instead of lines.
    #[arg(long)]
    json: bool,
    /// The file to write, in place of what stands there when all of it is written; a device or a pipe is written to, and `-` is the
    /// standard output, in which case the report goes to stderr.
    #[arg(long, short, value_name = "OUT.safetensors")]
    output: PathBuf,
    /// One file for each rank, in rank order.
    #[arg(required = true, value_name = "IN.safetensors")]
    inputs: Vec<PathBuf>,
}

/// The reason why a reduction was refused or failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReduceError {
    #[error(transparent)]
    File(Box<FileError>),
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error(transparent)]
    Gradsync(#[from] gradsync::Error),
    #[error("the report: {0}")]
    Report(#[from] std::io::Error),
    #[error("--backend cuda: {0}")]
    Backend(String),
    #[error("--scale {0} is not finite")]
    Scale(f64),
    #[error("--algorithm tree needs a power of two of inputs, and there are {0}")]
    NotPowerOfTwo(usize),
    #[error("tensor {tensor:?}: {source}")]
    Tensor { tensor: String, source: gradsync::Error },
    #[error("tensor {tensor:?} of the result is not finite: {cause}; {} is left as it was", shown(output))]
    NotFinite { tensor: String, cause: String, output: PathBuf },
    #[error("--fail-on-non-finite writes to regular files only, and nothing written to {} could be taken back", shown(.0))]
    CannotTakeBack(PathBuf),
}

impl From<FileError> for ReduceError {
    fn from(error: FileError) -> Self {
        ReduceError::File(error.into())
    }
}

impl ReduceError {
    /// The exit code of the program.
    pub(crate) fn exit_code(&self) -> ExitCode {
        if matches!(self, ReduceError::NotFinite { .. }) { ExitCode::from(3) } else { ExitCode::FAILURE }
    }
}

impl Reduce {
    pub(crate) fn run(self) -> Result<(), ReduceError> {
        if !self.scale.is_finite() {
            return Err(ReduceError::Scale(self.scale));
        }
        if self.is_tree() && !self.inputs.len().is_power_of_two() {
            return Err(ReduceError::NotPowerOfTwo(self.inputs.len()));
        }
        let destination = Destination::find(&self.output, &self.inputs)?;
        if self.fail_on_non_finite && !destination.is_file() {
            return Err(ReduceError::CannotTakeBack(self.output));
        }
        let (listener, written) = (Listener::beside([&destination]), destination.shown());
        let ranks = Checkpoints::open(&self.inputs, &self.limits, self.other_dtypes)?;
        let progress = self.progress_bar(&ranks);
        let source = Source::new(&ranks, &progress);
        // Whatever else is wrong, or seems to be well, is of no meaning if an input has been changed: here, and after the reduction.
        let copied = ranks.check_copied(&mut source.pieces());
        ranks.check().and(copied)?;
        // Wide dtypes come first, as in the format's own writer: every tensor is then aligned in the file.
        let mut order: Vec<u32> = (0..ranks.tensors.len() as u32).collect();
        order.sort_by_key(|tensor| Reverse(self.written(ranks.tensors.dtype(*tensor as usize)).bitsize()));
        let processor = self.backend.open().map_err(ReduceError::Backend)?;
        let backend = processor.name();
        let reduction = OfflineReduction::new(&source, self.offline_op(), self.scale, processor)?;
        let mut output = destination.open()?;
        let found = self.write(&source, &order, reduction, &mut output).and_then(|tensors| {
            let inputs = tensors.not_finite().map(|tensor| Ok(non_finite::inputs(&source, tensor)?));
            let inputs: Vec<Vec<NotFinite>> = inputs.collect::<Result<_, ReduceError>>()?;
            Ok((tensors, inputs.into_iter().flatten().collect()))
        });
        ranks.check()?;
        let (tensors, not_finite_inputs) = found?;
        output.finish()?;
        progress.finish_and_clear();
        let (op, algorithm) = match self.op {
            Op::Sum => ("sum", None),
            Op::Mean => ("mean", None),
            Op::Adasum if self.is_tree() => ("adasum", Some("tree")),
            Op::Adasum => ("adasum", Some("gram")),
        };
        let (ranks, skipped) = (ranks.len(), &ranks.skipped);
        let report = Report { op, algorithm, backend, ranks, output: written, tensors, skipped, not_finite_inputs };
        if let Some(warning) = report.warning() {
            messages::say("warning", warning);
        }
        listener.print_by(|writer| if self.json { report.write_json(writer) } else { report.write_lines(writer) })?;
        Ok(())
    }

    fn is_tree(&self) -> bool {
        self.op == Op::Adasum && self.algorithm == AlgorithmChoice::Tree
    }

    fn offline_op(&self) -> OfflineOp {
        let algorithm = match self.algorithm {
            AlgorithmChoice::Auto => Algorithm::Auto,
            AlgorithmChoice::Gram => Algorithm::Gram,
            AlgorithmChoice::Tree => Algorithm::Tree,
        };
        let granularity = match self.granularity {
            GranularityChoice::Tensor => Granularity::Tensor,
            GranularityChoice::Whole => Granularity::Whole,
        };
        match self.op {
            Op::Sum => OfflineOp::Sum,
            Op::Mean => OfflineOp::Mean,
            Op::Adasum => {
                OfflineOp::Adasum(AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity))
            }
        }
    }

    /// Writes the results of all tensors, in this order.
    fn write<'a>(
        &self,
        source: &Source<'a>,
        order: &'a [u32],
        mut reduction: OfflineReduction<'_>,
        output: &mut OutputFile,
    ) -> Result<Found<'a>, ReduceError> {
        let tensors = &source.ranks.tensors;
        let written = || {
            let tensors = order.iter().map(|&tensor| tensors.get(tensor as usize));
            tensors.map(|tensor| Tensor { dtype: self.written(tensor.dtype), ..tensor })
        };
        write_header(output, source.ranks.metadata(), written)?;
        let mut found = Found::new(tensors, order, self.output_dtype);
        for &tensor in order {
            let tensor = tensor as usize;
            let Some(own) = reducible(tensors.dtype(tensor)) else {
                source
                    .ranks
                    .copied(tensor, &mut source.pieces(), |bytes| Ok::<_, ReduceError>(output.write(bytes)?))?;
                continue;
            };
            let (mut norm, mut is_finite) = (0.0f64, true);
            let coefficients = reduction.reduce(tensor, self.output_dtype.unwrap_or(own), |piece| {
                norm = norm.hypot(piece_norm(piece)?);
                is_finite &= cpu::all_finite(piece);
                Ok::<_, ReduceError>(output.write(piece.as_bytes())?)
            });
            let coefficients = coefficients.map_err(|error| source.explained(tensor, error))?;
            if self.fail_on_non_finite && !is_finite {
                return Err(self.not_finite(source, tensor)?);
            }
            found.push(coefficients, norm, is_finite);
        }
        Ok(found)
    }

    /// The error of a result that is not finite, with the inputs to blame.
    fn not_finite(&self, source: &Source<'_>, tensor: usize) -> Result<ReduceError, FileError> {
        // Tensors that share their weights share what is wrong with one of them.
        let is_whole = self.op == Op::Adasum && self.granularity == GranularityChoice::Whole;
        let others = (0..source.ranks.tensors.len()).filter(|_| is_whole);
        let mut inputs = Vec::new();
        for tensor in iter::once(tensor).chain(others) {
            inputs = non_finite::inputs(source, tensor)?;
            if !inputs.is_empty() {
                break;
            }
        }
        let cause = non_finite::cause(&inputs);
        let tensor = source.ranks.tensors.name(tensor).to_owned();
        Ok(ReduceError::NotFinite { tensor, cause, output: self.output.clone() })
    }

    /// The dtype in which a tensor of this dtype is written.
    fn written(&self, own: Dtype) -> Dtype {
        self.output_dtype.filter(|_| reducible(own).is_some()).and_then(file_dtype).unwrap_or(own)
    }

    /// A bar over the bytes of all passes; indicatif draws it only if stderr is a terminal.
    fn progress_bar(&self, ranks: &Checkpoints) -> ProgressBar {
        let reduced = ranks.tensors.iter().filter(|tensor| reducible(tensor.dtype).is_some());
        let bytes: usize = reduced.map(|tensor| tensor.bytes()).sum();
        let passes = match (self.op, self.algorithm) {
            // One pass for each pair, and one for the combination.
            (Op::Adasum, AlgorithmChoice::Tree) => ranks.len(),
            (Op::Adasum, _) => 2,
            _ => 1,
        };
        let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        let bar = ProgressBar::new((bytes * ranks.len() * passes) as u64);
        bar.with_style(style.expect("the template is well-formed"))
    }
}

/// Parses the name of a floating-point dtype.
fn float_dtype(name: &str) -> Result<DType, String> {
    let found = DType::FLOATS.into_iter().find(|dtype| dtype.name() == name);
    found.ok_or_else(|| format!("expected one of {}", DType::FLOATS.map(DType::name).join(", ")))
}

/// The Euclidean norm. If squares of finite values overflow, the values are scaled down by a power of two first.
fn piece_norm(values: Slice<'_>) -> gradsync::Result<f64> {
    const DOWN: f64 = 1.0 / (1u128 << 127) as f64;
    let whole = [0..values.len()];
    let norm = cpu::squared_norms(values, &whole)?[0].sqrt();
    if norm.is_finite() || !cpu::all_finite(values) {
        return Ok(norm);
    }
    let mut scaled = GradientBuffer::new(DType::F64, 1, [("scaled", [values.len()])])?;
    let mut exponent = 0;
    loop {
        exponent += 1;
        let factor = DOWN.powi(exponent);
        cpu::scale(scaled.as_mut_slice().range_mut(0..values.len()), values, factor)?;
        let norm = cpu::squared_norms(scaled.as_slice().range(0..values.len()), &whole)?[0].sqrt();
        if norm.is_finite() {
            return Ok(norm / factor);
        }
    }
}
