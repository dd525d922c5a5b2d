//! The time of Adasum on many ranks, by a closed form from the eight numbers of a [`Gpu`], and the choice of the fastest [`Scheme`].
//!
//! A collective takes a latency, and the time of the bytes that its busiest rank sends: inside the node over the GPU's links, to other nodes
//! over the network. A kernel takes a launch, and the time of the bytes that it reads and writes. The time of a scheme is the sum over its
//! collectives and kernels, one after the other.
//!
//! [`Scheme::Gram`] computes P(P+1)/2 products of each element's P values, sends every rank its shard of every vector, and adds P(P+1)/2
//! numbers for each layer. Inside a node all of that is nearly free. Across nodes it is not: shards of whole vectors are sent over the
//! network, whereas reducing inside the nodes first leaves one vector for each node; with more ranks the products become expensive too.
//!
//! `cargo run -p gradsync-bench -- model FILE…` derives the numbers of a kind of GPU that one machine can tell from
//! the JSON of `cargo xtask perf`, and prints them as they stand here.

use std::fmt;

use gradsync_device::math::adasum::products;

/// A scheme must take less than this fraction of the time of a scheme with fewer roundings, since the closed form is no more exact.
pub const GAIN: f64 = 0.8;

/// The number of tensors for which [`choose`] chooses: those of BERT-large.
pub const LAYERS: usize = 398;

/// An algorithm that computes the Adasum of all ranks' vectors.
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
    /// The sum inside each node, and a Gram matrix of the nodes' sums. The result is not the Adasum of all ranks.
    SumThenGram,
    /// The sum inside each node, and the tree over the nodes' sums: the result of `SumThenGram`, up to rounding.
    SumThenTree,
}

impl Scheme {
    /// All schemes.
    pub const ALL: [Scheme; 6] = [
        Scheme::Gram,
        Scheme::Tree,
        Scheme::TwoLevelGram,
        Scheme::GramThenTree,
        Scheme::SumThenGram,
        Scheme::SumThenTree,
    ];

    /// The schemes that compute the Adasum of all ranks where ranks do not know their nodes, the usual one first.
    pub const OF_RANKS: &[Scheme] = &[Scheme::Gram, Scheme::Tree];
    /// The schemes that compute the Adasum of all ranks where they know their nodes, the usual one first.
    pub const OF_NODES: &[Scheme] = &[Scheme::Gram, Scheme::TwoLevelGram, Scheme::GramThenTree];
    /// The schemes that compute the Adasum of the nodes' sums, the usual one first.
    pub const OF_SUMS: &[Scheme] = &[Scheme::SumThenGram, Scheme::SumThenTree];

    /// The name of the scheme in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Gram => "gram",
            Scheme::Tree => "tree",
            Scheme::TwoLevelGram => "gram+gram",
            Scheme::GramThenTree => "gram+tree",
            Scheme::SumThenGram => "sum+gram",
            Scheme::SumThenTree => "sum+tree",
        }
    }

    /// Whether the scheme can run in `world` and combines the ranks in the order of the tree of adjacent pairs.
    pub fn fits(self, world: World) -> bool {
        let local = world.local();
        let in_nodes = world.nodes() > 1 && world.ranks % local == 0;
        match self {
            Scheme::Gram => true,
            Scheme::Tree => world.ranks.is_power_of_two(),
            // Whole nodes are subtrees of the tree of all ranks only if a node has a power of two of ranks.
            Scheme::TwoLevelGram => in_nodes && local.is_power_of_two(),
            Scheme::GramThenTree => in_nodes && local.is_power_of_two() && world.nodes().is_power_of_two(),
            Scheme::SumThenGram => in_nodes,
            Scheme::SumThenTree => in_nodes && world.nodes().is_power_of_two(),
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Ranks in nodes of equal size. The ranks of a node are connected by the GPU's links, and have consecutive numbers.
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

    /// The ranks of one node.
    fn node(self) -> Self {
        Self::new(self.local(), self.local())
    }

    /// The ranks at the same position of all nodes.
    fn across(self) -> Self {
        Self::new(self.nodes(), 1)
    }
}

/// The numbers of a kind of GPU, and of the network between its nodes: times in seconds, bandwidths in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gpu {
    /// From the launch to the end of a collective of few bytes inside a node.
    pub latency: f64,
    /// A small kernel.
    pub launch: f64,
    /// From a GPU to the others of its node.
    pub link: f64,
    /// Read and written by a kernel.
    pub memory: f64,
    /// From a GPU to other nodes.
    pub network: f64,
    /// What a doubling of the number of nodes adds to a collective's latency.
    pub hop: f64,
    /// A further message to another node in the same collective.
    pub message: f64,
    /// The weights of one layer from its products, by one thread, for each pair of ranks.
    pub weight: f64,
}

/// A network that is assumed and not measured.
const ASSUMED: Gpu = Gpu {
    latency: 0.0,
    launch: 0.0,
    link: f64::INFINITY,
    memory: f64::INFINITY,
    network: 45e9,
    hop: 5e-6,
    message: 1e-6,
    weight: 15e-9,
};

impl Gpu {
    /// H200 with NVLink, measured on four of one machine; the network and the weights are assumed.
    pub const H200: Self = Self { latency: 20e-6, launch: 3.2e-6, link: 350e9, memory: 4300e9, ..ASSUMED };
    /// H100 with NVLink, measured on four of one machine; the network and the weights are assumed.
    pub const H100: Self = Self { latency: 17.5e-6, launch: 6.7e-6, link: 334e9, memory: 3084e9, ..ASSUMED };

    /// The time of a scheme in seconds, for vectors of `bytes` bytes in `layers` tensors on each rank; `None` where it does not
    /// [fit](Scheme::fits).
    pub fn seconds(&self, scheme: Scheme, world: World, bytes: usize, layers: usize) -> Option<f64> {
        if !scheme.fits(world) {
            return None;
        }
        let (bytes, layers) = (bytes as f64, layers as f64);
        let (local, nodes) = (world.local(), world.nodes());
        let share = bytes / local as f64;
        let gram_inside = || self.gram(world.node(), world.node(), local, bytes, layers);
        let sum_inside = || self.gather(world.node(), bytes);
        let gram_across =
            || self.gram(world.across(), world, nodes, share, layers) + self.gather(world.across(), share);
        let tree_across = || self.tree(world, local, share, layers);
        let gather_inside = || self.gather(world.node(), bytes);
        Some(match scheme {
            Scheme::Gram => self.gram(world, world, world.ranks, bytes, layers) + self.gather(world, bytes),
            Scheme::Tree => self.tree(world, 1, bytes, layers),
            Scheme::TwoLevelGram => gram_inside() + gram_across() + gather_inside(),
            Scheme::GramThenTree => gram_inside() + tree_across() + gather_inside(),
            Scheme::SumThenGram => sum_inside() + gram_across() + gather_inside(),
            Scheme::SumThenTree => sum_inside() + tree_across() + gather_inside(),
        })
    }

    /// The fastest of the schemes that fit, of which the first fits everywhere. Each other one replaces the choice among the earlier ones if
    /// it needs less than [`GAIN`] of that one's time.
    pub fn choose(&self, among: &[Scheme], world: World, bytes: usize, layers: usize) -> Choice {
        let usual = among[0];
        let usual_seconds = self.seconds(usual, world, bytes, layers).unwrap_or(0.0);
        let mut choice = Choice { scheme: usual, seconds: usual_seconds, usual, usual_seconds };
        for &scheme in &among[1..] {
            if let Some(seconds) =
                self.seconds(scheme, world, bytes, layers).filter(|time| *time < GAIN * choice.seconds)
            {
                choice = Choice { scheme, seconds, ..choice };
            }
        }
        choice
    }

    /// An all-gather or reduce-scatter of `bytes` bytes: rings inside the nodes, and between nodes one ring for each rank of a node.
    fn gather(&self, world: World, bytes: f64) -> f64 {
        if world.ranks == 1 {
            return 0.0;
        }
        let (local, nodes) = (world.local() as f64, world.nodes() as f64);
        let (inside, between) = (bytes * (local - 1.0) / local, bytes / local * (nodes - 1.0) / nodes);
        self.latency + self.hop * nodes.log2() + inside / self.link + between / self.network
    }

    /// An all-reduce of `bytes` bytes in one call: a reduce-scatter and an all-gather.
    fn all_reduce(&self, world: World, bytes: f64) -> f64 {
        if world.ranks == 1 { 0.0 } else { 2.0 * self.gather(world, bytes) - self.latency }
    }

    /// Every rank sends every other its shard of `bytes` bytes.
    fn all_to_all(&self, world: World, bytes: f64) -> f64 {
        if world.ranks == 1 {
            return 0.0;
        }
        let (ranks, local) = (world.ranks as f64, world.local() as f64);
        let others = ranks - local;
        let (inside, between) = (bytes * (local - 1.0) / ranks, bytes * others / ranks);
        let network =
            if others > 0.0 { self.hop + self.message * (others - 1.0) + between / self.network } else { 0.0 };
        self.latency + inside / self.link + network
    }

    /// An exchange of `bytes` bytes, each way, with the rank at this distance.
    fn exchange(&self, world: World, distance: usize, bytes: f64) -> f64 {
        if distance < world.ranks_per_node {
            self.latency + bytes / self.link
        } else {
            self.latency + self.hop + bytes / self.network
        }
    }

    /// A Gram matrix of `vectors` vectors of `bytes` bytes, and this rank's shard of the result. The vectors are exchanged in one group of
    /// ranks; the shards' products are added over another.
    fn gram(&self, exchange: World, sums: World, vectors: usize, bytes: f64, layers: f64) -> f64 {
        if vectors == 1 {
            return 0.0;
        }
        let width = vectors as f64;
        let shard = bytes / width;
        // The exact path's sums: one small all-reduce for each level above the first, whether a layer needs it or not.
        let exact = 2.0 * self.launch + self.all_reduce(sums, 24.0 * layers * (width / 4.0).max(1.0));
        let exact_levels = width.log2().ceil() - 1.0;
        self.all_to_all(exchange, bytes)
            + self.products(vectors, shard)
            + self.all_reduce(sums, 8.0 * products(vectors) as f64 * layers)
            + self.launch + self.weight * width * width
            + exact_levels * exact
            // The weighted sum.
            + self.launch + (width + 1.0) * shard / self.memory
    }

    /// The products of vectors of `bytes` bytes each with each other.
    fn products(&self, vectors: usize, bytes: f64) -> f64 {
        let (launches, reads) = product_kernels(vectors);
        launches * self.launch + reads * bytes / self.memory
    }

    /// Halving and doubling from `first` ranks on, over vectors of which each rank has `bytes` bytes, and back. Vectors are divided among
    /// the ranks at smaller distances, which form a node.
    fn tree(&self, world: World, first: usize, bytes: f64, layers: f64) -> f64 {
        let sums = 24.0 * layers;
        let in_node = if first > 1 { self.all_reduce(world.node(), sums) } else { 0.0 };
        let (mut time, mut held, mut distance, mut of_pairs) = (0.0, bytes, first, 0.0);
        while distance < world.ranks {
            held /= 2.0;
            // The sums of a pair go over all ranks that have a slice of it: over the node at once, and then by doubling.
            of_pairs += self.exchange(world, distance, sums);
            // Half of the vector there and back, the kernels of products and of the weighted sum.
            time += 2.0 * self.exchange(world, distance, held) + 2.0 * self.launch + 5.0 * held / self.memory;
            time += in_node + of_pairs;
            distance *= 2;
        }
        time
    }
}

/// The kernels that multiply `vectors` vectors with each other, and the number of vectors that they read: a kernel multiplies up to eight
/// vectors, or four by four of different eights, which are read again.
pub fn product_kernels(vectors: usize) -> (f64, f64) {
    let width = vectors as f64;
    ((width * width / 32.0 - width / 8.0).max(1.0), (width * width / 4.0 - width).max(width))
}

/// An automatic choice of a scheme, with its reason.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// The fastest scheme, or the first that is nearly as fast.
    pub scheme: Scheme,
    /// Its time, in seconds.
    pub seconds: f64,
    /// The usual scheme.
    pub usual: Scheme,
    /// The time of the usual scheme, in seconds.
    pub usual_seconds: f64,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scheme, usual, .. } = self;
        write!(f, "{scheme}, {:.3} ms", 1e3 * self.seconds)?;
        if scheme == usual { Ok(()) } else { write!(f, ": {usual} takes {:.3} ms", 1e3 * self.usual_seconds) }
    }
}

/// Chooses among schemes of one result for vectors of `bytes` bytes on `world_size` ranks in nodes of `ranks_per_node`, by the numbers of
/// [`Gpu::H200`] and for [`LAYERS`] tensors. The result depends on the arguments alone, so that all ranks make the same choice.
pub fn choose(among: &[Scheme], world_size: usize, ranks_per_node: usize, bytes: usize) -> Choice {
    Gpu::H200.choose(among, World::new(world_size, ranks_per_node), bytes, LAYERS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const GIB: usize = 1 << 30;

    /// Worlds of 2, 4, 8 and so on up to 4096 ranks.
    fn worlds() -> impl Iterator<Item = World> {
        (1..=12).map(|power| World::new(1 << power, 8))
    }

    #[test]
    fn seconds_grow_with_bytes_and_layers() {
        for world in worlds() {
            for scheme in Scheme::ALL.into_iter().filter(|scheme| scheme.fits(world)) {
                let time = |bytes, layers| Gpu::H200.seconds(scheme, world, bytes, layers).unwrap();
                let sizes = [MIB, 16 * MIB, 256 * MIB, GIB].map(|bytes| time(bytes, 100));
                assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]), "{scheme} {world:?}: {sizes:?}");
                let layers = [1, 10, 100, 1000].map(|layers| time(64 * MIB, layers));
                assert!(layers.windows(2).all(|pair| pair[0] < pair[1]), "{scheme} {world:?}: {layers:?}");
            }
        }
    }

    /// Where bytes alone take time, each rank sends a vector of which nodes have reduced their part, once in either direction.
    #[test]
    fn seconds_of_levels_keep_vectors_inside_their_nodes() {
        let network = Gpu { latency: 0.0, launch: 0.0, link: f64::INFINITY, memory: f64::INFINITY, ..ASSUMED };
        let network = Gpu { hop: 0.0, message: 0.0, weight: 0.0, ..network };
        for world in worlds().filter(|world| world.nodes() > 1) {
            let bytes = |scheme| network.seconds(scheme, world, GIB, 0).unwrap() * network.network;
            let share = 2.0 * GIB as f64 / 8.0 * (1.0 - 1.0 / world.nodes() as f64);
            for scheme in [Scheme::TwoLevelGram, Scheme::GramThenTree, Scheme::SumThenGram, Scheme::SumThenTree] {
                assert!((bytes(scheme) - share).abs() < 8.0, "{scheme} {world:?}: {}", bytes(scheme));
                assert!(bytes(Scheme::Gram) > 4.0 * bytes(scheme), "{scheme} {world:?}");
            }
        }
    }

    /// Measured on one H200, in µs: vectors, bytes of one.
    #[test]
    fn products_of_many_vectors_take_the_measured_time() {
        for (vectors, bytes, microseconds) in [(8, GIB, 1884.0), (16, 64 * MIB, 755.8), (32, 64 * MIB, 3498.0)] {
            let predicted = 1e6 * Gpu::H200.products(vectors, bytes as f64);
            assert!((predicted / microseconds - 1.0).abs() < 1.0 / 8.0, "{vectors}: {predicted} for {microseconds}");
        }
    }

    /// Measured on four H200 of one machine over NCCL, in µs: f32 in 300 tensors. Pairs of ranks have less bandwidth than all at once.
    #[test]
    fn seconds_of_four_gpus_are_the_measured_ones() {
        use Scheme::{Gram, Tree};
        let measured = [
            (Gram, MIB, 91.8),
            (Gram, 64 * MIB, 508.0),
            (Gram, 256 * MIB, 1550.0),
            (Gram, GIB, 5519.0),
            (Tree, MIB, 127.0),
            (Tree, 64 * MIB, 725.0),
            (Tree, GIB, 5674.0),
        ];
        for (scheme, bytes, microseconds) in measured {
            let predicted = 1e6 * Gpu::H200.seconds(scheme, World::new(4, 8), bytes, 300).unwrap();
            let ratio = predicted / microseconds;
            assert!((0.66..1.34).contains(&ratio), "{scheme} {bytes}: {predicted} µs, measured {microseconds}");
        }
    }

    #[test]
    fn choose_takes_gram_inside_a_node_and_not_across_many() {
        for bytes in [MIB / 16, MIB, 64 * MIB, GIB] {
            for among in [Scheme::OF_RANKS, Scheme::OF_NODES] {
                for ranks in 1..=8 {
                    assert_eq!(choose(among, ranks, 8, bytes).scheme, Scheme::Gram, "{ranks} ranks, {bytes} bytes");
                }
                let far = choose(among, 4096, 8, bytes);
                assert!(far.scheme != Scheme::Gram && far.seconds < far.usual_seconds, "{bytes} bytes: {far}");
                assert!(far.to_string().contains(far.scheme.name()) && far.to_string().contains("gram takes"), "{far}");
            }
        }
    }

    /// The numbers of ranks, doubled each time, from which a scheme is chosen, in nodes of eight.
    #[test]
    fn choose_changes_where_the_pages_say() {
        let switches = |among, bytes| -> Vec<(usize, &str)> {
            let chosen = worlds().map(|world| (world.ranks, choose(among, world.ranks, 8, bytes).scheme.name()));
            let mut switches: Vec<(usize, &str)> = Vec::new();
            chosen.for_each(|(ranks, name)| match switches.last() {
                Some((_, last)) if *last == name => {}
                _ => switches.push((ranks, name)),
            });
            switches
        };
        for (bytes, tree, levels, tree_of_nodes) in
            [(MIB / 16, 64, 32, 1024), (MIB, 64, 32, 1024), (64 * MIB, 16, 16, 1024), (GIB, 16, 16, 2048)]
        {
            assert_eq!(switches(Scheme::OF_RANKS, bytes), [(2, "gram"), (tree, "tree")], "{bytes}");
            let of_nodes = [(2, "gram"), (levels, "gram+gram"), (tree_of_nodes, "gram+tree")];
            assert_eq!(switches(Scheme::OF_NODES, bytes), of_nodes, "{bytes}");
        }
    }

    #[test]
    fn choose_depends_on_what_fits() {
        let of_nodes = |ranks, per_node, bytes| choose(Scheme::OF_NODES, ranks, per_node, bytes).scheme;
        // Nodes of six are no whole trees.
        assert_eq!(of_nodes(12, 6, GIB), Scheme::Gram);
        // Three nodes cannot use the tree, but a Gram matrix.
        assert_eq!(of_nodes(24, 8, GIB), Scheme::TwoLevelGram);
        assert!(!Scheme::GramThenTree.fits(World::new(24, 8)) && Scheme::TwoLevelGram.fits(World::new(24, 8)));
        // The last node is not full.
        assert!(!Scheme::TwoLevelGram.fits(World::new(20, 8)) && Scheme::Gram.fits(World::new(20, 8)));
        assert_eq!(Gpu::H200.seconds(Scheme::Tree, World::new(20, 8), MIB, 1), None);
        assert_eq!(of_nodes(0, 0, 0), Scheme::Gram);
        // Sums of nodes of six can combine along a tree; a single node has no choice.
        let of_sums = |ranks, per_node| choose(Scheme::OF_SUMS, ranks, per_node, 64 * MIB).scheme;
        assert_eq!([of_sums(8, 8), of_sums(6 * 64, 6)], [Scheme::SumThenGram; 2]);
        assert_eq!([of_sums(6 * 256, 6), of_sums(4096, 8)], [Scheme::SumThenTree; 2]);
        assert_eq!(of_sums(6 * 255, 6), Scheme::SumThenGram);
    }
}
