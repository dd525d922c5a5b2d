//! The model's results for growing worlds: the changes of the automatic choice, and the point from which products are expensive.

use gradsync::plan::cost::{Alternatives, Parameters, Scheme, Work, Workload, World, choose_with, gram_kernels, work};

/// The changes of the choice among some schemes as the world size doubles from 2 to `most` ranks: the number of ranks from which a scheme
/// is chosen, and the scheme. Worlds of a single node are left out if the usual scheme needs several nodes.
pub(super) fn switches(
    among: Alternatives,
    parameters: &Parameters,
    ranks_per_node: usize,
    load: Workload,
    most: usize,
) -> Vec<(usize, Scheme)> {
    let mut found: Vec<(usize, Scheme)> = Vec::new();
    for world in doublings(most).map(|ranks| World::new(ranks, ranks_per_node)).filter(|&world| among.usual.fits(world))
    {
        let scheme = choose_with(parameters, among, world, load).scheme;
        if found.last().is_none_or(|&(_, last)| last != scheme) {
            found.push((world.ranks, scheme));
        }
    }
    found
}

/// The share of the time of one Gram matrix over all ranks that products, their sums and weights take.
pub(super) fn products_share(parameters: &Parameters, world: World, load: Workload) -> f64 {
    let of = |layers| work(Scheme::Gram, world, Workload { layers, ..load }).unwrap_or_default();
    // The bare work, which any weights require, has no layers and no products, and reads each vector once for the Gram matrix, in one
    // launch, and once more for the weighted sum.
    let launches = gram_kernels(world.ranks, 0.0, load.element_bytes, 0).launches;
    let memory_bytes = (2 * world.ranks + 1) as f64 * load.bytes as f64 / world.ranks as f64;
    let launches = of(0).launches - launches + 1.0;
    let bare = Work { memory_bytes, launches, products: 0.0, serial: 0.0, ..of(0) };
    let (whole, bare) = (parameters.time(&of(load.layers)), parameters.time(&bare));
    if whole > 0.0 { (1.0 - bare / whole).max(0.0) } else { 0.0 }
}

/// 2, 4, 8, … up to `most`.
pub(super) fn doublings(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(2usize), |ranks| ranks.checked_mul(2)).take_while(move |&ranks| ranks <= most)
}
