//! Calls that Adasum refuses on every rank.

use gradsync::comm::{Ranks, ReduceOp};
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, adasum_all_reduce, all_reduce};
use gradsync::{DType, Error, GradientBuffer};
use gradsync_tests::inputs::Kind;
use gradsync_tests::oracle::Format;
use gradsync_tests::ranks::{guarded, on_ranks};

use gradsync_tests::suite::adasum::case::Case;

#[test]
fn tree_needs_a_power_of_two_and_names_the_count() {
    guarded(60, || {
        for world_size in [3, 5, 6, 7, 12] {
            let case = Case::of(Kind::Random, Format::F32, world_size, &[&[100]], 1);
            let case = case.with(Algorithm::Tree, Granularity::Tensor);
            let outcome = on_ranks(world_size, |comm| {
                let mut buffer = case.buffer(comm.rank());
                let error = adasum_all_reduce(&comm, &mut buffer, case.options()).expect_err("no power of two");
                // The call was refused before any exchange, so the group is still usable.
                comm.barrier().unwrap();
                error.to_string()
            });
            for text in outcome {
                assert!(text.contains(&world_size.to_string()), "\"{text}\" does not name {world_size}");
                assert!(text.contains("power"), "\"{text}\" does not say why");
            }
        }
    });
}

/// One rank runs `odd`, the others run `common`; every rank must refuse.
fn assert_refused_everywhere(what: &str, common: &Case, odd: &Case) {
    for algorithm in [Algorithm::Gram, Algorithm::Tree] {
        let outcomes = on_ranks(4, |comm| {
            let case = if comm.rank() == 2 { odd } else { common };
            let case = case.clone().with(algorithm, Granularity::Tensor);
            adasum_all_reduce(&comm, &mut case.buffer(comm.rank()), case.options()).is_err()
        });
        assert_eq!(outcomes, [true; 4], "{what}, {algorithm:?}: not an error on every rank");
    }
}

#[test]
fn ranks_with_different_lengths_or_dtypes() {
    guarded(60, || {
        let case = |format, shapes: &[&[usize]]| Case::of(Kind::Random, format, 4, shapes, 1);
        let common = case(Format::F32, &[&[60], &[64]]);
        assert_refused_everywhere("a longer buffer", &common, &case(Format::F32, &[&[60], &[640]]));
        assert_refused_everywhere("another dtype", &common, &case(Format::F64, &[&[60], &[64]]));
        // The tensor of bf16 is padded to the same number of elements, so only the dtype differs.
        assert_refused_everywhere("the same length", &case(Format::F16, &[&[128]]), &case(Format::BF16, &[&[128]]));
    });
}

/// The arenas have the same number of elements but different segments. The collectives alone cannot detect this, and the ranks would weight
/// elements by another layer's coefficients.
#[test]
fn ranks_with_different_layouts_of_one_length() {
    guarded(60, || {
        let case = |shapes: &[&[usize]]| Case::of(Kind::Random, Format::F32, 4, shapes, 1);
        assert_refused_everywhere("other cuts", &case(&[&[60], &[64]]), &case(&[&[64], &[60]]));
        assert_refused_everywhere("other number of tensors", &case(&[&[60], &[64]]), &case(&[&[128]]));
    });
}

#[test]
fn ranks_with_different_options_all_get_an_error() {
    guarded(60, || {
        for (common, odd) in [
            ((Algorithm::Gram, Granularity::Tensor), (Algorithm::Tree, Granularity::Tensor)),
            ((Algorithm::Gram, Granularity::Tensor), (Algorithm::Gram, Granularity::Whole)),
            ((Algorithm::Tree, Granularity::Tensor), (Algorithm::Tree, Granularity::Whole)),
        ] {
            let case = Case::of(Kind::Random, Format::F32, 4, &[&[60], &[64]], 1);
            let outcomes = on_ranks(4, |comm| {
                let (algorithm, granularity) = if comm.rank() == 1 { odd } else { common };
                let case = case.clone().with(algorithm, granularity);
                adasum_all_reduce(&comm, &mut case.buffer(comm.rank()), case.options()).is_err()
            });
            assert_eq!(outcomes, [true; 4], "{odd:?} among {common:?}");
        }
    });
}

#[test]
fn a_buffer_for_another_number_of_ranks() {
    guarded(60, || {
        let case = Case::of(Kind::Random, Format::F32, 4, &[&[100]], 1);
        for algorithm in [Algorithm::Gram, Algorithm::Tree] {
            let case = case.clone().with(algorithm, Granularity::Tensor);
            let texts = on_ranks(2, |comm| {
                adasum_all_reduce(&comm, &mut case.buffer(0), case.options()).expect_err("4 is not 2").to_string()
            });
            for text in texts {
                assert!(text.contains('4') && text.contains('2'), "\"{text}\" does not name both counts");
            }
        }
    });
}

/// A rank that leaves without a call ends the call on the others.
#[test]
fn a_rank_that_never_comes_is_an_error_on_the_others() {
    guarded(60, || {
        for algorithm in [Algorithm::Gram, Algorithm::Tree] {
            let case = Case::of(Kind::Random, Format::F32, 4, &[&[100]], 1).with(algorithm, Granularity::Tensor);
            let outcomes = on_ranks(4, |comm| {
                if comm.rank() == 3 {
                    return None;
                }
                let outcome = adasum_all_reduce(&comm, &mut case.buffer(comm.rank()), case.options());
                Some(outcome.expect_err("rank 3 left").to_string())
            });
            // In the tree, some ranks notice only through a partner that failed, so not every error names rank 3.
            assert!(outcomes[..3].iter().all(Option::is_some));
            assert!(outcomes.iter().flatten().any(|text| text.contains("rank 3")), "{outcomes:?}");
        }
    });
}

/// Tensors of the same length in a different order, as when parameters come out of a hash map: only their names differ.
#[test]
fn ranks_with_the_same_tensors_in_another_order() {
    guarded(60, || {
        let buffer = |rank: usize, shape: [usize; 2]| {
            let (first, second) = if rank == 1 { ("b", "a") } else { ("a", "b") };
            GradientBuffer::new(DType::F32, 3, [(first, shape), (second, shape)]).unwrap()
        };
        let texts = on_ranks(3, |comm| {
            let mut gradients = buffer(comm.rank(), [2, 3]);
            let adasum = adasum_all_reduce(&comm, &mut gradients, AdasumOptions::default());
            let sum = all_reduce(&comm, &mut gradients, ReduceOp::Sum);
            // One rank has the same names with other shapes.
            let mut gradients = buffer(0, if comm.rank() == 2 { [3, 2] } else { [2, 3] });
            let reshaped = all_reduce(&comm, &mut gradients, ReduceOp::Sum);
            (adasum.unwrap_err().to_string(), sum.unwrap_err().to_string(), reshaped.unwrap_err().to_string())
        });
        for (adasum, sum, reshaped) in texts {
            let order = "ranks disagree on tensor 0: rank 0 has \"a\", rank 1 has \"b\"";
            assert_eq!(adasum, format!("adasum_all_reduce(Auto, per tensor): {order}"));
            assert_eq!(sum, format!("all_reduce(sum): {order}"));
            let shapes = "rank 0 has shape [2, 3], rank 2 has shape [3, 2]";
            assert_eq!(reshaped, format!("all_reduce(sum): ranks disagree on tensor 0 \"a\": {shapes}"));
        }
    });
}

/// One rank alone has the wrong world size, or makes an impossible request: the others learn it at once, not at the deadline.
#[test]
fn a_rank_that_is_wrong_alone_keeps_nobody_waiting() {
    guarded(20, || {
        let outcomes = on_ranks(3, |comm| {
            let planned = if comm.rank() == 1 { 4 } else { 3 };
            let mut gradients = GradientBuffer::new(DType::F32, planned, [("a", [100])]).unwrap();
            let world = adasum_all_reduce(&comm, &mut gradients, AdasumOptions::default()).unwrap_err();
            let algorithm = if comm.rank() == 1 { Algorithm::Tree } else { Algorithm::Gram };
            let mut gradients = GradientBuffer::new(DType::F32, 3, [("a", [100])]).unwrap();
            let options = AdasumOptions::default().with_algorithm(algorithm);
            (world, adasum_all_reduce(&comm, &mut gradients, options).unwrap_err())
        });
        for (rank, (world, tree)) in outcomes.into_iter().enumerate() {
            let is_own = matches!(tree, Error::UnsupportedWorldSize { world_size: 3, .. });
            assert_eq!(is_own, rank == 1, "{tree}: rank {rank} has the error of another rank");
            for (error, why) in [(world, "a world size of 4"), (tree, "a power of two")] {
                let text = error.to_string();
                assert!(text.contains(why), "\"{text}\" does not say \"{why}\"");
                assert!(rank == 1 || text.contains("rank 1 refuses"), "\"{text}\" does not name rank 1");
            }
        }
    });
}

/// Gradients in shared memory are reduced window by window, each by its own rank, so the reduction operation has to be compared.
#[test]
fn another_reduction_on_one_rank() {
    guarded(20, || {
        for make in [GradientBuffer::new, GradientBuffer::new_shared] {
            let texts = on_ranks(3, |comm| {
                let mut gradients = make(DType::F32, 3, [("a", [100])]).unwrap();
                let op = if comm.rank() == 2 { ReduceOp::Mean } else { ReduceOp::Sum };
                all_reduce(&comm, &mut gradients, op).map_err(|error| error.to_string())
            });
            for text in texts {
                let text = text.expect_err("ranks disagree");
                assert_eq!(text, "ranks disagree: rank 0 called all_reduce(sum), rank 2 called all_reduce(mean)");
            }
        }
    });
}
