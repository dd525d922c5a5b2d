//! Schedules of transfers, run by the simulator below, which only uses the order of slots on each rank.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;

use gradsync::internal::plan::schedule::Slot;
use gradsync::ops::send_recv::{RankSchedule, Schedule};
use gradsync_tests::inputs::Random;
use proptest::prelude::*;

/// The next action of one rank.
pub(crate) enum Action<'a, T> {
    /// A computation that takes `ticks` and needs no other rank, with its number.
    Compute { number: usize, ticks: u64 },
    /// One group call.
    Group(&'a Slot<T>),
}

/// An event on a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event<T> {
    Computed { number: usize },
    Received { from: usize, what: T },
}

/// The result of a rank that has finished its program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ended<T> {
    pub(crate) events: Vec<Event<T>>,
    pub(crate) clock: u64,
}

/// The state of one rank during a run.
struct Running {
    next: usize,
    clock: u64,
    /// The transfers of the current group call that are not matched yet.
    open: usize,
    inside: bool,
}

/// Runs all ranks to their ends. A group call starts all its transfers when the rank reaches it, and ends when all of them are matched. As
/// in NCCL, the n-th send from one rank to another matches the n-th receive, whichever calls they are in. Nothing is buffered. Returns the
/// events on each rank and its clock at the end, or the ranks that are stuck.
pub(crate) fn run<T: Clone + PartialEq + Debug>(programs: &[Vec<Action<'_, T>>]) -> Result<Vec<Ended<T>>, Vec<usize>> {
    let mut ranks: Vec<_> = programs.iter().map(|_| Running { next: 0, clock: 0, open: 0, inside: false }).collect();
    let mut events = vec![Vec::new(); programs.len()];
    let mut sends: BTreeMap<(usize, usize), VecDeque<&T>> = BTreeMap::new();
    let mut recvs: BTreeMap<(usize, usize), VecDeque<&T>> = BTreeMap::new();
    loop {
        let mut moved = false;
        for (rank, program) in programs.iter().enumerate() {
            while !ranks[rank].inside && ranks[rank].next < program.len() {
                moved = true;
                match &program[ranks[rank].next] {
                    Action::Compute { number, ticks } => {
                        ranks[rank].clock += ticks;
                        ranks[rank].next += 1;
                        events[rank].push(Event::Computed { number: *number });
                    }
                    Action::Group(slot) => {
                        ranks[rank].inside = true;
                        ranks[rank].open = slot.sends.len() + slot.recvs.len();
                        for send in &slot.sends {
                            sends.entry((rank, send.peer)).or_default().push_back(&send.payload);
                        }
                        for recv in &slot.recvs {
                            recvs.entry((recv.peer, rank)).or_default().push_back(&recv.payload);
                        }
                    }
                }
            }
        }
        for (&(from, to), sent) in &mut sends {
            let Some(received) = recvs.get_mut(&(from, to)) else { continue };
            while !sent.is_empty() && !received.is_empty() {
                let (sent, received) = (sent.pop_front().unwrap(), received.pop_front().unwrap());
                assert_eq!(sent, received, "what rank {from} sent is not what rank {to} received");
                let clock = ranks[from].clock.max(ranks[to].clock);
                for rank in [from, to] {
                    ranks[rank].clock = clock;
                    ranks[rank].open -= 1;
                }
                events[to].push(Event::Received { from, what: received.clone() });
                moved = true;
            }
        }
        for running in ranks.iter_mut().filter(|running| running.inside && running.open == 0) {
            running.inside = false;
            running.next += 1;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    let stuck: Vec<_> = (0..ranks.len()).filter(|&rank| ranks[rank].next < programs[rank].len()).collect();
    if !stuck.is_empty() {
        return Err(stuck);
    }
    Ok(events.into_iter().zip(ranks).map(|(events, Running { clock, .. })| Ended { events, clock }).collect())
}

fn groups<T>(part: &RankSchedule<T>) -> Vec<Action<'_, T>> {
    part.slots().map(|(_, slot)| Action::Group(slot)).collect()
}

/// The values that a rank has received from each peer, in order.
fn received(ended: &Ended<u32>) -> BTreeMap<usize, Vec<u32>> {
    let mut received: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for event in &ended.events {
        if let Event::Received { from, what } = event {
            received.entry(*from).or_default().push(*what);
        }
    }
    received
}

fn parts_of(world_size: usize) -> Vec<RankSchedule<u32>> {
    (0..world_size).map(|rank| RankSchedule::new(rank, world_size).unwrap()).collect()
}

fn refusal(parts: Vec<RankSchedule<u32>>) -> String {
    Schedule::from_ranks(parts).unwrap_err().to_string()
}

/// NcclService refuses two sends to one peer in a slot, which this schedule allows.
#[test]
fn many_transfers_per_peer_and_slot() {
    let mut schedule = Schedule::new(2).unwrap();
    for payload in 0..3u32 {
        schedule.transfer(0, 0, 1, payload).unwrap();
        schedule.transfer(0, 1, 0, 10 + payload).unwrap();
    }
    let slot = schedule.rank(0).slot(0).unwrap();
    assert_eq!((slot.sends.len(), slot.recvs.len()), (3, 3));
    let ended = run(&[groups(schedule.rank(0)), groups(schedule.rank(1))]).unwrap();
    assert_eq!(received(&ended[0])[&1], [10, 11, 12]);
    assert_eq!(received(&ended[1])[&0], [0, 1, 2]);
}

#[test]
fn refusals_name_ranks_and_slot() {
    // In a ring, every rank sends first and receives one slot later, so no send is ever matched.
    let mut parts = parts_of(3);
    for (rank, part) in parts.iter_mut().enumerate() {
        part.send(4, (rank + 1) % 3, 0).unwrap();
        part.recv(5, (rank + 2) % 3, 0).unwrap();
    }
    let programs: Vec<_> = parts.iter().map(groups).collect();
    assert_eq!(run(&programs), Err(vec![0, 1, 2]));
    let message = refusal(parts);
    assert!(message.contains("slot 4 would deadlock: rank 0 has 1 sends to rank 1, which has 0"), "{message}");

    let mut parts = parts_of(2);
    parts[1].recv(2, 0, 7).unwrap();
    assert!(refusal(parts.clone()).contains("slot 2 would deadlock: rank 0 has 0 sends to rank 1, which has 1"));
    parts[0].send(2, 1, 8).unwrap();
    let message = refusal(parts);
    assert!(message.contains("slot 2: send 0 from rank 0 to rank 1 is 8, and its receive 0 is 7"), "{message}");

    // The order of transfers is part of the match.
    let mut parts = parts_of(2);
    for payload in [1, 2] {
        parts[0].send(0, 1, payload).unwrap();
        parts[1].recv(0, 0, 3 - payload).unwrap();
    }
    assert!(refusal(parts).contains("send 0 from rank 0 to rank 1 is 1, and its receive 0 is 2"));

    assert!(refusal(vec![]).contains("world size is 0"));
    assert!(refusal(parts_of(3).split_off(1)).contains("part 0 of 2 is for rank 1 of 3"));
    let mut part = RankSchedule::new(1, 2).unwrap();
    for peer in [1, 2] {
        let message = part.send(9, peer, 0).unwrap_err().to_string();
        assert!(
            message.contains(&format!(
                "slot 9: rank 1 cannot exchange with rank {peer}: that must be another one of the 2 ranks"
            )),
            "{message}"
        );
        assert!(part.recv(9, peer, 0).is_err());
    }
    assert!(part.slot(9).is_none());
    assert!(RankSchedule::<u32>::new(2, 2).is_err() && Schedule::<u32>::new(0).is_err());
    assert!(Schedule::<u32>::new(usize::MAX).unwrap_err().to_string().contains("no memory"));
    let mut schedule = Schedule::new(2).unwrap();
    for (from, to) in [(2, 0), (0, 2), (1, 1)] {
        assert!(schedule.transfer(0, from, to, 0u32).unwrap_err().to_string().contains("slot 0: "));
    }
    assert_eq!(schedule, Schedule::new(2).unwrap());
}

/// Random transfers, as slot, sender and receiver.
fn transfers() -> impl Strategy<Value = (usize, Vec<(usize, usize, usize)>)> {
    (2usize..6).prop_flat_map(|world_size| {
        let transfer = (0usize..5, 0..world_size, 1..world_size)
            .prop_map(move |(slot, from, by)| (slot * slot, from, (from + by) % world_size));
        (Just(world_size), prop::collection::vec(transfer, 1..40))
    })
}

proptest! {
    #[test]
    fn valid_schedules_run_to_their_end((world_size, transfers) in transfers()) {
        let mut schedule = Schedule::new(world_size).unwrap();
        for (payload, &(slot, from, to)) in transfers.iter().enumerate() {
            schedule.transfer(slot, from, to, payload as u32).unwrap();
        }
        let parts: Vec<_> = (0..world_size).map(|rank| schedule.rank(rank).clone()).collect();
        prop_assert_eq!(&Schedule::from_ranks(parts).unwrap(), &schedule);
        let programs: Vec<_> = (0..world_size).map(|rank| groups(schedule.rank(rank))).collect();
        let ended = run(&programs).unwrap();
        let mut by_slot: Vec<_> = transfers.iter().enumerate().collect();
        by_slot.sort_by_key(|(_, transfer)| transfer.0);
        for (rank, ended) in ended.iter().enumerate() {
            let mut wanted: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
            for &(payload, &(_, from, to)) in &by_slot {
                if to == rank {
                    wanted.entry(from).or_default().push(payload as u32);
                }
            }
            prop_assert_eq!(received(ended), wanted);
        }
    }

    /// One receive is missing, or in another slot: the schedule is refused for the first slot that becomes wrong.
    #[test]
    fn a_schedule_with_one_fault_is_refused(
        (world_size, transfers) in transfers(),
        fault in any::<prop::sample::Index>(),
        moved in prop::option::of(25usize..30),
        seed in any::<u64>(),
    ) {
        let fault = fault.index(transfers.len());
        let mut parts = parts_of(world_size);
        let mut order: Vec<_> = transfers.iter().enumerate().collect();
        for &(payload, &(slot, from, to)) in &order {
            parts[from].send(slot, to, payload as u32).unwrap();
        }
        // Receives from different pairs may be added in any order.
        let mut random = Random::new(seed);
        let keys: Vec<_> = (0..world_size * world_size).map(|_| random.below(1 << 30)).collect();
        order.sort_by_key(|(_, (_, from, to))| keys[from * world_size + to]);
        for (payload, &(slot, from, to)) in order {
            let slot = if payload == fault { moved } else { Some(slot) };
            if let Some(slot) = slot {
                parts[to].recv(slot, from, payload as u32).unwrap();
            }
        }
        let (slot, from, to) = transfers[fault];
        let message = refusal(parts);
        prop_assert!(message.contains(&format!("slot {slot} would deadlock: rank {from} has ")), "{}", message);
        prop_assert!(message.contains(&format!("to rank {to}, which has ")), "{}", message);
    }
}
