//! What Adasum costs on many ranks, as pure arithmetic: bytes on the wire, steps, products; and which [`Scheme`] is the fastest.
//!
//! A scheme is a list of collectives and kernels, its [`phases`]. Its [`Work`] is counted by formulas, for the rank that does most, and
//! takes the time that [`Parameters`] say. Nothing here measures, or runs, anything: the program that measures fits parameters to what it
//! found, and simulates the messages of the phases one by one as a check.
//!
//! [`Scheme::Gram`] forms P(P+1)/2 products of each element's P values, sends every rank its shard of every vector, and sums
//! P(P+1)/2 numbers for each layer. Inside a node all of that is nearly free. Across nodes it is not: shards of whole vectors pass the
//! slow links, where reducing inside the nodes first leaves one vector for each node; later the products are no longer free either.

mod phases;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;

#[doc(hidden)]
pub use self::phases::{Group, Phase, gram_kernels, phases};
#[doc(hidden)]
pub use self::work::{
    MEMORY, PART_NAMES, PARTS, PRODUCTS, Parameters, Work, World, all_gather, all_reduce, all_to_all, exchange,
    reduce_scatter,
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
    /// The scheme that is taken unless others are faster.
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

/// The vectors of a reduction.
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

/// The work of the rank that has most; `None` where the scheme does not [fit](Scheme::fits).
pub fn work(scheme: Scheme, world: World, load: Workload) -> Option<Work> {
    let phases = phases(scheme, world, load)?;
    Some(phases.iter().fold(Work::default(), |sum, phase| sum + phase.work(world)))
}

/// The scheme that an automatic choice takes, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The fastest, or the first that is nearly as fast.
    pub scheme: Scheme,
    /// Its time, in seconds.
    pub seconds: f64,
    /// The usual one.
    pub usual: Scheme,
    /// The time of that.
    pub usual_seconds: f64,
    /// The part that takes most of that time, by its number in [`PART_NAMES`], and its share.
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
