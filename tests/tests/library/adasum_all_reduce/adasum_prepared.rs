//! `Adasum` as an object: prepared once, it gives the results of the function at every step, over all ranks and over nodes.

use gradsync::GradientBuffer;
use gradsync::comm::local::LocalCommunicator;
use gradsync::comm::{Ranks, ReduceOp};
use gradsync::ops::{
    Adasum, AdasumOptions, AdasumReport, Algorithm, Granularity, WithinNode, adasum_all_reduce,
    hierarchical_adasum_all_reduce,
};
use gradsync_tests::array::patterns_of;
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::agreed;
use gradsync_tests::suite::adasum::on_nodes::Groups;

use gradsync_tests::suite::adasum::case::Case;

const SHAPES: [&[usize]; 3] = [&[700], &[], &[5, 51]];

fn case(seed: u64, options: AdasumOptions) -> Case {
    Case::of(Kind::Random, Format::F32, 4, &SHAPES, seed).with(options.algorithm, options.granularity)
}

/// Runs three steps by an `Adasum` object and by the function, and compares their bits and reports.
fn check(
    options: AdasumOptions,
    prepare: impl Fn(&LocalCommunicator, &GradientBuffer, &mut dyn FnMut(&mut Adasum<'_>)) + Sync,
    function: impl Fn(&LocalCommunicator, &mut GradientBuffer) -> AdasumReport + Sync,
) {
    agreed(&format!("{options:?}"), 4, |comm| {
        let mut all = Vec::new();
        prepare(&comm, &case(0, options).buffer(comm.rank()), &mut |adasum| {
            let layers = if options.granularity == Granularity::Whole { 1 } else { SHAPES.len() };
            let before = adasum.report().unwrap().weights;
            assert!(
                before.is_none_or(|weights| weights.len() % layers == 0 && weights.iter().all(|&weight| weight == 0.0))
            );
            for seed in 1..4 {
                let mut buffer = case(seed, options).buffer(comm.rank());
                adasum.all_reduce(&mut buffer).unwrap();
                let mut expected = case(seed, options).buffer(comm.rank());
                let report = function(&comm, &mut expected);
                assert_eq!(adasum.report().unwrap(), report, "the report of step {seed}, {options:?}");
                let of_layers = (0..layers).filter_map(|layer| report.weights_of(layer)).collect::<Vec<_>>();
                assert_eq!(of_layers.len(), if report.weights.is_some() { layers } else { 0 }, "{options:?}");
                assert_eq!(of_layers.concat(), report.weights.clone().unwrap_or_default(), "{options:?}");
                assert_eq!(report.weights_of(layers), None, "{options:?}");
                assert!(patterns_of(buffer.as_slice()) == patterns_of(expected.as_slice()), "step {seed}, {options:?}");
                all.extend(patterns_of(buffer.as_slice()));
            }
        });
        all
    });
}

fn options() -> impl Iterator<Item = AdasumOptions> {
    [Algorithm::Auto, Algorithm::Gram, Algorithm::Tree].into_iter().flat_map(|algorithm| {
        [Granularity::Tensor, Granularity::Whole]
            .map(|granularity| AdasumOptions::default().with_algorithm(algorithm).with_granularity(granularity))
    })
}

#[test]
fn of_all_ranks() {
    for options in options() {
        check(
            options,
            |comm, buffer, run| run(&mut Adasum::new(comm, buffer, options).unwrap()),
            |comm, buffer| adasum_all_reduce(comm, buffer, options).unwrap(),
        );
    }
}

#[test]
fn on_nodes() {
    for (options, within) in
        options().flat_map(|options| [WithinNode::Adasum, ReduceOp::Mean.into()].map(|within| (options, within)))
    {
        check(
            options,
            |all, buffer, run| {
                let groups = Groups::of(all, 2);
                run(&mut Adasum::on_nodes(groups.nodes(), buffer, within, options).unwrap());
            },
            |all, buffer| hierarchical_adasum_all_reduce(Groups::of(all, 2).nodes(), buffer, within, options).unwrap(),
        );
    }
}

#[test]
fn a_buffer_that_it_was_not_made_for_is_refused_and_left_alone() {
    agreed("refusals", 2, |comm| {
        let new = |len: usize| GradientBuffer::new(gradsync::DType::F32, 2, [("w", [len])]).unwrap();
        let mut adasum = Adasum::new(&comm, &new(8), AdasumOptions::default()).unwrap();
        let mut other = new(9);
        let message = adasum.all_reduce(&mut other).unwrap_err().to_string();
        assert!(message.contains("other tensors"), "{message}");
        assert!(patterns_of(other.as_slice()).iter().all(|&bits| bits == 0));
        adasum.all_reduce(&mut new(8)).unwrap();
        message
    });
}
