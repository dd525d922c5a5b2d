//! Every collective with every dtype, in place and out of place, at aligned and unaligned addresses, with ranks in processes and in
//! threads.

mod groups;
mod integers;
mod options;
mod refusals;
mod scaling;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync_tests::array::Array;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::collectives::{Grid, OPS, inputs, patterns, reductions};
use gradsync_tests::suite::data_movement;

use crate::context::Context;
use crate::placed::OnDevice;
use crate::report::Report;

/// The communicator of the cases.
struct Cases<'c> {
    context: &'c Context,
    comm: &'c NcclCommunicator,
}

impl<'c> Cases<'c> {
    fn rank(&self) -> usize {
        self.context.rank
    }

    fn world_size(&self) -> usize {
        self.context.world_size
    }

    fn operands(&self) -> OnDevice<'c> {
        OnDevice { queue: &self.context.queue, comm: self.comm }
    }

    /// A vector of ordinary numbers for each rank; all ranks compute the same vectors.
    fn inputs(&self, format: Format, len: usize) -> Vec<Vec<f64>> {
        inputs(format, self.world_size(), len)
    }

    /// A vector of arbitrary bits for each rank, NaN with payloads among them; all ranks compute the same vectors.
    fn patterns(&self, format: Format, len: usize) -> Vec<Array> {
        patterns(format, self.world_size(), len)
    }
}

/// Every dtype, reduction and length.
const GRID: Grid<'_> =
    Grid { how: "", formats: &Format::ALL, ops: &OPS, lens: &[0, 1, 33, 257, 4097], shards: &[0, 1, 33, 257, 4097] };

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let cases = Cases { context, comm: &comm };
    reductions(&cases.operands(), GRID, report);
    scaling::run(&cases, GRID, report);
    let mut by_nccl = None;
    report.case("communicator, small sums by NCCL", || {
        by_nccl = Some(context.communicator(1, &context.options().with_low_latency_bytes(Some(0))));
    });
    if let Some(comm) = &by_nccl {
        let (cases, grid) = (Cases { context, comm }, Grid { how: " by NCCL", shards: &[], ..GRID });
        reductions(&cases.operands(), grid, report);
        scaling::run(&cases, grid, report);
    }
    data_movement::run(&cases.operands(), GRID, report);
    integers::run(&cases, report);
    groups::run(&cases, report);
    options::run(&cases, report);
    refusals::run(&cases, report);
}

pub(crate) fn run_large(context: &Context, report: &mut Report) {
    const LEN: usize = (1 << 20) + 3;
    let Some(comm) = context.first(report) else { return };
    let (cases, shards) = (Cases { context, comm: &comm }, [LEN.div_ceil(context.world_size)]);
    let grid = Grid { lens: &[LEN], shards: &shards, ..GRID };
    reductions(&cases.operands(), grid, report);
    data_movement::run(&cases.operands(), grid, report);
}

/// Runs some of the cases. Ranks that are threads of one process share NCCL's library, the driver and the kernels.
pub(crate) fn run_threads(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let cases = Cases { context, comm: &comm };
    let lens = &[0, 257, 4097];
    let grid = Grid { formats: &[Format::F32, Format::BF16], lens, shards: lens, ..GRID };
    reductions(&cases.operands(), grid, report);
    data_movement::run(&cases.operands(), grid, report);
    groups::run(&cases, report);
    options::of_threads(&cases, report);
    refusals::run(&cases, report);
}
