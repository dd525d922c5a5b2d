//! How long collectives take on device memory over MPI, beside the same on the host's: what staging adds to it.

use std::time::Instant;

use gradsync::DType;
use gradsync::comm::mpi::device::MpiDeviceOptions;
use gradsync::comm::{Collectives, Communicator, ReduceOp};
use gradsync::driver::DeviceBuffer;

use crate::context::Context;
use crate::report::Report;

const ROUNDS: usize = 5;

pub(super) fn run(context: &Context, report: &mut Report) {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.mpi_communicator(MpiDeviceOptions::default())));
    let Some(comm) = comm else { return };
    let (queue, job, path) = (&context.queue, context.job(), if comm.is_direct() { "direct" } else { "staged" });
    let (peer, world_size) = (context.rank ^ 1, context.world_size);
    for mib in [1, 64, 256] {
        let len = (mib << 20) / 4;
        let mut times = Vec::new();
        report.case(&format!("{mib} MiB"), || {
            let mut data = DeviceBuffer::zeroed(queue, DType::F32, len).unwrap();
            let mut host = vec![0f32; len];
            let reduce = fastest(job, || {
                comm.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
                comm.synchronize(queue).unwrap();
            });
            let on_host = fastest(job, || job.all_reduce(&mut host, ReduceOp::Sum).unwrap());
            times.push((format!("all_reduce f32 {mib} MiB"), reduce, on_host));
            let gather = fastest(job, || {
                comm.all_gather_in_place(data.as_mut_slice()).unwrap();
                comm.synchronize(queue).unwrap();
            });
            let on_host = fastest(job, || job.all_gather_in_place(&mut host).unwrap());
            times.push((format!("all_gather f32 {mib} MiB, {path}"), gather, on_host));
            assert!(world_size % 2 == 0, "ranks are paired");
            let swap = fastest(job, || {
                let (send, receive) = data.as_mut_slice().split_at_mut(len / 2);
                crate::transfers::exchange(&comm, vec![(peer, send.as_slice())], vec![(peer, receive)]).unwrap();
                comm.synchronize(queue).unwrap();
            });
            let on_host = fastest(job, || {
                let (send, receive) = host.split_at_mut(len / 2);
                job.send_recv(&*send, peer, receive, peer).unwrap();
            });
            times.push((format!("half of f32 {mib} MiB swapped, {path}"), swap, on_host));
        });
        for (name, seconds, baseline) in times {
            report.figure(&name, seconds * 1e3, "ms", Some(baseline * 1e3));
        }
    }
}

/// Seconds of the fastest of a few rounds, each begun together.
fn fastest(job: &dyn Communicator, mut round: impl FnMut()) -> f64 {
    let mut time = || {
        job.barrier().unwrap();
        let begun = Instant::now();
        round();
        begun.elapsed().as_secs_f64()
    };
    (0..ROUNDS).map(|_| time()).fold(f64::INFINITY, f64::min)
}
