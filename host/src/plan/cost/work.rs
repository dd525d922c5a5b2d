//! [`Work`]: the counted work of an operation, and the time of each unit.
//!
//! Counts are for the busiest rank. Nothing here knows Adasum.

use std::ops::{Add, AddAssign};

/// Ranks in nodes of equal size. The ranks of a node are connected by the fast links, and have consecutive numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// The number of ranks.
    pub ranks: usize,
    /// The largest number of ranks per node.
    pub ranks_per_node: usize,
}

impl World {
    /// A world of at least one rank, in nodes of at least one rank.
    pub fn new(ranks: usize, ranks_per_node: usize) -> Self {
        Self { ranks: ranks.max(1), ranks_per_node: ranks_per_node.max(1) }
    }

    /// The number of ranks of the largest node.
    pub fn local(self) -> usize {
        self.ranks.min(self.ranks_per_node)
    }

    /// The number of nodes.
    pub fn nodes(self) -> usize {
        self.ranks.div_ceil(self.ranks_per_node)
    }

    /// The number of doublings from one node to all nodes.
    fn hops(self) -> f64 {
        (self.nodes() as f64).log2()
    }
}

/// The number of parts into which [`Work`] is divided.
pub const PARTS: usize = 9;

/// The names of the parts, in the order of [`Work::parts`], as reports print them.
pub const PART_NAMES: [&str; PARTS] = [
    "steps",
    "hops between nodes",
    "messages between nodes",
    "launches of kernels",
    "bytes inside the node",
    "bytes between nodes",
    "bytes of memory",
    "products",
    "serial arithmetic",
];

/// The index of memory traffic among the parts.
pub const MEMORY: usize = 6;
/// The index of products among the parts.
pub const PRODUCTS: usize = 7;

/// The work of one rank, in units of constant time each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// The number of exchanges and collectives, one after the other.
    pub steps: f64,
    /// The number of doublings of the distance between nodes in all of them.
    pub hops: f64,
    /// The number of messages to other nodes beyond the first of a step.
    pub messages: f64,
    /// The number of kernels, one after the other.
    pub launches: f64,
    /// The bytes that the rank sends to ranks of its node.
    pub intra_bytes: f64,
    /// The bytes that the rank sends to other nodes.
    pub inter_bytes: f64,
    /// The bytes that its kernels read and write.
    pub memory_bytes: f64,
    /// The number of products of two elements, in `f64`.
    pub products: f64,
    /// The number of sequential steps of arithmetic in one thread.
    pub serial: f64,
}

impl Work {
    /// The counts, in the order of [`PART_NAMES`].
    pub fn parts(&self) -> [f64; PARTS] {
        let Self { steps, hops, messages, launches, intra_bytes, inter_bytes, memory_bytes, products, serial } = *self;
        [steps, hops, messages, launches, intra_bytes, inter_bytes, memory_bytes, products, serial]
    }

    /// A kernel with this memory traffic and this number of products.
    pub fn kernel(memory_bytes: f64, products: f64) -> Self {
        Self { launches: 1.0, memory_bytes, products, ..Self::default() }
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            steps: self.steps + other.steps,
            hops: self.hops + other.hops,
            messages: self.messages + other.messages,
            launches: self.launches + other.launches,
            intra_bytes: self.intra_bytes + other.intra_bytes,
            inter_bytes: self.inter_bytes + other.inter_bytes,
            memory_bytes: self.memory_bytes + other.memory_bytes,
            products: self.products + other.products,
            serial: self.serial + other.serial,
        }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// The time of one unit of each part, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// The seconds, in the order of [`PART_NAMES`].
    pub seconds: [f64; PARTS],
}

impl Default for Parameters {
    /// Measured on four H200 of one machine: 20 µs from the launch to the end of a small collective, 3 µs for a small kernel, 350 GB/s of
    /// bus bandwidth for each GPU, 4.3 TB/s of memory, and at least 9e12 products a second: the products of eight vectors take less time
    /// than their memory traffic. Assumed, not measured: 45 GB/s for each GPU to other nodes, 5 µs per hop, 1 µs per message, 10 ns per
    /// serial step.
    fn default() -> Self {
        Self { seconds: [20e-6, 5e-6, 1e-6, 3e-6, 1.0 / 350e9, 1.0 / 45e9, 1.0 / 4.3e12, 1.0 / 9e12, 10e-9] }
    }
}

impl Parameters {
    /// The time of the work: the sum of the parts, where memory traffic and products overlap.
    pub fn time(&self, work: &Work) -> f64 {
        self.times(work).iter().sum()
    }

    /// The time that each part adds: of memory traffic and products, the longer one hides the other, which adds nothing.
    pub fn times(&self, work: &Work) -> [f64; PARTS] {
        let mut times = work.parts();
        times.iter_mut().zip(self.seconds).for_each(|(part, seconds)| *part *= seconds);
        let hidden = if times[MEMORY] < times[PRODUCTS] { MEMORY } else { PRODUCTS };
        times[hidden] = 0.0;
        times
    }
}

/// Gathers `bytes` bytes, a shard from each rank: rings inside the nodes, and between nodes one ring for each rank of a node.
pub fn all_gather(world: World, bytes: f64) -> Work {
    if world.ranks == 1 {
        return Work::default();
    }
    let (local, nodes) = (world.local() as f64, world.nodes() as f64);
    Work {
        steps: 1.0,
        hops: world.hops(),
        intra_bytes: bytes * (local - 1.0) / local,
        inter_bytes: bytes / local * (nodes - 1.0) / nodes,
        ..Work::default()
    }
}

/// Sums `bytes` bytes and leaves a shard on each rank: the traffic of [`all_gather`] in the reverse direction.
pub fn reduce_scatter(world: World, bytes: f64) -> Work {
    all_gather(world, bytes)
}

/// Sums `bytes` bytes on every rank, in one step: a reduce-scatter and an all-gather.
pub fn all_reduce(world: World, bytes: f64) -> Work {
    let once = all_gather(world, bytes);
    let (intra_bytes, inter_bytes) = (2.0 * once.intra_bytes, 2.0 * once.inter_bytes);
    Work { hops: 2.0 * once.hops, intra_bytes, inter_bytes, ..once }
}

/// Sends every rank its shard of `bytes` bytes, each directly to its receiver.
pub fn all_to_all(world: World, bytes: f64) -> Work {
    if world.ranks == 1 {
        return Work::default();
    }
    let (ranks, local) = (world.ranks as f64, world.local() as f64);
    let others = ranks - local;
    Work {
        steps: 1.0,
        hops: if others > 0.0 { 1.0 } else { 0.0 },
        messages: (others - 1.0).max(0.0),
        intra_bytes: bytes * (local - 1.0) / ranks,
        inter_bytes: bytes * others / ranks,
        ..Work::default()
    }
}

/// Exchanges `bytes` bytes with the rank at this distance.
pub fn exchange(world: World, distance: usize, bytes: f64) -> Work {
    let step = Work { steps: 1.0, ..Work::default() };
    // Exact where the distance divides the node size, or the node size divides the distance.
    if distance < world.ranks_per_node {
        Work { intra_bytes: bytes, ..step }
    } else {
        Work { inter_bytes: bytes, hops: 1.0, ..step }
    }
}
