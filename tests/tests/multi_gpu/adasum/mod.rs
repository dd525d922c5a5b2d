//! Adasum on GPUs, compared with the oracle, and with the CPU's Adasum on the same inputs, by ranks in processes and in threads.

mod against_oracle;
mod device;
mod gaps;
mod in_succession;
mod large;
mod layout_independence;
mod nodes;
mod on_one_gpu;
mod out_of_range;
mod refusals;
mod separate_tensors;

use gradsync::comm::Ranks;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::driver::Queue;
use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use crate::context::Context;
use crate::report::Report;
use device::{Runner, Way};
use gradsync_tests::suite::adasum::case::Case;
use gradsync_tests::suite::adasum::known::{self, Runner as _};

pub(crate) use large::run as run_large;
pub(crate) use nodes::{run as run_nodes, run_over as run_nodes_over};
pub(crate) use on_one_gpu::{
    ENVIRONMENT as ONE_GPU, ENVIRONMENT_PTX as ONE_GPU_PTX, run as run_on_one_gpu, run_from_ptx as run_on_one_gpu_ptx,
};

/// The context that the cases of a suite share.
struct Cases<'c> {
    context: &'c Context,
    runner: Runner<'c>,
    formats: &'static [Format],
    kinds: &'static [Kind],
}

impl<'c> Cases<'c> {
    fn new(context: &'c Context, comm: &'c NcclCommunicator) -> Self {
        let runner = Runner { queue: &context.queue, comm, way: Way::Peers };
        Cases { context, runner, formats: &Format::ALL, kinds: &Kind::ADASUM }
    }

    fn world_size(&self) -> usize {
        self.context.world_size
    }

    /// The algorithms that support this world size and depend on the path.
    fn algorithms(&self) -> &'static [Algorithm] {
        self.runner.algorithms(self.world_size())
    }

    /// The name of a case that runs on each path.
    fn name(&self, name: &str) -> String {
        match self.runner.way {
            Way::Peers => name.to_lowercase(),
            Way::OneShot => format!("{}, in one shot", name.to_lowercase()),
            Way::TwoShots => format!("{}, in two shots", name.to_lowercase()),
            Way::Transport => format!("{}, over NCCL", name.to_lowercase()),
        }
    }

    /// These cases on each path.
    fn each_way(self) -> impl Iterator<Item = Cases<'c>> {
        let Cases { context, runner, formats, kinds } = self;
        Way::all(context.world_size).iter().map(move |&way| {
            let runner = Runner { way, ..runner };
            Cases { context, runner, formats, kinds }
        })
    }
}

/// The same tensors give the same bits in every layout.
pub(crate) fn run_layouts(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    layout_independence::run(context, &comm, report);
}

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    for cases in Cases::new(context, &comm).each_way() {
        against_oracle::run(&cases, report);
        known::run(&cases.runner, cases.world_size(), |name| cases.name(name), report);
        out_of_range::run(&cases, report);
        gaps::run(&cases, report);
        separate_tensors::run(&cases, report);
    }
    in_succession::run(context, report);
    refusals::run(&Cases::new(context, &comm), report);
}

/// Runs some of the cases. Ranks that are threads of one process share NCCL's library, the driver and the kernels.
pub(crate) fn run_threads(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let formats = &[Format::F32, Format::BF16];
    let kinds = &[Kind::Random, Kind::NearlyOpposite(1e-6)];
    for cases in (Cases { formats, kinds, ..Cases::new(context, &comm) }).each_way() {
        against_oracle::run(&cases, report);
    }
    in_succession::run(context, report);
}

/// Adasum of random layers over any communicator, on each path, for suites about other subjects.
pub(crate) fn check_random(queue: &Queue, comm: &NcclCommunicator) {
    let world_size = comm.world_size();
    for &way in Way::all(world_size) {
        let case = Case::of(Kind::Random, Format::F32, world_size, &against_oracle::SHAPES, world_size as u64);
        Runner { queue, comm, way }.check(&case.with(Algorithm::Gram, Granularity::Tensor), "random layers");
    }
}
