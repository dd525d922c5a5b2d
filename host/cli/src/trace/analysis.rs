//! Comparison of ranks: the first collective in which they differ, the ranks that wait and for whom, and the ranks at the end of the waits.
//!
//! Pure: the input is traces, the output findings.

use std::collections::{BTreeMap, BTreeSet};

use gradsync::trace::{CallState, GroupTrace, RankTrace, TracedCall};
use serde::Serialize;

use super::Ends;

/// The number of a rank; for threads of one process, it also identifies the process.
pub(super) type Who = usize;

/// The findings.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Analysis {
    /// The number of ranks.
    pub(super) world_size: usize,
    /// The ranks without a file.
    pub(super) silent: Vec<Who>,
    /// Different collectives with the same number: the first of each group.
    pub(super) differences: Vec<Difference>,
    pub(super) waits: Vec<Wait>,
    /// The ranks that others wait for, and that wait for no rank.
    pub(super) causes: Vec<Cause>,
    /// Ranks that wait for each other, if no other rank is at the end of the waits.
    pub(super) cycle: Vec<Who>,
    /// The failures of ranks.
    pub(super) failures: Vec<Failure>,
    /// The last call of each rank with a file.
    pub(super) last: Vec<Last>,
}

/// Ranks with different calls under one number.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Difference {
    pub(super) group: String,
    pub(super) sequence: u64,
    /// Each call, with the ranks that made it.
    pub(super) calls: Vec<(String, Vec<Who>)>,
    /// The ranks of the group without such a call.
    pub(super) without: Vec<Who>,
}

/// Ranks that wait in one call for the same other ranks.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Wait {
    pub(super) group: String,
    pub(super) sequence: u64,
    pub(super) call: String,
    pub(super) waiting: Vec<Who>,
    pub(super) awaited: Vec<Who>,
    /// The longest wait of a rank, in seconds.
    pub(super) seconds: f64,
    /// Whether the wait has ended in a failure.
    pub(super) has_failed: bool,
}

/// A rank that holds up others.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Cause {
    pub(super) rank: Who,
    /// The known state of the rank.
    pub(super) state: String,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Failure {
    pub(super) ranks: Vec<Who>,
    pub(super) text: String,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Last {
    pub(super) rank: Who,
    pub(super) group: String,
    pub(super) call: String,
    pub(super) sequence: u64,
    pub(super) state: CallState,
    /// The time from the state to the writing of the file, in seconds.
    pub(super) seconds: f64,
}

/// A group on all ranks.
struct Group<'t> {
    name: String,
    members: &'t [usize],
    /// The trace of each rank of the group, by its number there, with the time of its file.
    ranks: BTreeMap<usize, (&'t GroupTrace, f64)>,
}

impl<'t> Group<'t> {
    fn who(&self, rank: usize) -> Who {
        self.members[rank]
    }

    /// The collectives of a rank, in the order of their numbers.
    fn collectives(&self, rank: usize) -> impl Iterator<Item = &'t TracedCall> {
        let calls = self.ranks.get(&rank).map_or(&[][..], |(trace, _)| &trace.calls[..]);
        calls.iter().filter(|call| is_collective(call))
    }

    /// The number of the last collective that a rank has called.
    fn reached(&self, rank: usize) -> u64 {
        self.collectives(rank).map(|call| call.sequence).max().unwrap_or(0)
    }

    fn first_difference(&self) -> Option<Difference> {
        let mut by_number: BTreeMap<u64, BTreeMap<String, Vec<Who>>> = BTreeMap::new();
        for &rank in self.ranks.keys() {
            for call in self.collectives(rank) {
                by_number.entry(call.sequence).or_default().entry(described(call)).or_default().push(self.who(rank));
            }
        }
        let (sequence, calls) = by_number.into_iter().find(|(_, calls)| calls.len() > 1)?;
        let without = (0..self.members.len()).filter(|&rank| self.reached(rank) < sequence).map(|rank| self.who(rank));
        let mut without: Vec<Who> = without.collect();
        without.sort_unstable();
        let mut calls: Vec<(String, Vec<Who>)> = calls.into_iter().collect();
        calls.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks[0]));
        Some(Difference { group: self.name.clone(), sequence, calls, without })
    }

    /// The ranks that a call of `rank` waits for.
    fn awaited(&self, rank: usize, call: &TracedCall) -> Vec<usize> {
        if is_collective(call) {
            return (0..self.members.len()).filter(|&peer| self.reached(peer) < call.sequence).collect();
        }
        let is_open = |peer: usize, fits: &dyn Fn(&TracedCall) -> bool| {
            let calls = self.ranks.get(&peer).map_or(&[][..], |(trace, _)| &trace.calls[..]);
            calls.iter().any(|theirs| theirs.state != CallState::Finished && fits(theirs))
        };
        let to = call.to.filter(|&peer| !is_open(peer, &|theirs| theirs.from == Some(rank)));
        let from = call.from.filter(|&peer| !is_open(peer, &|theirs| theirs.to == Some(rank)));
        to.into_iter().chain(from).collect()
    }

    /// The calls in which a rank waits, or has waited until a failure, with the ranks that it waits for.
    fn waits(&self, rank: usize) -> Vec<Wait> {
        let Some((trace, written)) = self.ranks.get(&rank) else { return Vec::new() };
        let is_open = |call: &&TracedCall| matches!(call.state, CallState::Posted | CallState::Failed);
        let wait = |call: &TracedCall| {
            let mut awaited: Vec<Who> = self.awaited(rank, call).into_iter().map(|peer| self.who(peer)).collect();
            awaited.sort_unstable();
            let has_failed = call.state == CallState::Failed;
            Wait {
                group: self.name.clone(),
                sequence: call.sequence,
                call: described(call),
                waiting: vec![self.who(rank)],
                awaited,
                seconds: if has_failed { call.changed } else { *written } - call.posted,
                has_failed,
            }
        };
        trace.calls.iter().filter(is_open).map(wait).filter(|wait| !wait.awaited.is_empty()).collect()
    }
}

fn is_collective(call: &TracedCall) -> bool {
    call.to.is_none() && call.from.is_none()
}

/// Describes a call as text.
fn described(call: &TracedCall) -> String {
    let data = call.dtype.as_ref().map(|dtype| format!(" of {} × {dtype}", call.len)).unwrap_or_default();
    let tensors = call.tensors.map(|tensors| format!(", {tensors} tensors")).unwrap_or_default();
    match &call.within {
        Some(within) => format!("{}{data} (a step of {within}{tensors})", call.operation),
        None => format!("{}{data}{tensors}", call.operation),
    }
}

/// The groups of all ranks. A group of threads of another process with the same name is another group.
fn groups(traces: &BTreeMap<usize, RankTrace>) -> Vec<Group<'_>> {
    let mut found: BTreeMap<_, Group<'_>> = BTreeMap::new();
    for trace in traces.values() {
        for group in &trace.groups {
            let process = group.in_process.then_some((&trace.host, trace.pid));
            let new = || {
                let name = match process {
                    Some((_, pid)) => format!("{} of process {pid}", group.group),
                    None => group.group.clone(),
                };
                Group { name, members: &group.members, ranks: BTreeMap::new() }
            };
            let entry = found.entry((&group.group, &group.members, process)).or_insert_with(new);
            entry.ranks.insert(group.rank, (group, trace.written));
        }
    }
    found.into_values().collect()
}

impl Analysis {
    /// Of these traces by rank; of at least `world_size` ranks; with what a launcher knows of ranks.
    pub(super) fn of(traces: &BTreeMap<usize, RankTrace>, world_size: usize, known: &Ends) -> Self {
        let groups = groups(traces);
        let members = groups.iter().flat_map(|group| group.members).map(|member| member + 1);
        let world_size = members.chain(traces.keys().map(|rank| rank + 1)).chain([world_size]).max().unwrap_or(0);
        let here: BTreeSet<Who> = groups
            .iter()
            .flat_map(|group| group.ranks.keys().map(|&rank| group.who(rank)))
            .chain(traces.keys().copied())
            .collect();
        // Ranks that the launcher of another machine has started write to another folder.
        let is_elsewhere = |rank: &Who| !known.is_empty() && !known.contains_key(rank);
        let silent: Vec<Who> = (0..world_size).filter(|rank| !here.contains(rank) && !is_elsewhere(rank)).collect();

        let ranks = |group: &Group<'_>| group.ranks.keys().copied().collect::<Vec<_>>();
        let mut waits = Vec::new();
        for group in &groups {
            for wait in ranks(group).into_iter().flat_map(|rank| group.waits(rank)) {
                join(&mut waits, wait);
            }
        }
        let waiting: BTreeSet<Who> = waits.iter().flat_map(|wait| &wait.waiting).copied().collect();
        let awaited: BTreeSet<Who> = waits.iter().flat_map(|wait| &wait.awaited).copied().collect();
        // A rank whose call has failed was itself blocked by another.
        let has_failed = |rank: &Who| latest(*rank, &groups).is_some_and(|call| call.call.state == CallState::Failed);
        let causes: Vec<Who> = awaited.difference(&waiting).copied().filter(|rank| !has_failed(rank)).collect();
        let is_cycle = causes.is_empty() && awaited.is_subset(&waiting);
        let cycle = if is_cycle { awaited.into_iter().collect() } else { Vec::new() };
        let state = |rank: Who| match known.get(&rank) {
            Some(Some(how)) => format!("it {how}"),
            _ if is_elsewhere(&rank) => "it is on another machine, whose launcher knows more".into(),
            _ => state(rank, &groups, traces),
        };
        Analysis {
            world_size,
            silent,
            differences: groups.iter().filter_map(Group::first_difference).collect(),
            waits,
            causes: causes.into_iter().map(|rank| Cause { rank, state: state(rank) }).collect(),
            cycle,
            failures: failures(&groups),
            last: groups
                .iter()
                .flat_map(|group| ranks(group).into_iter().filter_map(|rank| last(group, rank)))
                .collect(),
        }
    }
}

/// Merges a wait with the waits of other ranks in the same call.
fn join(waits: &mut Vec<Wait>, wait: Wait) {
    let is_same = |other: &&mut Wait| {
        (&other.group, other.sequence, &other.call, &other.awaited, other.has_failed)
            == (&wait.group, wait.sequence, &wait.call, &wait.awaited, wait.has_failed)
    };
    match waits.iter_mut().find(is_same) {
        Some(other) => {
            other.waiting.extend(wait.waiting);
            other.waiting.sort_unstable();
            other.seconds = other.seconds.max(wait.seconds);
        }
        None => waits.push(wait),
    }
}

/// A rank's last call, with its group.
struct Latest<'g, 't> {
    group: &'g Group<'t>,
    trace: &'t GroupTrace,
    call: &'t TracedCall,
    written: f64,
}

/// The last call of a rank in all groups.
fn latest<'g, 't>(rank: Who, groups: &'g [Group<'t>]) -> Option<Latest<'g, 't>> {
    let calls = groups.iter().flat_map(|group| {
        let own = group.ranks.iter().filter(move |(number, _)| group.who(**number) == rank);
        own.filter_map(move |(_, &(trace, written))| Some(Latest { group, trace, call: trace.calls.last()?, written }))
    });
    calls.max_by(|left, right| left.call.changed.total_cmp(&right.call.changed))
}

/// Describes the recorded state of a rank that others wait for.
fn state(rank: Who, groups: &[Group<'_>], traces: &BTreeMap<usize, RankTrace>) -> String {
    let Some(Latest { group, trace, call, written }) = latest(rank, groups) else {
        return match traces.get(&rank) {
            Some(_) => "it has made no call yet".into(),
            None => {
                "it has written no record: it has not come to a call of gradsync, does not run any more, or is stopped"
                    .into()
            }
        };
    };
    let seconds = written - call.changed;
    let description = format!("call {} of {}, {}", call.sequence, group.name, described(call));
    match call.state {
        _ if trace.has_left => format!("it has dropped its communicator; its last call was {description}"),
        CallState::Finished => {
            format!(
                "it is in no call: the last one, {description}, was over {seconds:.1} s before its record was written"
            )
        }
        CallState::Failed => {
            format!("its last call failed {seconds:.1} s before its record was written: {description}")
        }
        CallState::Matched => format!("it is moving data since {seconds:.1} s, in {description}"),
        _ => format!("it is in {description}, since {seconds:.1} s"),
    }
}

fn failures(groups: &[Group<'_>]) -> Vec<Failure> {
    let mut found: Vec<(f64, Failure)> = Vec::new();
    for group in groups {
        for (&rank, (trace, written)) in &group.ranks {
            let Some(text) = &trace.failure else { continue };
            match found.iter_mut().find(|(_, failure)| failure.text == *text) {
                Some((_, failure)) => failure.ranks.push(group.who(rank)),
                None => found.push((*written, Failure { ranks: vec![group.who(rank)], text: text.clone() })),
            }
        }
    }
    found.sort_by(|left, right| left.0.total_cmp(&right.0));
    let sorted = |mut failure: Failure| {
        failure.ranks.sort_unstable();
        failure.ranks.dedup();
        failure
    };
    found.into_iter().map(|(_, failure)| sorted(failure)).collect()
}

fn last(group: &Group<'_>, rank: usize) -> Option<Last> {
    let (trace, written) = group.ranks.get(&rank)?;
    let call = trace.calls.last()?;
    Some(Last {
        rank: group.who(rank),
        group: group.name.clone(),
        call: described(call),
        sequence: call.sequence,
        state: call.state,
        seconds: written - call.changed,
    })
}
