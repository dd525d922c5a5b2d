//! The exhaustive exploration: every program of up to three ranks with up to four calls, in every interleaving, with an exit, a loss or a passed
//! deadline at every point.

use std::collections::HashSet;

use super::tests::{barrier, recv, reduce, send};
use super::*;

/// The most calls of all ranks of a program together.
const CALLS: usize = 4;

/// The lists of each rank, in order.
#[derive(Clone, Debug)]
struct Program {
    lists: Vec<Vec<Vec<Call>>>,
    awaited: Awaited,
}

/// The lists in which ranks wait.
#[derive(Clone, Copy, Debug)]
enum Awaited {
    All,
    None,
    /// Every second list of each rank; the first one of rank 0 is not awaited, the first one of rank 1 is, and so on.
    Alternating,
}

impl Program {
    fn is_awaited(&self, rank: usize, list: usize) -> bool {
        match self.awaited {
            Awaited::All => true,
            Awaited::None => false,
            Awaited::Alternating => (rank + list) % 2 == 1,
        }
    }
}

/// The disturbances of a run of a program. There is one at most: a second one finds a group that has failed, or is the first one alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disturbance {
    None,
    /// A rank leaves before the end of its program, between two lists or, by another of its threads, while it waits in one.
    Exit,
    /// A rank is lost, at any point but during a call that is being carried out.
    Loss,
    /// The deadline of a list passes.
    Deadline,
}

#[derive(Clone, Debug)]
struct World<'p> {
    program: &'p Program,
    engine: Engine,
    /// The lists that each rank has posted.
    posted: Vec<usize>,
    running: Vec<Run>,
    /// The lengths of the sends that were matched between each two ranks, and the collectives of each rank, in order.
    transfers: Vec<Vec<Vec<usize>>>,
    collectives: Vec<Vec<Call>>,
    disturbance: Disturbance,
}

impl<'p> World<'p> {
    fn new(program: &'p Program, disturbance: Disturbance) -> Self {
        let world_size = program.lists.len();
        World {
            program,
            engine: Engine::new(world_size),
            posted: vec![0; world_size],
            running: Vec::new(),
            transfers: vec![vec![Vec::new(); world_size]; world_size],
            collectives: vec![Vec::new(); world_size],
            disturbance,
        }
    }

    fn ranks(&self) -> std::ops::Range<usize> {
        0..self.posted.len()
    }

    fn has_ended(&self, rank: usize) -> bool {
        self.posted[rank] == self.program.lists[rank].len()
    }

    fn is_free(&self, rank: usize) -> bool {
        self.engine.ranks[rank].departure.is_none() && !self.engine.is_waiting(rank)
    }

    /// The list that `rank` has in progress, as the program has it.
    fn current(&self, rank: usize) -> &'p [Call] {
        let ticket = self.engine.current(rank).expect("it carries out a call");
        &self.program.lists[rank][ticket.number as usize - 1]
    }

    /// Checks calls that the engine wants to be carried out against the program alone.
    fn begin(&mut self, runs: Vec<Run>) {
        for run in runs {
            match run {
                Run::Collectives => {
                    let is_collective = |call: &&Call| call.operation.peers() == (None, None);
                    for rank in self.ranks() {
                        let own = self.current(rank).iter().filter(is_collective);
                        self.collectives[rank].extend(own);
                    }
                    assert!(self.collectives.iter().all(|calls| *calls == self.collectives[0]), "{self:?}");
                }
                Run::Transfer { send, receive } => {
                    let (sent, received) =
                        (self.current(send.rank)[send.index], self.current(receive.rank)[receive.index]);
                    assert_eq!(
                        (sent.operation.peers().0, received.operation.peers().1),
                        (Some(receive.rank), Some(send.rank))
                    );
                    assert_eq!((sent.len, sent.dtype), (received.len, received.dtype));
                    self.transfers[send.rank][receive.rank].push(sent.len);
                }
            }
            self.running.push(run);
        }
    }

    /// Whether the transfers so far are the first ones of the program, in its order.
    fn check_order(&self) {
        for sender in self.ranks() {
            for receiver in self.ranks() {
                let sends = |call: &&Call| call.operation.peers().0 == Some(receiver);
                let lens = self.program.lists[sender].iter().flatten().filter(sends).map(|call| call.len);
                let done = &self.transfers[sender][receiver];
                assert!(lens.take(done.len()).eq(done.iter().copied()), "{self:?}");
            }
        }
    }

    /// The states that can follow this one, and whether the disturbance was used in each.
    fn successors(&self) -> Vec<World<'p>> {
        let mut next = Vec::new();
        let mut add = |change: &dyn Fn(&mut World<'p>)| {
            let mut world = self.clone();
            change(&mut world);
            if self.engine.failure().is_some() {
                assert_eq!(
                    world.running.len().max(self.running.len()),
                    self.running.len(),
                    "a call begins after a failure"
                );
                assert_eq!(world.engine.failure(), self.engine.failure(), "the first failure is final");
            }
            world.check_order();
            next.push(world);
        };
        for index in 0..self.running.len() {
            add(&|world| {
                let run = world.running.swap_remove(index);
                let runs = world.engine.finish(run);
                world.begin(runs);
            });
        }
        for rank in self.ranks() {
            let (is_free, is_running) = (self.is_free(rank), self.engine.is_running(rank));
            let has_failed = self.engine.failure().is_some();
            // A rank gets a failure from its call, and makes no further one.
            if is_free && !has_failed && !self.has_ended(rank) {
                add(&|world| {
                    let is_awaited = world.program.is_awaited(rank, world.posted[rank]);
                    let list = &world.program.lists[rank][world.posted[rank]];
                    world.posted[rank] += 1;
                    let (_, runs) = world.engine.post(rank, list, is_awaited);
                    world.begin(runs);
                });
            }
            if is_free && (self.has_ended(rank) || has_failed) {
                add(&|world| world.engine.depart(rank, Departure::Left));
            }
            if has_failed && self.engine.is_waiting(rank) && !is_running {
                add(&|world| world.engine.withdraw(rank));
            }
            if self.engine.ranks[rank].departure.is_some() {
                continue;
            }
            match self.disturbance {
                Disturbance::Exit if !is_running && (!is_free || !self.has_ended(rank)) => add(&|world| {
                    world.disturbance = Disturbance::None;
                    world.engine.depart(rank, Departure::Left);
                }),
                Disturbance::Loss if !is_running => add(&|world| {
                    world.disturbance = Disturbance::None;
                    world.engine.withdraw(rank);
                    world.engine.depart(rank, Departure::Lost);
                    let (operation, departure) = (Operation::Exchange, Departure::Lost);
                    world.engine.fail(CommError::PeerGone { operation, rank, departure });
                }),
                Disturbance::Deadline if self.engine.current(rank).is_some() => add(&|world| {
                    world.disturbance = Disturbance::None;
                    world.engine.expire(rank, Duration::from_secs(1));
                }),
                _ => {}
            }
        }
        next
    }

    /// The state without its past; two worlds of one program with equal keys have the same future.
    fn key(&self) -> Vec<u8> {
        let mut key = vec![self.disturbance as u8, u8::from(self.engine.failure.is_some())];
        for (rank, posted) in self.engine.ranks.iter().zip(&self.posted) {
            let count = |unmatched: &list::Unmatched| unmatched.values().map(VecDeque::len).sum::<usize>();
            let list = rank.lists.front();
            let front =
                list.map(|list| [list.running, list.collectives.len(), count(&list.sends), count(&list.receives)]);
            let departure = rank.departure.map_or(0, |departure| 1 + departure as usize);
            key.extend([*posted, rank.over as usize, rank.lists.len(), departure].map(|number| number as u8));
            key.extend(front.unwrap_or_default().map(|number| number as u8));
        }
        let mut running: Vec<[u8; 4]> = self.running.iter().map(encoded).collect();
        running.sort_unstable();
        key.extend(running.as_flattened());
        key
    }
}

fn encoded(run: &Run) -> [u8; 4] {
    match run {
        Run::Collectives => [u8::MAX; 4],
        Run::Transfer { send, receive } => {
            [send.rank, send.index, receive.rank, receive.index].map(|number| number as u8)
        }
    }
}

/// Explores all interleavings of a program. Returns the number of states, and whether programs ended without a failure, with one, or both.
fn explore(program: &Program, disturbance: Disturbance) -> (usize, [bool; 2]) {
    let mut seen = HashSet::new();
    let mut open = vec![World::new(program, disturbance)];
    let mut ends = [false; 2];
    while let Some(world) = open.pop() {
        if !seen.insert(world.key()) {
            continue;
        }
        let next = world.successors();
        if next.is_empty() {
            // The end: every rank has left, nothing is in progress, and without a failure every list is over.
            let has_ended = |rank: usize| world.has_ended(rank) || disturbance == Disturbance::Exit;
            let is_over = |rank: usize| has_ended(rank) && world.engine.current(rank).is_none();
            let has_failed = world.engine.failure().is_some();
            assert!(
                world.running.is_empty() && world.ranks().all(|rank| world.engine.ranks[rank].departure.is_some()),
                "{world:?}"
            );
            assert!(has_failed || world.ranks().all(is_over), "{world:?}");
            ends[usize::from(has_failed)] = true;
        }
        open.extend(next);
    }
    (seen.len(), ends)
}

/// All programs of `world_size` ranks with at most [`CALLS`] calls, one of each class that differ in the numbers of the ranks alone, or by a
/// rotation of them.
fn programs(world_size: usize) -> Vec<Program> {
    let alphabet = |rank: usize| {
        let others = (1..world_size).map(move |distance| (rank + distance) % world_size);
        let transfers = others
            .flat_map(|peer| [send(peer, 1), recv(peer, 1)])
            .chain((world_size > 1).then(|| send((rank + 1) % world_size, 2)));
        [barrier(), reduce(1)].into_iter().chain(transfers).collect::<Vec<Call>>()
    };
    let letters = alphabet(0).len();
    let mut words = vec![vec![Vec::new(); world_size]];
    let mut from = 0;
    for _ in 0..CALLS {
        let until = words.len();
        for index in from..until {
            // Calls are added to the last rank that has any, or to a later one, so that each program is made once.
            let last = words[index].iter().rposition(|word: &Vec<usize>| !word.is_empty()).unwrap_or(0);
            for rank in last..world_size {
                for letter in 0..letters {
                    let mut word = words[index].clone();
                    word[rank].push(letter);
                    words.push(word);
                }
            }
        }
        from = until;
    }
    let is_least = |word: &Vec<Vec<usize>>| {
        (1..world_size).all(|shift| {
            let mut rotated = word.clone();
            rotated.rotate_left(shift);
            *word <= rotated
        })
    };
    words.retain(is_least);
    let mut programs = Vec::new();
    for word in words {
        let alone =
            |(rank, word): (usize, &Vec<usize>)| word.iter().map(|&letter| vec![alphabet(rank)[letter]]).collect();
        let lists: Vec<Vec<Vec<Call>>> = word.iter().enumerate().map(alone).collect();
        for awaited in [Awaited::All, Awaited::None, Awaited::Alternating] {
            programs.push(Program { lists: lists.clone(), awaited });
            if lists.iter().any(|lists| lists.len() > 1) {
                let joined = |lists: &Vec<Vec<Call>>| if lists.is_empty() { vec![] } else { vec![lists.concat()] };
                programs.push(Program { lists: lists.iter().map(joined).collect(), awaited });
            }
        }
    }
    programs
}

#[test]
fn engine_ends_alike_in_every_interleaving_of_small_programs() {
    let (mut states, mut completed) = (0, 0);
    for world_size in 1..=3 {
        for program in programs(world_size) {
            let (count, ends) = explore(&program, Disturbance::None);
            states += count;
            assert!(ends == [true, false] || ends == [false, true], "{program:?}: {ends:?}");
            completed += usize::from(ends[0]);
            for disturbance in [Disturbance::Exit, Disturbance::Loss, Disturbance::Deadline] {
                let (count, _) = explore(&program, disturbance);
                states += count;
            }
        }
    }
    println!("{states} states, {completed} programs completed");
    assert!(completed > 0);
}
