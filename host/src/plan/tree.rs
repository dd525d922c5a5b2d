//! Vector halving, distance doubling: the steps of one rank in the tree algorithm of Adasum.
//!
//! At distance 1, 2, 4, … a rank exchanges data with the partner whose number differs in that bit. Both halve their current slice; the
//! lower rank keeps the first half, the higher one the second, and each sends the other half to its partner. After the last level every
//! rank has one slice of the combined vector; the gather phase collects the whole, step by step or several steps at once.

use std::ops::Range;

/// One exchange of one rank in the halving phase.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) struct HalvingStep {
    /// The rank to exchange with.
    pub(crate) peer: usize,
    /// The elements that this rank keeps.
    pub(crate) keep: Range<usize>,
    /// The elements that this rank sends to the peer.
    pub(crate) give: Range<usize>,
    /// Whether this rank's vector is the left one of the pair.
    pub(crate) is_left: bool,
    /// The ranks with slices of the pair's two vectors: `2 × distance` ranks, this one included.
    pub(crate) group: Range<usize>,
}

/// The steps of `rank` in a world of `world_size` ranks, a power of two, over `len` elements. Panics for any other world size, or a rank
/// beyond it.
pub(crate) fn steps(rank: usize, world_size: usize, len: usize) -> Vec<HalvingStep> {
    assert!(world_size.is_power_of_two() && rank < world_size, "rank {rank} of {world_size} has no steps");
    let mut held = 0..len;
    (0..world_size.trailing_zeros())
        .map(|level| {
            let distance = 1usize << level;
            let is_left = rank & distance == 0;
            let middle = held.start + held.len() / 2;
            let (first, second) = (held.start..middle, middle..held.end);
            let (keep, give) = if is_left { (first, second) } else { (second, first) };
            held = keep.clone();
            let begin = rank & !(2 * distance - 1);
            HalvingStep { peer: rank ^ distance, keep, give, is_left, group: begin..begin + 2 * distance }
        })
        .collect()
}

/// One exchange of one rank in the gather phase, which reductions of GPUs have.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub(crate) struct Gather {
    /// The elements that the rank has, and sends to every peer.
    pub(crate) held: Range<usize>,
    /// The peers, with the elements that each of them has and sends.
    pub(crate) peers: Vec<(usize, Range<usize>)>,
}

/// The number of levels that the gather phase combines, in groups of four consecutive ranks: on one machine, simultaneous transfers to
/// three peers are up to twice as fast as sequential ones. Higher levels usually cross machines, where level-by-level exchanges send least.
#[cfg(any(feature = "cuda", test))]
const NEAR_LEVELS: usize = 2;

/// The gather phase after [`steps`]: afterwards every rank has all elements. Panics in the same cases.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn gathers(rank: usize, world_size: usize, len: usize) -> Vec<Gather> {
    let steps = self::steps(rank, world_size, len);
    let near = steps.len().min(NEAR_LEVELS);
    let far = steps[near..].iter().rev();
    let mut gathers: Vec<Gather> =
        far.map(|step| Gather { held: step.keep.clone(), peers: vec![(step.peer, step.give.clone())] }).collect();
    if let Some(last) = near.checked_sub(1) {
        let of = |peer: usize| (peer, self::steps(peer, world_size, len)[last].keep.clone());
        let peers = steps[last].group.clone().filter(|&peer| peer != rank).map(of).collect();
        gathers.push(Gather { held: steps[last].keep.clone(), peers });
    }
    gathers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gathers_bring_every_rank_everything() {
        for world_size in [1, 2, 4, 8, 16, 64] {
            for len in [0, 1, 7, 64, 1001] {
                let all: Vec<_> = (0..world_size).map(|rank| gathers(rank, world_size, len)).collect();
                let owned = |rank: usize| steps(rank, world_size, len).last().map_or(0..len, |last| last.keep.clone());
                let mut held: Vec<Vec<bool>> = (0..world_size)
                    .map(|rank| (0..len).map(|element| owned(rank).contains(&element)).collect())
                    .collect();
                for turn in 0..all[0].len() {
                    let before = held.clone();
                    for (rank, gathers) in all.iter().enumerate() {
                        let Gather { held: own, peers } = &gathers[turn];
                        assert!(own.clone().all(|element| before[rank][element]), "rank {rank} has what it sends");
                        for (peer, range) in peers {
                            let theirs = &all[*peer][turn];
                            assert_eq!((&theirs.held, theirs.peers.len()), (range, peers.len()));
                            assert!(theirs.peers.contains(&(rank, own.clone())), "{peer} expects {rank}");
                            for element in range.clone() {
                                assert!(!held[rank][element], "rank {rank} receives {element} once");
                                held[rank][element] = true;
                            }
                        }
                    }
                }
                assert!(held.iter().flatten().all(|&is_held| is_held), "{world_size} ranks, {len} elements");
            }
        }
    }

    #[test]
    fn steps_of_peers_agree_and_their_ranges_partition() {
        for world_size in [1, 2, 4, 8, 16, 64] {
            for len in [0, 1, 7, 64, 1001] {
                let all: Vec<_> = (0..world_size).map(|rank| steps(rank, world_size, len)).collect();
                for (rank, steps) in all.iter().enumerate() {
                    for (level, step) in steps.iter().enumerate() {
                        let peer = &all[step.peer][level];
                        assert_eq!((&peer.keep, &peer.give, peer.peer), (&step.give, &step.keep, rank));
                        assert_ne!(peer.is_left, step.is_left);
                        assert!(step.group.contains(&rank) && step.group.contains(&step.peer));
                    }
                }
                let mut ends: Vec<_> =
                    all.iter().map(|steps| steps.last().map_or(0..len, |last| last.keep.clone())).collect();
                ends.sort_by_key(|range| (range.start, range.end));
                assert_eq!(ends.iter().map(Range::len).sum::<usize>(), len);
                assert!(ends.windows(2).all(|pair| pair[0].end == pair[1].start));
            }
        }
    }
}
