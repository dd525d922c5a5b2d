//! `gradsync reduce`: sum, mean or Adasum of the checkpoints of several ranks.
//!
//! Inputs are mapped and read piece by piece, so that memory use does not grow with their size. Every check of the inputs comes
//! before the output is begun.

mod report;
mod tree;

use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use gradsync::kernels::cpu::{self, Trees};
use gradsync::{DType, GradientBuffer, Slice};
use gradsync_device::math::adasum::{self, Criterion};
use indicatif::{ProgressBar, ProgressStyle};

use self::report::{Found, Report};
use self::tree::Arena;
use crate::backend::{self, Backend, BackendChoice};
use crate::checkpoint::{Checkpoints, FileError, HeaderLimits, Tensor, write_header};
use gradsync_cli::messages::Listener;
use gradsync_cli::output::{Destination, OutputError, OutputFile};
use gradsync_cli::text::shown;

/// Elements of every rank that are worked on at a time.
const PIECE_LEN: usize = 1 << 22;

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
    /// What the cost model finds fastest: gram up to some hundred ranks.
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

/// Why a reduction was refused or failed.
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
    /// What the program ends with.
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
        // Wide dtypes first, as the format's own writer has it: every tensor is then aligned in the file.
        let mut order: Vec<u32> = (0..ranks.tensors.len() as u32).collect();
        let size = |tensor: &u32| self.output_dtype(ranks.tensors.dtype(*tensor as usize)).size_bytes();
        order.sort_by_key(|tensor| std::cmp::Reverse(size(tensor)));
        let backend = backend::open(self.backend).map_err(ReduceError::Backend)?;
        let arenas = if self.is_tree() { Arena::of_all(&ranks)? } else { vec![] };
        let output = destination.open()?;
        let progress = self.progress_bar(&ranks);
        let reduction = Reduction { options: &self, ranks: &ranks, order: &order, arenas, backend, progress };
        let report = reduction.run(output)?;
        if let Some(names) = report.not_finite() {
            gradsync_cli::messages::say("warning", format_args!("the result is not finite in {names}"));
        }
        listener.print_by(|writer| if self.json { report.write_json(writer) } else { report.write_lines(writer) })?;
        Ok(())
    }

    fn is_tree(&self) -> bool {
        self.op == Op::Adasum && self.algorithm == AlgorithmChoice::Tree
    }

    fn output_dtype(&self, own: DType) -> DType {
        self.output_dtype.unwrap_or(own)
    }

    /// A bar over the bytes of all passes; indicatif draws it only if stderr is a terminal.
    fn progress_bar(&self, ranks: &Checkpoints) -> ProgressBar {
        let bytes: usize = ranks.tensors.iter().map(|tensor| tensor.bytes()).sum();
        let passes = match (self.op, self.algorithm) {
            (Op::Adasum, AlgorithmChoice::Tree) => ranks.len().ilog2() as usize + 1,
            (Op::Adasum, _) => 2,
            _ => 1,
        };
        let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        let bar = ProgressBar::new((bytes * ranks.len() * passes) as u64);
        bar.with_style(style.expect("the template is well-formed"))
    }
}

/// How the ranks combine: by one weight each, and along a tree where those weights alone would amplify rounding.
#[derive(Clone)]
struct Combination {
    weights: Vec<f64>,
    tree: Option<Trees>,
}

/// A reduction of checkpoints that are known to match.
struct Reduction<'a> {
    options: &'a Reduce,
    ranks: &'a Checkpoints,
    /// In which the tensors are written.
    order: &'a [u32],
    /// For the tree.
    arenas: Vec<Arena<'a>>,
    backend: Box<dyn Backend>,
    progress: ProgressBar,
}

impl<'a> Reduction<'a> {
    fn run(mut self, mut output: OutputFile) -> Result<Report<'a>, ReduceError> {
        let Self { options, ranks, order, .. } = self;
        let written = || {
            let tensors = order.iter().map(|&tensor| ranks.tensors.get(tensor as usize));
            tensors.map(|tensor| Tensor { dtype: options.output_dtype(tensor.dtype), ..tensor })
        };
        write_header(&mut output, ranks.metadata(), written)?;

        let shared = match (options.op, options.granularity) {
            (Op::Adasum, GranularityChoice::Whole) => Some(self.adasum(0..ranks.tensors.len())?),
            _ => None,
        };
        let (tensors, output_dtype) = (&ranks.tensors, options.output_dtype);
        let (coefficients, norms, finite) = Default::default();
        let mut found = Found { tensors, order, output_dtype, coefficients, norms, finite };
        for &tensor in order {
            let combination = match &shared {
                Some(combination) => combination.clone(),
                None => self.combination(tensor as usize)?,
            };
            let is_finite = self.combine(tensor as usize, combination, &mut output, &mut found)?;
            if options.fail_on_non_finite && !is_finite {
                let tensor = tensors.get(tensor as usize).name.to_owned();
                return Err(ReduceError::NotFinite { tensor, output: options.output.clone() });
            }
        }
        output.finish()?;
        self.progress.finish_and_clear();

        let algorithm = match (options.op, options.algorithm) {
            (Op::Adasum, AlgorithmChoice::Tree) => Some("tree"),
            (Op::Adasum, _) => Some("gram"),
            _ => None,
        };
        let op = match options.op {
            Op::Sum => "sum",
            Op::Mean => "mean",
            Op::Adasum => "adasum",
        };
        Ok(Report { op, algorithm, backend: self.backend.name(), ranks: ranks.len(), tensors: found })
    }

    /// How the ranks combine in one tensor.
    fn combination(&mut self, tensor: usize) -> Result<Combination, ReduceError> {
        let ranks = self.ranks.len();
        match self.options.op {
            Op::Sum | Op::Mean => Ok(Combination { weights: vec![1.0; ranks], tree: None }),
            Op::Adasum => self.adasum(tensor..tensor + 1),
        }
    }

    /// How Adasum combines some tensors taken as one vector.
    fn adasum(&mut self, tensors: Range<usize>) -> Result<Combination, ReduceError> {
        let ranks = self.ranks.len();
        if self.options.algorithm == AlgorithmChoice::Tree {
            return self.rounded_tree(tensors);
        }
        // Tensors taken as one vector may differ in dtype: the narrowest says what the result can hold.
        let own = || tensors.clone().map(|tensor| self.ranks.tensors.get(tensor));
        let is_double = own().all(|tensor| tensor.dtype == DType::F64);
        let criterion = Criterion::of(is_double, own().map(|tensor| tensor.len).sum());
        let mut gram = vec![0.0; adasum::products(ranks)];
        self.for_each_piece(tensors.clone(), |backend, vectors| {
            gram.iter_mut().zip(backend.gram(vectors)?).for_each(|(total, part)| *total += part);
            Ok(())
        })?;
        let found = cpu::coefficients_by(&gram, ranks, |_| criterion)?;
        if !found.cancelled[0] {
            return Ok(Combination { weights: found.weights, tree: None });
        }
        // The norms have lost their digits to cancellation: take the tree's way, from the vectors themselves. Such layers are
        // rare or short, and the passes over them run on the CPU whatever the backend, which has the same bits.
        let mut tree = match is_double {
            true => Trees::precise(ranks, vec![true], &gram)?,
            false => Trees::new(ranks, vec![true])?,
        };
        let mut weights = vec![1.0; ranks];
        for pair in adasum::pairs(ranks) {
            let mut sums = vec![0.0; tree.sums()];
            self.for_each_piece(tensors.clone(), |_, vectors| {
                let part = cpu::tree_dots(vectors, &[0..vectors[0].len()], &tree, pair)?;
                sums.iter_mut().zip(part).for_each(|(total, part)| *total += part);
                Ok(())
            })?;
            tree.set_pair(pair, &sums, &mut weights)?;
        }
        Ok(Combination { weights, tree: Some(tree) })
    }

    /// The same by the algorithm of that name.
    fn rounded_tree(&self, tensors: Range<usize>) -> Result<Combination, ReduceError> {
        let ranks = self.ranks.len();
        let layers: Vec<_> = self.arenas.iter().filter_map(|arena| Some((arena, arena.layer(&tensors)?))).collect();
        let (mut tree, mut weights) = (Trees::rounded(ranks, vec![true])?, vec![1.0; ranks]);
        for pair in adasum::pairs(ranks) {
            let mut sums = vec![0.0; tree.sums()];
            for (arena, layer) in &layers {
                let part = arena.sums(layer, &tree, pair, |bytes| self.progress.inc(bytes as u64))?;
                sums.iter_mut().zip(part).for_each(|(total, part)| *total += part);
            }
            tree.set_pair(pair, &sums, &mut weights)?;
        }
        Ok(Combination { weights, tree: Some(tree) })
    }

    /// Writes one tensor's weighted sum, and says whether it is finite.
    fn combine(
        &mut self,
        tensor: usize,
        combination: Combination,
        file: &mut OutputFile,
        found: &mut Found<'_>,
    ) -> Result<bool, ReduceError> {
        let Tensor { len, dtype, .. } = self.ranks.tensors.get(tensor);
        let dtype = self.options.output_dtype(dtype);
        let mut output = GradientBuffer::new(dtype, 1, [("output", [len.min(PIECE_LEN)])])?;
        let Combination { weights, tree } = combination;
        let factor = self.options.scale;
        // A mean is the sum divided, rounded once: its wide sums wait here. Everything else is one weighted sum.
        let divisor = if self.options.op == Op::Mean { self.ranks.len() as f64 } else { 1.0 };
        let mut wide = match divisor {
            1.0 => None,
            _ => Some(GradientBuffer::new(DType::F64, 1, [("wide", [len.min(PIECE_LEN)])])?),
        };
        let coefficients: Vec<f64> = weights.iter().map(|weight| weight / divisor * factor).collect();
        let (mut norm, mut finite) = (0.0f64, true);
        self.for_each_piece(tensor..tensor + 1, |backend, vectors| {
            let len = vectors[0].len();
            match (&tree, &mut wide) {
                (Some(tree), _) => {
                    let output = output.as_mut_slice().range_mut(0..len);
                    cpu::tree_combine(output, vectors, &[0..len], tree, factor)?;
                }
                (None, None) => backend.combine(&mut output, vectors, &coefficients)?,
                (None, Some(wide)) => {
                    backend.combine(wide, vectors, &weights)?;
                    let sums = wide.tensor_mut(0).into_data().typed::<f64>().expect("made as f64");
                    sums.iter_mut().for_each(|sum| *sum = *sum / divisor * factor);
                    cpu::cast(output.as_mut_slice().range_mut(0..len), wide.as_slice().range(0..len))?;
                }
            }
            let written = output.as_slice().range(0..len);
            norm = norm.hypot(piece_norm(written)?);
            finite &= cpu::all_finite(written);
            Ok(file.write(written.as_bytes())?)
        })?;
        found.coefficients.extend(coefficients);
        found.norms.push(norm);
        found.finite.push(finite);
        Ok(finite)
    }

    /// Calls `work` with every rank's elements of each piece of the tensors.
    fn for_each_piece(
        &mut self,
        tensors: Range<usize>,
        mut work: impl FnMut(&mut dyn Backend, &[Slice<'_>]) -> Result<(), ReduceError>,
    ) -> Result<(), ReduceError> {
        for tensor in tensors {
            let Tensor { len, dtype, .. } = self.ranks.tensors.get(tensor);
            for begin in (0..len).step_by(PIECE_LEN) {
                let range = begin..len.min(begin + PIECE_LEN);
                let mut copies: Vec<Option<GradientBuffer>> = (0..self.ranks.len()).map(|_| None).collect();
                let vectors = self.ranks.elements(tensor, range.clone(), &mut copies)?;
                work(self.backend.as_mut(), &vectors)?;
                self.progress.inc((range.len() * dtype.size_bytes() * vectors.len()) as u64);
                self.ranks.release(tensor, range);
            }
        }
        Ok(())
    }
}

/// The Euclidean norm, also where squares of finite values overflow: then of values scaled down by a power of two.
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
