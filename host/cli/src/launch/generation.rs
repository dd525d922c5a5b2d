//! One start of all ranks of this machine, until the last of them has ended.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gradsync::comm::Departure;
use gradsync::internal::trace::RankTrace;
use gradsync_cli::messages::{complain, say};
use rustix::process::Pid;

use super::blame::{self, Named};
use super::descendants::{self, Descendants, Orphan};
use super::guard::Guarded;
use super::machines::Machines;
use super::nodes::Nodes;
use super::outcome::{Cause, Outcome};
use super::output::OutputTargets;
use super::rank::{Common, Rank};
use super::records::{LateRank, Records, has_failure};
use super::signals::{ENDING, Event, Listener};
use super::status::{self, PANIC, Status};
use super::timing::{DEPARTURE, KILL, LAST_LINES, LOOK_FOR_ORPHANS, LOOK_FOR_TRACES, SIMULTANEOUS};
use super::{Launch, affinity};
use crate::trace::Blamed;

pub(super) struct Generation<'a> {
    pub(super) launch: &'a Launch,
    pub(super) events: &'a Listener,
    pub(super) number: u32,
    pub(super) started: Instant,
    pub(super) records: Records,
    pub(super) guard: Guarded,
    pub(super) ranks: Vec<Rank>,
    pub(super) world_size: usize,
    pub(super) descendants: &'a Descendants,
    /// The number of this start.
    pub(super) job: String,
    /// The processes and process groups that ranks have left behind and that were told to end.
    pub(super) told: HashSet<Pid>,
    /// Those that were killed, and ranks that were, and when; no time once the launcher does not wait for them any more.
    pub(super) killed: HashMap<Pid, Option<Instant>>,
    /// Whether processes are left that no rank is known for.
    pub(super) has_orphans: bool,
    /// The launchers of several machines.
    pub(super) machines: Option<Arc<Machines>>,
    /// Why the ranks are being ended, and when those that still run are killed.
    pub(super) ending: Option<(Cause, Instant)>,
    /// Whether a second signal has ended the grace period.
    pub(super) is_hurried: bool,
    /// While ranks are being ended, the ranks that had ended before.
    pub(super) ended_before: Option<Vec<usize>>,
    pub(super) are_all_done: bool,
    /// The rank that is blamed for the end.
    pub(super) blamed: Option<Blamed>,
    /// The ranks that were asked for their records and have not written them; those that were stopped then.
    pub(super) late: Vec<LateRank>,
    pub(super) stopped: HashSet<usize>,
    /// Whether a record that could not be written has been reported.
    pub(super) is_unwritten: bool,
    /// Whether the comparison of the ranks' traces has been shown.
    pub(super) is_explained: bool,
}

impl<'a> Generation<'a> {
    /// Starts all ranks.
    pub(super) fn start(
        launch: &'a Launch,
        nodes: &Nodes,
        descendants: &'a Descendants,
        number: u32,
        events: &'a Listener,
    ) -> Result<Self, String> {
        let (node, machines) = nodes.meet(launch, number, events)?;
        let ranks = node.first_rank..node.first_rank + node.local_world_size;
        let records = Records::start(&node.job, number, ranks, &events.sender())?;
        let guard = Guarded::start(&node.job, records.private());
        let guard = guard.map_err(|error| format!("cannot start the guard: {error}"))?;
        let targets = OutputTargets::new(launch, number, node.world_size)?;
        let shares = || affinity::shares(node.local_world_size).map_err(|error| format!("--affinity: {error}"));
        let processors = launch.affinity.then(shares).transpose()?;
        let mut generation = Generation {
            launch,
            events,
            number,
            started: Instant::now(),
            records,
            guard,
            ranks: Vec::new(),
            world_size: node.world_size,
            descendants,
            job: node.job.clone(),
            told: HashSet::new(),
            killed: HashMap::new(),
            has_orphans: false,
            machines,
            ending: None,
            is_hurried: false,
            ended_before: None,
            are_all_done: false,
            blamed: None,
            late: Vec::new(),
            stopped: HashSet::new(),
            is_unwritten: false,
            is_explained: false,
        };
        for local_rank in 0..node.local_world_size {
            let common = Common {
                launch,
                node: &node,
                targets: &targets,
                records: &generation.records,
                processors: processors.as_deref(),
                events: events.sender(),
            };
            match Rank::start(&common, local_rank) {
                Ok(rank) => {
                    generation.guard.add(rank.pid);
                    generation.ranks.push(rank);
                }
                Err(reason) => {
                    // The ranks that already run end when this object is dropped.
                    generation.tell_machines(&reason);
                    return Err(reason);
                }
            }
        }
        Ok(generation)
    }

    /// Waits until all ranks have ended, and ends them when one fails.
    pub(super) fn watch(mut self) -> Result<Outcome, String> {
        loop {
            self.end_orphans()?;
            let is_over = self.ranks.iter().all(|rank| rank.is_over) && !self.has_orphans;
            if is_over && !self.awaits_machines() {
                self.await_output();
                return Ok(self.outcome());
            }
            match self.events.next(self.patience()) {
                Some(event) => self.handle(event)?,
                None => self.look(),
            }
            self.kill_late_ones();
        }
    }

    /// Waits for the last lines of all ranks. A process that this launcher may not end can hold the pipes open.
    fn await_output(&self) {
        let end = Instant::now() + LAST_LINES;
        self.ranks.iter().for_each(|rank| rank.output.wait(end.saturating_duration_since(Instant::now())));
    }

    fn handle(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Ended(generation, rank, status) if generation == self.number => self.ended(rank, status)?,
            Event::AllMachines(generation, outcome) if generation == self.number => self.machines_done(outcome),
            Event::Reported(generation, rank, reason) if generation == self.number => self.reported(rank, &reason),
            Event::Unwritten(generation, reason) if generation == self.number => self.unwritten(&reason),
            Event::Signal(signal) => self.signal(signal),
            // An event of an earlier generation.
            _ => {}
        }
        Ok(())
    }

    /// Whether the ranks of this machine have succeeded, while ranks of other machines may still fail.
    fn awaits_machines(&self) -> bool {
        self.machines.is_some() && self.ending.is_none() && !self.are_all_done
    }

    fn patience(&self) -> Duration {
        let has_left = |rank: &Rank| !rank.is_running() && !rank.is_over;
        let look = if self.has_orphans || self.ranks.iter().any(has_left) { LOOK_FOR_ORPHANS } else { LOOK_FOR_TRACES };
        let kill = self.ending.as_ref().map(|(_, end)| end.saturating_duration_since(Instant::now()));
        kill.filter(|kill| !kill.is_zero()).map_or(look, |kill| kill.min(look))
    }

    fn ended(&mut self, index: usize, status: Status) -> Result<(), String> {
        self.ranks[index].has_ended(status);
        self.end_orphans()?;
        if status.is_success() {
            if !self.ranks.iter().any(Rank::is_running) {
                self.await_machines();
            }
            return Ok(());
        }
        if self.ending.is_none() { self.failed(index) } else { Ok(()) }
    }

    /// Reaps the ranks of which nothing is left, and ends the processes that ranks have left behind: by SIGTERM, and by SIGKILL after the grace
    /// period.
    fn end_orphans(&mut self) -> Result<(), String> {
        let ranks = self.ranks.iter().filter(|rank| !rank.is_over).map(|rank| rank.pid);
        let known = ranks.chain([self.guard.pid()]).collect();
        let mut orphans = self.descendants.orphans(&known, &self.job);
        orphans.retain(|orphan| !self.has_given_up(orphan));
        let owner = |orphan: &Orphan| self.ranks.iter().position(|rank| orphan.is_of(rank.number, rank.pid));
        let owned: Vec<(Orphan, Option<usize>)> = orphans.into_iter().map(|orphan| (orphan, owner(&orphan))).collect();
        let are_all_ended = !self.ranks.iter().any(Rank::is_running);
        self.has_orphans = are_all_ended && !owned.is_empty();
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if !rank.is_running() && !rank.is_over && owned.iter().all(|(_, owner)| *owner != Some(index)) {
                rank.reap().map_err(|error| format!("rank {}: {error}", rank.number))?;
                self.guard.remove(rank.pid);
            }
        }
        for (orphan, owner) in owned {
            // The processes of a rank that runs are its own affair.
            if owner.map_or(are_all_ended, |owner| !self.ranks[owner].is_running()) {
                self.end_orphan(orphan, owner);
            }
        }
        Ok(())
    }

    /// Whether a process stays although it was killed: another user's, as after `sudo`, or one that the kernel cannot end now.
    fn has_given_up(&mut self, orphan: &Orphan) -> bool {
        let Some(killed) = self.killed.get_mut(&orphan.pid()) else { return false };
        if killed.is_some_and(|killed| killed.elapsed() > KILL) {
            say("warning", format_args!("process {} cannot be ended, and stays", orphan.pid().as_raw_nonzero()));
            *killed = None;
        }
        killed.is_none()
    }

    fn end_orphan(&mut self, orphan: Orphan, owner: Option<usize>) {
        let rank = owner.map(|owner| &self.ranks[owner]);
        let grace = Duration::from_secs_f64(self.launch.grace);
        let ended = rank.map_or_else(|| self.ranks.iter().filter_map(|rank| rank.ended).max(), |rank| rank.ended);
        let ending = self.ending.as_ref().map(|(_, end)| *end);
        if ending.or(ended.map(|ended| ended + grace)).is_none_or(|end| end <= Instant::now()) {
            let is_first = !self.killed.contains_key(&orphan.pid());
            self.killed.entry(orphan.pid()).or_insert_with(|| Some(Instant::now()));
            if is_first && !grace.is_zero() && !self.is_hurried {
                let of = rank.map(|rank| format!("of rank {}, ", rank.number)).unwrap_or_default();
                let (pid, grace) = (orphan.pid().as_raw_nonzero(), self.launch.grace);
                say("warning", format_args!("process {pid}, {of}has not ended within {grace} s, and is killed"));
            }
            return orphan.signal(libc::SIGKILL);
        }
        match rank.filter(|rank| orphan.group() == Some(rank.pid)) {
            Some(rank) if self.told.insert(rank.pid) => rank.signal_group(libc::SIGTERM),
            None if self.told.insert(orphan.pid()) => orphan.signal(libc::SIGTERM),
            _ => {}
        }
    }

    /// Handles the ends of ranks for some time, until `is_enough` or a signal that ends the job. Returns the other events.
    fn collect(&mut self, time: Duration, is_enough: impl Fn(&Self) -> bool) -> Result<Vec<Event>, String> {
        let (mut later, end) = (Vec::new(), Instant::now() + time);
        while !is_enough(self) {
            match self.events.next(end.saturating_duration_since(Instant::now())) {
                Some(Event::Ended(generation, rank, status)) if generation == self.number => {
                    self.ended(rank, status)?
                }
                Some(event) => {
                    let is_signal = matches!(event, Event::Signal(signal) if ENDING.contains(&signal));
                    later.push(event);
                    if is_signal {
                        break;
                    }
                }
                None => break,
            }
        }
        Ok(later)
    }

    /// Handles the first failure of a rank: finds the cause, and ends the others.
    fn failed(&mut self, first: usize) -> Result<(), String> {
        let after = self.started.elapsed().as_secs_f64();
        // Ranks that end from now on are no further causes.
        self.ending = Some((Cause::Rank(first), Instant::now() + Duration::from_secs_f64(self.launch.grace)));
        self.request_records();
        let mut later = self.collect(SIMULTANEOUS, |_| false)?;
        let traces = self.records.read(self.ranks.iter().map(|rank| rank.number));
        let named = blame::named_in_records(self.ranks[first].number, &traces);
        let of_here = |named: Named| self.ranks.iter().position(|rank| rank.number == named.rank);
        let mut cause = None;
        if let Some((named, index)) = named.and_then(|named| Some((named, of_here(named)?))) {
            if matches!(named.departure, Some(Departure::Panicked | Departure::Lost)) {
                later.extend(self.collect(DEPARTURE, |start| !start.ranks[index].is_running())?);
            }
            let has_panicked = named.departure == Some(Departure::Panicked);
            let rank = &self.ranks[index];
            cause = (rank.has_failed() || has_panicked && rank.is_running()).then_some((index, has_panicked));
        }
        let (cause, has_panicked) = cause.unwrap_or_else(|| (self.first_to_fail(&traces).unwrap_or(first), false));
        let rank = &self.ranks[cause];
        let how = match rank.status {
            Some(status) if has_panicked => format!("rank {} panicked and {status}", rank.number),
            Some(status) => format!("rank {} {status}", rank.number),
            None => format!("rank {} panicked, and still runs", rank.number),
        };
        let code = rank.status.map_or(PANIC, Status::code);
        let is_follower = !has_panicked && traces.get(&rank.number).is_some_and(has_failure);
        self.blamed = Some(Blamed { rank: rank.number, code, is_follower });
        if !self.launch.is_plain {
            let all = if self.machines.is_some() { "on this machine" } else { "of all" };
            complain(format_args!("{how}, first {all}, after {after:.1} s; the others are ended"));
        }
        self.tell_machines(&how);
        self.end(Cause::Rank(cause), libc::SIGTERM);
        later.into_iter().for_each(|event| self.events.repeat(event));
        Ok(())
    }

    /// The first rank that has failed by itself, by the order of the ends.
    fn first_to_fail(&self, traces: &BTreeMap<usize, RankTrace>) -> Option<usize> {
        let mut failed: Vec<&Rank> = self.ranks.iter().filter(|rank| rank.has_failed()).collect();
        failed.sort_by_key(|rank| rank.ended);
        let numbers: Vec<usize> = failed.iter().map(|rank| rank.number).collect();
        let first = blame::first_without_failure(&numbers, traces)?;
        self.ranks.iter().position(|rank| rank.number == first)
    }

    /// Handles the success of this machine's ranks: waits for the other machines, concurrently with other events.
    fn await_machines(&self) {
        let Some(machines) = self.machines.clone().filter(|_| self.ending.is_none()) else { return };
        let (sender, generation) = (self.events.sender(), self.number);
        thread::spawn(move || {
            let outcome = machines.wait_for_all();
            // The launcher may end as soon as it has the outcome, and only the last owner takes leave of the other machines.
            drop(machines);
            // Nobody listens only if the launcher ends.
            let _ = sender.send(Event::AllMachines(generation, outcome));
        });
    }

    fn machines_done(&mut self, outcome: Result<(), String>) {
        match outcome {
            Ok(()) => self.are_all_done = true,
            Err(reason) => self.other_machine_failed(&reason),
        }
    }

    fn other_machine_failed(&mut self, reason: &str) {
        if self.ending.is_none() {
            complain(format_args!("{reason}; the ranks of this machine are ended"));
            self.request_records();
            self.end(Cause::OtherMachine, libc::SIGTERM);
        }
    }

    /// Checks for failures without an event: a failure on another machine.
    fn look(&mut self) {
        if let Some(reason) = self.machines.as_ref().and_then(|machines| machines.failure()) {
            self.other_machine_failed(&reason);
        }
    }

    /// Handles a rank's report of a failure that has not ended the rank.
    fn reported(&mut self, rank: usize, reason: &str) {
        if self.ending.is_none() && !self.is_explained && !self.launch.is_plain {
            complain(format_args!("rank {rank} reports: {reason}"));
            self.request_records();
            self.explain();
        }
    }

    fn signal(&mut self, signal: i32) {
        let name = status::name(signal);
        match signal {
            _ if ENDING.contains(&signal) && self.ending.is_some() => {
                say("info", format_args!("{name} again: the ranks are killed"));
                self.ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
                self.ending.iter_mut().for_each(|(_, end)| *end = Instant::now());
                self.is_hurried = true;
            }
            _ if ENDING.contains(&signal) => {
                say("info", format_args!("{name} is passed on to the ranks"));
                self.tell_machines(&format!("{name} to its launcher"));
                self.end(Cause::Signal(signal), signal);
            }
            libc::SIGTSTP => {
                self.ranks.iter().for_each(|rank| rank.signal(libc::SIGSTOP));
                // Returns when this process is continued.
                let _ = signal_hook::low_level::emulate_default_handler(libc::SIGTSTP);
            }
            libc::SIGCONT => self.ranks.iter().for_each(|rank| rank.signal(libc::SIGCONT)),
            _ => {
                for rank in self.ranks.iter().filter(|rank| rank.is_running()) {
                    if rank.handles(signal) {
                        rank.signal(signal);
                    } else {
                        say("warning", format_args!("rank {} does not handle {name}, which would end it", rank.number));
                    }
                }
                if signal == libc::SIGUSR1 {
                    self.request_records();
                    self.explain();
                    // Each request gets an answer.
                    self.is_explained = false;
                }
            }
        }
    }

    /// Ends the remaining ranks: by this signal, and by SIGKILL after the grace period.
    fn end(&mut self, cause: Cause, signal: i32) {
        let grace = Duration::from_secs_f64(self.launch.grace);
        self.ended_before = Some(self.ranks.iter().filter(|rank| !rank.is_running()).map(|rank| rank.number).collect());
        self.ending = Some((cause, Instant::now() + grace));
        self.ranks.iter().for_each(|rank| rank.signal(signal));
        // A stopped rank must be continued before it can end.
        self.ranks.iter().for_each(|rank| rank.signal(libc::SIGCONT));
    }

    fn kill_late_ones(&mut self) {
        if self.ending.as_ref().is_none_or(|(_, end)| Instant::now() < *end) {
            return;
        }
        for rank in self.ranks.iter().filter(|rank| rank.is_running()) {
            if self.killed.insert(rank.pid, Some(Instant::now())).is_none()
                && !self.is_hurried
                && self.launch.grace > 0.0
            {
                let (rank, grace) = (rank.number, self.launch.grace);
                say("warning", format_args!("rank {rank} has not ended within {grace} s, and is killed"));
            }
            rank.signal(libc::SIGKILL);
        }
    }

    /// Requests the records of all ranks that use gradsync, and waits a moment for them.
    fn request_records(&mut self) {
        self.late = self.records.request();
        let is_stopped = |rank: &&Rank| {
            let asked = self.late.iter().filter(|late| late.rank == rank.number).filter_map(|late| late.process);
            // In another PID namespace the number belongs to another process.
            let asked = asked.filter(|&pid| descendants::rank_of(pid, &self.job) == Some(rank.number));
            rank.is_running() && asked.chain([rank.pid]).any(descendants::is_stopped)
        };
        self.stopped = self.ranks.iter().filter(is_stopped).map(|rank| rank.number).collect();
    }

    fn tell_machines(&self, reason: &str) {
        self.machines.iter().for_each(|machines| machines.tell_failure(reason.to_owned()));
    }
}

impl Drop for Generation<'_> {
    /// No rank, and nothing that ranks have started, stays when the launcher gives up.
    fn drop(&mut self) {
        /// Killed processes end at once, unless the kernel is busy with them.
        const TIMES: usize = 500;
        self.ranks.iter().for_each(|rank| rank.signal_group(libc::SIGKILL));
        for rank in self.ranks.iter_mut().filter(|rank| !rank.is_over) {
            if let Err(error) = rank.reap() {
                tracing::warn!(%error, rank = rank.number, "a rank was not reaped");
            }
        }
        let known = HashSet::from([self.guard.pid()]);
        for _ in 0..TIMES {
            let mut orphans = self.descendants.orphans(&known, &self.job);
            orphans.retain(|orphan| self.killed.get(&orphan.pid()) != Some(&None));
            if orphans.is_empty() {
                break;
            }
            orphans.iter().for_each(|orphan| orphan.signal(libc::SIGKILL));
            thread::sleep(Duration::from_millis(10));
        }
        self.await_output();
    }
}
