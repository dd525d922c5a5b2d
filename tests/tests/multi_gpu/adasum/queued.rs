//! Reductions that follow each other in the queue, with nobody waiting in between and no calls compared: their bits are
//! those of reductions that are waited for one by one.

use gradsync::DeviceGradientBuffer;
use gradsync::comm::DeviceCommunicator;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::ops::cuda::Adasum;
use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::{Case, Cases};
use crate::checks::Checks;
use crate::context::Context;
use crate::report::Report;

/// Large enough for one reduction to be under way while the host puts the next into the queue.
const SHAPES: [&[usize]; 4] = [&[300_001], &[1], &[513, 257], &[0]];

pub(super) fn run(context: &Context, report: &mut Report) {
    report.case("queued", || {
        let options = NcclOptions { checks: false, ..context.options() };
        let comm = context.communicator(1, &options);
        for cases in Cases::new(context, &comm).each_way() {
            for &algorithm in cases.algorithms() {
                queued(&cases, &comm, algorithm);
            }
        }
    });
}

/// Three reductions: of one buffer, of another one with the same tensors, and of the first one's result.
fn queued(cases: &Cases<'_>, comm: &NcclCommunicator, algorithm: Algorithm) {
    let of = |kind, seed| {
        Case::of(kind, Format::F32, cases.world_size(), &SHAPES, seed).with(algorithm, Granularity::Tensor)
    };
    // One of them takes the exact path, where the world is large enough to have one.
    let (case, other) = (of(Kind::Random, 21), of(Kind::NearlyOpposite(1e-6), 22));
    let runner = cases.runner;
    let reduce = |is_waited_for: bool| {
        let (mut first, mut second) = (runner.buffer(&case), runner.buffer(&other));
        let mut for_first = runner.way.prepare(comm, &first, case.options()).unwrap();
        // Where peers reach into it, a buffer needs an object of its own; elsewhere one workspace serves both.
        let mut for_second = for_first.uses_peers().then(|| runner.way.prepare(comm, &second, case.options()).unwrap());
        let step = |adasum: &mut Adasum, buffer: &mut DeviceGradientBuffer| {
            adasum.all_reduce(comm, buffer).unwrap();
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
