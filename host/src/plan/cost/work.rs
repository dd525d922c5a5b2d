//! [`Work`]: what an operation does, counted, and what each unit of it takes.
//!
//! Counts are those of the rank that does most. Nothing here knows Adasum.

use std::ops::{Add, AddAssign};

/// Ranks, in nodes of equal size. Ranks of a node reach each other by the fast links, and have numbers in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// How many ranks there are.
    pub ranks: usize,
    /// How many of them a node has, at most.
    pub ranks_per_node: usize,
}

impl World {
    /// A world of at least one rank, in nodes of at least one.
    pub fn new(ranks: usize, ranks_per_node: usize) -> Self {
        Self { ranks: ranks.max(1), ranks_per_node: ranks_per_node.max(1) }
    }

    /// Ranks of the largest node.
    pub fn local(self) -> usize {
        self.ranks.min(self.ranks_per_node)
    }

    /// How many nodes there are.
    pub fn nodes(self) -> usize {
        self.ranks.div_ceil(self.ranks_per_node)
    }

    /// Doublings from one node to all of them.
    fn hops(self) -> f64 {
        (self.nodes() as f64).log2()
    }
}

/// The parts that [`Work`] is counted in.
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

/// The place of the bytes of memory among the parts.
pub const MEMORY: usize = 6;
/// The place of the products among the parts.
pub const PRODUCTS: usize = 7;

/// The work of one rank, in units that each take the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Exchanges and collectives, one after the other.
    pub steps: f64,
    /// Doublings of the distance between nodes in all of them.
    pub hops: f64,
    /// Messages to other nodes beyond the first of a step.
    pub messages: f64,
    /// Kernels, one after the other.
    pub launches: f64,
    /// Bytes that the rank sends to ranks of its node.
    pub intra_bytes: f64,
    /// Bytes that it sends to other nodes.
    pub inter_bytes: f64,
    /// Bytes that its kernels read and write.
    pub memory_bytes: f64,
    /// Products of two elements, in `f64`.
    pub products: f64,
    /// Steps of arithmetic that one thread does one after the other.
    pub serial: f64,
}

impl Work {
    /// The counts, in the order of [`PART_NAMES`].
    pub fn parts(&self) -> [f64; PARTS] {
        let Self { steps, hops, messages, launches, intra_bytes, inter_bytes, memory_bytes, products, serial } = *self;
        [steps, hops, messages, launches, intra_bytes, inter_bytes, memory_bytes, products, serial]
    }

    /// A kernel that moves this many bytes and forms this many products.
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

/// Seconds that one unit of each part takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// In the order of [`PART_NAMES`].
    pub seconds: [f64; PARTS],
}

impl Default for Parameters {
    /// Measured on four H200 of one machine: 20 µs from the launch to the end of a small collective, 3 µs for a small kernel, 350 GB/s of
    /// bus bandwidth for each GPU, 4.3 TB/s of memory, and at least 9e12 products a second: those of eight vectors hide behind the memory.
    /// Assumed, not measured: 45 GB/s for each GPU to other nodes, 5 µs a hop, 1 µs a message, 10 ns a serial step.
    fn default() -> Self {
        Self { seconds: [20e-6, 5e-6, 1e-6, 3e-6, 1.0 / 350e9, 1.0 / 45e9, 1.0 / 4.3e12, 1.0 / 9e12, 10e-9] }
    }
}

impl Parameters {
    /// How long the work takes: the parts one after the other, but memory and products at once.
    pub fn time(&self, work: &Work) -> f64 {
        self.times(work).iter().sum()
    }

    /// The time that each part adds: of memory and products, the one that takes longer hides the other, which adds nothing.
    pub fn times(&self, work: &Work) -> [f64; PARTS] {
        let mut times = work.parts();
        times.iter_mut().zip(self.seconds).for_each(|(part, seconds)| *part *= seconds);
        let hidden = if times[MEMORY] < times[PRODUCTS] { MEMORY } else { PRODUCTS };
        times[hidden] = 0.0;
        times
    }
}

/// Gathers `bytes` bytes, a shard from each rank: rings inside the nodes, and between them one for each rank of a node.
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

/// Sums `bytes` bytes and leaves a shard with each rank: the same bytes as [`all_gather`], the other way.
pub fn reduce_scatter(world: World, bytes: f64) -> Work {
    all_gather(world, bytes)
}

/// Sums `bytes` bytes on every rank, in one step: scatters, and gathers.
pub fn all_reduce(world: World, bytes: f64) -> Work {
    let once = all_gather(world, bytes);
    let (intra_bytes, inter_bytes) = (2.0 * once.intra_bytes, 2.0 * once.inter_bytes);
    Work { hops: 2.0 * once.hops, intra_bytes, inter_bytes, ..once }
}

/// Sends every rank its shard of `bytes` bytes, each straight to its receiver.
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

/// Exchanges `bytes` bytes with the rank at that distance.
pub fn exchange(world: World, distance: usize, bytes: f64) -> Work {
    let step = Work { steps: 1.0, ..Work::default() };
    // Exact where a distance divides a node, or a node divides it.
    if distance < world.ranks_per_node {
        Work { intra_bytes: bytes, ..step }
    } else {
        Work { inter_bytes: bytes, hops: 1.0, ..step }
    }
}
