//! Reductions in direct succession in the queue, without waits and without comparison of calls: the bits equal the bits of reductions with
//! a wait after each.

use gradsync::GradientBuffer;
use gradsync::comm::Communicator;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::internal::kernels::cuda::cast;
use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::suite::checks::Checks;

use super::{Case, Cases};
use crate::context::Context;
use crate::report::Report;

/// Large enough for one reduction to be in progress while the host enqueues the next.
const SHAPES: [&[usize]; 4] = [&[300_001], &[1], &[513, 257], &[0]];

pub(super) fn run(context: &Context, report: &mut Report) {
    let each = |generation: u64, reduction: fn(&Cases<'_>, &NcclCommunicator, Algorithm)| {
        let options = context.options().with_checks(false);
        let comm = context.communicator(generation, &options);
        for cases in Cases::new(context, &comm).each_way() {
            for &algorithm in cases.algorithms() {
                reduction(&cases, &comm, algorithm);
            }
        }
    };
    report.case("queued", || each(1, queued));
    report.case("three inputs in turn, queued", || each(2, in_turn));
}

/// Three reductions: of one buffer, of another buffer with the same tensors, and of the first one's result.
fn queued(cases: &Cases<'_>, comm: &NcclCommunicator, algorithm: Algorithm) {
    let of = |kind, seed| {
        Case::of(kind, Format::F32, cases.world_size(), &SHAPES, seed).with(algorithm, Granularity::Tensor)
    };
    // One of the cases takes the exact path, where the world size permits it.
    let (case, other) = (of(Kind::Random, 21), of(Kind::NearlyOpposite(1e-6), 22));
    let runner = cases.runner;
    let reduce = |is_waited_for: bool| {
        let (mut first, mut second) = (runner.buffer(&case), runner.buffer(&other));
        let mut for_first = runner.way.prepare(comm, &first, case.options()).unwrap();
        // With peer access, each buffer needs an object of its own; otherwise one workspace serves both.
        let mut for_second = for_first.uses_peers().then(|| runner.way.prepare(comm, &second, case.options()).unwrap());
        let step = |adasum: &mut Adasum<'_, Cuda>, buffer: &mut GradientBuffer<Cuda>| {
            adasum.all_reduce(buffer).unwrap();
            if is_waited_for {
                comm.synchronize(runner.queue).unwrap();
            }
        };
        step(&mut for_first, &mut first);
        step(for_second.as_mut().unwrap_or(&mut for_first), &mut second);
        step(&mut for_first, &mut first);
        [runner.bits(&case, &first), runner.bits(&other, &second)]
    };
    let [first, second] = reduce(false);
    let [first_alone, second_alone] = reduce(true);
    let what = format!("{algorithm:?} {:?}", runner.way);
    let mut checks = Checks::new(comm);
    checks.same_list(format!("{what}: the first buffer, reduced twice"), first, first_alone);
    checks.same_list(format!("{what}: the second buffer"), second, second_alone);
    checks.finish();
}

/// Many reductions of three inputs in turn, with only kernels between them. A kernel that reads too early, or whose input is overwritten too
/// early, would use another input's numbers. Packets share memory with those of the last call but one, which had another input, too. Nearly
/// opposite vectors and short ones of `f64` take the exact path.
fn in_turn(cases: &Cases<'_>, comm: &NcclCommunicator, algorithm: Algorithm) {
    const RUNS: usize = 200;
    let runner = cases.runner;
    let of_kinds: [(Format, Kind, &[&[usize]]); 4] = [
        (Format::F32, Kind::Random, &SHAPES),
        (Format::F32, Kind::Random, &[&[4099]]),
        (Format::F32, Kind::NearlyOpposite(1e-6), &[&[4099]]),
        (Format::F64, Kind::Random, &[&[40], &[4099]]),
    ];
    for (format, kind, shapes) in of_kinds {
        let of = |seed| Case::of(kind, format, cases.world_size(), shapes, seed).with(algorithm, Granularity::Tensor);
        let of_seeds = [23, 24, 25].map(of);
        let inputs = of_seeds.each_ref().map(|case| runner.buffer(case));
        let [case, ..] = &of_seeds;
        let mut buffer = runner.zeros(case);
        let mut adasum = runner.way.prepare(comm, &buffer, case.options()).unwrap();
        let expected = inputs.each_ref().map(|input| {
            cast(buffer.as_mut_slice(), input.as_slice()).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            runner.bits(case, &buffer)
        });
        let mut results: Vec<GradientBuffer<Cuda>> = (0..RUNS).map(|_| runner.zeros(case)).collect();
        for (run, result) in results.iter_mut().enumerate() {
            cast(buffer.as_mut_slice(), inputs[run % inputs.len()].as_slice()).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            cast(result.as_mut_slice(), buffer.as_slice()).unwrap();
        }
        let is_wrong = |run: &usize| runner.bits(case, &results[*run]) != expected[run % inputs.len()];
        let wrong: Vec<usize> = (0..RUNS).filter(is_wrong).collect();
        let mut checks = Checks::new(comm);
        let what = format!("{algorithm:?} {:?}, {kind:?} of {format:?}, {shapes:?}", runner.way);
        // The expected results come from reductions with waits; here ranks compare them with each other.
        checks.same_list(format!("{what}: the inputs' results"), expected.concat(), expected.concat());
        checks.own_list(format!("{what}: runs with other bits"), wrong, Vec::new());
        checks.finish();
    }
}
