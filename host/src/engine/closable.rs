//! [`Closable`]: the counter of a rank's steps, without a centre. Its rank raises it, and any other rank can close it, so that a step was made
//! or never will be.
//!
//! Ranks without a coordinator take each round of a handshake by such counters in shared memory. A rank whose wait fails closes the round: it
//! tries the counters of all ranks in rank order, and closes the first one that has not reached the round. Raising and closing are single
//! atomic operations on one word. All ranks try the counters in the same order, and a counter is closed once, so either all ranks enter a round
//! or none passes it, and all ranks that fail in it name the same closer. The test explores all interleavings of these operations.

/// The value of a counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Closable(pub(crate) u64);

/// The outcome of an attempt to close a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closing {
    /// The counter was open, and gets this value.
    Closes(Closable),
    /// This rank has closed it before.
    ClosedBy(usize),
    /// The counter has reached the step.
    Reached,
}

impl Closable {
    /// The number of low bits that hold the number of steps. The bits above hold the rank that has closed it, plus one, or 0 while it is open.
    pub(crate) const NUMBER_BITS: u32 = 48;

    /// The number of steps that its rank has made.
    pub(crate) fn number(self) -> u64 {
        self.0 & ((1 << Self::NUMBER_BITS) - 1)
    }

    /// The rank that has closed it, if one has.
    pub(crate) fn closer(self) -> Option<usize> {
        (self.0 >> Self::NUMBER_BITS).checked_sub(1).map(|rank| rank as usize)
    }

    /// The effect of an attempt of `rank` to close it before the step `step`.
    pub(crate) fn close(self, step: u64, rank: usize) -> Closing {
        match self.closer() {
            _ if self.number() >= step => Closing::Reached,
            Some(closer) => Closing::ClosedBy(closer),
            None => Closing::Closes(Closable(self.0 | (rank as u64 + 1) << Self::NUMBER_BITS)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The rounds of a collective, and one of the next.
    const ROUNDS: u64 = 3;

    /// The next operation of a rank.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Next {
        /// Raise the own counter to this round.
        Raise(u64),
        /// Look whether all ranks have entered this round.
        Wait(u64),
        /// Try to close the counter of the rank `at`.
        Close { round: u64, at: usize },
        /// Nothing: all rounds were passed, the rank has failed, or its process has ended.
        None,
    }

    /// How a rank has left a round.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Outcome {
        Passed,
        Failed { closer: usize },
    }

    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct World {
        counters: Vec<Closable>,
        next: Vec<Next>,
        outcomes: Vec<Vec<Option<Outcome>>>,
    }

    impl World {
        fn new(world_size: usize) -> Self {
            World {
                counters: vec![Closable::default(); world_size],
                next: vec![Next::Raise(1); world_size],
                outcomes: vec![vec![None; world_size]; ROUNDS as usize + 1],
            }
        }

        fn leave(&mut self, rank: usize, round: u64, outcome: Outcome) {
            self.outcomes[round as usize][rank] = Some(outcome);
            let goes_on = outcome == Outcome::Passed && round < ROUNDS;
            self.next[rank] = if goes_on { Next::Raise(round + 1) } else { Next::None };
        }

        /// The states after one atomic operation of `rank`: what it does next, and, in a wait, that its deadline passes or that it finds
        /// that a rank has left.
        fn after(&self, rank: usize) -> Vec<World> {
            let change = |change: &dyn Fn(&mut World)| {
                let mut world = self.clone();
                change(&mut world);
                world
            };
            match self.next[rank] {
                Next::None => Vec::new(),
                Next::Raise(round) => vec![change(&|world| match world.counters[rank].closer() {
                    Some(closer) => world.leave(rank, round, Outcome::Failed { closer }),
                    None => {
                        assert_eq!(world.counters[rank], Closable(round - 1));
                        world.counters[rank] = Closable(round);
                        world.next[rank] = Next::Wait(round);
                    }
                })],
                Next::Wait(round) => {
                    let missing = self.counters.iter().filter(|counter| counter.number() < round);
                    let closer = missing.clone().find_map(|counter| counter.closer());
                    let mut after = vec![change(&|world| world.next[rank] = Next::Close { round, at: 0 })];
                    if missing.count() == 0 {
                        after.push(change(&|world| world.leave(rank, round, Outcome::Passed)));
                    } else if let Some(closer) = closer {
                        after.push(change(&|world| world.leave(rank, round, Outcome::Failed { closer })));
                    }
                    after
                }
                Next::Close { round, at } => vec![change(&|world| {
                    let Some(&counter) = world.counters.get(at) else {
                        return world.leave(rank, round, Outcome::Passed);
                    };
                    match counter.close(round, rank) {
                        Closing::Reached => world.next[rank] = Next::Close { round, at: at + 1 },
                        Closing::ClosedBy(closer) => world.leave(rank, round, Outcome::Failed { closer }),
                        Closing::Closes(closed) => {
                            world.counters[at] = closed;
                            world.leave(rank, round, Outcome::Failed { closer: rank });
                        }
                    }
                })],
            }
        }
    }

    /// Ranks are stopped for any time, give up in any wait, and end between any two operations.
    #[test]
    fn close_has_all_ranks_leave_alike_in_every_interleaving() {
        for world_size in 1..=3 {
            let (mut seen, mut open) = (HashSet::new(), vec![World::new(world_size)]);
            let mut ends = [0; 2];
            while let Some(world) = open.pop() {
                if !seen.insert(world.clone()) {
                    continue;
                }
                for (round, outcomes) in world.outcomes.iter().enumerate() {
                    let mut left = outcomes.iter().flatten();
                    let first = left.next();
                    assert!(left.all(|outcome| Some(outcome) == first), "round {round}: {world:?}");
                }
                let alive = (0..world_size).filter(|&rank| world.next[rank] != Next::None);
                let after: Vec<World> = alive.clone().flat_map(|rank| world.after(rank)).collect();
                // A rank that waits for ever is one that neither has a deadline nor hears of an end: here every wait can be given up.
                assert!(alive.clone().all(|rank| !world.after(rank).is_empty()), "{world:?}");
                let ended = alive.map(|rank| {
                    let mut world = world.clone();
                    world.next[rank] = Next::None;
                    world
                });
                let has_passed = world.outcomes[ROUNDS as usize].contains(&Some(Outcome::Passed));
                ends[usize::from(has_passed)] += usize::from(after.is_empty());
                open.extend(ended.collect::<Vec<_>>());
                open.extend(after);
            }
            assert!(ends.iter().all(|count| *count > 0), "{world_size} ranks: {ends:?}");
            println!("{world_size} ranks: {} states", seen.len());
        }
    }
}
