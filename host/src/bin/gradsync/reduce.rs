//! `gradsync reduce`: sum, mean or Adasum of the checkpoints of several ranks.
//!
//! Inputs are mapped and read piece by piece, so that memory use does not grow with their size. Every check of the inputs comes
//! before the output is begun.

use std::ops::Range;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use gradsync::kernels::cpu::{self, Trees};
use gradsync::{DType, GradientBuffer, Slice};
use gradsync_device::math::adasum::{self, Criterion};
use indicatif::{ProgressBar, ProgressStyle};

use crate::backend::{self, Backend, BackendChoice};
use crate::checkpoint::{Checkpoint, FileError, Tensor, Writer, check_output};
use crate::print;
use crate::report::{Report, TensorReport};

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
    /// Weights level by level from the combined tensors themselves; powers of two.
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
    /// Print one JSON object instead of lines.
    #[arg(long)]
    json: bool,
    /// The file to write.
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
    Gradsync(#[from] gradsync::Error),
    #[error("standard output: {0}")]
    Stdout(#[from] std::io::Error),
    #[error("--backend cuda: {0}")]
    Backend(String),
    #[error("--scale {0} is not finite")]
    Scale(f64),
    #[error("--algorithm tree needs a power of two of inputs, and there are {0}")]
    NotPowerOfTwo(usize),
}

impl Reduce {
    pub(crate) fn run(mut self) -> Result<(), ReduceError> {
        if !self.scale.is_finite() {
            return Err(ReduceError::Scale(self.scale));
        }
        if self.op == Op::Adasum && self.algorithm == AlgorithmChoice::Tree && !self.inputs.len().is_power_of_two() {
            return Err(ReduceError::NotPowerOfTwo(self.inputs.len()));
        }
        self.output = check_output(&self.output, &self.inputs)?;
        let mut ranks = self.inputs.iter().map(|path| Checkpoint::open(path)).collect::<Result<Vec<_>, _>>()?;
        let (first, others) = ranks.split_first_mut().expect("clap requires an input");
        others.iter_mut().try_for_each(|other| other.match_to(first))?;
        let backend = backend::open(self.backend).map_err(ReduceError::Backend)?;
        let report = Reduction { options: &self, ranks: &ranks, backend, progress: ProgressBar::hidden() }.run()?;
        let json = || serde_json::to_string(&report).expect("a report is plain data") + "\n";
        Ok(print(&if self.json { json() } else { report.lines() })?)
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
    ranks: &'a [Checkpoint],
    backend: Box<dyn Backend>,
    progress: ProgressBar,
}

impl Reduction<'_> {
    fn run(mut self) -> Result<Report, ReduceError> {
        let tensors = &self.ranks[0].tensors;
        let output_dtype = |tensor: &Tensor| self.options.output_dtype.unwrap_or(tensor.dtype);
        // Wide dtypes first, as the format's own writer has it: every tensor is then aligned in the file.
        let mut order: Vec<usize> = (0..tensors.len()).collect();
        order.sort_by_key(|&tensor| std::cmp::Reverse(output_dtype(&tensors[tensor]).size_bytes()));
        let headers = order.iter().map(|&tensor| {
            let tensor = &tensors[tensor];
            (tensor.name.clone(), output_dtype(tensor), tensor.shape.clone())
        });
        let mut writer = Writer::create(&self.options.output, self.ranks[0].metadata.clone(), headers)?;

        self.progress = self.progress_bar(tensors);
        let shared = match (self.options.op, self.options.granularity) {
            (Op::Adasum, GranularityChoice::Whole) => Some(self.adasum(0..tensors.len())?),
            _ => None,
        };
        let mut reports = Vec::with_capacity(tensors.len());
        for &tensor in &order {
            let combination = match &shared {
                Some(combination) => combination.clone(),
                None => self.combination(tensor)?,
            };
            reports.push(self.combine(tensor, output_dtype(&tensors[tensor]), combination, &mut writer)?);
        }
        writer.finish()?;
        self.progress.finish_and_clear();

        let algorithm = match (self.options.op, self.options.algorithm) {
            (Op::Adasum, AlgorithmChoice::Tree) => Some("tree"),
            (Op::Adasum, _) => Some("gram"),
            _ => None,
        };
        let op = match self.options.op {
            Op::Sum => "sum",
            Op::Mean => "mean",
            Op::Adasum => "adasum",
        };
        Ok(Report { op, algorithm, backend: self.backend.name(), ranks: self.ranks.len(), tensors: reports })
    }

    /// A bar over the bytes of all passes; indicatif draws it only if stderr is a terminal.
    fn progress_bar(&self, tensors: &[Tensor]) -> ProgressBar {
        let bytes: usize = tensors.iter().map(|tensor| tensor.len * tensor.dtype.size_bytes()).sum();
        let passes = if self.options.op == Op::Adasum { 2 } else { 1 };
        let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        let bar = ProgressBar::new((bytes * self.ranks.len() * passes) as u64);
        bar.with_style(style.expect("the template is well-formed"))
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
        let mut gram = Vec::new();
        let own = &self.ranks[0].tensors[tensors.clone()];
        // Tensors taken as one vector may differ in dtype: the narrowest says what the result can hold.
        let is_double = own.iter().all(|tensor| tensor.dtype == DType::F64);
        let criterion = Criterion::of(is_double, own.iter().map(|tensor| tensor.len).sum());
        if self.options.algorithm != AlgorithmChoice::Tree {
            gram = vec![0.0; adasum::products(ranks)];
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
        }
        let mut tree = match gram.is_empty() || !is_double {
            true => Trees::new(ranks, vec![true])?,
            false => Trees::precise(ranks, vec![true], &gram)?,
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

    /// Writes one tensor's weighted sum.
    fn combine(
        &mut self,
        tensor: usize,
        dtype: DType,
        combination: Combination,
        writer: &mut Writer,
    ) -> Result<TensorReport, ReduceError> {
        let Tensor { name, shape, len, .. } = self.ranks[0].tensors[tensor].clone();
        let mut output = GradientBuffer::new(dtype, 1, [("output", [len.min(PIECE_LEN)])])?;
        let Combination { weights, tree } = combination;
        let factor = self.options.scale;
        // A mean is the sum divided, rounded once: its wide sums wait here. Everything else is one weighted sum.
        let divisor = if self.options.op == Op::Mean { self.ranks.len() as f64 } else { 1.0 };
        let wide_len = if divisor == 1.0 { 0 } else { output.tensor(0).data().len() };
        let mut wide = GradientBuffer::new(DType::F64, 1, [("wide", [wide_len])])?;
        let coefficients: Vec<f64> = weights.iter().map(|weight| weight / divisor * factor).collect();
        let (mut norm, mut finite) = (0.0f64, true);
        self.for_each_piece(tensor..tensor + 1, |backend, vectors| {
            let len = vectors[0].len();
            match &tree {
                Some(tree) => {
                    let output = output.as_mut_slice().range_mut(0..len);
                    cpu::tree_combine(output, vectors, &[0..len], tree, factor)?;
                }
                None if divisor == 1.0 => backend.combine(&mut output, vectors, &coefficients)?,
                None => {
                    backend.combine(&mut wide, vectors, &weights)?;
                    let sums = wide.tensor_mut(0).into_data().typed::<f64>().expect("made as f64");
                    sums.iter_mut().for_each(|sum| *sum = *sum / divisor * factor);
                    cpu::cast(output.as_mut_slice().range_mut(0..len), wide.as_slice().range(0..len))?;
                }
            }
            let written = output.as_slice().range(0..len);
            norm = norm.hypot(piece_norm(written)?);
            finite &= cpu::all_finite(written);
            Ok(writer.write(written.as_bytes())?)
        })?;
        Ok(TensorReport { name, dtype: dtype.name(), shape, coefficients, norm, finite })
    }

    /// Calls `work` with every rank's elements of each piece of the tensors.
    fn for_each_piece(
        &mut self,
        tensors: Range<usize>,
        mut work: impl FnMut(&mut dyn Backend, &[Slice<'_>]) -> Result<(), ReduceError>,
    ) -> Result<(), ReduceError> {
        for tensor in tensors {
            let Tensor { len, dtype, .. } = self.ranks[0].tensors[tensor];
            for begin in (0..len).step_by(PIECE_LEN) {
                let range = begin..len.min(begin + PIECE_LEN);
                let mut copies: Vec<Option<GradientBuffer>> = self.ranks.iter().map(|_| None).collect();
                let vectors = self
                    .ranks
                    .iter()
                    .zip(&mut copies)
                    .map(|(rank, copy)| rank.elements(tensor, range.clone(), copy))
                    .collect::<gradsync::Result<Vec<_>>>()?;
                work(self.backend.as_mut(), &vectors)?;
                self.ranks.iter().for_each(|rank| rank.release(tensor, range.clone()));
                self.progress.inc((range.len() * dtype.size_bytes() * vectors.len()) as u64);
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
