//! Collectives over more than 2 GiB and more than 2³¹ elements, where 32 bits cannot count bytes or elements.
//!
//! Numbers are integers, so sums are exact. They repeat with a period that is no power of two, so that data at a wrong offset are detected.
//! Windows are compared at the ends, around the relevant powers of two, and at pseudo-random offsets.

use std::ops::Range;

use gradsync::DType;
use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::driver::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use gradsync::internal::kernels::cuda;
use gradsync_tests::array::Array;
use gradsync_tests::inputs::Random;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;

use crate::context::Context;
use crate::report::Report;

/// The length in f32: 2 GiB and 4100 bytes.
const LEN: usize = (1 << 29) + 1025;
/// The period of the numbers is a prime.
const PERIOD: usize = 1_000_003;
const WINDOW: usize = 64;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    let (queue, rank, world_size) = (&context.queue, context.rank, context.world_size);
    let pattern: Vec<f32> = (0..PERIOD).map(|index| number(rank, index)).collect();

    report.case("all_reduce", || {
        let pattern = DeviceBuffer::from_host(queue, (&pattern).into()).unwrap();
        let mut data = DeviceBuffer::zeroed(queue, DType::F32, LEN).unwrap();
        fill(data.as_mut_slice(), &pattern);
        comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
        comm.synchronize(queue).unwrap();
        let sum = |index: usize| (0..world_size).map(|rank| number(rank, index)).sum();
        let mut checks = Checks::new(&comm);
        check(&mut checks, data.as_slice(), &[LEN / world_size, LEN.div_ceil(world_size)], sum);
        checks.finish();
    });

    // Input and output share the memory: every rank's shard is itself longer than 2 GiB.
    report.case("all_gather", || {
        let pattern = DeviceBuffer::from_host(queue, (&pattern).into()).unwrap();
        let mut data = DeviceBuffer::zeroed(queue, DType::F32, world_size * LEN).unwrap();
        let own = rank * LEN..(rank + 1) * LEN;
        let edges: Vec<usize> = (1..world_size).map(|rank| rank * LEN).collect();
        let gathered = |index: usize| number(index / LEN, index % LEN);

        fill(data.as_mut_slice().range_mut(own.clone()), &pattern);
        comm.all_gather_in_place(data.as_mut_slice()).unwrap();
        comm.synchronize(queue).unwrap();
        let mut checks = Checks::new(&comm);
        check(&mut checks, data.as_slice(), &edges, gathered);
        checks.finish();

        // In bytes, a shard has more than 2³¹ elements.
        cuda::zero(data.as_mut_slice()).unwrap();
        fill(data.as_mut_slice().range_mut(own.clone()), &pattern);
        let (shard, whole) = (data.as_slice().range(own).address(), data.as_slice().address());
        // SAFETY: the bytes of the shard, which outlive the wait below.
        let input = unsafe { DeviceSlice::from_raw_parts(queue, shard, DType::U8, 4 * LEN) };
        // SAFETY: the memory outlives the wait below, nothing else uses it, and the input is this rank's shard of the
        // output.
        unsafe { comm.all_gather_raw(input, whole) }.unwrap();
        comm.synchronize(queue).unwrap();
        let mut checks = Checks::new(&comm);
        check(&mut checks, data.as_slice(), &edges, gathered);
        checks.finish();
    });
}

/// A rank's number at an index: an integer between -1000 and 1000.
fn number(rank: usize, index: usize) -> f32 {
    let place = index % PERIOD;
    ((place * 7919 + rank * 613) % 2001) as f32 - 1000.0
}

/// Writes numbers that repeat; `pattern` holds one period of them.
pub(crate) fn fill(data: DeviceSliceMut<'_>, pattern: &DeviceBuffer) {
    let mut rest = data;
    while !rest.as_slice().is_empty() {
        let count = rest.as_slice().len().min(pattern.as_slice().len());
        let (mut first, others) = rest.split_at_mut(count);
        first.copy_from_device(pattern.as_slice().range(0..count)).unwrap();
        rest = others;
    }
}

/// Windows of the data and their numbers: at the ends, around each multiple of 2²⁸ elements, around the given offsets and at random.
pub(crate) fn windows(
    data: DeviceSlice<'_>,
    format: Format,
    around: &[usize],
) -> impl Iterator<Item = (Range<usize>, Vec<f64>)> {
    let (len, mut random) = (data.len(), Random::new(data.len() as u64));
    let mut begins = vec![0, len - WINDOW];
    let multiples = (1 << 28..len).step_by(1 << 28);
    begins.extend(multiples.chain(around.iter().copied()).map(|middle| middle - WINDOW / 2));
    begins.extend((0..500).map(|_| random.below((len - WINDOW) as u64) as usize));
    begins.into_iter().map(move |begin| {
        let window = begin.min(len - WINDOW)..begin.min(len - WINDOW) + WINDOW;
        let mut values = Array::unwritten(format, WINDOW);
        data.range(window.clone()).copy_to_host(values.slice_mut()).unwrap();
        (window, values.values())
    })
}

/// Compares windows with the number that `expected` gives for each index.
fn check(checks: &mut Checks<'_>, data: DeviceSlice<'_>, around: &[usize], expected: impl Fn(usize) -> f32) {
    for (window, values) in windows(data, Format::F32, around) {
        let got = values.into_iter().map(f64::to_bits).collect();
        let wanted = window.clone().map(|index| f64::from(expected(index)).to_bits()).collect();
        checks.same_list(format!("elements {window:?}"), got, wanted);
    }
}
