//! [`phases`]: the collectives and kernels of a scheme, one after the other; formulas and simulations both process them.

use gradsync_device::abi::{GRAM_CROSS_WIDTH, GRAM_WIDTHS};
use gradsync_device::math::adasum::products;

use super::work::{Work, World, all_gather, all_reduce, all_to_all, exchange, reduce_scatter};
use super::{Scheme, Workload};
use crate::plan::chunks::chunk_len;

/// The kernels of a level of pairs: products, and coefficients.
const LEVEL_LAUNCHES: f64 = 2.0;

/// The ranks that take part in a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// All ranks.
    All,
    /// The ranks of each node.
    Node,
    /// The ranks at the same position in all nodes.
    Places,
}

impl Group {
    /// The members of one group, as a world of their own.
    pub fn world(self, all: World) -> World {
        match self {
            Group::All => all,
            Group::Node => World::new(all.local(), all.local()),
            Group::Places => World::new(all.nodes(), 1),
        }
    }
}

/// A part of a scheme that begins when the preceding one has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Phase {
    /// Every rank sends every other its shard; here and in the next three phases the number is the size of a rank's whole operand in bytes.
    AllToAll(Group, f64),
    /// Every rank receives the sum.
    AllReduce(Group, f64),
    /// Every rank receives all shards.
    AllGather(Group, f64),
    /// Each rank receives its shard of the sum.
    ReduceScatter(Group, f64),
    /// Exchanges this number of bytes, each way, with the rank at this distance.
    Exchange(usize, f64),
    /// Kernels on each rank's own memory.
    Kernels(Work),
}

impl Phase {
    /// The work of the phase by the formulas.
    pub fn work(self, all: World) -> Work {
        match self {
            Phase::AllToAll(group, bytes) => all_to_all(group.world(all), bytes),
            Phase::AllReduce(group, bytes) => all_reduce(group.world(all), bytes),
            Phase::AllGather(group, bytes) => all_gather(group.world(all), bytes),
            Phase::ReduceScatter(group, bytes) => reduce_scatter(group.world(all), bytes),
            Phase::Exchange(distance, bytes) => exchange(all, distance, bytes),
            Phase::Kernels(work) => work,
        }
    }
}

/// The phases of a scheme; `None` where it does not [fit](Scheme::fits).
pub fn phases(scheme: Scheme, world: World, load: Workload) -> Option<Vec<Phase>> {
    if !scheme.fits(world) {
        return None;
    }
    let (ranks, local, nodes) = (world.ranks, world.local(), world.nodes());
    let bytes = load.bytes as f64;
    let part = bytes / local as f64;
    let mut phases = Vec::new();
    match scheme {
        Scheme::Gram => {
            gram(&mut phases, (Group::All, Group::All), ranks, bytes, load);
            phases.push(Phase::AllGather(Group::All, bytes));
        }
        Scheme::Tree => tree(&mut phases, world, 1, bytes, load),
        Scheme::TwoLevelGram => {
            gram(&mut phases, (Group::Node, Group::Node), local, bytes, load);
            gram(&mut phases, (Group::Places, Group::All), nodes, part, load);
            phases.extend([Phase::AllGather(Group::Places, part), Phase::AllGather(Group::Node, bytes)]);
        }
        Scheme::GramThenTree => {
            gram(&mut phases, (Group::Node, Group::Node), local, bytes, load);
            tree(&mut phases, world, local, part, load);
            phases.push(Phase::AllGather(Group::Node, bytes));
        }
        Scheme::SumThenTree => {
            phases.push(Phase::ReduceScatter(Group::Node, bytes));
            tree(&mut phases, world, local, part, load);
            phases.push(Phase::AllGather(Group::Node, bytes));
        }
        Scheme::SumThenGram => {
            phases.push(Phase::ReduceScatter(Group::Node, bytes));
            gram(&mut phases, (Group::Places, Group::All), nodes, part, load);
            phases.extend([Phase::AllGather(Group::Places, part), Phase::AllGather(Group::Node, bytes)]);
        }
    }
    Some(phases)
}

/// One Gram matrix of `vectors` vectors of `bytes` bytes each, and this rank's shard of the result. The vectors are exchanged in the group
/// `exchange`; the shards' products are added over the group `sums`.
fn gram(phases: &mut Vec<Phase>, (exchange, sums): (Group, Group), vectors: usize, bytes: f64, load: Workload) {
    if vectors == 1 {
        return;
    }
    let (width, layers) = (vectors as f64, load.layers as f64);
    let vector_bytes = bytes / width;
    let len = vector_bytes / load.element_bytes as f64;
    let levels = width.log2().ceil() as usize;

    phases.push(Phase::AllToAll(exchange, bytes));
    phases.push(Phase::Kernels(gram_kernels(vectors, vector_bytes, load.element_bytes, load.layers)));
    phases.push(Phase::AllReduce(sums, 8.0 * products(vectors) as f64 * layers));
    // One thread computes a layer's weights: at every level the quadratic forms of all pairs.
    phases.push(Phase::Kernels(Work { launches: 1.0, serial: 1.5 * width * width, ..Work::default() }));
    // The exact path's sums: one small all-reduce for each level above the first, whether a layer needs it or not.
    for _ in 1..levels {
        phases.push(Phase::Kernels(Work { launches: LEVEL_LAUNCHES, ..Work::default() }));
        phases.push(Phase::AllReduce(sums, 3.0 * 8.0 * layers * (width / 4.0).max(1.0)));
    }
    let combine = Work::kernel((width + 1.0) * vector_bytes, width * len);
    phases.push(Phase::Kernels(combine));
}

/// The products of vectors of `vector_bytes` bytes each with each other, for each of `layers` tensors, on one GPU.
pub fn gram_kernels(vectors: usize, vector_bytes: f64, element_bytes: usize, layers: usize) -> Work {
    let (count, len) = (products(vectors) as f64, vector_bytes / element_bytes as f64);
    // Each chunk has its own sums, which are written, read and cleared.
    let chunks = len / chunk_len(len as usize / layers.max(1)) as f64 + layers as f64;
    let moved = reads(vectors) * vector_bytes + 24.0 * count * chunks + 8.0 * count * layers as f64;
    Work { launches: launches(vectors), ..Work::kernel(moved, count * len) }
}

/// The number of kernels that multiply `vectors` vectors: one for each tile, and one for each pair of cells of different tiles.
pub(super) fn launches(vectors: usize) -> f64 {
    let (tiles, pairs) = tiles_and_pairs(vectors);
    (tiles + pairs) as f64
}

/// The number of vectors that these kernels read; vectors of other tiles are read again.
pub(super) fn reads(vectors: usize) -> f64 {
    let (_, pairs) = tiles_and_pairs(vectors);
    (vectors + pairs * 2 * GRAM_CROSS_WIDTH) as f64
}

fn tiles_and_pairs(vectors: usize) -> (usize, usize) {
    const WIDEST: usize = GRAM_WIDTHS[GRAM_WIDTHS.len() - 1];
    const CELLS_OF_TILE: usize = WIDEST / GRAM_CROSS_WIDTH;
    let cells = vectors.div_ceil(GRAM_CROSS_WIDTH);
    let (whole, rest) = (cells / CELLS_OF_TILE, cells % CELLS_OF_TILE);
    let within_tiles = whole * CELLS_OF_TILE.pow(2) + rest.pow(2);
    (vectors.div_ceil(WIDEST), (cells.pow(2) - within_tiles) / 2)
}

/// Halving and doubling from `first` ranks on, over vectors of which each rank has `bytes` bytes, and back. Vectors are divided among the
/// ranks at smaller distances, which form a node.
fn tree(phases: &mut Vec<Phase>, world: World, first: usize, bytes: f64, load: Workload) {
    let sums = 3.0 * 8.0 * load.layers as f64;
    let mut back = Vec::new();
    let (mut distance, mut held) = (first, bytes);
    while distance < world.ranks {
        held /= 2.0;
        let len = held / load.element_bytes as f64;
        phases.push(Phase::Exchange(distance, held));
        back.push(Phase::Exchange(distance, held));
        let dots = Work::kernel(2.0 * held, 3.0 * len);
        phases.push(Phase::Kernels(dots));
        // The sums of the pair, over all ranks that have a slice of it: over the node at once, and then by doubling.
        if first > 1 {
            phases.push(Phase::AllReduce(Group::Node, sums));
        }
        let mut step = first;
        while step < 2 * distance {
            phases.push(Phase::Exchange(step, sums));
            step *= 2;
        }
        phases.push(Phase::Kernels(Work::kernel(3.0 * held, 2.0 * len)));
        distance *= 2;
    }
    phases.extend(back.into_iter().rev());
}
