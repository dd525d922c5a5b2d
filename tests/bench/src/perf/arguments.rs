//! The command line of `cargo xtask perf`, with nccl-tests' option letters where it has them.
//!
//! This module measures nothing, and refuses only errors that the arguments alone show.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};
use gradsync::DType;
use gradsync::comm::ReduceOp;
use gradsync::internal::plan::cost::Scheme;
use gradsync::ops::Algorithm;

use super::PerfError;
use super::layers::Layers;
use super::nodes::OnNodes;
use super::operation::{Operation, Redop, Types};
use super::sizes::{Bytes, Stride, series};
use super::tensors::Model;

/// The usual number of GPUs in machines with NVLink.
const RANKS_PER_NODE: usize = 8;

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// GPUs if there are some, otherwise the CPU.
    Auto,
    /// The CPU, all cores.
    Cpu,
    /// GPUs; an error if there are none.
    Cuda,
}

/// The transport of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportChoice {
    /// Threads of this process, on host memory.
    Local,
    /// Processes of a launcher (torchrun's variables and GRADSYNC_SECRET) on host memory, without MPI; under mpirun, compared with `mpi`.
    Process,
    /// The processes of an MPI job, on host memory: start this program with mpirun.
    Mpi,
    /// The processes of an MPI job with a GPU each, on device memory; compared with the same calls on host memory.
    MpiDevice,
    /// NCCL, a GPU for each rank: the ranks of a launcher (torchrun's, Slurm's or MPI's variables), or else threads of this process.
    Nccl,
    /// Kernels that access the memory of the other ranks' GPUs.
    Peer,
}

impl TransportChoice {
    /// Whether ranks are processes that can share memory of the host.
    pub(crate) fn are_processes(self) -> bool {
        matches!(self, TransportChoice::Process | TransportChoice::Mpi)
    }

    /// Whether ranks are the processes of an MPI job.
    pub(crate) fn is_over_mpi(self) -> bool {
        matches!(self, TransportChoice::Mpi | TransportChoice::MpiDevice)
    }
}

/// The values of `-d`: a dtype, a pair of dtypes, or all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TypeChoice {
    All,
    One(DType),
    Pair(Types),
}

impl FromStr for TypeChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let dtype = |name: &str| match name {
            "float" => Ok(DType::F32),
            "double" => Ok(DType::F64),
            "half" => Ok(DType::F16),
            "bfloat16" => Ok(DType::BF16),
            name => name.parse::<DType>().ok().filter(|dtype| dtype.is_float()).ok_or_else(|| {
                format!("`{name}` is no dtype: expected f64, f32, f16, bf16, two of them as TO:FROM, or all")
            }),
        };
        Ok(match text.split_once(':') {
            None if text == "all" => TypeChoice::All,
            None => TypeChoice::One(dtype(text)?),
            Some((to, from)) => TypeChoice::Pair(Types { to: dtype(to)?, from: dtype(from)? }),
        })
    }
}

/// The values of `-o`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RedopChoice {
    Sum,
    #[value(alias = "avg")]
    Mean,
    Max,
    Min,
    /// All of them.
    All,
}

/// The algorithms of Adasum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AlgorithmChoice {
    /// The library's own choice.
    Auto,
    Gram,
    Tree,
    /// A Gram matrix inside each node, and one of nodes.
    #[value(name = "gram+gram")]
    TwoLevelGram,
    /// A Gram matrix inside each node, and the tree over nodes.
    #[value(name = "gram+tree")]
    GramThenTree,
    /// The sum inside each node, and a Gram matrix of nodes.
    #[value(name = "sum+gram")]
    SumThenGram,
    /// The sum inside each node, and the tree over nodes.
    #[value(name = "sum+tree")]
    SumThenTree,
}

/// The arguments of `cargo xtask perf`.
#[derive(Args)]
pub(crate) struct Perf {
    /// The operations to measure, or `all`
    #[arg(value_name = "OPERATION", required_unless_present = "tensors", value_parser = operations)]
    operations: Vec<Operations>,
    /// The smallest size: bytes, or with K, M, G
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "32M")]
    begin: Bytes,
    /// The largest size; equal to -b if left out
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE")]
    end: Option<Bytes>,
    /// Multiply sizes by this
    #[arg(short = 'f', long = "stepfactor", value_name = "FACTOR", conflicts_with = "step")]
    factor: Option<f64>,
    /// Add this to sizes; 1M if -f is left out too
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE")]
    step: Option<Bytes>,
    /// Iterations that count
    #[arg(short = 'n', long = "iters", value_name = "N", default_value_t = 20)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
    /// Warm-up iterations before the counted ones
    #[arg(short = 'w', long = "warmup_iters", value_name = "N", default_value_t = 5)]
    warm_ups: u32,
    /// Record this many calls in a CUDA graph, launch that for each iteration, and divide its time; 0 for none
    #[arg(short = 'G', long = "cudagraph", value_name = "N", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1024))]
    graph_calls: u32,
    /// Dtypes: f64, f32, f16, bf16, TO:FROM for cast, scale and accumulate, or all
    #[arg(short = 'd', long = "datatype", value_name = "DTYPE", value_delimiter = ',', default_value = "f32")]
    types: Vec<TypeChoice>,
    /// Reductions of all_reduce, reduce_scatter and reducer
    #[arg(short = 'o', long = "op", value_name = "OP", value_enum, value_delimiter = ',', default_value = "sum")]
    redops: Vec<RedopChoice>,
    /// Algorithms of adasum; algorithms of two levels use --ranks-per-node
    #[arg(long = "algorithm", value_name = "NAME", value_enum, value_delimiter = ',', default_value = "auto")]
    algorithms: Vec<AlgorithmChoice>,
    /// Tensors of adasum's vector, and of reducer's: a number of equal ones, or a model's tensors (resnet50, bert-large) in proportion
    #[arg(long, value_name = "N|MODEL", default_value = "32")]
    layers: Layers,
    /// Check results: 1, or 0 to leave it out
    #[arg(short = 'c', long = "check", value_name = "0|1", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// Numbers of ranks (for gram and combine, of vectors); all GPUs, or 4, if left out, and a launcher's number under one
    #[arg(short = 'g', long = "ranks", value_name = "N", value_delimiter = ',')]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks: Vec<u32>,
    /// Where to compute
    #[arg(long, value_name = "BACKEND", value_enum, value_delimiter = ',', default_value = "auto")]
    backend: Vec<BackendChoice>,
    /// What carries collectives; local for the CPU and nccl for GPUs if left out
    #[arg(long, value_name = "TRANSPORT", value_enum, value_delimiter = ',')]
    transport: Vec<TransportChoice>,
    /// Alternate between buffers of this total size; if left out, three times the L2 cache and at least two sets on GPUs, one on the CPU
    #[arg(long, value_name = "SIZE")]
    working_set: Option<Bytes>,
    /// Leave the baselines out
    #[arg(long)]
    no_baseline: bool,
    /// Compare kernels on GPUs with a kernel that does nothing, instead of a copy or a sweep
    #[arg(long, conflicts_with_all = ["tensors", "no_baseline"])]
    against_empty: bool,
    /// Compare adasum on GPUs with NCCL's sum, instead of the staged mode
    #[arg(long, conflicts_with_all = ["tensors", "no_baseline"])]
    against_sum: bool,
    /// The largest all-reduces over `nccl`, and adasum over `peer`, that are sent in packets; the library's choice if left out, 0 for none
    #[arg(long, value_name = "SIZE", conflicts_with = "tensors")]
    low_latency: Option<Bytes>,
    /// The largest of these all-reduces, and of adasum over `peer`, that are sent in one shot; the library's choice if left out
    #[arg(long, value_name = "SIZE", conflicts_with = "tensors")]
    one_shot: Option<Bytes>,
    /// Keep the gradients of all_reduce, adasum and reducer between processes of one machine in memory that all of them map
    #[arg(long, conflicts_with = "tensors")]
    shared_buffers: bool,
    /// The hardware's limit in GB/s of busbw, if the program cannot determine it
    #[arg(long, value_name = "GB/s", allow_negative_numbers = true)]
    limit: Option<f64>,
    /// Accumulate, cast and clear the tensors of a model instead, in one launch, with bf16 gradients and f32 sums
    #[arg(long, value_name = "MODEL", value_enum, conflicts_with_all = ["operations", "begin", "end", "factor", "step"])]
    #[arg(conflicts_with_all = ["types", "redops", "algorithms", "layers", "ranks", "transport"])]
    tensors: Option<Model>,
    /// Ranks of a node for algorithms of two levels; 8 if left out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    ranks_per_node: Option<u32>,
    /// End if a call makes no progress for so many seconds: work that hangs on a GPU has no end of its own
    #[arg(long, value_name = "SECONDS", default_value_t = 300.0)]
    deadline: f64,
    /// Write all results as JSON too; `-` is the standard output, and the table then goes to stderr
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One operation, or all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Operations(Vec<Operation>);

fn operations(text: &str) -> Result<Operations, String> {
    if text == "all" {
        return Ok(Operations(Operation::value_variants().to_vec()));
    }
    let names: Vec<_> = Operation::value_variants().iter().map(|operation| operation.name()).collect();
    let known = Operation::value_variants().iter().find(|operation| operation.name() == text);
    let known = known.ok_or_else(|| format!("no such operation: expected all, {}", names.join(", ")))?;
    Ok(Operations(vec![*known]))
}

/// The measurements that the arguments ask for.
pub(crate) struct Settings {
    pub(crate) operations: Vec<Operation>,
    pub(crate) sizes: Vec<usize>,
    pub(crate) counts: Counts,
    pub(crate) types: Vec<TypeChoice>,
    pub(crate) redops: Vec<ReduceOp>,
    /// The algorithms of Adasum.
    pub(crate) algorithms: Vec<Redop>,
    pub(crate) layers: Layers,
    /// Empty where the arguments leave it open.
    pub(crate) ranks: Vec<usize>,
    pub(crate) backend: Vec<BackendChoice>,
    pub(crate) transport: Vec<TransportChoice>,
    pub(crate) limit: Option<f64>,
    /// The model whose tensors are measured instead of `operations`.
    pub(crate) tensors: Option<Model>,
}

/// The numbers of iterations and the method of measuring.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) iterations: usize,
    pub(crate) warm_ups: usize,
    pub(crate) check: bool,
    pub(crate) baseline: bool,
    pub(crate) working_set: Option<usize>,
    /// Whether the baseline of kernels on GPUs is an empty kernel.
    pub(crate) against_empty: bool,
    /// Whether the baseline of Adasum on GPUs is NCCL's sum in every case.
    pub(crate) against_sum: bool,
    /// The largest all-reduces that are one launch of the library's kernels, in bytes.
    pub(crate) low_latency: Option<usize>,
    /// The largest vectors that are sent in one shot, in bytes.
    pub(crate) one_shot: Option<usize>,
    /// Whether gradients of processes are in memory that all of them map.
    pub(crate) shared_buffers: bool,
    /// Calls per CUDA graph; 0 means that no graph is recorded.
    pub(crate) graph_calls: usize,
}

impl Perf {
    fn per_node(&self) -> usize {
        self.ranks_per_node.map_or(RANKS_PER_NODE, |ranks| ranks as usize)
    }

    pub(crate) fn deadline(&self) -> Duration {
        Duration::from_secs_f64(self.deadline)
    }

    pub(crate) fn json(&self) -> Option<&PathBuf> {
        self.json.as_ref()
    }

    /// # Errors
    /// [`PerfError::Arguments`], which names the arguments that contradict each other.
    pub(crate) fn settings(&self) -> Result<Settings, PerfError> {
        let refuse = |reason: String| Err(PerfError::Arguments(reason));
        let (begin, end) = (self.begin.0, self.end.map_or(self.begin.0, |end| end.0));
        if end < begin {
            return refuse(format!("-e {end} is smaller than -b {begin}"));
        }
        let stride = match (self.factor, self.step) {
            (Some(factor), _) if !(factor > 1.0 && factor.is_finite()) => {
                return refuse(format!("-f {factor} does not make sizes grow"));
            }
            (_, Some(Bytes(0))) => return refuse("-i 0 does not make sizes grow".into()),
            (Some(factor), _) => Stride::Factor(factor),
            (None, step) => Stride::Step(step.map_or(1 << 20, |step| step.0)),
        };
        if !(self.deadline > 0.0 && self.deadline < 1e9) {
            return refuse(format!("--deadline {} is no number of seconds above 0", self.deadline));
        }
        if let Some(limit) = self.limit
            && !(limit > 0.0 && limit.is_finite())
        {
            return refuse(format!("--limit {limit} is no bandwidth"));
        }
        let mut operations: Vec<Operation> = Vec::new();
        for operation in self.operations.iter().flat_map(|some| &some.0) {
            if !operations.contains(operation) {
                operations.push(*operation);
            }
        }
        if let Some(TypeChoice::Pair(types)) = self.types.iter().find(|choice| matches!(choice, TypeChoice::Pair(_)))
            && let Some(operation) = operations.iter().find(|operation| !operation.takes_pairs())
        {
            let name = operation.name();
            return refuse(format!(
                "-d {}:{}: {name} has one dtype; cast, scale and accumulate have two",
                types.to, types.from
            ));
        }
        let are_processes = |transport: &TransportChoice| transport.are_processes();
        let have_buffers = [Operation::AllReduce, Operation::Adasum, Operation::Reducer]
            .iter()
            .any(|operation| operations.contains(operation));
        if self.shared_buffers && !(have_buffers && self.transport.iter().any(are_processes)) {
            let reason =
                "--shared-buffers: only all_reduce, adasum and reducer with --transport mpi or process have them";
            return refuse(reason.into());
        }
        let algorithms = algorithms(&self.algorithms, self.per_node());
        let is_in_nodes = |redop: &Redop| matches!(redop, Redop::OnNodes(_));
        let have_nodes = operations.contains(&Operation::Adasum) && algorithms.iter().any(is_in_nodes);
        if let (Some(ranks), false) = (self.ranks_per_node, have_nodes) {
            return refuse(format!("--ranks-per-node {ranks}: only --algorithm gram+gram and the like have nodes"));
        }
        Ok(Settings {
            operations,
            sizes: series(begin, end, stride),
            counts: Counts {
                iterations: self.iterations as usize,
                warm_ups: self.warm_ups as usize,
                check: self.check == 1,
                baseline: !self.no_baseline,
                working_set: self.working_set.map(|size| size.0),
                against_empty: self.against_empty,
                against_sum: self.against_sum,
                low_latency: self.low_latency.map(|size| size.0),
                one_shot: self.one_shot.map(|size| size.0),
                shared_buffers: self.shared_buffers,
                graph_calls: self.graph_calls as usize,
            },
            types: self.types.clone(),
            redops: redops(&self.redops),
            algorithms,
            layers: self.layers,
            ranks: self.ranks.iter().map(|&ranks| ranks as usize).collect(),
            backend: self.backend.clone(),
            transport: self.transport.clone(),
            limit: self.limit,
            tensors: self.tensors,
        })
    }
}

fn redops(choices: &[RedopChoice]) -> Vec<ReduceOp> {
    let mut ops = Vec::new();
    for choice in choices {
        ops.extend_from_slice(match choice {
            RedopChoice::Sum => &[ReduceOp::Sum][..],
            RedopChoice::Mean => &[ReduceOp::Mean],
            RedopChoice::Max => &[ReduceOp::Max],
            RedopChoice::Min => &[ReduceOp::Min],
            RedopChoice::All => &[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max, ReduceOp::Min],
        });
    }
    ops
}

fn algorithms(choices: &[AlgorithmChoice], per_node: usize) -> Vec<Redop> {
    let on_nodes = |scheme| Redop::OnNodes(OnNodes { scheme, per_node });
    let redop = |choice: &AlgorithmChoice| match choice {
        AlgorithmChoice::Auto => Redop::Adasum(Algorithm::Auto),
        AlgorithmChoice::Gram => Redop::Adasum(Algorithm::Gram),
        AlgorithmChoice::Tree => Redop::Adasum(Algorithm::Tree),
        AlgorithmChoice::TwoLevelGram => on_nodes(Scheme::TwoLevelGram),
        AlgorithmChoice::GramThenTree => on_nodes(Scheme::GramThenTree),
        AlgorithmChoice::SumThenGram => on_nodes(Scheme::SumThenGram),
        AlgorithmChoice::SumThenTree => on_nodes(Scheme::SumThenTree),
    };
    choices.iter().map(redop).collect()
}

impl TypeChoice {
    /// The dtypes of an operation's rows.
    pub(crate) fn of(self, operation: Operation) -> Vec<Types> {
        match self {
            TypeChoice::All if operation.takes_pairs() => {
                let pairs = DType::FLOATS.into_iter().flat_map(|to| DType::FLOATS.map(|from| Types { to, from }));
                pairs.collect()
            }
            TypeChoice::All => DType::FLOATS.map(Types::both).to_vec(),
            TypeChoice::One(dtype) => vec![Types::both(dtype)],
            TypeChoice::Pair(types) => vec![types],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_choice_takes_the_names_of_nccl_tests() {
        let types = |text: &str| text.parse::<TypeChoice>();
        assert_eq!(types("float"), Ok(TypeChoice::One(DType::F32)));
        assert_eq!(types("bf16"), types("bfloat16"));
        assert_eq!(types("f32:half"), Ok(TypeChoice::Pair(Types { to: DType::F32, from: DType::F16 })));
        assert!(types("f32:int8").is_err_and(|error| error.contains("int8")));
        assert_eq!(TypeChoice::All.of(Operation::Cast).len(), 16);
        assert_eq!(TypeChoice::All.of(Operation::Gram).len(), 4);
    }
}
