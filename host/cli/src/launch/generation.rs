//! One start of all ranks of this machine, until the last of them has ended.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use gradsync::comm::Departure;
use gradsync::trace::RankTrace;
use gradsync_cli::messages::{complain, say};
use gradsync_cli::text::{one_line, shown};
use rustix::process::Pid;

use super::blame::{self, Named};
use super::descendants::{self, Descendants, Orphan};
use super::guard::Guarded;
use super::machines::Machines;
use super::nodes::Nodes;
use super::output::Places;
use super::rank::{Common, Rank};
use super::records::{LateRank, Records, has_failure};
use super::signals::{ENDING, Event, Listener};
use super::status::{self, PANIC, Status};
use super::timing::{DEPARTURE, LAST_LINES, LOOK_FOR_ORPHANS, LOOK_FOR_TRACES, RECORDS, SIMULTANEOUS};
use super::{Launch, affinity};
use crate::trace::{Blamed, End, Record};

/// The outcome of one start of all ranks.
pub(super) enum Outcome {
    Succeeded,
    /// The exit status of the first failure.
    Failed(u8),
    /// A signal to the launcher ended the ranks; the exit status for it.
    Stopped(u8),
}

/// The reason why ranks are being ended.
#[derive(Debug)]
enum Cause {
    /// This rank on this machine failed first.
    Rank(usize),
    Signal(i32),
    OtherMachine,
}

pub(super) struct Generation<'a> {
    launch: &'a Launch,
    events: &'a Listener,
    number: u32,
    started: Instant,
    records: Records,
    guard: Guarded,
    ranks: Vec<Rank>,
    world_size: usize,
    descendants: &'a Descendants,
    /// The number of this start.
    job: String,
    /// The processes and process groups that ranks have left behind and that were told to end; those that are killed.
    told: HashSet<Pid>,
    killed: HashSet<Pid>,
    /// Whether processes are left that no rank is known for.
    has_orphans: bool,
    /// The launchers of several machines.
    machines: Option<Arc<Machines>>,
    /// Why the ranks are being ended, and when those that still run are killed.
    ending: Option<(Cause, Instant)>,
    /// While ranks are being ended, the ranks that had ended before.
    ended_before: Option<Vec<usize>>,
    are_all_done: bool,
    /// The rank that is blamed for the end.
    blamed: Option<Blamed>,
    /// The ranks that were asked for their records and have not written them; those that were stopped then.
    late: Vec<LateRank>,
    stopped: HashSet<usize>,
    /// Whether a record that could not be written has been reported.
    is_unwritten: bool,
    /// Whether the comparison of the ranks' traces has been shown.
    is_explained: bool,
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
        let (place, machines) = nodes.meet(launch, number, events)?;
        let ranks = place.first_rank..place.first_rank + place.local_world_size;
        let records = Records::start(&place.job, number, ranks, &events.sender())?;
        let guard = Guarded::start(&place.job, records.private());
        let guard = guard.map_err(|error| format!("cannot start the guard: {error}"))?;
        let places = Places::new(launch, number, place.world_size)?;
        let shares = || affinity::shares(place.local_world_size).map_err(|error| format!("--affinity: {error}"));
        let processors = launch.affinity.then(shares).transpose()?;
        let mut generation = Generation {
            launch,
            events,
            number,
            started: Instant::now(),
            records,
            guard,
            ranks: Vec::new(),
            world_size: place.world_size,
            descendants,
            job: place.job.clone(),
            told: HashSet::new(),
            killed: HashSet::new(),
            has_orphans: false,
            machines,
            ending: None,
            ended_before: None,
            are_all_done: false,
            blamed: None,
            late: Vec::new(),
            stopped: HashSet::new(),
            is_unwritten: false,
            is_explained: false,
        };
        for local_rank in 0..place.local_world_size {
            let common = Common {
                launch,
                place: &place,
                places: &places,
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
                return Ok(self.outcome());
            }
            match self.events.next(self.patience()) {
                Some(event) => self.handle(event)?,
                None => self.look(),
            }
            self.kill_late_ones();
        }
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
        kill.map_or(look, |kill| kill.clamp(Duration::from_millis(1), look))
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
        let orphans = self.descendants.orphans(&known, &self.job);
        let owner = |orphan: &Orphan| self.ranks.iter().position(|rank| orphan.is_of(rank.number, rank.pid));
        let owned: Vec<(Orphan, Option<usize>)> = orphans.into_iter().map(|orphan| (orphan, owner(&orphan))).collect();
        let are_all_ended = !self.ranks.iter().any(Rank::is_running);
        self.has_orphans = are_all_ended && !owned.is_empty();
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if !rank.is_running() && !rank.is_over && owned.iter().all(|(_, owner)| *owner != Some(index)) {
                rank.reap(LAST_LINES).map_err(|error| format!("rank {}: {error}", rank.number))?;
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

    fn end_orphan(&mut self, orphan: Orphan, owner: Option<usize>) {
        let rank = owner.map(|owner| &self.ranks[owner]);
        let grace = Duration::from_secs_f64(self.launch.grace);
        let ended = rank.map_or_else(|| self.ranks.iter().filter_map(|rank| rank.ended).max(), |rank| rank.ended);
        let ending = self.ending.as_ref().map(|(_, end)| *end);
        if ending.or(ended.map(|ended| ended + grace)).is_none_or(|end| end <= Instant::now()) {
            if self.killed.insert(orphan.pid()) && !grace.is_zero() {
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
            // Nobody listens only if the launcher ends.
            let _ = sender.send(Event::AllMachines(generation, machines.wait_for_all()));
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

    /// Says once that records of calls cannot be written.
    fn unwritten(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.is_unwritten, true) && !self.launch.is_plain {
            let folder = self.records.folder().map(|folder| shown(folder).to_string()).unwrap_or_default();
            say("warning", format_args!("records of calls are not written to {folder}: {reason}"));
        }
    }

    fn signal(&mut self, signal: i32) {
        let name = status::name(signal);
        match signal {
            _ if ENDING.contains(&signal) && self.ending.is_some() => {
                say("info", format_args!("{name} again: the ranks are killed"));
                self.ranks.iter().for_each(|rank| rank.signal(libc::SIGKILL));
                self.ending.iter_mut().for_each(|(_, end)| *end = Instant::now());
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
        let Some((_, end)) = &mut self.ending else { return };
        if Instant::now() < *end {
            return;
        }
        *end = Instant::now() + Duration::from_secs(1);
        for rank in self.ranks.iter().filter(|rank| rank.is_running()) {
            say(
                "warning",
                format_args!("rank {} has not ended within {} s, and is killed", rank.number, self.launch.grace),
            );
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

    /// Shows where ranks part, by the last calls that the ranks of this machine have written.
    fn explain(&mut self) {
        if !std::mem::replace(&mut self.is_explained, true) {
            show(&self.record(), self.world_size);
        }
    }

    /// The same at the end, for the ranks of all machines. Returns the rank that is blamed among all.
    fn explain_end(&mut self) -> Option<Blamed> {
        let Some(machines) = &self.machines else {
            self.explain();
            return self.blamed.clone();
        };
        let record = self.exchange_records(machines);
        show(&record, self.world_size);
        record.blamed
    }

    /// Gives other machines the record of this one, and takes theirs; if they do not come, this machine's alone.
    fn exchange_records(&self, machines: &Machines) -> Record {
        let own = self.record();
        let deadline = Duration::from_secs_f64(self.launch.grace) + RECORDS;
        let exchanged = serde_json::to_vec(&own).map_err(|error| error.to_string()).and_then(|bytes| {
            let all = machines.exchange(&bytes, deadline).map_err(|error| error.to_string())?;
            let parsed = all.iter().map(|bytes| serde_json::from_slice(bytes));
            parsed.collect::<Result<Vec<Record>, _>>().map_err(|error| error.to_string())
        });
        match exchanged {
            Ok(records) => records.into_iter().collect(),
            Err(reason) => {
                say("warning", format_args!("the record of calls has this machine's ranks only: {reason}"));
                own
            }
        }
    }

    fn record(&self) -> Record {
        let describe = |rank: &Rank| {
            let is_by_itself = self.ended_before.as_ref().is_none_or(|ended| ended.contains(&rank.number));
            let end = match rank.status.filter(|_| is_by_itself) {
                Some(status) => End::Ended(status.to_string()),
                None if self.stopped.contains(&rank.number) => End::IsStopped,
                None if self.late.iter().any(|late| late.rank == rank.number) => End::IsLate,
                None => End::Runs,
            };
            (rank.number, end)
        };
        Record {
            traces: self.records.read(self.ranks.iter().map(|rank| rank.number)),
            ends: self.ranks.iter().map(describe).collect(),
            blamed: self.blamed.clone(),
        }
    }

    /// Reports records that ranks could not write while they ended.
    fn report_unwritten(&mut self) {
        for event in std::iter::from_fn(|| self.events.next(Duration::ZERO)).collect::<Vec<_>>() {
            match event {
                Event::Unwritten(generation, reason) if generation == self.number => self.unwritten(&reason),
                other => self.events.repeat(other),
            }
        }
    }

    fn outcome(&mut self) -> Outcome {
        let Some((cause, _)) = self.ending.take() else { return Outcome::Succeeded };
        self.report_unwritten();
        match cause {
            Cause::Rank(index) => {
                let status = self.ranks[index].status.unwrap_or(Status::Code(1));
                if self.launch.is_plain {
                    return Outcome::Failed(status.code());
                }
                let blamed = self.explain_end();
                let rank = &self.ranks[index];
                let lines = rank.output.last_lines();
                let failed = format!("rank {} (process {}) {status}", rank.number, rank.pid.as_raw_nonzero());
                if lines.is_empty() {
                    complain(format_args!("{failed}, and had printed nothing"));
                } else {
                    let lines: String = lines.iter().map(|line| format!("\n    {}", one_line(line))).collect();
                    complain(format_args!("{failed}; its last lines:{lines}"));
                }
                Outcome::Failed(blamed.map_or(status.code(), |blamed| blamed.code))
            }
            Cause::OtherMachine => Outcome::Failed(self.explain_end().map_or(1, |blamed| blamed.code)),
            Cause::Signal(signal) => {
                // The other machines explain why their ranks end.
                self.machines.iter().for_each(|machines| _ = self.exchange_records(machines));
                let is_success = |rank: &Rank| rank.status.is_some_and(Status::is_success);
                let is_success = self.ranks.iter().all(is_success);
                Outcome::Stopped(if is_success { 0 } else { Status::Signal { number: signal, has_core: false }.code() })
            }
        }
    }
}

impl Drop for Generation<'_> {
    /// No rank, and nothing that ranks have started, stays when the launcher gives up.
    fn drop(&mut self) {
        /// Killed processes end at once, unless the kernel is busy with them.
        const TIMES: usize = 500;
        self.ranks.iter().for_each(|rank| rank.signal_group(libc::SIGKILL));
        for rank in self.ranks.iter_mut().filter(|rank| !rank.is_over) {
            if let Err(error) = rank.reap(LAST_LINES) {
                tracing::warn!(%error, rank = rank.number, "a rank was not reaped");
            }
        }
        let known = HashSet::from([self.guard.pid()]);
        for _ in 0..TIMES {
            let orphans = self.descendants.orphans(&known, &self.job);
            if orphans.is_empty() {
                break;
            }
            orphans.iter().for_each(|orphan| orphan.signal(libc::SIGKILL));
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Prints the comparison of the last calls of ranks, if there are any.
fn show(record: &Record, world_size: usize) {
    if let Some(text) = record.explanation(world_size) {
        say("record of calls", text);
    }
}
