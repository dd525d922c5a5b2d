//! Reductions that follow each other in the queue, with nobody waiting in between and no calls compared: their bits are those of
//! reductions that are waited for one by one.

use gradsync::DeviceGradientBuffer;
use gradsync::comm::DeviceCommunicator;
use gradsync::comm::nccl::{NcclCommunicator, NcclOptions};
use gradsync::ops::cuda::Adasum;
use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::{Case, Cases, algorithms, device};
use crate::checks::Checks;
use crate::report::Report;

/// Large enough for one reduction to be under way while the host puts the next into the queue.
const SHAPES: [&[usize]; 4] = [&[300_001], &[1], &[513, 257], &[0]];

pub(super) fn run(cases: &Cases<'_>, report: &mut Report) {
    report.case("queued", || {
        let options = NcclOptions { checks: false, ..cases.context.options() };
        let comm = cases.context.communicator(1, &options);
        for &algorithm in algorithms(cases.world_size()) {
            queued(cases, &comm, algorithm);
        }
    });
}

/// Three reductions: of one buffer, of another one with the same tensors, and of the first one's result.
fn queued(cases: &Cases<'_>, comm: &NcclCommunicator, algorithm: Algorithm) {
    let queue = &cases.context.queue;
    let of = |kind, seed| {
        Case::of(kind, Format::F32, cases.world_size(), &SHAPES, seed).with(algorithm, Granularity::Tensor)
    };
    // One of them takes the exact path, where the world is large enough to have one.
    let (case, other) = (of(Kind::Random, 21), of(Kind::NearlyOpposite(1e-6), 22));
    let reduce = |is_waited_for: bool| {
        let mut first = device::buffer(queue, comm, &case);
        let mut second = device::buffer(queue, comm, &other);
        let mut adasum = Adasum::new(comm, &first, case.options()).unwrap();
        let mut step = |buffer: &mut DeviceGradientBuffer| {
            adasum.all_reduce(comm, buffer).unwrap();
            if is_waited_for {
                comm.synchronize(queue).unwrap();
            }
        };
        step(&mut first);
        step(&mut second);
        step(&mut first);
        [device::bits(comm, &case, &first), device::bits(comm, &other, &second)]
    };
    let [first, second] = reduce(false);
    let [first_alone, second_alone] = reduce(true);
    let mut checks = Checks::new(comm);
    checks.same_list(format!("{algorithm:?}: the first buffer, reduced twice"), first, first_alone);
    checks.same_list(format!("{algorithm:?}: the second buffer"), second, second_alone);
    checks.finish();
}
