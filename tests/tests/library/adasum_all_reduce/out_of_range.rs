//! `f64` vectors whose inner products leave the range of `f64`, or their products with weights, though the result does not: against exact
//! rational arithmetic.

use std::ops::Range;

use gradsync::comm::{Ranks, ReduceOp};
use gradsync::ops::offline::{OfflineOp, OfflineReduction, Processor, RankTensors};
use gradsync::ops::{AdasumOptions, Algorithm, Granularity, WithinNode, hierarchical_adasum_all_reduce};
use gradsync::{DType, Error, Result, Slice};
use gradsync_tests::array::patterns_of;
use gradsync_tests::double::{OUT_OF_RANGE, UNITS, UNITS_OUT_OF_RANGE, of_magnitudes};
use gradsync_tests::oracle::{Format, rational};
use gradsync_tests::ranks::{agreed, guarded};

use gradsync_tests::suite::adasum::case::Case;
use gradsync_tests::suite::adasum::on_nodes::Groups;

/// The algorithms that support a number of ranks.
fn algorithms(ranks: usize) -> &'static [Algorithm] {
    if ranks.is_power_of_two() { &[Algorithm::Gram, Algorithm::Tree] } else { &[Algorithm::Gram] }
}

/// A case of layers of `f64`, given as layers × ranks × elements.
fn case(layers: &[Vec<Vec<f64>>], algorithm: Algorithm, granularity: Granularity) -> Case {
    let of_rank = |rank: usize| layers.iter().map(|layer| layer[rank].clone()).collect();
    Case {
        format: Format::F64,
        algorithm,
        granularity,
        shapes: layers.iter().map(|layer| vec![layer[0].len()]).collect(),
        inputs: (0..layers[0].len()).map(of_rank).collect(),
    }
}

/// The error of a layer in units of the largest input; panics if it exceeds the tolerance.
fn check(inputs: &[Vec<f64>], found: &[f64], what: &str) -> f64 {
    let error = rational::adasum(inputs).error_of(found, rational::unit(inputs));
    assert!(error <= UNITS_OUT_OF_RANGE, "{what}, {} elements: {error} units", found.len());
    error
}

/// The lengths of layers that take the exact path always, and only where they must, in one window and in several.
fn lens(ranks: usize) -> &'static [usize] {
    if ranks < 8 { &[1, 2, 128, 129, 1000] } else { &[1, 128, 129] }
}

#[test]
fn products_out_of_range_give_the_exact_result() {
    guarded(170, || {
        for magnitudes in OUT_OF_RANGE {
            for ranks in [2, 3, 4, 5, 8] {
                let layers: Vec<_> = lens(ranks)
                    .iter()
                    .zip(1..)
                    .map(|(&len, seed)| of_magnitudes(magnitudes, ranks, len, seed))
                    .collect();
                for &algorithm in algorithms(ranks) {
                    let case = case(&layers, algorithm, Granularity::Tensor);
                    let what = format!("{magnitudes:?}, {}", case.name());
                    let found = case.layers(&case.run());
                    let errors = layers.iter().zip(&found).map(|(inputs, found)| check(inputs, found, &what));
                    println!("{what}: {} units", errors.fold(0.0, f64::max));
                }
            }
        }
    });
}

/// All tensors are one layer. Four ranks with elements of `1e-75` and `1e90` have products in range, whose weights are not: the exact path
/// then has all its digits.
#[test]
fn weights_out_of_range_give_the_exact_result() {
    guarded(60, || {
        let layers = [of_magnitudes(&[1e-75, 1e90], 4, 129, 5), of_magnitudes(&[1e-75, 1e90], 4, 71, 6)];
        let whole: Vec<Vec<f64>> = (0..4).map(|rank| [&layers[0][rank][..], &layers[1][rank]].concat()).collect();
        for (inputs, granularity) in [(&layers[0], Granularity::Tensor), (&whole, Granularity::Whole)] {
            let case = case(&layers, Algorithm::Gram, granularity);
            let found = case.layers(&case.run()).concat();
            let error = rational::adasum(inputs).error_of(&found[..inputs[0].len()], rational::unit(inputs));
            assert!(error <= UNITS, "{granularity:?}: {error} units");
        }
    });
}

#[test]
fn equal_vectors_of_any_size_are_their_own_adasum() {
    guarded(60, || {
        for largest in [1e160, 1e300, f64::MAX] {
            for ranks in 2..=8 {
                for &algorithm in algorithms(ranks) {
                    let layer = |len: usize| {
                        let vector: Vec<f64> = (0..len).map(|index| largest / (1.0 + index as f64)).collect();
                        vec![vector; ranks]
                    };
                    for granularity in [Granularity::Tensor, Granularity::Whole] {
                        let case = case(&[layer(1), layer(128), layer(129), layer(1000)], algorithm, granularity);
                        let found = case.layers(&case.run());
                        assert!(found == case.inputs[0], "{largest:e}, {}", case.name());
                    }
                }
            }
        }
    });
}

/// As in any other layer: an infinite element makes the whole layer NaN, also where another rank's vector is large or zero.
#[test]
fn an_infinity_beside_a_large_vector_spoils_the_layer() {
    guarded(60, || {
        for ranks in [2, 3, 4, 8] {
            for &algorithm in algorithms(ranks) {
                for other in [0.0, 1.0, 1e160] {
                    let mut layer = vec![vec![other; 130]; ranks];
                    layer[ranks - 1][7] = f64::NEG_INFINITY;
                    let case = case(&[layer], algorithm, Granularity::Tensor);
                    let found = case.layers(&case.run());
                    assert!(found[0].iter().all(|x| x.is_nan()), "{other:e}, {}: {:?}", case.name(), found[0]);
                }
            }
        }
    });
}

/// Two ranks of each node have the two halves of its vector, which the reduction inside the node adds.
#[test]
fn products_out_of_range_across_nodes() {
    guarded(60, || {
        for magnitudes in OUT_OF_RANGE {
            for nodes in [2, 3, 4] {
                let layers: Vec<_> = [1, 129, 500].map(|len| of_magnitudes(magnitudes, nodes, len, len as u64)).into();
                for &algorithm in algorithms(nodes) {
                    let sums = case(&layers, algorithm, Granularity::Tensor);
                    let mut all = sums.clone();
                    all.inputs = sums.inputs.iter().flat_map(|layers| halves(layers)).collect();
                    let what = format!("{magnitudes:?}, {nodes} nodes, {algorithm:?}");
                    let arena = agreed(&what, all.world_size(), |comm| {
                        let (mut buffer, place) = (all.buffer(comm.rank()), (comm.rank() / 2, comm.rank() % 2));
                        let (groups, within_node) = (Groups::new(&comm, place), WithinNode::Reduce(ReduceOp::Sum));
                        hierarchical_adasum_all_reduce(groups.nodes(), &mut buffer, within_node, all.options())
                            .unwrap();
                        patterns_of(buffer.as_slice())
                    });
                    for (inputs, segment) in layers.iter().zip(all.buffer(0).segments()) {
                        let found: Vec<f64> = arena[segment.clone()].iter().map(|&bits| f64::from_bits(bits)).collect();
                        check(inputs, &found, &what);
                    }
                }
            }
        }
    });
}

/// Layers divided among two ranks: the even elements, and the odd ones.
fn halves(layers: &[Vec<f64>]) -> [Vec<Vec<f64>>; 2] {
    [0, 1].map(|half| {
        let of =
            |layer: &Vec<f64>| layer.iter().enumerate().map(|(i, &x)| if i % 2 == half { x } else { 0.0 }).collect();
        layers.iter().map(of).collect()
    })
}

/// The tensors of a case as one process reads them, those with a number in `narrow` as `f32`.
struct OfCase<'a> {
    case: &'a Case,
    narrow: Range<usize>,
}

impl RankTensors for OfCase<'_> {
    fn ranks(&self) -> usize {
        self.case.world_size()
    }

    fn tensor_count(&self) -> usize {
        self.case.shapes.len()
    }

    fn tensor(&self, index: usize) -> (DType, usize) {
        let dtype = if self.narrow.contains(&index) { DType::F32 } else { DType::F64 };
        (dtype, self.case.shapes[index][0])
    }

    fn read(&self, index: usize, elements: Range<usize>, work: &mut dyn FnMut(&[Slice<'_>])) -> Result<()> {
        let vectors = self.case.inputs.iter().map(|layers| &layers[index][elements.clone()]);
        if self.narrow.contains(&index) {
            let narrow: Vec<Vec<f32>> = vectors.map(|vector| vector.iter().map(|&x| x as f32).collect()).collect();
            work(&narrow.iter().map(Slice::from).collect::<Vec<_>>());
        } else {
            work(&vectors.map(Slice::from).collect::<Vec<_>>());
        }
        Ok(())
    }
}

/// The results of all tensors of a case from one process.
fn offline(source: &OfCase<'_>, options: AdasumOptions, factor: f64) -> Vec<Vec<f64>> {
    let mut reduction =
        OfflineReduction::new(source, OfflineOp::Adasum(options), factor, Processor::Cpu).expect("a reduction");
    let mut tensor = |index: usize| {
        let mut result = Vec::new();
        reduction
            .reduce(index, DType::F64, |piece| {
                result.extend(piece.to_f64_vec());
                Ok::<_, Error>(())
            })
            .expect("a result");
        result
    };
    (0..source.tensor_count()).map(&mut tensor).collect()
}

#[test]
fn offline_reduction_gives_the_bits_of_the_ranks() {
    guarded(60, || {
        for magnitudes in OUT_OF_RANGE {
            for ranks in [2, 3, 4, 8] {
                let layers: Vec<_> = [1, 129, 1000].map(|len| of_magnitudes(magnitudes, ranks, len, len as u64)).into();
                for &algorithm in algorithms(ranks) {
                    for granularity in [Granularity::Tensor, Granularity::Whole] {
                        let case = case(&layers, algorithm, granularity);
                        let found = offline(&OfCase { case: &case, narrow: 0..0 }, case.options(), 1.0);
                        let what = format!("{magnitudes:?}, {}", case.name());
                        assert!(found == case.layers(&case.run()), "{what}: other bits than ranks");
                    }
                }
            }
        }
    });
}

/// A factor beside large vectors, and a layer of `f64` and `f32` tensors.
#[test]
fn offline_reduction_scales_layers_of_several_dtypes() {
    guarded(60, || {
        for algorithm in [Algorithm::Gram, Algorithm::Tree] {
            for magnitudes in [&[1e160][..], &[1e-75, 1e90], &[1e300, 1e295]] {
                let mut layers = vec![of_magnitudes(magnitudes, 4, 200, 3), of_magnitudes(&[1.0], 4, 50, 4)];
                layers[1].iter_mut().flatten().for_each(|x| *x = f64::from(*x as f32));
                let case = case(&layers, algorithm, Granularity::Whole);
                let whole: Vec<Vec<f64>> = case.inputs.iter().map(|layers| layers.concat()).collect();
                let exact = rational::adasum(&whole);
                // Powers of two, which are exact.
                for factor in [1.0, 2f64.powi(-480), 0.5] {
                    let found = offline(&OfCase { case: &case, narrow: 1..2 }, case.options(), factor).concat();
                    let found: Vec<f64> = found.into_iter().map(|x| x / factor).collect();
                    let error = exact.error_of(&found, rational::unit(&whole));
                    let what = format!("{algorithm:?}, {magnitudes:?}, factor {factor:e}");
                    assert!(error <= UNITS_OUT_OF_RANGE, "{what}: {error} units");
                }
            }
        }
    });
}
