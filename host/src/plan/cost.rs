//! What Adasum costs on many ranks, as pure arithmetic: bytes on the wire, steps, products; and which [`Scheme`] is the fastest.
//!
//! Each scheme's [`Work`] is counted for the rank that does most, and takes the time that [`Parameters`] say; [`fit`] finds those from
//! measurements. Nothing here measures, or runs, anything.
//!
//! [`Scheme::Gram`] forms P(P+1)/2 products of each element's P values, sends every rank its shard of every vector, and sums
//! P(P+1)/2 numbers for each layer. Inside a node all of that is nearly free. Across nodes it is not: shards of whole vectors pass the
//! slow links, where reducing inside the nodes first leaves one vector for each node; later the products are no longer free either.

mod fit;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;

use gradsync_device::abi::{GRAM_CROSS_WIDTH, GRAM_WIDTHS};
use gradsync_device::math::adasum::products;

pub use self::fit::{Fit, Point, fit};
pub use self::work::{
    PART_NAMES, PARTS, Parameters, Work, World, all_gather, all_reduce, all_to_all, exchange, reduce_scatter,
};

/// The elements that one block of a kernel takes, and has sums of its own for.
const CHUNK_LEN: f64 = 16384.0;
/// Another scheme has to take less than this part of Gram's time: the model is no more exact, and Gram rounds once.
const GAIN: f64 = 0.9;

/// A way to form the Adasum of all ranks' vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// One Gram matrix over all ranks.
    Gram,
    /// Pair by pair: vector halving, distance doubling.
    Tree,
    /// A Gram matrix inside each node, and one of the nodes' results.
    TwoLevelGram,
    /// A Gram matrix inside each node, and the tree over the nodes' results.
    GramThenTree,
    /// The sum inside each node, and a Gram matrix of the nodes' sums. Another result: not the Adasum of all ranks.
    Hierarchical,
}

impl Scheme {
    /// All of them.
    pub const ALL: [Scheme; 5] =
        [Scheme::Gram, Scheme::Tree, Scheme::TwoLevelGram, Scheme::GramThenTree, Scheme::Hierarchical];

    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Gram => "gram",
            Scheme::Tree => "tree",
            Scheme::TwoLevelGram => "gram+gram",
            Scheme::GramThenTree => "gram+tree",
            Scheme::Hierarchical => "sum+gram",
        }
    }

    /// Whether it gives what [`Gram`](Self::Gram) gives, up to rounding, so that an automatic choice may take it.
    pub const fn is_adasum_of_all(self) -> bool {
        !matches!(self, Scheme::Hierarchical)
    }

    /// Whether it can run in that world and combines the ranks in the order of the tree of adjacent pairs.
    pub fn fits(self, world: World) -> bool {
        let local = world.local();
        let in_nodes = world.nodes() > 1 && world.ranks % local == 0;
        match self {
            Scheme::Gram => true,
            Scheme::Tree => world.ranks.is_power_of_two(),
            // The tree of all ranks is one of whole nodes only if a node is a whole tree.
            Scheme::TwoLevelGram => in_nodes && local.is_power_of_two(),
            Scheme::GramThenTree => in_nodes && local.is_power_of_two() && world.nodes().is_power_of_two(),
            Scheme::Hierarchical => in_nodes,
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Bytes of one rank's vector.
    pub bytes: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// Tensors with weights of their own.
    pub layers: usize,
}

impl Workload {
    /// Gradients in f32 with as many tensors as BERT-large has.
    pub fn of(bytes: usize) -> Self {
        Self { bytes, element_bytes: 4, layers: 398 }
    }
}

/// What the rank that does most has to do; `None` where the scheme does not [fit](Scheme::fits).
pub fn work(scheme: Scheme, world: World, load: Workload) -> Option<Work> {
    if !scheme.fits(world) {
        return None;
    }
    let (ranks, local, nodes) = (world.ranks, world.local(), world.nodes());
    let bytes = load.bytes as f64;
    let part = bytes / local as f64;
    let inside = World::new(local, local);
    // Across nodes, each rank meets those of its own place in the other nodes.
    let across = World::new(nodes, 1);
    Some(match scheme {
        Scheme::Gram => gram(world, world, ranks, bytes, load) + all_gather(world, bytes),
        Scheme::Tree => tree(world, 1, bytes, load),
        Scheme::TwoLevelGram => {
            let first = gram(inside, inside, local, bytes, load);
            let second = gram(across, world, nodes, part, load) + all_gather(across, part);
            first + second + all_gather(inside, bytes)
        }
        Scheme::GramThenTree => {
            let first = gram(inside, inside, local, bytes, load);
            first + tree(world, local, part, load) + all_gather(inside, bytes)
        }
        Scheme::Hierarchical => {
            let second = gram(across, world, nodes, part, load) + all_gather(across, part);
            reduce_scatter(inside, bytes) + second + all_gather(inside, bytes)
        }
    })
}

/// One Gram matrix of `vectors` vectors of `bytes` bytes each, and this rank's shard of the result. `exchange` is the world in which the
/// vectors meet, `sums` the one over which the shards' products are added up.
fn gram(exchange: World, sums: World, vectors: usize, bytes: f64, load: Workload) -> Work {
    if vectors == 1 {
        return Work::default();
    }
    let len = bytes / load.element_bytes as f64 / exchange.ranks as f64;
    let width = vectors as f64;
    let count = products(vectors) as f64;
    let totals = 8.0 * count * load.layers as f64;
    let levels = width.log2().ceil();
    let vector_bytes = len * load.element_bytes as f64;

    let mut work = all_to_all(exchange, bytes) + all_reduce(sums, totals);
    // The exact path's sums: one small all-reduce for each level above the first, whether a layer needs it or not.
    for _ in 1..levels as usize {
        work += all_reduce(sums, 3.0 * 8.0 * load.layers as f64 * (width / 4.0).max(1.0));
    }
    let chunks = len / CHUNK_LEN + 1.0;
    let read = reads(vectors) * vector_bytes + (width + 1.0) * vector_bytes;
    work += Work::kernel(read + 16.0 * count * chunks + totals, (count + width) * len);
    // A layer's weights are found by one thread: at every level the quadratic forms of all pairs.
    work + Work { serial: 1.5 * width * width, ..Work::default() }
}

/// Vectors that the products of `vectors` vectors read, those of other tiles again.
fn reads(vectors: usize) -> f64 {
    let widest = GRAM_WIDTHS[GRAM_WIDTHS.len() - 1];
    let (cells, tiles) = (vectors.div_ceil(GRAM_CROSS_WIDTH), vectors.div_ceil(widest));
    let cells_in_tile = widest / GRAM_CROSS_WIDTH;
    let pairs = cells.pow(2).saturating_sub(tiles * cells_in_tile.pow(2)) / 2;
    (vectors + pairs * 2 * GRAM_CROSS_WIDTH) as f64
}

/// Halving and doubling from `distance` ranks on, over vectors of which each rank holds `bytes` bytes, and back.
fn tree(world: World, distance: usize, bytes: f64, load: Workload) -> Work {
    let mut work = Work::default();
    let (mut distance, mut held) = (distance, bytes);
    while distance < world.ranks {
        held /= 2.0;
        let len = held / load.element_bytes as f64;
        // There and back.
        work += exchange(world, distance, held) + exchange(world, distance, held);
        // The sums of the pair, by doubling over all ranks that hold a slice of it.
        let mut step = 1;
        while step < 2 * distance {
            work += exchange(world, step, 3.0 * 8.0 * load.layers as f64);
            step *= 2;
        }
        work += Work::kernel(5.0 * held, 5.0 * len);
        distance *= 2;
    }
    work
}

/// The scheme that an automatic choice takes, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The fastest that gives the Adasum of all ranks, or Gram where that is nearly as fast.
    pub scheme: Scheme,
    /// What it takes, in seconds.
    pub seconds: f64,
    /// What one Gram matrix over all ranks takes.
    pub gram_seconds: f64,
    /// What that spends most of its time on, by number in [`PART_NAMES`], and the share of its time.
    pub gram_spends: (usize, f64),
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (part, share) = self.gram_spends;
        let (scheme, milliseconds) = (self.scheme, self.seconds * 1e3);
        if scheme == Scheme::Gram {
            return write!(f, "{scheme}, {milliseconds:.3} ms, most of it {}", PART_NAMES[part]);
        }
        let (gram, percent) = (self.gram_seconds * 1e3, 100.0 * share);
        write!(f, "{scheme}, {milliseconds:.3} ms: gram takes {gram:.3} ms, {percent:.0} % of it {}", PART_NAMES[part])
    }
}

/// The fastest scheme that gives the Adasum of all ranks; one Gram matrix unless another gains a tenth.
pub fn choose_with(parameters: &Parameters, world: World, load: Workload) -> Choice {
    let time = |scheme| work(scheme, world, load).map(|work| (scheme, parameters.time(&work)));
    let gram = work(Scheme::Gram, world, load).unwrap_or_default();
    let gram_seconds = parameters.time(&gram);
    let (scheme, seconds) = Scheme::ALL
        .into_iter()
        .filter(|scheme| scheme.is_adasum_of_all())
        .filter_map(time)
        .filter(|(_, seconds)| *seconds < GAIN * gram_seconds)
        .fold((Scheme::Gram, gram_seconds), |best, other| if other.1 < best.1 { other } else { best });
    let times = parameters.times(&gram);
    let most = (0..PARTS).fold(0, |most, part| if times[part] > times[most] { part } else { most });
    let share = if gram_seconds > 0.0 { times[most] / gram_seconds } else { 0.0 };
    Choice { scheme, seconds, gram_seconds, gram_spends: (most, share) }
}

/// The scheme for vectors of `bytes` bytes on `world_size` ranks in nodes of `ranks_per_node`, as [`choose_with`] the default
/// [`Parameters`] and [`Workload::of`] those bytes. A function of its arguments alone, so that all ranks choose alike.
pub fn choose(world_size: usize, ranks_per_node: usize, bytes: usize) -> Choice {
    choose_with(&Parameters::default(), World::new(world_size, ranks_per_node), Workload::of(bytes))
}

/// Where the choice changes as the world doubles from 2 to `most` ranks: the number of ranks from which a scheme is chosen, and the scheme.
pub fn switches(parameters: &Parameters, ranks_per_node: usize, load: Workload, most: usize) -> Vec<(usize, Scheme)> {
    let mut found: Vec<(usize, Scheme)> = Vec::new();
    for ranks in doublings(most) {
        let scheme = choose_with(parameters, World::new(ranks, ranks_per_node), load).scheme;
        if found.last().is_none_or(|&(_, last)| last != scheme) {
            found.push((ranks, scheme));
        }
    }
    found
}

/// The share of a scheme's time that its products and their sums take: how far they are from being free.
pub fn products_share(parameters: &Parameters, scheme: Scheme, world: World, load: Workload) -> Option<f64> {
    let whole = work(scheme, world, load)?;
    // Without layers, and without products, what is left is what any all-reduce has to do.
    let bare = work(scheme, world, Workload { layers: 0, ..load })?;
    let bare = Work { products: 0.0, serial: 0.0, ..bare };
    let (whole, bare) = (parameters.time(&whole), parameters.time(&bare));
    Some(if whole > 0.0 { 1.0 - bare / whole } else { 0.0 })
}

/// 2, 4, 8, … up to `most`.
pub fn doublings(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(2usize), |ranks| ranks.checked_mul(2)).take_while(move |&ranks| ranks <= most)
}
