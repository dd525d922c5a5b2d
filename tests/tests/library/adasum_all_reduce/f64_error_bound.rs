//! Short layers of `f64` against exact rational arithmetic: the error is at most 8 units of `2^-52` of the largest input, for every family
//! of data.

use gradsync::ops::{Algorithm, Granularity};
use gradsync_tests::double::{Family, UNITS};
use gradsync_tests::oracle::{Format, rational};

use gradsync_tests::suite::adasum::case::Case;

/// A case of layers with lengths `lens`, as ranks × layers × elements.
fn case(family: Family, ranks: usize, lens: &[usize], seed: u64) -> Case {
    let layers: Vec<Vec<Vec<f64>>> =
        lens.iter().zip(seed..).map(|(&len, seed)| family.vectors(ranks, len, seed)).collect();
    let of_rank = |rank: usize| layers.iter().map(|layer| layer[rank].clone()).collect();
    Case {
        format: Format::F64,
        algorithm: Algorithm::Gram,
        granularity: Granularity::Tensor,
        shapes: lens.iter().map(|&len| vec![len]).collect(),
        inputs: (0..ranks).map(of_rank).collect(),
    }
}

/// The largest error in any layer of the case, in units; panics if a layer's error exceeds the tolerance.
fn check(case: &Case, family: Family) -> f64 {
    let found = case.layers(&case.run_once(&case.name()));
    let errors = found.iter().enumerate().map(|(layer, found)| {
        let inputs: Vec<Vec<f64>> = case.inputs.iter().map(|rank| rank[layer].clone()).collect();
        let exact = rational::adasum(&inputs);
        let unit = rational::unit(&inputs);
        if unit < f64::MIN_POSITIVE {
            // The layer is zero, or so small that its unit would be subnormal.
            return exact.error_of(found, f64::MIN_POSITIVE);
        }
        let (error, len, ranks) = (exact.error_of(found, unit), found.len(), case.world_size());
        assert!(error <= UNITS, "{family:?}, {ranks} ranks, layer {layer} of {len} elements: {error} units");
        error
    });
    errors.fold(0.0, f64::max)
}

/// Layers in one rank's window and layers that span windows, on every world size up to 16.
#[test]
fn short_layers_are_exact_to_eight_units() {
    for family in Family::ALL {
        let mut worst = 0.0_f64;
        for ranks in 1..=16 {
            // The rational numbers of many ranks have many digits, so larger groups get fewer and shorter vectors.
            let lens: &[usize] = match ranks {
                1..=4 => &[1, 1, 1, 2, 3, 4, 5, 8, 13, 33, 64, 100, 100],
                5..=8 => &[1, 1, 2, 5, 17, 100],
                _ => &[1, 1, 2, 3, 7, 33],
            };
            worst = worst.max(check(&case(family, ranks, lens, 1000 * ranks as u64), family));
        }
        println!("{family:?}: {worst} units");
    }
}

/// The measurement of the issue report: one-element tensors on eight ranks.
#[test]
fn single_elements_are_exact() {
    for seed in 0..20 {
        let error = check(&case(Family::Normal, 8, &[1; 50], 100 * seed), Family::Normal);
        assert!(error <= 1.0, "{error} units");
    }
}

#[test]
fn the_most_elements_of_the_most_ranks() {
    for family in Family::ALL {
        println!("{family:?}: {} units", check(&case(family, 16, &[128], 5), family));
    }
}
