//! Every collective with every dtype, in place and not, at aligned and unaligned addresses, of ranks in processes and
//! in threads.

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

/// Which data the collectives are tried with, on which communicator.
struct Cases<'c> {
    context: &'c Context,
    comm: &'c NcclCommunicator,
    formats: &'static [Format],
    /// Lengths of whole vectors.
    lens: Vec<usize>,
    /// Lengths of shards; a rank has one, or one for every rank.
    shards: Vec<usize>,
}

/// How many elements behind an aligned address data begin.
const BEGINS: [usize; 2] = [0, 1];

impl Cases<'_> {
    fn rank(&self) -> usize {
        self.context.rank
    }

    fn world_size(&self) -> usize {
        self.context.world_size
    }

    /// One vector of ordinary numbers for each rank; the same on every rank.
    fn inputs(&self, format: Format, len: usize) -> Vec<Vec<f64>> {
        (0..self.world_size()).map(|rank| vector(format, len, (rank * 31 + len) as u64)).collect()
    }

    /// One vector of arbitrary bits for each rank, NaN with payloads among them; the same on every rank.
    fn patterns(&self, format: Format, len: usize) -> Vec<Array> {
        let any = |rank: usize| {
            let mut random = Random::new((rank * 37 + len + 1) as u64);
            Array::from_patterns(format, (0..len).map(|_| random.bits()))
        };
        (0..self.world_size()).map(any).collect()
    }
}

/// Arrays one behind the other.
fn concat(arrays: &[Array]) -> Array {
    Array::from_patterns(arrays[0].format(), arrays.iter().flat_map(Array::patterns))
}

/// Some elements of an array.
fn part(array: &Array, range: std::ops::Range<usize>) -> Array {
    Array::from_patterns(array.format(), array.patterns()[range].iter().copied())
}

/// The communicator of a suite; making it is its first case.
fn communicator(context: &Context, report: &mut Report) -> Option<NcclCommunicator> {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.communicator(0, &context.options())));
    comm
}

const LENS: [usize; 5] = [0, 1, 33, 257, 4097];

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let cases = Cases { context, comm: &comm, formats: &Format::ALL, lens: LENS.to_vec(), shards: LENS.to_vec() };
    reductions::run(&cases, report);
    scaling::run(&cases, report);
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
    let cases = Cases { context, comm: &comm, formats: &Format::ALL, lens: vec![LEN], shards };
    reductions::run(&cases, report);
    moves::run(&cases, report);
}

/// A part of them: what ranks have in common as threads of one process is NCCL's library, the driver and their kernels.
pub(crate) fn run_threads(context: &Context, report: &mut Report) {
    let Some(comm) = communicator(context, report) else { return };
    let lens = vec![0, 257, 4097];
    let formats = &[Format::F32, Format::BF16];
    let cases = Cases { context, comm: &comm, formats, lens: lens.clone(), shards: lens };
    reductions::run(&cases, report);
    moves::run(&cases, report);
    groups::run(&cases, report);
    options::of_threads(&cases, report);
    refusals::run(&cases, report);
}
