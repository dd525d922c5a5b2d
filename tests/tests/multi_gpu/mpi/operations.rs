//! Operations on any transport, over MPI on device memory: Send and Recv, tensor parallelism, Adasum across nodes and on the processors,
//! and the communicators of a topology's groups, of MPI and of NCCL.

use gradsync::GradientBuffer;
use gradsync::comm::mpi::device::MpiDeviceOptions;
use gradsync::comm::{Collectives, Communicator, ReduceOp, Split};
use gradsync::driver::DeviceBuffer;
use gradsync::groups::{GroupKind, Groups, Sizes, Topology};
use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce};
use gradsync_tests::array::{dtype, fill_gaps, patterns_of, tensor_patterns, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;
use gradsync_tests::tolerance::gamma;

use crate::context::Context;
use crate::report::Report;
use crate::{adasum, send_recv, tensor_parallel};

/// Shapes of tensors; the first one takes several chunks.
const SHAPES: [&[usize]; 6] = [&[2_500_003], &[0], &[257, 3], &[], &[64], &[20, 5, 5]];

pub(super) fn run(context: &Context, report: &mut Report) {
    let mut comm = None;
    report.case("communicator", || comm = Some(context.mpi_communicator(MpiDeviceOptions::default())));
    let Some(comm) = comm else { return };
    let queue = &context.queue;
    if context.world_size > 1 {
        let rank = send_recv::DeviceRank { comm: &comm, queue };
        for (name, case) in send_recv::cases() {
            report.case(&format!("send and recv: {name}"), || case(&rank));
        }
    }
    let ranks = tensor_parallel::cases::RankContext { comm: &comm, queue };
    for case in tensor_parallel::cases::of(context.world_size) {
        report.case(&format!("tensor parallel: {}", case.name), || (case.run)(&ranks));
    }
    adasum::run_nodes_over(queue, &comm, "MPI", report);
    for format in Format::ALL {
        report.case(&format!("adasum by the processors, {}", format.name()), || staged(context, format));
    }
    report.case("adasum by the processors and by the kernels", || against_kernels(context));
    report.case("groups over MPI", || groups(context, context.mpi_communicator(MpiDeviceOptions::default())));
    report.case("groups over NCCL", || groups(context, context.communicator(1, &context.options())));
}

fn filled(context: &Context, format: Format, kind: Kind) -> GradientBuffer {
    let tensors = SHAPES.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.to_vec()));
    let mut host = GradientBuffer::new(dtype(format), context.world_size, tensors).unwrap();
    for (i, segment) in host.segments().to_vec().into_iter().enumerate() {
        let layer = &generate(kind, format, context.world_size, segment.len(), i as u64)[context.rank];
        write(host.as_mut_slice(), segment.start, layer);
    }
    host
}

fn on_device(context: &Context, host: &GradientBuffer) -> GradientBuffer<Cuda> {
    let tensors = (0..host.tensor_count()).map(|i| (host.name(i).to_owned(), host.shape(i).to_vec()));
    let mut buffer = GradientBuffer::on_queue(&context.queue, host.dtype(), context.world_size, tensors).unwrap();
    buffer.copy_from_host(host).unwrap();
    buffer
}

fn bits(host: &GradientBuffer, buffer: &GradientBuffer<Cuda>) -> Vec<u64> {
    let tensors = (0..host.tensor_count()).map(|i| (host.name(i).to_owned(), host.shape(i).to_vec()));
    let mut back = GradientBuffer::new(host.dtype(), host.world_size(), tensors).unwrap();
    buffer.copy_to_host(&mut back).unwrap();
    patterns_of(back.as_slice())
}

/// The bits of Adasum on the host, by one object in two rounds.
fn staged(context: &Context, format: Format) {
    let job = context.job();
    let tree = context.world_size.is_power_of_two().then_some(Algorithm::Tree);
    for kind in [Kind::Random, Kind::NearlyOpposite(1e-6)] {
        let algorithms = [Algorithm::Gram].into_iter().chain(tree);
        let granularities = [Granularity::Tensor, Granularity::Whole];
        for (algorithm, granularity) in algorithms.flat_map(|algorithm| granularities.map(|of| (algorithm, of))) {
            let options = AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity);
            let mut host = filled(context, format, kind);
            let mut buffer = on_device(context, &host);
            let mut adasum = Adasum::staged(job, &buffer, options).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            let first = bits(&host, &buffer);
            buffer.copy_from_host(&host).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            let second = bits(&host, &buffer);
            let expected = adasum_all_reduce(job, &mut host, options).unwrap();
            let what = format!("{kind:?} {options:?}");
            assert!(first == patterns_of(host.as_slice()), "{what}: other bits than on the host");
            assert!(first == second, "{what}: other bits in the second round");
            assert_eq!(adasum.report().unwrap(), expected, "{what}");
            // Values that a caller has written between tensors change nothing.
            let mut dirty = filled(context, format, kind);
            fill_gaps(&mut dirty, 1.0);
            buffer.copy_from_host(&dirty).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            buffer.copy_to_host(&mut dirty).unwrap();
            assert!(tensor_patterns(&dirty) == tensor_patterns(&host), "{what}: ones between tensors");
            assert_eq!(adasum.report().unwrap(), expected, "{what}: ones between tensors");
        }
    }
    if tree.is_none() {
        let options = AdasumOptions::default().with_algorithm(Algorithm::Tree);
        let buffer = on_device(context, &filled(context, format, Kind::Random));
        let message = Adasum::staged(job, &buffer, options).unwrap_err().to_string();
        assert!(message.contains("tree"), "{message}");
    }
}

/// ONNX Runtime's choices on the same gradients: the result of the processors equals the result of the kernels, except for the last bits of
/// f64.
fn against_kernels(context: &Context) {
    let (job, nccl) = (context.job(), context.communicator(0, &context.options()));
    let (host, options) = (filled(context, Format::F64, Kind::Random), AdasumOptions::default());
    let run = |by_processors: bool| {
        let mut buffer = on_device(context, &host);
        let prepared = match by_processors {
            true => Adasum::staged(job, &buffer, options),
            false => Adasum::new(&nccl, &buffer, options),
        };
        let mut adasum = prepared.unwrap();
        adasum.all_reduce(&mut buffer).unwrap();
        nccl.synchronize(&context.queue).unwrap();
        let values: Vec<f64> = bits(&host, &buffer).into_iter().map(f64::from_bits).collect();
        (values, adasum.report().unwrap().weights.unwrap())
    };
    let ((by_processors, weights), (by_kernels, kernel_weights)) = (run(true), run(false));
    // A coefficient `1 - s / 2q` of vectors with `s ≤ q` errs by at most γ_n for each product, in all three of them. With four ranks a
    // weight consists of two levels of coefficients, each of them at most 3/2, in both implementations. Elements are at most 4.
    let bound = 2.0 * 2.0 * 3.0 * 1.5 * gamma(SHAPES[0][0]) * 4.0 * context.world_size as f64;
    let near = |one: f64, other: f64| (one - other).abs() <= bound;
    let differs = |(one, other): (&f64, &f64)| !near(*one, *other);
    assert_eq!(by_processors.iter().zip(&by_kernels).position(differs), None, "an element differs");
    assert_eq!(weights.iter().zip(&kernel_weights).position(differs), None, "a weight differs");
}

/// Asserts that a sum over each group of a topology covers its ranks and no others.
pub(crate) fn groups<C: Communicator<Cuda> + Split>(context: &Context, comm: C) {
    let (rank, world) = (context.rank, context.world_size);
    let (data, horizontal) = if world % 2 == 0 { (world / 2, 2) } else { (world, 1) };
    // On one node, two nodes are simulated.
    let local = if context.layout.nodes > 1 { context.layout.ranks_per_node } else { world.div_ceil(2) };
    let sizes = Sizes { world, local, data, horizontal, pipeline: 1 };
    let (groups, topology) = (Groups::new(comm, sizes).unwrap(), Topology::new(rank, sizes).unwrap());
    for kind in GroupKind::ALL {
        let Ok(planned) = topology.group(kind) else {
            assert!(groups.get(kind).is_err(), "{kind}: a group that cannot be");
            continue;
        };
        let group = groups.get(kind).unwrap();
        assert_eq!((group.rank(), group.world_size()), (planned.index, planned.ranks.len()), "{kind}");
        let mut data = DeviceBuffer::from_host(&context.queue, (&[(1u32 << rank) as f32][..]).into()).unwrap();
        group.all_reduce(data.as_mut_slice(), ReduceOp::Sum).unwrap();
        group.synchronize(&context.queue).unwrap();
        let mut sum = [0.0f32];
        data.as_slice().copy_to_host((&mut sum[..]).into()).unwrap();
        let expected: u32 = planned.ranks.iter().map(|rank| 1 << rank).sum();
        assert_eq!(sum, [expected as f32], "{kind}: the sum of 2^rank");
        assert!(std::ptr::eq(group, groups.get(kind).unwrap()), "{kind}: made twice");
    }
}
