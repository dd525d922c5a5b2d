//! Hierarchical Adasum on GPUs: a sum or mean inside nodes, which are made of the GPUs of one machine, and Adasum across nodes, by either
//! algorithm; and the choice between ONNX Runtime's three reductions.
//!
//! The ranks of nodes of up to two ranks have vectors of their own, and their sum is rounded once by any implementation. On larger nodes
//! each layer lies on one rank.

use gradsync::GradientBuffer;
use gradsync::comm::{Communicator, ReduceOp, Split};
use gradsync::driver::Queue;
use gradsync::memory::Cuda;
use gradsync::ops::Adasum;
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, Nodes, WithinNode};
use gradsync_tests::array::{dtype, fill_gaps, patterns_of, tensor_patterns};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;

use super::against_oracle::SHAPES;
use crate::context::Context;
use crate::mpi::operations::groups;
use crate::report::Report;
use gradsync_tests::suite::adasum::on_nodes::{Groups, OnNodes};
use gradsync_tests::suite::checks::Checks;

pub(crate) fn run(context: &Context, report: &mut Report) {
    let Some(comm) = context.first(report) else { return };
    run_over(&context.queue, &comm, "NCCL", report);
    report.case("groups of a topology, over NCCL", || groups(context, context.communicator(1, &context.options())));
}

/// Runs the cases over any transport.
pub(crate) fn run_over<C: Communicator<Cuda> + Split>(queue: &Queue, comm: &C, transport: &str, report: &mut Report) {
    let world_size = comm.world_size();
    for per_node in (1..=world_size).filter(|per_node| world_size % per_node == 0) {
        for is_interleaved in [false, true] {
            let nodes = world_size / per_node;
            let order = if is_interleaved { ", interleaved" } else { "" };
            let mut groups = None;
            report.case(&format!("{nodes} nodes of {per_node}{order}, over {transport}, groups"), || {
                let case = OnNodes::random(Format::F32, nodes, per_node, &[&[1]], 1);
                let case = if is_interleaved { case.interleaved() } else { case };
                groups = Some(Groups::new(comm, case.place(comm.rank())));
            });
            let Some(groups) = groups else { return };
            let runner = Runner { queue, groups: &groups, per_node, nodes, is_interleaved };
            if !is_interleaved {
                let name = format!("{nodes} nodes of {per_node}, over {transport}, Adasum within");
                report.case(&name, || runner.adasum_within());
            }
            for format in Format::ALL {
                report.case(
                    &format!("{nodes} nodes of {per_node}{order}, over {transport}, {}", format.name()),
                    || {
                        runner.check_format(format);
                    },
                );
            }
        }
    }
    report.case(&format!("refusals over {transport}"), || refusals(queue, comm));
}

struct Runner<'r, 'c, C> {
    queue: &'r Queue,
    groups: &'r Groups<'c, C>,
    per_node: usize,
    nodes: usize,
    is_interleaved: bool,
}

impl<C: Communicator<Cuda> + Split> Runner<'_, '_, C> {
    fn check_format(&self, format: Format) {
        let Runner { nodes, per_node, .. } = *self;
        let placed = |case: OnNodes| if self.is_interleaved { case.interleaved() } else { case };
        let check = |case: OnNodes, label: &str| {
            self.check(&case, label);
            if nodes.is_power_of_two() {
                self.check(&case.along_tree(), label);
            }
        };
        if per_node <= 2 {
            check(placed(OnNodes::random(format, nodes, per_node, &SHAPES, 5)), "random");
            check(placed(OnNodes::random(format, nodes, per_node, &SHAPES, 6).with_mean()), "random");
            check(placed(OnNodes::random(format, nodes, per_node, &[&[70_001], &[255, 257]], 7)), "larger");
        }
        for kind in Kind::ADASUM {
            for granularity in [Granularity::Tensor, Granularity::Whole] {
                // `of_kind` assigns layers to consecutive indices in the node.
                let mut case = OnNodes::of_kind(kind, format, nodes, per_node, &SHAPES, 8);
                case.all.granularity = granularity;
                if !self.is_interleaved {
                    check(case, &format!("{kind:?}"));
                }
            }
        }
    }

    /// Runs a case twice with one workspace, and compares with the other ranks and the oracle.
    fn check(&self, case: &OnNodes, label: &str) {
        let (what, comm) = (format!("{label}, {}", case.name()), self.groups.all);
        let tensors = case.all.shapes.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.clone()));
        let dtype = dtype(case.all.format);
        let mut buffer = GradientBuffer::on_queue(self.queue, dtype, comm.world_size(), tensors).unwrap();
        let (nodes, options) = (self.groups.nodes(), case.all.options());
        let mut adasum = Adasum::on_nodes(nodes, &buffer, case.within_node, options).unwrap();
        let mut once = |in_gaps: f64| {
            let mut host = case.all.buffer(comm.rank());
            fill_gaps(&mut host, in_gaps);
            buffer.copy_from_host(&host).unwrap();
            adasum.all_reduce(&mut buffer).unwrap();
            comm.synchronize(self.queue).unwrap();
            buffer.copy_to_host(&mut host).unwrap();
            (patterns_of(host.as_slice()), tensor_patterns(&host), adasum.report().unwrap())
        };
        let ((first, tensors, report), (second, ..)) = (once(0.0), once(0.0));
        let (_, of_dirty, report_of_dirty) = once(1.0);
        let mut checks = Checks::new(comm);
        checks.same_list(format!("{what}: the second run's bits"), second, first.clone());
        checks.same_list(format!("{what}: the bits with ones between tensors"), of_dirty, tensors);
        checks.finish();
        assert_eq!(
            format!("{report_of_dirty:?}"),
            format!("{report:?}"),
            "{what}: the report with ones between tensors"
        );
        let layers = case.all.layers_of(&first).concat();
        case.check(&what, &layers, (report.algorithm, report.weights.as_deref(), report.recomputed));
    }
}

impl<C: Communicator<Cuda> + Split> Runner<'_, '_, C> {
    /// Nodes that also combine by Adasum give the result of Adasum over all ranks. With the powers of two that occur here, they agree up to
    /// the rounding of the nodes' results, and bitwise with one node or one rank on each node.
    fn adasum_within(&self) {
        let (comm, nodes) = (self.groups.all, self.groups.nodes());
        let case = OnNodes::random(Format::F32, self.nodes, self.per_node, &[&[70_001], &[255, 257], &[1]], 9);
        let tensors = case.all.shapes.iter().enumerate().map(|(i, shape)| (format!("layer{i}"), shape.clone()));
        let mut buffer = GradientBuffer::on_queue(self.queue, dtype(Format::F32), comm.world_size(), tensors).unwrap();
        let auto = AdasumOptions::default();
        let gram = auto.with_algorithm(Algorithm::Gram);
        let mut of_all = Adasum::over_transport(comm, &buffer, gram).unwrap();
        let tree = auto.with_algorithm(Algorithm::Tree);
        let prepare = |options| Adasum::on_nodes(nodes, &buffer, WithinNode::Adasum, options).unwrap();
        let (mut two, mut chosen) = (prepare(gram), prepare(auto));
        let mut along_tree = self.nodes.is_power_of_two().then(|| prepare(tree));
        let mut run = |reduce: &mut dyn FnMut(&mut GradientBuffer<Cuda>)| {
            buffer.copy_from_host(&case.all.buffer(comm.rank())).unwrap();
            reduce(&mut buffer);
            comm.synchronize(self.queue).unwrap();
            let mut host = case.all.buffer(comm.rank());
            buffer.copy_to_host(&mut host).unwrap();
            host.as_slice().to_f64_vec()
        };
        let expected = run(&mut |buffer| of_all.all_reduce(buffer).unwrap());
        for adasum in [&mut two, &mut chosen].into_iter().chain(&mut along_tree) {
            let got = run(&mut |buffer| adasum.all_reduce(buffer).unwrap());
            let bits: Vec<u64> = got.iter().map(|value| value.to_bits()).collect();
            let mut checks = Checks::new(comm);
            checks.same_list("Adasum within nodes", bits.clone(), bits);
            checks.finish();
            let largest = expected.iter().fold(0.0f64, |most, value| most.max(value.abs()));
            // A node's result is rounded by half a unit of f32, and so is the sum of two results at each level; weights are sums in f64.
            let is_tree = adasum.report().unwrap().algorithm == Algorithm::Tree;
            let is_exact = self.nodes == 1 || (self.per_node == 1 && !is_tree);
            let bound = if is_exact { 0.0 } else { 4.0 * largest * f64::from(f32::EPSILON) };
            for (place, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert!((got - expected).abs() <= bound, "element {place}: {got}, and {expected} by one matrix");
            }
        }
        assert_eq!(two.report().unwrap().weights.map(|weights| weights.len()), Some(3 * self.nodes));
    }
}

/// Invalid preparations are refused on every rank, and the communicators stay usable.
fn refusals<C: Communicator<Cuda> + Split>(queue: &Queue, comm: &C) {
    let rank = comm.rank();
    let groups = Groups::new(comm, (0, rank));
    let tensors = [("w", [100usize])];
    let mut buffer = GradientBuffer::on_queue(queue, gradsync::DType::F32, comm.world_size(), tensors).unwrap();
    if !comm.world_size().is_power_of_two() {
        let nodes_of_one = Groups::new(comm, (rank, 0));
        let tree = AdasumOptions::default().with_algorithm(Algorithm::Tree);
        let prepared = Adasum::on_nodes(nodes_of_one.nodes(), &buffer, ReduceOp::Sum, tree);
        let message = prepared.unwrap_err().to_string();
        assert!(message.contains("tree") && message.contains("a power of two of nodes"), "{message}");
    }
    let within = Adasum::on_nodes(groups.nodes(), &buffer, ReduceOp::Min, AdasumOptions::default());
    let message = within.unwrap_err().to_string();
    assert!(message.contains("min"), "{message}");
    if comm.world_size() > 1 {
        let nodes = Nodes::<Cuda> { all: comm, node: comm, across: comm };
        let grid = Adasum::on_nodes(nodes, &buffer, ReduceOp::Sum, AdasumOptions::default());
        let message = grid.unwrap_err().to_string();
        assert!(message.contains("in all"), "{message}");
    }
    let mut adasum = Adasum::on_nodes(groups.nodes(), &buffer, ReduceOp::Sum, AdasumOptions::default()).unwrap();
    adasum.all_reduce(&mut buffer).unwrap();
    comm.synchronize(queue).unwrap();
}
