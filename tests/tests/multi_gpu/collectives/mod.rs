//! Every collective with every dtype, in place and out of place, at aligned and unaligned addresses, with ranks in processes and in
//! threads.

mod groups;
mod integers;
mod moves;
mod options;
mod reductions;
mod refusals;
mod scaling;

use gradsync::comm::nccl::NcclCommunicator;
use gradsync_tests::array::Array;
use gradsync_tests::inputs::{Random, vector};
use gradsync_tests::oracle::Format;

use crate::context::Context;
use crate::report::Report;

/// The data and the communicator of the cases.
struct Cases<'c> {
    context: &'c Context,
    comm: &'c NcclCommunicator,
    /// What distinguishes the communicator, in the names of cases.
    how: &'static str,
    formats: &'static [Format],
    /// Lengths of whole vectors.
    lens: Vec<usize>,
    /// Lengths of shards; a rank has one shard, or one for every rank.
    shards: Vec<usize>,
}

/// The offsets of data in elements after an aligned address.
const BEGINS: [usize; 2] = [0, 1];

impl Cases<'_> {
    fn rank(&self) -> usize {
        self.context.rank
    }

    fn world_size(&self) -> usize {
        self.context.world_size
    }

    /// A vector of ordinary numbers for each rank; all ranks compute the same vectors.
    fn inputs(&self, format: Format, len: usize) -> Vec<Vec<f64>> {
        (0..self.world_size()).map(|rank| vector(format, len, (rank * 31 + len) as u64)).collect()
    }

    /// A vector of arbitrary bits for each rank, NaN with payloads among them; all ranks compute the same vectors.
    fn patterns(&self, format: Format, len: usize) -> Vec<Array> {
        let any = |rank: usize| {
            let mut random = Random::new((rank * 37 + len + 1) as u64);
            Array::from_patterns(format, (0..len).map(|_| random.bits()))
        };
        (0..self.world_size()).map(any).collect()
    }
}

/// Concatenates arrays.
fn concat(arrays: &[Array]) -> Array {
    Array::from_patterns(arrays[0].format(), arrays.iter().flat_map(Array::patterns))
}

/// A range of an array's elements.
fn part(array: &Array, range: std::ops::Range<usize>) -> Array {
    Array::from_patterns(array.format(), array.patterns()[range].iter().copied())
}

/// The communicator of a suite; its creation is the first case.
fn communicator(context: &Context, report: &mut Report) -> Option<NcclCommunicator> {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.communicator(0, &context.options())));
    comm
}

const LENS: [usize; 5] = [0, 1, 33, 257, 4097];

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let (formats, lens) = (&Format::ALL, LENS.to_vec());
    let cases = Cases { context, comm: &comm, how: "", formats, lens: lens.clone(), shards: lens };
    reductions::run(&cases, report);
    scaling::run(&cases, report);
    let mut by_nccl = None;
    report.case("communicator, small sums by NCCL", || {
        by_nccl = Some(context.communicator(1, &context.options().with_low_latency_bytes(Some(0))));
    });
    if let Some(comm) = &by_nccl {
        let cases = Cases { comm, how: " by NCCL", lens: cases.lens.clone(), shards: Vec::new(), ..cases };
        reductions::run(&cases, report);
        scaling::run(&cases, report);
    }
    moves::run(&cases, report);
    integers::run(&cases, report);
    groups::run(&cases, report);
    options::run(&cases, report);
    refusals::run(&cases, report);
}

pub(crate) fn run_large(context: &Context, report: &mut Report) {
    const LEN: usize = (1 << 20) + 3;
    let Some(comm) = communicator(context, report) else { return };
    let shards = vec![LEN.div_ceil(context.world_size)];
    let cases = Cases { context, comm: &comm, how: "", formats: &Format::ALL, lens: vec![LEN], shards };
    reductions::run(&cases, report);
    moves::run(&cases, report);
}

/// Runs some of the cases. Ranks that are threads of one process share NCCL's library, the driver and the kernels.
pub(crate) fn run_threads(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let lens = vec![0, 257, 4097];
    let formats = &[Format::F32, Format::BF16];
    let cases = Cases { context, comm: &comm, how: "", formats, lens: lens.clone(), shards: lens };
    reductions::run(&cases, report);
    moves::run(&cases, report);
    groups::run(&cases, report);
    options::of_threads(&cases, report);
    refusals::run(&cases, report);
}
