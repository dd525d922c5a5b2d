//! A result, weights included, depends on the tensors and the number of vectors alone, to the bit. It does not depend on other tensors in
//! the buffer, their order, the number of shards, or the path by which ranks access each other's vectors. It equals the result of one rank
//! that has all vectors.

use gradsync::GradientBuffer;
use gradsync::comm::nccl::NcclCommunicator;
use gradsync::comm::{Communicator, Ranks, ReduceOp, Split};
use gradsync::driver::{DeviceBuffer, DeviceSlice, Queue};
use gradsync::internal::kernels::cuda::SegmentWorkspace;
use gradsync::memory::Cuda;
use gradsync::ops::OrderedAllReduce;
use gradsync::ops::{Adasum, AdasumOptions, AdasumReport, Algorithm, Granularity, Nodes};
use gradsync_tests::array::{Array, dtype, patterns_of, write};
use gradsync_tests::inputs::{Kind, generate};
use gradsync_tests::oracle::Format;

use super::device::Way;
use crate::context::Context;
use crate::report::Report;

/// Lengths of one chunk and of many chunks, for all three chunk lengths; some are multiples of the chunk length and some are not.
const LENS: [usize; 11] = [700, 300_001, 64, 20_000, 1, 16_384, 262_145, 513, 0, 50_000, 9];

/// The tensors of every vector.
pub(super) struct Tensors {
    format: Format,
    lens: Vec<usize>,
    /// `vectors × tensors × elements`.
    of_vectors: Vec<Vec<Vec<f64>>>,
}

/// The bits of a tensor's result, and the bits of its weights, if there are any.
type Outcome = (Vec<u64>, Option<Vec<u64>>);

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

impl Tensors {
    pub(super) fn new(kind: Kind, format: Format, vectors: usize, lens: &[usize]) -> Self {
        let of_tensor = |(index, &len)| generate(kind, format, vectors, len, 70 + index as u64);
        let of_tensors: Vec<Vec<Vec<f64>>> = lens.iter().enumerate().map(of_tensor).collect();
        let of_vector = |vector: usize| of_tensors.iter().map(|tensor| tensor[vector].clone()).collect();
        Self { format, lens: lens.to_vec(), of_vectors: (0..vectors).map(of_vector).collect() }
    }

    fn vectors(&self) -> usize {
        self.of_vectors.len()
    }

    fn order(&self) -> Vec<usize> {
        (0..self.lens.len()).collect()
    }

    /// Each tensor's Adasum, computed by one rank that has all vectors.
    fn alone(&self, queue: &Queue) -> Vec<Outcome> {
        self.order().into_iter().map(|index| self.one_alone(queue, index)).collect()
    }

    fn one_alone(&self, queue: &Queue, index: usize) -> Outcome {
        let (len, vectors) = (self.lens[index], self.vectors());
        if len == 0 {
            return (Vec::new(), Some(bits(&vec![1.0; vectors])));
        }
        let upload = |vector: &Vec<Vec<f64>>| {
            DeviceBuffer::from_host(queue, Array::new(self.format, &vector[index]).slice()).unwrap()
        };
        let devices: Vec<DeviceBuffer> = self.of_vectors.iter().map(upload).collect();
        let views: Vec<DeviceSlice<'_>> = devices.iter().map(DeviceBuffer::as_slice).collect();
        let mut layers = SegmentWorkspace::new(queue, len, &[0..len], vectors).unwrap();
        let mut result = DeviceBuffer::zeroed(queue, dtype(self.format), len).unwrap();
        layers.adasum(result.as_mut_slice(), &views).unwrap();
        let mut host = Array::unwritten(self.format, len);
        result.as_slice().copy_to_host(host.slice_mut()).unwrap();
        (host.patterns(), Some(bits(&layers.read_coefficients().unwrap().weights)))
    }

    /// Reduces these tensors, in this order, in one buffer with one shard per rank. This rank contributes a vector, or else zeros.
    fn reduce(
        &self,
        queue: &Queue,
        comm: &dyn Communicator<Cuda>,
        order: &[usize],
        vector: Option<usize>,
        reduce: &dyn Fn(&mut GradientBuffer<Cuda>) -> Option<AdasumReport>,
    ) -> Vec<Outcome> {
        let tensors = || order.iter().map(|&index| (format!("tensor{index}"), [self.lens[index]]));
        let (dtype, ranks) = (dtype(self.format), comm.world_size());
        let mut host = GradientBuffer::new(dtype, ranks, tensors()).unwrap();
        if let Some(vector) = vector {
            for (segment, &index) in host.segments().to_vec().into_iter().zip(order) {
                write(host.as_mut_slice(), segment.start, &self.of_vectors[vector][index]);
            }
        }
        let mut buffer = GradientBuffer::on_queue(queue, dtype, ranks, tensors()).unwrap();
        buffer.copy_from_host(&host).unwrap();
        let weights = reduce(&mut buffer).and_then(|report| report.weights);
        comm.synchronize(queue).unwrap();
        buffer.copy_to_host(&mut host).unwrap();
        let vectors = self.vectors();
        let of_tensor = |index: usize| {
            let layer = |weights: &Vec<f64>| if weights.len() == vectors { 0 } else { index };
            let weights = weights.as_ref().map(|all| bits(&all[layer(all) * vectors..][..vectors]));
            (patterns_of(host.as_slice().range(host.segments()[index].clone())), weights)
        };
        (0..order.len()).map(of_tensor).collect()
    }

    /// Compares Adasum of several buffers and orders with `expected`; every rank has a vector of its own.
    fn check_flat(
        &self,
        queue: &Queue,
        comm: &dyn Communicator<Cuda>,
        way: Way,
        algorithm: Algorithm,
        expected: &[Outcome],
    ) {
        let options = AdasumOptions::default().with_algorithm(algorithm).with_granularity(Granularity::Tensor);
        let order = self.order();
        let reversed: Vec<usize> = order.iter().rev().copied().collect();
        let parts = order.chunks(3).chain(order.chunks(1));
        for order in [&order[..], &reversed].into_iter().chain(parts) {
            let found = self.reduce(queue, comm, order, Some(comm.rank()), &|buffer| {
                let mut adasum = way.prepare(comm, buffer, options).unwrap();
                adasum.all_reduce(buffer).unwrap();
                Some(adasum.report().unwrap())
            });
            self.check(&format!("{algorithm:?}, {way:?}, tensors {order:?}"), order, &found, expected);
        }
    }

    fn check(&self, what: &str, order: &[usize], found: &[Outcome], expected: &[Outcome]) {
        for (&index, found) in order.iter().zip(found) {
            let (len, format) = (self.lens[index], self.format);
            let first = found.0.iter().zip(&expected[index].0).position(|(found, expected)| found != expected);
            assert!(first.is_none(), "{what}, {format:?}: the tensor of {len} elements differs at {first:?}");
            assert!(found.1 == expected[index].1, "{what}, {format:?}: the weights of the tensor of {len} elements");
        }
    }

    /// Compares all paths, orders and numbers of buffers, with one rank per vector; returns the result of each algorithm.
    pub(super) fn check_ways(
        &self,
        queue: &Queue,
        comm: &dyn Communicator<Cuda>,
        ways: &[Way],
    ) -> Vec<(Algorithm, Vec<Outcome>)> {
        let mut all = vec![(Algorithm::Gram, self.alone(queue))];
        for &way in ways {
            self.check_flat(queue, comm, way, Algorithm::Gram, &all[0].1);
        }
        // The tree is computed over the transport alone.
        if comm.world_size().is_power_of_two() && ways.contains(&Way::Transport) {
            let options = AdasumOptions::default().with_algorithm(Algorithm::Tree);
            let tree = self.reduce(queue, comm, &self.order(), Some(comm.rank()), &|buffer| {
                let mut adasum = Way::Transport.prepare(comm, buffer, options).unwrap();
                adasum.all_reduce(buffer).unwrap();
                Some(adasum.report().unwrap())
            });
            self.check_flat(queue, comm, Way::Transport, Algorithm::Tree, &tree);
            all.push((Algorithm::Tree, tree));
        }
        all
    }

    /// Checks all tensors as one layer, by each path.
    pub(super) fn check_whole(&self, queue: &Queue, comm: &dyn Communicator<Cuda>, ways: &[Way]) {
        let options = AdasumOptions::default().with_algorithm(Algorithm::Gram).with_granularity(Granularity::Whole);
        let of_way = |way: &Way| {
            self.reduce(queue, comm, &self.order(), Some(comm.rank()), &|buffer| {
                let mut adasum = way.prepare(comm, buffer, options).unwrap();
                adasum.all_reduce(buffer).unwrap();
                Some(adasum.report().unwrap())
            })
        };
        let expected = of_way(&ways[0]);
        for way in &ways[1..] {
            self.check(&format!("one layer, {way:?}"), &self.order(), &of_way(way), &expected);
        }
    }

    /// Checks sums in rank order, by both objects that form them, in one buffer and in many.
    pub(super) fn check_sums(&self, queue: &Queue, comm: &dyn Communicator<Cuda>, has_transport: bool) {
        let order = self.order();
        let sum = |index: usize| {
            let column = |element: usize| self.of_vectors.iter().fold(-0.0, |sum, vector| sum + vector[index][element]);
            let sums: Vec<f64> = (0..self.lens[index]).map(|element| self.format.round(column(element))).collect();
            (Array::new(self.format, &sums).patterns(), None)
        };
        let expected: Vec<Outcome> = order.iter().map(|&index| sum(index)).collect();
        for order in [&order[..]].into_iter().chain(order.chunks(4)) {
            let by_peers = self.reduce(queue, comm, order, Some(comm.rank()), &|buffer| {
                let mut ordered = OrderedAllReduce::new(comm, buffer, ReduceOp::Sum).unwrap();
                assert!(ordered.uses_peers() || has_transport || buffer.is_empty(), "kernels reach all buffers");
                ordered.all_reduce(buffer).unwrap();
                None
            });
            self.check(&format!("ordered_all_reduce, tensors {order:?}"), order, &by_peers, &expected);
            if has_transport {
                let found = self.reduce(queue, comm, order, Some(comm.rank()), &|buffer| {
                    let (wire, op) = (buffer.dtype(), ReduceOp::Sum);
                    OrderedAllReduce::over_transport(comm, buffer, wire, op).unwrap().all_reduce(buffer).unwrap();
                    None
                });
                self.check(
                    &format!("ordered_all_reduce over a transport, tensors {order:?}"),
                    order,
                    &found,
                    &expected,
                );
            }
        }
    }
}

pub(super) fn run(context: &Context, comm: &NcclCommunicator, report: &mut Report) {
    let (queue, ranks) = (&context.queue, context.world_size);
    for vectors in (2..=ranks).filter(|vectors| ranks % vectors == 0) {
        let per_node = ranks / vectors;
        let split = |colour: usize| comm.split(Some(colour as u64), 0).unwrap().expect("every rank has a colour");
        let mut groups = None;
        report.case(&format!("groups for {vectors} vectors in {ranks} shards"), || {
            groups = Some((split(context.rank / per_node), split(context.rank % per_node)));
        });
        let Some((node, across)) = groups else { return };
        let nodes = Nodes { all: comm, node: &node, across: &across };
        for (format, kind) in [
            (Format::F64, Kind::Random),
            (Format::F32, Kind::Random),
            (Format::F16, Kind::Random),
            (Format::BF16, Kind::Random),
            (Format::F64, Kind::NearlyOpposite(1e-6)),
            (Format::F32, Kind::NearlyOpposite(1e-6)),
        ] {
            let name = format!("{vectors} vectors, {kind:?} {}", format.name()).to_lowercase();
            report.case(&format!("{name}, in {ranks} shards and others"), || {
                let tensors = Tensors::new(kind, format, vectors, &LENS);
                // There is one shard per vector.
                let ways = Way::all(vectors);
                let expected = tensors.check_ways(queue, &across, ways);
                tensors.check_whole(queue, &across, ways);
                tensors.check_sums(queue, &across, true);
                // There is one shard per rank.
                let is_first = node.rank() == 0;
                for (algorithm, expected) in expected.iter().filter(|_| per_node > 1) {
                    let options = AdasumOptions::default().with_algorithm(*algorithm);
                    let vector = is_first.then_some(across.rank());
                    let found = tensors.reduce(queue, comm, &tensors.order(), vector, &|buffer| {
                        let mut adasum = Adasum::on_nodes(nodes, buffer, ReduceOp::Sum, options).unwrap();
                        adasum.all_reduce(buffer).unwrap();
                        Some(adasum.report().unwrap())
                    });
                    tensors.check(&format!("{algorithm:?}, in {ranks} shards"), &tensors.order(), &found, expected);
                }
            });
        }
    }
}
