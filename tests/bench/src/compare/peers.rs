//! The implementations beside which gradsync is measured: what is compared, and the commands of both sides.

use std::env;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use gradsync::DType;
use gradsync::comm::ReduceOp;
use gradsync::ops::Algorithm;

use crate::mpirun;
use crate::perf::arguments::TransportChoice;
use crate::perf::layers::Layers;
use crate::perf::operation::{Operation, Redop, Row, Types};
use crate::perf::plan::Place;
use crate::perf::record::BaselineName;
use crate::perf::tensors::{self, Model};

const RANKS: [usize; 3] = [2, 4, 8];
const GLOO: &str = include_str!("gloo.py");
const FOREACH: &str = include_str!("foreach.py");

/// The implementation to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    /// Horovod's Adasum of MPI processes; Horovod has none for bf16.
    Horovod,
    /// PyTorch's all-reduce of processes over Gloo, where PyTorch is installed.
    Gloo,
    /// PyTorch's sums and casts of a model's tensors on a GPU, where PyTorch is installed.
    Pytorch,
}

impl Peer {
    /// Fails if the peer or its launcher is not here.
    pub(super) fn find(self) -> Result<()> {
        let needed = match self {
            Peer::Horovod => return mpirun::find().map_err(anyhow::Error::msg),
            Peer::Gloo => "import torch.distributed as d; assert d.is_gloo_available()",
            Peer::Pytorch => "import torch; assert torch.cuda.is_available()",
        };
        let output = python().args(["-c", needed]).output().with_context(|| format!("cannot start {:?}", python()))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let why = text.lines().last().unwrap_or("no answer");
            bail!("{:?} has no PyTorch for this: {why} (the variable PYTHON names another Python)", python());
        }
        Ok(())
    }

    pub(super) fn name(self) -> BaselineName {
        match self {
            Peer::Horovod => BaselineName { column: "Horovod", full: "Horovod's Adasum" },
            Peer::Gloo => BaselineName { column: "Gloo", full: "PyTorch's all-reduce over Gloo" },
            Peer::Pytorch => BaselineName { column: "PyTorch", full: "PyTorch's foreach functions" },
        }
    }

    pub(super) fn place(self) -> Place {
        match self {
            Peer::Horovod => Place::Ranks(TransportChoice::Mpi),
            Peer::Gloo => Place::Ranks(TransportChoice::Process),
            Peer::Pytorch => Place::Cuda,
        }
    }

    /// Whether gradients lie in memory that all ranks map, for each of gradsync's sides.
    pub(super) fn memories(self) -> &'static [bool] {
        if self == Peer::Horovod { &[true, false] } else { &[false] }
    }

    /// All rows; `is_quick` leaves the large ones out.
    pub(super) fn rows(self, is_quick: bool) -> Vec<Row> {
        let mut rows = Vec::new();
        match self {
            Peer::Horovod => {
                let dtypes: &[DType] = if env::consts::ARCH == "x86_64" {
                    &[DType::F32, DType::F64, DType::F16]
                } else {
                    // Horovod's Adasum of f16 is written for x86-64.
                    &[DType::F32, DType::F64]
                };
                for ranks in RANKS {
                    // Eight processes with vectors of 64 MiB would need gigabytes.
                    let large = if ranks > 4 { 16 << 20 } else { 64 << 20 };
                    for bytes in [64 << 10, 1 << 20, large].into_iter().filter(|&bytes| is_small(bytes, is_quick)) {
                        let redop = Redop::Adasum(Algorithm::Auto);
                        rows.extend(dtypes.iter().map(|&dtype| row(Operation::Adasum, redop, dtype, ranks, bytes)));
                    }
                }
            }
            Peer::Gloo => {
                for ranks in RANKS {
                    let sizes = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
                    let sizes = sizes.into_iter().filter(|&bytes| is_small(bytes, is_quick));
                    let redop = Redop::Reduce(ReduceOp::Sum);
                    rows.extend(sizes.map(|bytes| row(Operation::AllReduce, redop, DType::F32, ranks, bytes)));
                }
            }
            Peer::Pytorch => {
                for &model in if is_quick { &[Model::Resnet50][..] } else { &[Model::Resnet50, Model::BertLarge] } {
                    for operation in [Operation::Accumulate, Operation::Cast, Operation::AdamwStep] {
                        let (types, len) = (tensors::types(operation), model.lens().iter().sum());
                        let layers = Layers::Of(model);
                        rows.push(Row { operation, types, redop: Redop::None, ranks: 1, len, layers });
                    }
                }
            }
        }
        rows
    }

    /// The peer's command; `program` is Horovod's rank program.
    pub(super) fn theirs(
        self,
        program: Option<&Path>,
        row: &Row,
        [warm_ups, iterations]: [usize; 2],
    ) -> Result<Command> {
        let counts = [warm_ups.to_string(), iterations.to_string()];
        let mut command = match self {
            Peer::Horovod => {
                let mut command =
                    Command::new(program.context("`cargo xtask compare horovod` compiles its --program")?);
                command.args([row.types.to.name(), &row.bytes().to_string()]);
                command
            }
            Peer::Gloo => {
                let mut command = python();
                command.args(["-c", GLOO, &row.bytes().to_string()]);
                command
            }
            Peer::Pytorch => {
                let mut command = python();
                command.args(["-c", FOREACH, row.operation.name()]);
                command
            }
        };
        command.args(counts);
        if self == Peer::Pytorch {
            command.args(row.layers.lens(row.len).iter().map(usize::to_string));
        }
        Ok(command)
    }

    /// gradsync's command, which prints the JSON of `perf`.
    pub(super) fn ours(self, row: &Row, is_shared: bool, [warm_ups, iterations]: [usize; 2]) -> Result<Command> {
        let mut command = Command::new(env::current_exe().context("cannot find this program")?);
        command.args(["perf", "--no-baseline", "--json", "-"]);
        command.args(["-w", &warm_ups.to_string(), "-n", &iterations.to_string()]);
        match (self, row.layers) {
            (Peer::Horovod, _) => command.args(["adasum", "--transport", "mpi", "--layers", "1"]),
            (_, Layers::Of(model)) => command.args(["--backend", "cuda", "--tensors", model.argument()]),
            _ => command.args(["all_reduce", "--transport", "process", "--backend", "cpu"]),
        };
        if self != Peer::Pytorch {
            command.args(["-d", row.types.to.name(), "-b", &row.bytes().to_string()]);
        }
        command.args(is_shared.then_some("--shared-buffers"));
        Ok(command)
    }
}

/// Whether `--quick` keeps rows of this size.
fn is_small(bytes: usize, is_quick: bool) -> bool {
    bytes <= 1 << 20 || !is_quick
}

fn row(operation: Operation, redop: Redop, dtype: DType, ranks: usize, bytes: usize) -> Row {
    let len = bytes / dtype.size_bytes();
    Row { operation, types: Types::both(dtype), redop, ranks, len, layers: Layers::Equal(1) }
}

/// The Python that the variable PYTHON names, or `python3`.
fn python() -> Command {
    Command::new(env::var_os("PYTHON").unwrap_or_else(|| "python3".into()))
}
