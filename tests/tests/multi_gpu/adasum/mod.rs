//! Adasum on GPUs: held against the oracle, and against the CPU's own on the same inputs, by ranks in processes and in threads.

#[path = "../../adasum/case.rs"]
#[allow(dead_code)] // the CPU's tests ask more of a case
mod case;
mod device;
mod grid;
mod known;
mod large;
mod nonfinite;
mod queued;
mod refusals;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use crate::context::Context;
use crate::report::Report;
use case::Case;

pub(crate) use large::run as run_large;

/// What the cases of a suite share.
struct Cases<'c> {
    context: &'c Context,
    comm: &'c NcclCommunicator,
    formats: &'static [Format],
    kinds: &'static [Kind],
}

impl Cases<'_> {
    fn world_size(&self) -> usize {
        self.context.world_size
    }

    /// Compares a case with the oracle and with the CPU; returns the layers of the result.
    fn check(&self, case: &Case, label: &str) -> Vec<Vec<f64>> {
        device::check(&self.context.queue, self.comm, case, label)
    }
}

/// The algorithms that take this many ranks.
fn algorithms(world_size: usize) -> &'static [Algorithm] {
    if world_size.is_power_of_two() { &[Algorithm::Gram, Algorithm::Tree] } else { &[Algorithm::Gram] }
}

/// The communicator of a suite; making it is its first case.
fn communicator(context: &Context, report: &mut Report) -> Option<NcclCommunicator> {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.communicator(0, &context.options())));
    comm
}

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let cases = Cases { context, comm: &comm, formats: &Format::ALL, kinds: &Kind::ADASUM };
    grid::run(&cases, report);
    known::run(&cases, report);
    nonfinite::run(&cases, report);
    queued::run(&cases, report);
    refusals::run(&cases, report);
}

/// A part of them: what ranks have in common as threads of one process is NCCL's library, the driver and their kernels.
pub(crate) fn run_threads(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let formats = &[Format::F32, Format::BF16];
    let cases = Cases { context, comm: &comm, formats, kinds: &[Kind::Random, Kind::NearlyOpposite(1e-6)] };
    grid::run(&cases, report);
    queued::run(&cases, report);
}

/// Random layers over any communicator, by every algorithm that it allows: for suites whose subject is something else.
pub(crate) fn check_random(context: &Context, comm: &NcclCommunicator, world_size: usize) {
    for &algorithm in algorithms(world_size) {
        let case = Case::of(Kind::Random, Format::F32, world_size, &grid::SHAPES, world_size as u64);
        device::check(&context.queue, comm, &case.with(algorithm, Granularity::Tensor), "random layers");
    }
}
