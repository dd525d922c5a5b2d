//! The cost of Adasum on many ranks, as pure arithmetic: bytes on the wire, steps, products; and the choice of the fastest [`Scheme`].
//!
//! A scheme is a list of collectives and kernels, its `phases`. Formulas count its `Work` for the busiest rank, and [`Parameters`] give the
//! time of each unit. Nothing here measures or runs anything: the benchmark program fits parameters to measurements, and simulates the
//! messages of the phases one by one as a check.
//!
//! [`Scheme::Gram`] computes P(P+1)/2 products of each element's P values, sends every rank its shard of every vector, and adds P(P+1)/2
//! numbers for each layer. Inside a node all of that is nearly free. Across nodes it is not: shards of whole vectors are sent over the slow
//! links, whereas reducing inside the nodes first leaves one vector for each node; with more ranks the products become expensive too.

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

/// A scheme must take less than this fraction of the time of a scheme with fewer roundings, since the model is no more exact.
pub const GAIN: f64 = 0.8;

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

/// Schemes with the same result, up to rounding, from which an automatic choice selects one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alternatives {
    /// The scheme that is chosen unless another is faster.
    pub usual: Scheme,
    /// The other schemes. Each replaces the choice among the earlier ones if it needs less than [`GAIN`] of that one's time.
    pub others: &'static [Scheme],
}

impl Alternatives {
    /// All schemes that compute the Adasum of all ranks.
    pub const OF_ALL: Self =
        Self { usual: Scheme::Gram, others: &[Scheme::TwoLevelGram, Scheme::GramThenTree, Scheme::Tree] };
    /// The schemes that compute it where ranks do not know their nodes.
    pub const OF_ONE_LEVEL: Self = Self { usual: Scheme::Gram, others: &[Scheme::Tree] };
    /// The schemes that compute it where ranks are in known nodes.
    pub const OF_NODES: Self = Self { usual: Scheme::Gram, others: &[Scheme::TwoLevelGram, Scheme::GramThenTree] };
    /// The schemes that compute the Adasum of the nodes' sums.
    pub const OF_SUMS: Self = Self { usual: Scheme::SumThenGram, others: &[Scheme::SumThenTree] };
}

/// The vectors of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// The size of one rank's vector in bytes.
    pub bytes: usize,
    /// The size of an element in bytes.
    pub element_bytes: usize,
    /// The number of tensors with weights of their own.
    pub layers: usize,
}

impl Workload {
    /// Gradients in f32 with the number of tensors of BERT-large.
    pub fn of(bytes: usize) -> Self {
        Self { bytes, element_bytes: 4, layers: 398 }
    }
}

/// The work of the busiest rank; `None` where the scheme does not [fit](Scheme::fits).
pub fn work(scheme: Scheme, world: World, load: Workload) -> Option<Work> {
    let phases = phases(scheme, world, load)?;
    Some(phases.iter().fold(Work::default(), |sum, phase| sum + phase.work(world)))
}

/// An automatic choice of a scheme, with its reasons.
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
    /// The part that takes most of the usual scheme's time, by its number in [`PART_NAMES`], and its share.
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

/// Chooses the fastest of the schemes that fit, or the first that is nearly as fast.
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

/// Chooses the scheme for vectors of `bytes` bytes on `world_size` ranks in nodes of `ranks_per_node`, like [`choose_with`] the default
/// [`Parameters`] and [`Workload::of`] those bytes. The result depends on the arguments alone, so that all ranks make the same choice.
pub fn choose(among: Alternatives, world_size: usize, ranks_per_node: usize, bytes: usize) -> Choice {
    choose_with(&Parameters::default(), among, World::new(world_size, ranks_per_node), Workload::of(bytes))
}
