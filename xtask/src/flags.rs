//! The whole command line of `cargo xtask`, without any actions: each command's file adds `run` to its struct.

use std::{
    ffi::OsString,
    num::{NonZeroU64, NonZeroUsize},
    path::PathBuf,
};

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Repository tasks of gradsync.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
pub(crate) struct Xtask {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train with sum, mean and Adasum on 1 to 64 ranks, nine minutes on two cores, and write target/demo/report.html
    Demo(Demo),
    /// Make the study behind the demo: which reduction trains at which learning rate, on how many ranks; two hours of processor time
    Study(Study),
    /// Run every test that this machine can run, as CI does
    Test(Test),
    /// Run the tests with one rank per GPU, with every number of ranks that the GPUs here allow
    TestMultiGpu(TestMultiGpu),
    /// Compile device/ to PTX and write host/ptx/ and host/cubin/, or prove with --check that they are fresh
    Ptx(Ptx),
    /// Assemble host/ptx/ for every supported architecture; report registers, fail on spills and where host/cubin/ differs
    Ptxas(Ptxas),
    /// Pack the tests for one and for several GPUs, and a runner, into a folder that runs on a machine without Rust
    Bundle(Bundle),
    /// Measure operations and their baselines, as nccl-tests does; --help explains the arguments
    Perf(Perf),
    /// Measure an operation beside another implementation: Horovod's Adasum, Gloo's all-reduce, PyTorch's foreach functions
    Compare(Compare),
}

/// The one flag that every command with a set-up has.
#[derive(Debug, Default, Args)]
pub(crate) struct Setup {
    /// Install nothing: print the commands that would, and fail if something is missing
    #[arg(long)]
    pub(crate) no_install: bool,
}

#[derive(Debug, Args)]
pub(crate) struct Demo {
    #[command(flatten)]
    pub(crate) setup: Setup,
}

#[derive(Debug, Args)]
pub(crate) struct Study {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// Make a few short runs that only check that everything works
    #[arg(long)]
    pub(crate) quick: bool,
    /// Numbers of ranks instead of the study's, separated by commas; 1 is always included
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) ranks: Vec<usize>,
    /// Seeds for the figures instead of the study's, separated by commas, at least 3, below 100
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    pub(crate) seeds: Vec<u64>,
    /// Runs at a time: the processor's threads if left out
    #[arg(long, value_name = "N")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Start no run after this much time; the next call continues the study
    #[arg(long, value_name = "SECONDS")]
    pub(crate) within: Option<u64>,
    /// Publish the runs: copy them to tests/measured/convergence, and write their tables and charts into the documentation
    #[arg(long, conflicts_with_all = ["quick", "ranks", "seeds"])]
    pub(crate) publish: bool,
    /// Build a folder for another machine, and run nothing: the program, the data, and `./run`, which takes these flags
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["quick", "ranks", "seeds", "threads", "within", "publish"])]
    pub(crate) bundle: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Test {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// Run this stage only (may be repeated)
    #[arg(long, value_name = "STAGE", value_enum)]
    pub(crate) only: Vec<Stage>,
}

/// A stage of `cargo xtask test`, in the order in which they run: cheap ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Stage {
    /// cargo fmt --check
    Fmt,
    /// The house rules, which are xtask's own tests
    Tidy,
    /// host/ptx/ agrees with device/, and host/cubin/ with host/ptx/
    Ptx,
    /// ptxas accepts every PTX file, without spills, and makes host/cubin/ of them
    Ptxas,
    /// Clippy, for every feature set, warnings as errors
    Clippy,
    /// device/ compiles against rust-cuda's own cuda_std, and our replacements have its signatures
    Dialect,
    /// Documentation, warnings as errors
    Docs,
    /// Licences, sources and versions of dependencies, by deny.toml
    Deny,
    /// Unit, property, rank and documentation tests
    Tests,
    /// The MPI transport, under mpirun with 2, 3, 4 and 8 ranks
    Mpi,
    /// The MPI transport on several machines, which are simulated by Linux namespaces
    Nodes,
    /// The MPI transport built for MPI's standard ABI, on MPICH, on one machine and on several; runs only if it is named
    MpiAbi,
    /// The demo's own tests and a short training
    Demo,
    /// The crates are checked for macOS, Windows and Linux on aarch64, warnings as errors
    Systems,
    /// The published crates are packed, and a crate outside the workspace builds on them with each feature
    Downstream,
    /// The GPU tests: the tests on one GPU, then test-multi-gpu
    Gpu,
}

/// The flags that `--bundle` excludes, because it runs nothing.
const RUNS: [&str; 8] = ["ranks", "ranks_per_gpu", "nodes", "no_mps", "suite", "prebuilt", "sanitizer", "deadline"];

#[derive(Debug, Default, Args)]
pub(crate) struct TestMultiGpu {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// Only with this many ranks, instead of every number that a suite lists
    #[arg(long, value_name = "N")]
    pub(crate) ranks: Option<NonZeroUsize>,
    /// Put this many consecutive ranks on each GPU: by CUDA MPS if it is installed, else by time-slicing (needs NCCL 2.30)
    #[arg(long, value_name = "N")]
    pub(crate) ranks_per_gpu: Option<NonZeroUsize>,
    /// Make NCCL and gradsync treat the ranks as ranks of this many nodes, which exchange data by network
    #[arg(long, value_name = "M")]
    pub(crate) nodes: Option<NonZeroUsize>,
    /// Time-slice the ranks on one GPU, even if CUDA MPS is installed
    #[arg(long, requires = "ranks_per_gpu")]
    pub(crate) no_mps: bool,
    /// Only this suite (may be repeated)
    #[arg(long, value_name = "NAME")]
    pub(crate) suite: Vec<String>,
    /// Build the programs for a machine with GPUs into this folder, as `cargo xtask bundle` does, and run nothing
    #[arg(long, value_name = "FOLDER", conflicts_with_all = RUNS)]
    pub(crate) bundle: Option<PathBuf>,
    /// Run the programs of this folder, which was made with --bundle: needs neither Rust nor the sources
    #[arg(long, value_name = "FOLDER")]
    pub(crate) prebuilt: Option<PathBuf>,
    /// Start every rank under this tool of compute-sanitizer
    #[arg(long, value_name = "TOOL", value_enum)]
    pub(crate) sanitizer: Option<Sanitizer>,
    /// Kill every launch that takes longer, instead of at its suite's deadline
    #[arg(long, value_name = "SECONDS")]
    pub(crate) deadline: Option<NonZeroU64>,
}

/// A tool of compute-sanitizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sanitizer {
    /// Accesses outside of allocations
    Memcheck,
    /// Races in shared memory
    Racecheck,
    /// Reads of uninitialised memory
    Initcheck,
}

#[derive(Debug, Args)]
pub(crate) struct Ptx {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// Write nothing; fail if host/ptx/ differs from the output for device/, or host/cubin/ was made from other files
    #[arg(long)]
    pub(crate) check: bool,
    /// Compile with little optimisation, for reading the PTX; only with --copy-to
    #[arg(long, requires = "copy_to")]
    pub(crate) debug: bool,
    /// Put the compiler's unsplit PTX into this folder, and leave host/ptx/ alone
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    pub(crate) copy_to: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Ptxas {
    #[command(flatten)]
    pub(crate) setup: Setup,
}

#[derive(Debug, Args)]
pub(crate) struct Bundle {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// Where to put it
    #[arg(long, value_name = "FOLDER", default_value = "target/bundle")]
    pub(crate) output: PathBuf,
    /// Pack an NCCL too, from PyPI, with the code for some GPUs only
    #[arg(long)]
    pub(crate) nccl: bool,
    /// An architecture that this NCCL has code for (may be repeated)
    #[arg(long, value_name = "sm_NN", value_parser = architecture, requires = "nccl", default_value = "sm_90")]
    pub(crate) arch: Vec<u32>,
}

/// The number in an architecture's name.
fn architecture(name: &str) -> Result<u32, String> {
    let number = name.strip_prefix("sm_").and_then(|number| number.parse().ok());
    number.ok_or_else(|| format!("an architecture is called sm_90, for example, and not {name}"))
}

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Perf {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// Start it as this many processes of an MPI job on this machine
    #[arg(long, value_name = "N")]
    pub(crate) processes: Option<NonZeroUsize>,
    /// The arguments of `gradsync-bench perf`
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<OsString>,
}

#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Compare {
    #[command(flatten)]
    pub(crate) setup: Setup,
    /// horovod, gloo or pytorch
    #[arg(value_name = "PEER")]
    pub(crate) peer: String,
    /// Further arguments of `gradsync-bench compare`: --quick, --json FILE, --help
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<OsString>,
}
