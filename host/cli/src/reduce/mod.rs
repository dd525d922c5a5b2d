//! `gradsync reduce`: sum, mean or Adasum of the checkpoints of several ranks.
//!
//! The arithmetic is the library's ([`gradsync::ops::offline`]). Inputs are mapped and read piece by piece, so that memory use does not
//! grow with their size. All checks of the inputs precede the creation of the output.

mod report;

use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use gradsync::kernels::cpu;
use gradsync::ops::offline::{OfflineOp, OfflineReduction, RankTensors};
use gradsync::ops::{AdasumOptions, Algorithm, Granularity};
use gradsync::{DType, GradientBuffer, Slice};
use indicatif::{ProgressBar, ProgressStyle};

use self::report::{Found, Report};
use crate::backend::BackendChoice;
use crate::checkpoint::{Checkpoints, FileError, HeaderLimits, Tensor, write_header};
use gradsync_cli::messages::Listener;
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
    /// Write this dtype (f64, f32, f16 or bf16) instead of each tensor's own.
    #[arg(long, value_name = "DTYPE")]
    output_dtype: Option<DType>,
    /// Write nothing, and exit with code 3, if an element of the result is a NaN or an infinity. Otherwise such a result is written, a
    /// warning names its tensors, and the exit code is 0.
    #[arg(long)]
    fail_on_non_finite: bool,
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
    File(#[from] FileError),
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
    #[error("tensor {tensor:?} of the result is not finite; {} is left as it was", shown(output))]
    NotFinite { tensor: String, output: PathBuf },
    #[error("--fail-on-non-finite writes to regular files only, and nothing written to {} could be taken back", shown(.0))]
    CannotTakeBack(PathBuf),
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
        let listener = Listener::beside([&destination]);
        let ranks = Checkpoints::open(&self.inputs, &self.limits)?;
        // Wide dtypes come first, as in the format's own writer: every tensor is then aligned in the file.
        let mut order: Vec<u32> = (0..ranks.tensors.len() as u32).collect();
        let size = |tensor: &u32| self.output_dtype(ranks.tensors.dtype(*tensor as usize)).size_bytes();
        order.sort_by_key(|tensor| std::cmp::Reverse(size(tensor)));
        let progress = self.progress_bar(&ranks);
        let source = Source { ranks: &ranks, progress: &progress };
        let processor = self.backend.open().map_err(ReduceError::Backend)?;
        let backend = processor.name();
        let reduction = OfflineReduction::new(&source, self.offline_op(), self.scale, processor)?;
        let tensors = self.write(&ranks, &order, reduction, destination.open()?)?;
        progress.finish_and_clear();
        let (op, algorithm) = match self.op {
            Op::Sum => ("sum", None),
            Op::Mean => ("mean", None),
            Op::Adasum if self.is_tree() => ("adasum", Some("tree")),
            Op::Adasum => ("adasum", Some("gram")),
        };
        let report = Report { op, algorithm, backend, ranks: ranks.len(), tensors };
        if let Some(names) = report.not_finite() {
            gradsync_cli::messages::say("warning", format_args!("the result is not finite in {names}"));
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
        ranks: &'a Checkpoints,
        order: &'a [u32],
        mut reduction: OfflineReduction<'_>,
        mut output: OutputFile,
    ) -> Result<Found<'a>, ReduceError> {
        let tensors = &ranks.tensors;
        let written = || {
            let tensors = order.iter().map(|&tensor| tensors.get(tensor as usize));
            tensors.map(|tensor| Tensor { dtype: self.output_dtype(tensor.dtype), ..tensor })
        };
        write_header(&mut output, ranks.metadata(), written)?;
        let (coefficients, norms, finite) = Default::default();
        let mut found = Found { tensors, order, output_dtype: self.output_dtype, coefficients, norms, finite };
        for &tensor in order {
            let tensor = tensor as usize;
            let (mut norm, mut is_finite) = (0.0f64, true);
            let dtype = self.output_dtype(tensors.dtype(tensor));
            let coefficients = reduction.reduce(tensor, dtype, |piece| {
                norm = norm.hypot(piece_norm(piece)?);
                is_finite &= cpu::all_finite(piece);
                Ok::<_, ReduceError>(output.write(piece.as_bytes())?)
            })?;
            if self.fail_on_non_finite && !is_finite {
                let tensor = tensors.get(tensor).name.to_owned();
                return Err(ReduceError::NotFinite { tensor, output: self.output.clone() });
            }
            found.coefficients.extend(coefficients);
            found.norms.push(norm);
            found.finite.push(is_finite);
        }
        output.finish()?;
        Ok(found)
    }

    fn output_dtype(&self, own: DType) -> DType {
        self.output_dtype.unwrap_or(own)
    }

    /// A bar over the bytes of all passes; indicatif draws it only if stderr is a terminal.
    fn progress_bar(&self, ranks: &Checkpoints) -> ProgressBar {
        let bytes: usize = ranks.tensors.iter().map(|tensor| tensor.bytes()).sum();
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

/// The files of all ranks, with a bar of the bytes read so far.
struct Source<'a> {
    ranks: &'a Checkpoints,
    progress: &'a ProgressBar,
}

impl RankTensors for Source<'_> {
    fn ranks(&self) -> usize {
        self.ranks.len()
    }

    fn tensor_count(&self) -> usize {
        self.ranks.tensors.len()
    }

    fn tensor(&self, index: usize) -> (DType, usize) {
        let Tensor { dtype, len, .. } = self.ranks.tensors.get(index);
        (dtype, len)
    }

    fn read(&self, index: usize, elements: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> gradsync::Result<()> {
        let mut copies: Vec<Option<GradientBuffer>> = (0..self.ranks.len()).map(|_| None).collect();
        work(&self.ranks.elements(index, elements.clone(), &mut copies)?);
        let bytes = elements.len() * self.ranks.tensors.dtype(index).size_bytes();
        self.progress.inc((bytes * self.ranks.len()) as u64);
        self.ranks.release(index, elements);
        Ok(())
    }
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
