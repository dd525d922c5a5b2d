//! What Adasum costs on many ranks, as pure arithmetic: bytes on the wire, steps, products; and which [`Scheme`] is the fastest.
//!
//! A scheme is a list of collectives and kernels. Its [`Work`] is counted by formulas, for the rank that does most, and takes the time that
//! [`Parameters`] say; [`simulate`] sends its messages one by one instead. [`fit`] finds parameters from measurements. Nothing here
//! measures, or runs, anything.
//!
//! [`Scheme::Gram`] forms P(P+1)/2 products of each element's P values, sends every rank its shard of every vector, and sums
//! P(P+1)/2 numbers for each layer. Inside a node all of that is nearly free. Across nodes it is not: shards of whole vectors pass the
//! slow links, where reducing inside the nodes first leaves one vector for each node; later the products are no longer free either.

mod fit;
mod phases;
mod simulation;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;

pub use self::fit::{Fit, Point, fit, leave_one_out};
pub use self::phases::gram_kernels;
pub use self::simulation::simulate;
pub use self::work::{
    PART_NAMES, PARTS, Parameters, Work, World, all_gather, all_reduce, all_to_all, exchange, reduce_scatter,
};

/// A scheme has to take less than this part of the time of one that rounds less: the model is no more exact.
pub const GAIN: f64 = 0.8;

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
    SumThenGram,
    /// The sum inside each node, and the tree over the nodes' sums: that result, up to rounding.
    SumThenTree,
}

impl Scheme {
    /// All of them.
    pub const ALL: [Scheme; 6] = [
        Scheme::Gram,
        Scheme::Tree,
        Scheme::TwoLevelGram,
        Scheme::GramThenTree,
        Scheme::SumThenGram,
        Scheme::SumThenTree,
    ];

    /// Its name in tables.
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

/// Schemes with the same result, up to rounding, of which an automatic choice takes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alternatives {
    /// What is taken unless others are faster.
    pub usual: Scheme,
    /// The others, each of which is taken if it needs less than [`GAIN`] of the time of the one that would be taken of those before it.
    pub others: &'static [Scheme],
}

impl Alternatives {
    /// All that give the Adasum of all ranks.
    pub const OF_ALL: Self =
        Self { usual: Scheme::Gram, others: &[Scheme::TwoLevelGram, Scheme::GramThenTree, Scheme::Tree] };
    /// The same, where ranks know nothing of nodes.
    pub const OF_ONE_LEVEL: Self = Self { usual: Scheme::Gram, others: &[Scheme::Tree] };
    /// The same, where ranks are in known nodes.
    pub const OF_NODES: Self = Self { usual: Scheme::Gram, others: &[Scheme::TwoLevelGram, Scheme::GramThenTree] };
    /// All that give the Adasum of the nodes' sums.
    pub const OF_SUMS: Self = Self { usual: Scheme::SumThenGram, others: &[Scheme::SumThenTree] };
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
    let phases = phases::phases(scheme, world, load)?;
    Some(phases.iter().fold(Work::default(), |sum, phase| sum + phase.work(world)))
}

/// The scheme that an automatic choice takes, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The fastest, or the first that is nearly as fast.
    pub scheme: Scheme,
    /// What it takes, in seconds.
    pub seconds: f64,
    /// The usual one.
    pub usual: Scheme,
    /// What that takes.
    pub usual_seconds: f64,
    /// What that spends most of its time on, by number in [`PART_NAMES`], and the share of its time.
    pub usual_spends: (usize, f64),
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (part, share) = self.usual_spends;
        let (scheme, milliseconds, usual) = (self.scheme, self.seconds * 1e3, self.usual);
        if scheme == usual {
            return write!(f, "{scheme}, {milliseconds:.3} ms, most of it {}", PART_NAMES[part]);
        }
        let (longer, percent) = (self.usual_seconds * 1e3, 100.0 * share);
        let spent = PART_NAMES[part];
        write!(f, "{scheme}, {milliseconds:.3} ms: {usual} takes {longer:.3} ms, {percent:.0} % of it {spent}")
    }
}

/// The fastest of some schemes that fit, or the first that is nearly as fast.
pub fn choose_with(parameters: &Parameters, among: Alternatives, world: World, load: Workload) -> Choice {
    let Alternatives { usual, others } = among;
    let time = |scheme| work(scheme, world, load).map(|work| (scheme, parameters.time(&work)));
    let of_usual = work(usual, world, load).unwrap_or_default();
    let usual_seconds = parameters.time(&of_usual);
    let (scheme, seconds) = others
        .iter()
        .copied()
        .filter_map(time)
        .fold((usual, usual_seconds), |best, other| if other.1 < GAIN * best.1 { other } else { best });
    let times = parameters.times(&of_usual);
    let most = (0..PARTS).fold(0, |most, part| if times[part] > times[most] { part } else { most });
    let share = if usual_seconds > 0.0 { times[most] / usual_seconds } else { 0.0 };
    Choice { scheme, seconds, usual, usual_seconds, usual_spends: (most, share) }
}

/// The scheme for vectors of `bytes` bytes on `world_size` ranks in nodes of `ranks_per_node`, as [`choose_with`] the default
/// [`Parameters`] and [`Workload::of`] those bytes. A function of its arguments alone, so that all ranks choose alike.
pub fn choose(among: Alternatives, world_size: usize, ranks_per_node: usize, bytes: usize) -> Choice {
    choose_with(&Parameters::default(), among, World::new(world_size, ranks_per_node), Workload::of(bytes))
}

/// Where the choice among some schemes changes as the world doubles from 2 to `most` ranks: the number of ranks from which a scheme is
/// chosen, and the scheme. Worlds of a single node are left out where the usual scheme needs several.
pub fn switches(
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

/// The share of the time of one Gram matrix over all ranks that products, their sums and weights take: how far they are from being free.
pub fn products_share(parameters: &Parameters, world: World, load: Workload) -> f64 {
    let of = |layers| work(Scheme::Gram, world, Workload { layers, ..load }).unwrap_or_default();
    // Without layers and products, and with each vector read once for them, in one launch, and once more, what is left has to be done for
    // any weights.
    let memory_bytes = (2 * world.ranks + 1) as f64 * load.bytes as f64 / world.ranks as f64;
    let launches = of(0).launches - phases::launches(world.ranks) + 1.0;
    let bare = Work { memory_bytes, launches, products: 0.0, serial: 0.0, ..of(0) };
    let (whole, bare) = (parameters.time(&of(load.layers)), parameters.time(&bare));
    if whole > 0.0 { (1.0 - bare / whole).max(0.0) } else { 0.0 }
}

/// 2, 4, 8, … up to `most`.
pub fn doublings(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(2usize), |ranks| ranks.checked_mul(2)).take_while(move |&ranks| ranks <= most)
}
