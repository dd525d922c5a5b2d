//! Adasum on GPUs, compared with the oracle, and with the CPU's Adasum on the same inputs, by ranks in processes and in threads.

#[path = "../../adasum/case.rs"]
#[allow(dead_code)] // the CPU's tests ask more of a case
mod case;
mod device;
mod gaps;
mod grid;
mod known;
mod large;
mod layouts;
mod loose;
mod nodes;
mod nonfinite;
#[path = "../../adasum/on_nodes.rs"]
mod on_nodes;
mod on_one_gpu;
mod queued;
mod refusals;

use gradsync::comm::Ranks;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::driver::Queue;
use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use crate::context::Context;
use crate::report::Report;
use case::Case;
use device::{Runner, Way};

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
        // The tree is computed over the transport alone; in a world of one, there is one path.
        let has_tree = self.runner.way == Way::Transport || self.world_size() == 1;
        if has_tree && self.world_size().is_power_of_two() {
            &[Algorithm::Gram, Algorithm::Tree]
        } else {
            &[Algorithm::Gram]
        }
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

/// The communicator of a suite; its creation is the first case.
fn communicator(context: &Context, report: &mut Report) -> Option<NcclCommunicator> {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.communicator(0, &context.options())));
    comm
}

/// The same tensors give the same bits in every layout.
pub(crate) fn run_layouts(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    layouts::run(context, &comm, report);
}

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    for cases in Cases::new(context, &comm).each_way() {
        grid::run(&cases, report);
        known::run(&cases, report);
        nonfinite::run(&cases, report);
        gaps::run(&cases, report);
        loose::run(&cases, report);
    }
    queued::run(context, report);
    refusals::run(&Cases::new(context, &comm), report);
}

/// Runs some of the cases. Ranks that are threads of one process share NCCL's library, the driver and the kernels.
pub(crate) fn run_threads(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let formats = &[Format::F32, Format::BF16];
    let kinds = &[Kind::Random, Kind::NearlyOpposite(1e-6)];
    for cases in (Cases { formats, kinds, ..Cases::new(context, &comm) }).each_way() {
        grid::run(&cases, report);
    }
    queued::run(context, report);
}

/// Adasum of random layers over any communicator, on each path, for suites about other subjects.
pub(crate) fn check_random(queue: &Queue, comm: &NcclCommunicator) {
    let world_size = comm.world_size();
    for &way in Way::all(world_size) {
        let case = Case::of(Kind::Random, Format::F32, world_size, &grid::SHAPES, world_size as u64);
        Runner { queue, comm, way }.check(&case.with(Algorithm::Gram, Granularity::Tensor), "random layers");
    }
}
