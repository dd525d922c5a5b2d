//! Comparison of ranks: the first collective in which they differ, the ranks that wait and for whom, and the ranks at the end of the waits.
//!
//! Pure: the input is traces, the output findings.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use gradsync::internal::trace::{CallState, GroupTrace, RankTrace, TracedCall};
use serde::Serialize;

use super::{End, Ends};

/// The number of a rank; for threads of one process, it also identifies the process.
pub(super) type Who = usize;

/// The findings.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Analysis {
    /// The number of ranks.
    pub(super) world_size: usize,
    /// The ranks without a file.
    pub(super) silent: Vec<Who>,
    /// Of these, the ranks that run and were asked for a file a moment ago.
    pub(super) late: Vec<Who>,
    /// Different collectives with the same number: the first of each group.
    pub(super) differences: Vec<Difference>,
    pub(super) waits: Vec<Wait>,
    /// The ranks that others wait for, and that wait for no rank.
    pub(super) causes: Vec<Cause>,
    /// Ranks that wait for each other, if no other rank is at the end of the waits.
    pub(super) cycle: Vec<Who>,
    /// The ranks whose threads wait for work on a GPU, with the longest time in seconds.
    pub(super) device_waits: Option<(Vec<Who>, f64)>,
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
    /// The group and the number of the call that the state describes.
    #[serde(skip)]
    pub(super) call: Option<(String, u64)>,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Failure {
    pub(super) ranks: Vec<Who>,
    pub(super) text: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
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
struct RankGroup<'t> {
    name: String,
    members: &'t [usize],
    /// The trace of each rank of the group, by its number there, with the time of its file.
    ranks: BTreeMap<usize, (&'t GroupTrace, f64)>,
    /// The number of the last collective that each rank of the group has called, and the rank; sorted.
    reached: Vec<(u64, usize)>,
    /// The transfers that have not finished: the rank and its peer.
    sends: HashSet<(usize, usize)>,
    receives: HashSet<(usize, usize)>,
}

/// The ranks that a call waits for.
#[derive(PartialEq, Eq, Hash)]
enum Awaited {
    /// So many ranks that have reached the fewest collectives.
    Slowest(usize),
    /// The peers of a transfer.
    Peers(Vec<usize>),
}

impl<'t> RankGroup<'t> {
    fn new(name: String, members: &'t [usize]) -> Self {
        let (ranks, reached, sends, receives) = Default::default();
        RankGroup { name, members, ranks, reached, sends, receives }
    }

    /// Prepares the group for [`waits`](Self::waits) and [`first_difference`](Self::first_difference), once all ranks are there.
    fn index(&mut self) {
        for (&rank, (trace, _)) in &self.ranks {
            for call in trace.calls.iter().filter(|call| call.state != CallState::Finished) {
                self.sends.extend(call.to.map(|peer| (rank, peer)));
                self.receives.extend(call.from.map(|peer| (rank, peer)));
            }
        }
        self.reached = (0..self.members.len()).map(|rank| (self.last_collective(rank), rank)).collect();
        self.reached.sort_unstable();
    }

    fn who(&self, rank: usize) -> Who {
        self.members[rank]
    }

    /// These ranks of the group by their numbers in the group of all ranks, in order.
    fn all_of(&self, ranks: impl IntoIterator<Item = usize>) -> Vec<Who> {
        let mut all: Vec<Who> = ranks.into_iter().map(|rank| self.who(rank)).collect();
        all.sort_unstable();
        all
    }

    /// The collectives of a rank, in the order of their numbers.
    fn collectives(&self, rank: usize) -> impl Iterator<Item = &'t TracedCall> {
        let calls = self.ranks.get(&rank).map_or(&[][..], |(trace, _)| &trace.calls[..]);
        calls.iter().filter(|call| is_collective(call))
    }

    fn last_collective(&self, rank: usize) -> u64 {
        self.collectives(rank).map(|call| call.sequence).max().unwrap_or(0)
    }

    /// How many ranks have not reached a collective; they are the first ones of `reached`.
    fn before(&self, sequence: u64) -> usize {
        self.reached.partition_point(|(reached, _)| *reached < sequence)
    }

    fn slowest(&self, count: usize) -> Vec<Who> {
        self.all_of(self.reached[..count].iter().map(|(_, rank)| *rank))
    }

    fn first_difference(&self) -> Option<Difference> {
        let mut by_number: BTreeMap<u64, BTreeMap<String, Vec<Who>>> = BTreeMap::new();
        for &rank in self.ranks.keys() {
            for call in self.collectives(rank) {
                by_number.entry(call.sequence).or_default().entry(described(call)).or_default().push(self.who(rank));
            }
        }
        let (sequence, calls) = by_number.into_iter().find(|(_, calls)| calls.len() > 1)?;
        let without = self.slowest(self.before(sequence));
        let mut calls: Vec<(String, Vec<Who>)> = calls.into_iter().collect();
        calls.sort_by_key(|(_, ranks)| (std::cmp::Reverse(ranks.len()), ranks[0]));
        Some(Difference { group: self.name.clone(), sequence, calls, without })
    }

    /// The ranks that a call of `rank` waits for.
    fn awaited(&self, rank: usize, call: &TracedCall) -> Awaited {
        if is_collective(call) {
            return Awaited::Slowest(self.before(call.sequence));
        }
        let to = call.to.filter(|&peer| !self.receives.contains(&(peer, rank)));
        let from = call.from.filter(|&peer| !self.sends.contains(&(peer, rank)));
        Awaited::Peers(to.into_iter().chain(from).collect())
    }

    /// The calls in which ranks wait, or have waited until a failure, with the ranks that they wait for. Ranks that are only `late` with their
    /// files count where no others are awaited.
    fn waits(&self, late: &BTreeSet<Who>) -> Vec<Wait> {
        let is_open = |call: &&TracedCall| matches!(call.state, CallState::Posted | CallState::Failed);
        let (mut found, mut indices, mut slowest) = (Vec::<Wait>::new(), HashMap::new(), HashMap::new());
        for (&rank, (trace, written)) in &self.ranks {
            for call in trace.calls.iter().filter(is_open) {
                let awaited = self.awaited(rank, call);
                let ranks = match &awaited {
                    Awaited::Slowest(count) => {
                        slowest.entry(*count).or_insert_with(|| without(self.slowest(*count), late)).clone()
                    }
                    Awaited::Peers(peers) => without(self.all_of(peers.iter().copied()), late),
                };
                if ranks.is_empty() {
                    continue;
                }
                let (sequence, description, has_failed) =
                    (call.sequence, described(call), call.state == CallState::Failed);
                let end = if has_failed { call.changed } else { *written };
                let seconds = (end - call.posted).max(0.0);
                let key = (sequence, description.clone(), awaited, has_failed);
                match indices.get(&key) {
                    Some(&index) => {
                        let wait: &mut Wait = &mut found[index];
                        wait.waiting.push(self.who(rank));
                        wait.seconds = wait.seconds.max(seconds);
                    }
                    None => {
                        indices.insert(key, found.len());
                        found.push(Wait {
                            group: self.name.clone(),
                            sequence,
                            call: description,
                            waiting: vec![self.who(rank)],
                            awaited: ranks,
                            seconds,
                            has_failed,
                        });
                    }
                }
            }
        }
        found.iter_mut().for_each(|wait| wait.waiting.sort_unstable());
        found
    }
}

/// These ranks without the late ones, unless all of them are late.
fn without(ranks: Vec<Who>, late: &BTreeSet<Who>) -> Vec<Who> {
    let others: Vec<Who> = ranks.iter().copied().filter(|rank| !late.contains(rank)).collect();
    if others.is_empty() { ranks } else { others }
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
fn groups(traces: &BTreeMap<usize, RankTrace>) -> Vec<RankGroup<'_>> {
    let mut found: BTreeMap<_, RankGroup<'_>> = BTreeMap::new();
    for trace in traces.values() {
        for group in &trace.groups {
            let process = group.in_process.then_some((&trace.host, trace.pid));
            let new = || {
                let name = match process {
                    Some((_, pid)) => format!("{} of process {pid}", group.group),
                    None => group.group.clone(),
                };
                RankGroup::new(name, &group.members)
            };
            let entry = found.entry((&group.group, &group.members, process)).or_insert_with(new);
            entry.ranks.insert(group.rank, (group, trace.written));
        }
    }
    let mut groups: Vec<RankGroup<'_>> = found.into_values().collect();
    groups.iter_mut().for_each(RankGroup::index);
    groups
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
        let is_late = |rank: &Who| matches!(known.get(rank), Some(End::IsLate));
        let late: BTreeSet<Who> = silent.iter().copied().filter(is_late).collect();

        let waits: Vec<Wait> = groups.iter().flat_map(|group| group.waits(&late)).collect();
        let latest = latest(&groups);
        let waiting: BTreeSet<Who> = waits.iter().flat_map(|wait| &wait.waiting).copied().collect();
        let awaited: BTreeSet<Who> = waits.iter().flat_map(|wait| &wait.awaited).copied().collect();
        // A rank whose call has failed was itself blocked by another.
        let has_failed = |rank: &Who| latest.get(rank).is_some_and(|call| call.call.state == CallState::Failed);
        let causes: Vec<Who> = awaited.difference(&waiting).copied().filter(|rank| !has_failed(rank)).collect();
        let is_cycle = causes.is_empty() && awaited.is_subset(&waiting);
        let cycle = if is_cycle { awaited.into_iter().collect() } else { Vec::new() };
        let cause = |rank: Who| {
            let latest = latest.get(&rank);
            let state = match known.get(&rank) {
                Some(End::Ended(how)) => format!("it {how}"),
                Some(End::IsStopped) => "it is stopped, by SIGSTOP for example".into(),
                Some(End::IsLate) => "it runs, and has not written its record yet".into(),
                _ if is_elsewhere(&rank) => "it is on another machine, whose launcher knows more".into(),
                _ => state(latest, traces.contains_key(&rank)),
            };
            let call = latest.map(|latest| (latest.group.name.clone(), latest.call.sequence));
            Cause { rank, state, call }
        };
        Analysis {
            world_size,
            silent,
            differences: groups.iter().filter_map(RankGroup::first_difference).collect(),
            waits,
            causes: without(causes, &late).into_iter().map(cause).collect(),
            late: late.into_iter().collect(),
            cycle,
            device_waits: device_waits(traces),
            failures: failures(&groups),
            last: groups
                .iter()
                .flat_map(|group| group.ranks.keys().filter_map(|&rank| last(group, rank)).collect::<Vec<_>>())
                .collect(),
        }
    }
}

/// A rank's last call, with its group.
struct Latest<'g, 't> {
    group: &'g RankGroup<'t>,
    trace: &'t GroupTrace,
    call: &'t TracedCall,
    written: f64,
}

/// The last call of each rank in all groups.
fn latest<'g, 't>(groups: &'g [RankGroup<'t>]) -> HashMap<Who, Latest<'g, 't>> {
    let mut found: HashMap<Who, Latest<'g, 't>> = HashMap::new();
    for group in groups {
        for (&rank, &(trace, written)) in &group.ranks {
            let Some(call) = trace.calls.last() else { continue };
            let is_later = |other: &Latest<'_, '_>| other.call.changed <= call.changed;
            if found.get(&group.who(rank)).is_none_or(is_later) {
                found.insert(group.who(rank), Latest { group, trace, call, written });
            }
        }
    }
    found
}

/// Describes the recorded state of a rank that others wait for.
fn state(latest: Option<&Latest<'_, '_>>, has_trace: bool) -> String {
    let Some(Latest { group, trace, call, written }) = latest else {
        return match has_trace {
            true => "it has made no call yet".into(),
            false => {
                "it has written no record: it has not come to a call of gradsync, does not run any more, or is stopped"
                    .into()
            }
        };
    };
    let seconds = (written - call.changed).max(0.0);
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

/// The ranks that wait for work on a GPU, with the longest time to the writing of a file.
fn device_waits(traces: &BTreeMap<usize, RankTrace>) -> Option<(Vec<Who>, f64)> {
    let of_rank = |(&rank, trace): (&usize, &RankTrace)| {
        let seconds = trace.device_waits.iter().map(|wait| trace.written - wait.since).reduce(f64::max)?;
        Some((rank, seconds))
    };
    let (ranks, seconds): (Vec<Who>, Vec<f64>) = traces.iter().filter_map(of_rank).unzip();
    seconds.into_iter().reduce(f64::max).map(|longest| (ranks, longest))
}

/// The failures of ranks, in the order of their files.
fn failures(groups: &[RankGroup<'_>]) -> Vec<Failure> {
    let mut found: HashMap<&str, (f64, BTreeSet<Who>)> = HashMap::new();
    for group in groups {
        for (&rank, (trace, written)) in &group.ranks {
            let Some(text) = &trace.failure else { continue };
            let (first, ranks) = found.entry(text).or_insert_with(|| (*written, BTreeSet::new()));
            *first = first.min(*written);
            ranks.insert(group.who(rank));
        }
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by(|(left, (one, _)), (right, (other, _))| one.total_cmp(other).then(left.cmp(right)));
    found
        .into_iter()
        .map(|(text, (_, ranks))| Failure { ranks: ranks.into_iter().collect(), text: text.into() })
        .collect()
}

fn last(group: &RankGroup<'_>, rank: usize) -> Option<Last> {
    let (trace, written) = group.ranks.get(&rank)?;
    let call = trace.calls.last()?;
    Some(Last {
        rank: group.who(rank),
        group: group.name.clone(),
        call: described(call),
        sequence: call.sequence,
        state: call.state,
        seconds: (written - call.changed).max(0.0),
    })
}
